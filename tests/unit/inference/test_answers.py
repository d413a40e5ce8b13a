"""Answers of the completions API: every token has an entry with its text and position."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron.inference.generate import Token
from megatron.inference.jobs import InferenceJob
from megatron.inference.sampling import Sampling
from megatron.inference.server.answers import ChatAnswer, CompletionAnswer, megatron_answer
from megatron.inference.server.requests import Completion
from megatron.inference.server.worker import Result, StreamedToken
from megatron.inference.text import TextStream
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from tests.support.llama import EOS, write_sentence_piece

TEXT = "the dog saw € under a house"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    write_sentence_piece(path)
    return SentencePieceTokenizer(path)


def _token(number: int, position: int) -> Token:
    """Token with three alternatives, two of them bytes."""
    top = ((number, -1.0), (EOS, -2.0), (200, -3.0), (201, -4.0))
    return Token(number, -1.0 - position / 8, top)


def _answer(
    tokenizer: SentencePieceTokenizer, prompt: int, *, echo: bool, end: bool
) -> tuple[CompletionAnswer, Result]:
    """Answer to a prompt of the first tokens of a text; the other tokens and the end of document continue it."""
    ids = tokenizer.tokenize(TEXT)
    tokens = [_token(number, position) for position, number in enumerate(ids)]
    job = InferenceJob([ids[:prompt]], 99, Sampling(), [1], top=3, score=echo)
    stream = TextStream(tokenizer, context=ids[:prompt])
    text = "".join(map(stream.add_token, ids[prompt:])) + stream.finish()
    scored = tokens[1:prompt] if echo else []
    result = Result(text, "", tokens[prompt:], "stop", scored, _token(EOS, 99) if end else None)
    return CompletionAnswer(Completion(job, 1, False, echo, False), "name", tokenizer), result


@pytest.mark.parametrize("prompt", [0, 1, 7, 8, 9])
@pytest.mark.parametrize("echo", [True, False])
@pytest.mark.parametrize("end", [True, False])
def test_token_entries_have_the_offsets_of_their_texts(
    tokenizer: SentencePieceTokenizer, prompt: int, echo: bool, end: bool
) -> None:
    answer, result = _answer(tokenizer, prompt, echo=echo, end=end)
    (choice,) = answer.full_response([result])["choices"]
    entries: dict[str, Any] = choice["logprobs"]
    count = len(tokenizer.tokenize(TEXT)) - (0 if echo else prompt) + end
    assert {len(values) for values in entries.values()} == {count}
    assert "".join(entries["tokens"]) == choice["text"]
    assert choice["text"].endswith(" under a house")
    assert not echo or choice["text"] == TEXT
    for text, offset in zip(entries["tokens"], entries["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(text)
    for text, top, logprob in zip(entries["tokens"], entries["top_logprobs"], entries["token_logprobs"], strict=True):
        if top is not None:
            assert len(top) == 4 or (len(top) == 5 and logprob not in (-1.0, -2.0, -3.0, -4.0)) or logprob < -10
            assert top[text] == logprob
    if end:
        assert entries["token_logprobs"][-1] == _token(EOS, 99).logprob


def test_a_prompt_ending_within_a_character_loses_no_token(tokenizer: SentencePieceTokenizer) -> None:
    ids = tokenizer.tokenize(TEXT)
    within = ids.index(tokenizer.tokenize("€")[1]) + 1
    answer, result = _answer(tokenizer, within, echo=False, end=False)
    assert answer.full_response([result])["choices"][0]["text"] == "€ under a house"
    echoed, result = _answer(tokenizer, within, echo=True, end=False)
    assert echoed.full_response([result])["choices"][0]["text"] == TEXT
    full_answer = megatron_answer(echoed.job, [result], tokenizer)
    assert full_answer["text"] == [TEXT]
    assert "".join(full_answer["segments"][0]) == TEXT


@pytest.mark.parametrize("kind", [CompletionAnswer, ChatAnswer])
@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("left_out", [0, 4, 5, 6])
def test_stream_events_add_up_to_the_full_answer(
    tokenizer: SentencePieceTokenizer, left_out: int, end: bool, kind: type[CompletionAnswer]
) -> None:
    """Also where tokens end within a character: each has an entry, and their texts add up to the text."""
    _, result = _answer(tokenizer, 3, echo=False, end=end)
    result = dataclasses.replace(result, tokens=result.tokens[: len(result.tokens) - left_out])
    ids = tokenizer.tokenize(TEXT)
    job = InferenceJob([ids[:3]], 99, Sampling(), [1], top=3)
    stream = TextStream(tokenizer, context=ids[:3])
    texts = [stream.add_token(token.id) for token in result.tokens]
    final = stream.finish()
    result = dataclasses.replace(result, text="".join(texts) + final, unstreamed_text=final)
    assert ("\ufffd" in result.text) == (left_out in (4, 5)), "the cases end within and behind the character"
    answer, full_answer = (kind(Completion(job, 1, False, False, False), "name", tokenizer) for _ in range(2))
    events = [answer.token_event(StreamedToken(0, *pair)) for pair in zip(result.tokens, texts, strict=True)]
    events += list(answer.last_events([result]))
    expected = full_answer.full_response([result])["choices"][0]["logprobs"]
    logprobs = [event["choices"][0]["logprobs"] for event in events]
    lists = [name for name, values in expected.items() if values is not None]
    assert {name: [value for entry in logprobs for value in entry[name]] for name in lists} == {
        name: expected[name] for name in lists
    }
    assert {len(expected[name]) for name in lists} == {len(result.sampled)}
    pieces = expected["tokens"] if kind is CompletionAnswer else [entry["token"] for entry in expected["content"]]
    assert "".join(pieces) == result.text


def test_the_end_of_document_counts_as_a_token(tokenizer: SentencePieceTokenizer) -> None:
    answer, result = _answer(tokenizer, 3, echo=False, end=True)
    assert answer.full_response([result])["usage"]["completion_tokens"] == len(result.tokens) + 1
