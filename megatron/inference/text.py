"""Incremental detokenization."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.tokenizer.api import Tokenizer

_BROKEN = "\ufffd"
"""The character that a tokenizer shows for a part of a character."""

_LONGEST_BEGINNING = 3
"""Tokens that a character may lack its end after: one for each byte but the last of UTF-8's four."""

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
        self._tokens: list[int] = []
        self._start = self._seen = 0
        for token in context[-_CONTEXT:]:
            self.add(token)
        # What does not become a character within four bytes is none.
        self._seen = max(self._seen, len(self._tokens) - _LONGEST_BEGINNING)

    def add(self, token: int) -> str:
        """Adds a token; returns its text."""
        self._tokens.append(token)
        return self._take(final=False)

    def finish(self) -> str:
        """Returns what is left of a character that did not become whole."""
        return self._take(final=True)

    def preview(self, token: int) -> str:
        """The text that a token would have here."""
        text = self._text([token])
        return "" if text.endswith(_BROKEN) else text

    def _text(self, more: Sequence[int] = ()) -> str:
        known = self.tokenizer.detokenize(self._tokens[self._start : self._seen])
        return self.tokenizer.detokenize([*self._tokens[self._start :], *more])[len(known) :]

    def _take(self, final: bool) -> str:
        text = self._text()
        if text.endswith(_BROKEN) and not final:
            return ""
        if text:  # tokens without a text decide nothing about the next one's
            self._start = self._seen
        self._seen = len(self._tokens)
        return text


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
