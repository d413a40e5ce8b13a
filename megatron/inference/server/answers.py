"""Results, and refusals, in the words of the two APIs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from megatron.inference.generate import Token
from megatron.inference.jobs import InferenceJob
from megatron.inference.server.requests import Completion
from megatron.inference.server.worker import Result, StreamedToken
from megatron.tokenizer.api import Tokenizer

RETRY_SECONDS = 5
"""Seconds after which a client that found no room may try again."""


def error_body(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """A refusal as OpenAI's clients read it, and as Megatron's do."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}, "message": message}


def error_headers(status: int) -> dict[str, str]:
    """The headers of a refusal."""
    if status == 503:
        return {"Retry-After": str(RETRY_SECONDS)}
    # What is left of a body that came too late would be taken for the next request.
    return {"Connection": "close"} if status == 408 else {}


def error_response(
    message: str, status: int, code: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """A refusal."""
    return JSONResponse(error_body(message, status, code), status, {**error_headers(status), **(headers or {})})


def megatron_answer(job: InferenceJob, results: Sequence[Result], tokenizer: Tokenizer) -> dict[str, Any]:
    """Texts with their prompts, their tokens as texts, and the logarithms of the probabilities after the first."""
    text, segments, logprobs = [], [], []
    for prompt, result in zip(job.prompts, results, strict=True):
        ids = [*prompt, *(token.id for token in result.tokens)]
        text.append(tokenizer.detokenize(prompt) + result.text)
        segments.append([tokenizer.detokenize([one]) for one in ids])
        logprobs.append([token.logprob for token in (*result.prompt, *result.tokens)])
    answer: dict[str, Any] = {"text": text, "segments": segments}
    if job.top is not None:
        answer["logprobs"] = logprobs
    return answer


class CompletionAnswer:
    """Answers to one completion request.

    Args:
        asked: the request.
        model: its name.
        tokenizer: the model's.
    """

    def __init__(self, asked: Completion, model: str, tokenizer: Tokenizer) -> None:
        self.asked = asked
        self.job = asked.job
        self.model = model
        self.tokenizer = tokenizer
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._offsets = [0] * len(asked.job.prompts)

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, tokens: Sequence[Token | int], offset: int) -> dict[str, Any] | None:
        """Probabilities of tokens; the first of a text, a bare id, has none."""
        if self.job.top is None:
            return None
        ids = [token if isinstance(token, int) else token.id for token in tokens]
        texts = [self.tokenizer.detokenize([one]) for one in ids]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if isinstance(token, int) else token.logprob for token in tokens],
            "top_logprobs": [None if isinstance(token, int) else self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float]:
        # Several tokens may have the same text, as parts of characters have: the likeliest stands for them.
        found: dict[str, float] = {}
        for one, logprob in (*token.top, (token.id, token.logprob)):
            found.setdefault(self.tokenizer.detokenize([one]), logprob)
        return found

    def _choice(self, row: int, text: str, tokens: Sequence[Token | int], reason: str | None, offset: int = 0) -> Any:
        return {
            "index": row,
            "text": text,
            "logprobs": self._logprobs(tokens, offset),
            "finish_reason": reason,
        }

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for row, (prompt, result) in enumerate(zip(self.job.prompts, results, strict=True)):
            text, tokens = result.text, list[Token | int](result.tokens)
            if self.asked.echo:
                text = self.tokenizer.detokenize(prompt) + text
                tokens = [*prompt[:1], *result.prompt, *tokens]
            choices.append(self._choice(row, text, tokens, result.reason))
        return {**self._frame(choices), "usage": self._usage(results)}

    def _usage(self, results: Sequence[Result]) -> dict[str, int]:
        prompts = sum(map(len, self.job.prompts[:: self.asked.n]))
        new = sum(len(result.tokens) for result in results)
        return {"prompt_tokens": prompts, "completion_tokens": new, "total_tokens": prompts + new}

    def begin(self) -> Iterator[dict[str, Any]]:
        """The first events of a stream: the prompts, when they are to be echoed."""
        if self.asked.echo:
            for row, prompt in enumerate(self.job.prompts):
                yield self._frame([self._choice(row, self.tokenizer.detokenize(prompt), [], None)])

    def piece(self, piece: StreamedToken) -> dict[str, Any]:
        """An event for a token."""
        offset = self._offsets[piece.row]
        self._offsets[piece.row] += len(self.tokenizer.detokenize([piece.token.id]))
        return self._frame([self._choice(piece.row, piece.text, [piece.token], None, offset)])

    def end(self, results: Sequence[Result]) -> Iterator[dict[str, Any]]:
        """The last events: what was held back, why each text ended, and what it took."""
        for row, result in enumerate(results):
            yield self._frame([self._choice(row, result.rest, [], result.reason)])
        if self.asked.usage:
            yield {**self._frame([]), "usage": self._usage(results)}
