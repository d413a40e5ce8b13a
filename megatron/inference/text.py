"""Incremental detokenization."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.tokenizer.api import Tokenizer

_BROKEN = "\ufffd"
"""The character that a tokenizer shows for a part of a character."""

_CONTEXT = 8
"""Tokens that may decide how the next one is written: some tokenizers drop the space that a text begins with."""


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
        self.tokenizer = tokenizer
        self.stop = [text for text in stop if text]
        self.stopped = False
        self._tokens = list(context[-_CONTEXT:])
        self._start, self._seen = 0, len(self._tokens)
        self._held = ""

    def add(self, token: int) -> str:
        """Adds a token; returns the text that is final with it."""
        self._tokens.append(token)
        return "" if self.stopped else self._release(self._new_text(final=False), final=False)

    def finish(self) -> str:
        """Returns the remaining text."""
        return "" if self.stopped else self._release(self._new_text(final=True), final=True)

    def _new_text(self, final: bool) -> str:
        known = self.tokenizer.detokenize(self._tokens[self._start : self._seen])
        text = self.tokenizer.detokenize(self._tokens[self._start :])
        if text.endswith(_BROKEN) and not final:
            return ""
        self._start, self._seen = self._seen, len(self._tokens)
        return text[len(known) :]

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
