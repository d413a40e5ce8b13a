"""Responses and errors in the formats of the two APIs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from starlette.responses import JSONResponse

from megatron.inference.generate import Token
from megatron.inference.jobs import InferenceJob
from megatron.inference.server.requests import Completion
from megatron.inference.server.worker import Result, StreamedToken
from megatron.inference.text import TokenDecoder, prompt_text, token_texts
from megatron.tokenizer.api import Tokenizer

RETRY_SECONDS = 5
"""Seconds after which a client that found no room may try again."""


def error_body(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """The body of an error, for OpenAI's clients and for Megatron's."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}, "message": message}


def error_headers(status: int) -> dict[str, str]:
    """The headers of an error."""
    if status == 503:
        return {"Retry-After": str(RETRY_SECONDS)}
    # What is left of a body that came too late would be taken for the next request.
    return {"Connection": "close"} if status == 408 else {}


def error_response(
    message: str, status: int, code: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An error response."""
    return JSONResponse(error_body(message, status, code), status, {**error_headers(status), **(headers or {})})


def megatron_answer(job: InferenceJob, results: Sequence[Result], tokenizer: Tokenizer) -> dict[str, Any]:
    """The response of Megatron's API: texts with their prompts, their tokens as texts, and log-probabilities."""
    text, segments, logprobs = [], [], []
    for prompt, result in zip(job.prompts, results, strict=True):
        text.append(prompt_text(tokenizer, prompt) + result.text)
        segments.append(token_texts(tokenizer, [*prompt, *(token.id for token in result.tokens)]))
        logprobs.append([token.logprob for token in (*result.prompt, *result.tokens)])
    answer: dict[str, Any] = {"text": text, "segments": segments}
    if job.top is not None:
        answer["logprobs"] = logprobs
    return answer


def _top_logprobs(token: Token, decoder: TokenDecoder) -> dict[str, float]:
    """Probabilities of a token and the likeliest ones, by the texts that they have behind ``decoder``'s tokens.

    Where several have one text, as parts of characters do, the later ones are named by their ids.
    """
    logprobs = {decoder.preview(token.id): token.logprob}
    for number, logprob in token.top:
        if number != token.id:
            text = decoder.preview(number)
            logprobs[f"token_id:{number}" if text in logprobs else text] = logprob
    return logprobs


class CompletionAnswer:
    """Responses to one completion request.

    Args:
        asked: the request.
        model: name of the model.
        tokenizer: tokenizer of the model.
    """

    def __init__(self, asked: Completion, model: str, tokenizer: Tokenizer) -> None:
        self.asked = asked
        self.job = asked.job
        self.model = model
        self.tokenizer = tokenizer
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._offsets = [0] * len(asked.job.prompts)
        self._decoders = [TokenDecoder(tokenizer, prompt) for prompt in asked.job.prompts]

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, row: int, tokens: Sequence[Token | int], final: bool) -> dict[str, Any] | None:
        """Probabilities of a row's next tokens; the first of a text, a bare id, has none."""
        if self.job.top is None:
            return None
        decoder = self._decoders[row]
        texts: list[str] = []
        top: list[dict[str, float] | None] = []
        for token in tokens:
            top.append(None if isinstance(token, int) else _top_logprobs(token, decoder))
            texts.append(decoder.add(token if isinstance(token, int) else token.id))
        if final and texts:
            texts[-1] += decoder.finish()
        offsets = list(accumulate(map(len, texts), initial=self._offsets[row]))
        self._offsets[row] = offsets.pop()
        return {
            "tokens": texts,
            "token_logprobs": [None if isinstance(token, int) else token.logprob for token in tokens],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _choice(self, row: int, text: str, tokens: Sequence[Token | int], reason: str | None) -> Any:
        logprobs = self._logprobs(row, tokens, final=reason is not None)
        return {"index": row, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The response as a whole."""
        choices = []
        for row, (prompt, result) in enumerate(zip(self.job.prompts, results, strict=True)):
            text, tokens = result.text, list[Token | int](result.sampled)
            if self.asked.echo:
                text = prompt_text(self.tokenizer, prompt) + text
                tokens = [*prompt[:1], *result.prompt, *tokens]
                self._decoders[row] = TokenDecoder(self.tokenizer)
            choices.append(self._choice(row, text, tokens, result.reason))
        return {**self._frame(choices), "usage": self._usage(results)}

    def _usage(self, results: Sequence[Result]) -> dict[str, int]:
        prompts = sum(map(len, self.job.prompts[:: self.asked.n]))
        new = sum(len(result.sampled) for result in results)
        return {"prompt_tokens": prompts, "completion_tokens": new, "total_tokens": prompts + new}

    def begin(self) -> Iterator[dict[str, Any]]:
        """The first events of a stream: the prompts, if they are to be echoed."""
        if self.asked.echo:
            for row, prompt in enumerate(self.job.prompts):
                yield self._frame([self._choice(row, prompt_text(self.tokenizer, prompt), [], None)])

    def streamed(self, streamed: StreamedToken) -> dict[str, Any]:
        """The event of a token."""
        return self._frame([self._choice(streamed.row, streamed.text, [streamed.token], None)])

    def end(self, results: Sequence[Result]) -> Iterator[dict[str, Any]]:
        """The last events: held-back text, the ends of documents, the reasons why texts ended, and usage."""
        for row, result in enumerate(results):
            tokens = [] if result.end is None else [result.end]
            yield self._frame([self._choice(row, result.rest, tokens, result.reason)])
        if self.asked.usage:
            yield {**self._frame([]), "usage": self._usage(results)}
