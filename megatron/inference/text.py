"""Incremental detokenization."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from megatron.tokenizer.api import Tokenizer

_BROKEN = "\ufffd"
"""Replacement character: the text of an incomplete character."""

_LONGEST_BEGINNING = 3
"""Maximum number of tokens, or of replacement characters, in an incomplete character: UTF-8's four bytes less one."""

_CONTEXT = 8
"""Context tokens for decoding: some tokenizers drop the space at the beginning of a text."""


class TokenDecoder:
    """Incremental decoder: the text of each token in the context of the preceding tokens.

    The concatenated texts of all tokens are the text of the sequence. A character of several tokens belongs to the last
    of them.

    Args:
        tokenizer: tokenizer of the tokens.
        context: tokens before the text; a character that begins in them belongs to the text.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._tokens: list[int] = []  # newest tokens, at most about 2 * _CONTEXT
        self._sent = 0  # characters of their text already returned
        self._pending = 0  # number of newest tokens that may end within a character
        for token in context[-_CONTEXT:]:
            self.add_token(token)

    def add_token(self, token: int) -> str:
        """Add a token; return its text."""
        text_before = self._unsent_text() if self._pending and not self.tokenizer.detokenize([token]) else None
        self._tokens.append(token)
        text = self._unsent_text()
        if text == text_before:
            # A token without text must not push the beginning of a character out of the context.
            self._tokens.pop()
            return ""
        self._pending += 1
        # Up to ``_LONGEST_BEGINNING`` tokens may all belong to a single character; of more tokens, only the end may.
        broken = len(text) - len(text.rstrip(_BROKEN))
        if broken and self._pending <= _LONGEST_BEGINNING:
            complete_text = ""
        else:
            complete_text = text[: len(text) - min(broken, _LONGEST_BEGINNING)]
        if complete_text == text:
            self._advance(text)
            return text
        if self._pending <= _LONGEST_BEGINNING:
            return ""
        # A long run that ends within a character: drop its oldest tokens.
        del self._tokens[:-_CONTEXT]
        remaining, uncertain = self.tokenizer.detokenize(self._tokens), text[len(complete_text) :]
        if not remaining.endswith(uncertain):
            self._sent, self._pending = len(remaining), 0
            return text
        self._sent, self._pending = len(remaining) - len(uncertain), _LONGEST_BEGINNING
        return complete_text

    @property
    def is_within_character(self) -> bool:
        """Whether the newest tokens may end within a character."""
        return self._pending > 0

    def finish(self) -> str:
        """Return the remaining text of an incomplete character."""
        text = self._unsent_text()
        self._advance(text)
        return text

    def preview(self, token: int) -> str:
        """Text that ``add_token`` would return for a token."""
        decoder = copy(self)
        decoder._tokens = list(self._tokens)
        return decoder.add_token(token)

    def _unsent_text(self) -> str:
        return self.tokenizer.detokenize(self._tokens)[self._sent :]

    def _advance(self, text: str) -> None:
        """Keep the tokens of ``text`` as the context of the next token."""
        if text:  # tokens without text are no context for the next token
            del self._tokens[: len(self._tokens) - self._pending]
        elif len(self._tokens) > 2 * _CONTEXT:
            del self._tokens[len(self._tokens) - self._pending :]
        self._sent = len(self.tokenizer.detokenize(self._tokens))
        self._pending = 0


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Text of each token; concatenated, they are the text of the sequence."""
    decoder = TokenDecoder(tokenizer)
    texts = [decoder.add_token(token) for token in tokens]
    if texts:
        texts[-1] += decoder.finish()
    return texts


def prompt_text(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """Text of the complete characters of a prompt; the continuation's text follows it."""
    decoder = TokenDecoder(tokenizer)
    return "".join(map(decoder.add_token, prompt))


class TextStream:
    """Streaming detokenizer of complete characters, up to a stop string.

    A possible beginning of a stop string is held back. The concatenated texts of ``add_token`` and ``finish`` are the
    text of all tokens, cut before the stop string that ends in the earliest token; of several, the first.

    Args:
        tokenizer: tokenizer of the tokens.
        stop: strings that end the text.
        context: tokens before the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self.stop = [text for text in stop if text]
        self.stopped = False
        self._decoder = TokenDecoder(tokenizer, context)
        self._held_text = ""

    def add_token(self, token: int) -> str:
        """Add a token; return the text that becomes final."""
        return "" if self.stopped else self._release(self._decoder.add_token(token), final=False)

    def finish(self) -> str:
        """Return the remaining text."""
        return "" if self.stopped else self._release(self._decoder.finish(), final=True)

    def _release(self, text: str, final: bool) -> str:
        self._held_text += text
        stop_positions = [position for position in (self._held_text.find(stop) for stop in self.stop) if position >= 0]
        if stop_positions:
            self.stopped = True
            return self._held_text[: min(stop_positions)]
        keep = 0
        for stop in () if final else self.stop:
            # The longest suffix of the text that may be the beginning of the stop string.
            lengths = range(min(len(self._held_text), len(stop) - 1), keep, -1)
            keep = next((length for length in lengths if self._held_text.endswith(stop[:length])), keep)
        cut = len(self._held_text) - keep
        complete_text, self._held_text = self._held_text[:cut], self._held_text[cut:]
        return complete_text


def continuation(tokenizer: Tokenizer, tokens: Sequence[int], prompt_length: int) -> str:
    """Text of a continuation, decoded in the context of its prompt."""
    stream = TextStream(tokenizer, context=tokens[:prompt_length])
    return "".join(map(stream.add_token, tokens[prompt_length:])) + stream.finish()


def is_text(text: str) -> bool:
    """Return whether a line is valid text: bytes that are not UTF-8 arrive as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
