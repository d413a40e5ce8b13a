"""Responses and errors in the formats of Megatron's and OpenAI's APIs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import JSONResponse

from megatron.inference.generate import Token
from megatron.inference.jobs import InferenceJob
from megatron.inference.server.requests import Completion
from megatron.inference.server.worker import Result, StreamedToken
from megatron.inference.text import TokenDecoder, prompt_text, token_texts
from megatron.tokenizer.api import Tokenizer

RETRY_SECONDS = 5
"""Retry delay in seconds for clients rejected by a full server."""


def error_body(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """Body of an error response, for OpenAI's and Megatron's clients."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}, "message": message}


def error_response(
    message: str, status: int, code: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Error response with JSON body."""
    status_headers = {}
    if status == 503:
        status_headers = {"Retry-After": str(RETRY_SECONDS)}
    elif status == 408:  # the remaining bytes of a body that timed out would be parsed as the next request
        status_headers = {"Connection": "close"}
    return JSONResponse(error_body(message, status, code), status, {**status_headers, **(headers or {})})


def megatron_answer(job: InferenceJob, results: Sequence[Result], tokenizer: Tokenizer) -> dict[str, Any]:
    """Response of Megatron's API: texts with their prompts, token texts, and log-probabilities."""
    text, segments, logprobs = [], [], []
    for prompt, result in zip(job.prompts, results, strict=True):
        text.append(prompt_text(tokenizer, prompt) + result.text)
        segments.append(token_texts(tokenizer, [*prompt, *(token.id for token in result.tokens)]))
        logprobs.append([token.logprob for token in (*result.prompt, *result.tokens)])
    answer: dict[str, Any] = {"text": text, "segments": segments}
    if job.top is not None:
        answer["logprobs"] = logprobs
    return answer


@dataclass(frozen=True)
class TokenEntry:
    """A token in a response.

    Args:
        text: text that the token adds to the preceding tokens.
        offset: number of preceding characters.
        logprob: log-probability; None for the first token of a text.
        alternatives: ids of the likeliest tokens, their texts after the same context, and their log-probabilities.
    """

    text: str
    offset: int
    logprob: float | None
    alternatives: Sequence[tuple[int, str, float]]


class CompletionAnswer:
    """Responses to a completion request.

    Args:
        completion: the request.
        model: name of the model.
        tokenizer: tokenizer of the model.
    """

    _prefix, _object, _event_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, completion: Completion, model: str, tokenizer: Tokenizer) -> None:
        self.completion = completion
        self.job = completion.job
        self.model = model
        self.tokenizer = tokenizer
        self.id = f"{self._prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._offsets = [0] * len(completion.job.prompts)
        self._decoders = [TokenDecoder(tokenizer, prompt) for prompt in completion.job.prompts]
        self._held_entries: list[list[tuple[Token | int, TokenEntry]]] = [[] for _ in completion.job.prompts]

    def _frame(self, choices: list[dict[str, Any]], *, event: bool = False) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self._event_object if event else self._object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _entries(self, row: int, tokens: Sequence[Token | int], *, final: bool) -> list[tuple[Token | int, TokenEntry]]:
        """Entries of a row's next tokens; the first token of a text is a bare id without a probability.

        Tokens that end within a character are held back until the character is complete or the row ends. An incomplete
        character at the end is text, too, and belongs to the last held token.
        """
        decoder, held_entries = self._decoders[row], self._held_entries[row]
        for token in tokens:
            number, logprob = (token, None) if isinstance(token, int) else (token.id, token.logprob)
            top = () if isinstance(token, int) else token.top
            alternatives = [(other, decoder.preview(other), value) for other, value in top]
            text = decoder.add_token(number)
            held_entries.append((token, TokenEntry(text, self._offsets[row], logprob, alternatives)))
            self._offsets[row] += len(text)
        if decoder.is_within_character and not final:
            return []
        if final and held_entries:
            token, entry = held_entries[-1]
            held_entries[-1] = token, replace(entry, text=entry.text + decoder.finish())
        self._held_entries[row] = []
        return held_entries

    def _logprobs(self, entries: Sequence[tuple[Token | int, TokenEntry]]) -> dict[str, Any]:
        top_logprobs: list[dict[str, float] | None] = []
        for token, entry in entries:
            if isinstance(token, int):
                top_logprobs.append(None)
                continue
            # Tokens with the same text, such as parts of characters, are named by their ids after the first.
            logprob_by_text = {entry.text: token.logprob}
            for number, text, logprob in entry.alternatives:
                if number != token.id:
                    logprob_by_text[f"token_id:{number}" if text in logprob_by_text else text] = logprob
            top_logprobs.append(logprob_by_text)
        return {
            "tokens": [entry.text for _, entry in entries],
            "token_logprobs": [entry.logprob for _, entry in entries],
            "top_logprobs": top_logprobs,
            "text_offset": [entry.offset for _, entry in entries],
        }

    def _choice(self, row: int, text: str, tokens: Sequence[Token | int], reason: str | None, *, event: bool) -> Any:
        """Choice object of a row, complete or as a stream event."""
        logprobs = None
        if self.job.top is not None:
            logprobs = self._logprobs(self._entries(row, tokens, final=reason is not None))
        return {"index": row, **self._content(text, event), "logprobs": logprobs, "finish_reason": reason}

    def _content(self, text: str, event: bool) -> dict[str, Any]:
        return {"text": text}

    def full_response(self, results: Sequence[Result]) -> dict[str, Any]:
        """Complete response, without streaming."""
        choices = []
        for row, (prompt, result) in enumerate(zip(self.job.prompts, results, strict=True)):
            text, tokens = result.text, list[Token | int](result.sampled)
            if self.completion.echo:
                text = prompt_text(self.tokenizer, prompt) + text
                tokens = [*prompt[:1], *result.prompt, *tokens]
                self._decoders[row] = TokenDecoder(self.tokenizer)
            choices.append(self._choice(row, text, tokens, result.reason, event=False))
        return {**self._frame(choices), "usage": self._usage(results)}

    def _usage(self, results: Sequence[Result]) -> dict[str, int]:
        prompts = sum(map(len, self.job.prompts[:: self.completion.n]))
        new = sum(len(result.sampled) for result in results)
        return {"prompt_tokens": prompts, "completion_tokens": new, "total_tokens": prompts + new}

    def first_events(self) -> Iterator[dict[str, Any]]:
        """First events of a stream: the prompts, if they are echoed."""
        if self.completion.echo:
            for row, prompt in enumerate(self.job.prompts):
                yield self._event(row, prompt_text(self.tokenizer, prompt), [], None)

    def token_event(self, streamed: StreamedToken) -> dict[str, Any]:
        """Stream event of a token."""
        return self._event(streamed.row, streamed.text, [streamed.token], None)

    def last_events(self, results: Sequence[Result]) -> Iterator[dict[str, Any]]:
        """Last events of a stream: held-back text, end-of-document tokens, finish reasons, and usage."""
        for row, result in enumerate(results):
            tokens = [] if result.end is None else [result.end]
            yield self._event(row, result.unstreamed_text, tokens, result.reason)
        if self.completion.usage:
            yield {**self._frame([], event=True), "usage": self._usage(results)}

    def _event(self, row: int, text: str, tokens: Sequence[Token | int], reason: str | None) -> dict[str, Any]:
        return self._frame([self._choice(row, text, tokens, reason, event=True)], event=True)


class ChatAnswer(CompletionAnswer):
    """Responses to a chat request."""

    _prefix, _object, _event_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _content(self, text: str, event: bool) -> dict[str, Any]:
        if event:
            return {"delta": {"content": text} if text else {}}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, entries: Sequence[tuple[Token | int, TokenEntry]]) -> dict[str, Any]:
        content = []
        for _, entry in entries:
            alternatives = [_chat_token(text, logprob) for _, text, logprob in entry.alternatives]
            content.append({**_chat_token(entry.text, entry.logprob), "top_logprobs": alternatives})
        return {"content": content, "refusal": None}

    def first_events(self) -> Iterator[dict[str, Any]]:
        """First events of a stream: the role."""
        for row in range(len(self.job.prompts)):
            choice = {"index": row, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            yield self._frame([{**choice, "finish_reason": None}], event=True)


def _chat_token(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
