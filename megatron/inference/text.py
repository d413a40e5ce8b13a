"""Incremental detokenization."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.tokenizer.api import Tokenizer

_BROKEN = "\ufffd"
"""The character that a tokenizer shows for a part of a character."""

_LONGEST_BEGINNING = 3
"""Tokens, or marks of broken ones, that may become a character: one for each byte but the last of UTF-8's four."""

_CONTEXT = 8
"""Tokens that may decide how the next one is written: some tokenizers drop the space that a text begins with."""


class TokenDecoder:
    """Decodes tokens one by one, each as it is written behind those before it.

    The texts of all tokens, put together, are their text. A character of several tokens belongs to the last of them.

    Args:
        tokenizer: tokenizer of the tokens.
        context: tokens before the text; a character that they begin belongs to the text.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._tokens: list[int] = []  # the newest tokens, at most about two contexts of them
        self._sent = 0  # characters of their text that are returned already
        self._pending = 0  # newest tokens that may end within a character
        for token in context[-_CONTEXT:]:
            self.add(token)

    def add(self, token: int) -> str:
        """Adds a token; returns its text."""
        self._tokens.append(token)
        self._pending += 1
        text = self._unsent_text()
        certain = _certain_text(text, self._pending)
        if certain == text:
            self._advance(text)
            return text
        return self._shorten(text, certain) if self._pending > _LONGEST_BEGINNING else ""

    @property
    def is_within_character(self) -> bool:
        """Whether the newest tokens may end within a character."""
        return self._pending > 0

    def finish(self) -> str:
        """Returns the remaining text of a character that did not become whole."""
        text = self._unsent_text()
        self._advance(text)
        return text

    def preview(self, token: int) -> str:
        """The text that a token would have here."""
        return _certain_text(self._unsent_text([token]), self._pending + 1)

    def _unsent_text(self, more: Sequence[int] = ()) -> str:
        return self.tokenizer.detokenize([*self._tokens, *more])[self._sent :]

    def _advance(self, text: str) -> None:
        """Leaves the tokens whose text was the newest as the context of the next one."""
        if text:  # tokens without a text decide nothing about the next one's
            del self._tokens[: len(self._tokens) - self._pending]
        elif len(self._tokens) > 2 * _CONTEXT:
            del self._tokens[len(self._tokens) - self._pending :]
        self._sent = len(self.tokenizer.detokenize(self._tokens))
        self._pending = 0

    def _shorten(self, text: str, certain: str) -> str:
        """Forgets the oldest tokens of a long run that ends within a character; returns the text that is certain."""
        del self._tokens[:-_CONTEXT]
        remaining, uncertain = self.tokenizer.detokenize(self._tokens), text[len(certain) :]
        if not remaining.endswith(uncertain):
            self._sent, self._pending = len(remaining), 0
            return text
        self._sent, self._pending = len(remaining) - len(uncertain), _LONGEST_BEGINNING
        return certain


def _certain_text(text: str, tokens: int) -> str:
    """The text of this many tokens that no token behind them changes.

    They are waited for while they may be one character; of more tokens only the end may become one.
    """
    broken = len(text) - len(text.rstrip(_BROKEN))
    if broken and tokens <= _LONGEST_BEGINNING:
        return ""
    return text[: len(text) - min(broken, _LONGEST_BEGINNING)]


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text of each token; put together, they are the text of all."""
    decoder = TokenDecoder(tokenizer)
    texts = [decoder.add(token) for token in tokens]
    if texts:
        texts[-1] += decoder.finish()
    return texts


def prompt_text(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """The text of a prompt, as far as its characters are whole: the continuation's text goes on behind it."""
    decoder = TokenDecoder(tokenizer)
    return "".join(map(decoder.add, prompt))


class TextStream:
    """Detokenizes tokens that come one by one: whole characters, up to a stop string.

    What may turn out to be the beginning of a stop string is held back. The texts of ``add`` and ``finish``, put
    together, are the text of all tokens, cut before the first stop string.

    Args:
        tokenizer: tokenizer of the tokens.
        stop: strings that end the text.
        context: tokens before the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self.stop = [text for text in stop if text]
        self.stopped = False
        self._decoder = TokenDecoder(tokenizer, context)
        self._held = ""

    def add(self, token: int) -> str:
        """Adds a token; returns the text that is final with it."""
        return "" if self.stopped else self._release(self._decoder.add(token), final=False)

    def finish(self) -> str:
        """Returns the remaining text."""
        return "" if self.stopped else self._release(self._decoder.finish(), final=True)

    def _release(self, text: str, final: bool) -> str:
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        keep = 0 if final else max((_overlap(self._held, stop) for stop in self.stop), default=0)
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        return certain


def continuation(tokenizer: Tokenizer, tokens: Sequence[int], prompt_length: int) -> str:
    """The text of a prompt's continuation, as it would be written behind it."""
    stream = TextStream(tokenizer, context=tokens[:prompt_length])
    return "".join(map(stream.add, tokens[prompt_length:])) + stream.finish()


def is_text(text: str) -> bool:
    """Whether a line is valid text: bytes that are not UTF-8 arrive as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _overlap(text: str, stop: str) -> int:
    """Number of characters at the end of a text that a stop string begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
