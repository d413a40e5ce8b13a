"""Requests as jobs: defaults that fit, values as clients mean them, and errors that name the field."""

from __future__ import annotations

import pytest

from megatron.inference.server.requests import RequestError, RequestLimits, completion_job, megatron_job
from megatron.tokenizer.null import NullTokenizer

TOKENIZER, LIMITS = NullTokenizer(96), RequestLimits(window=16, tokens=200)


@pytest.mark.parametrize("prompts", [[""], ["1"], ["", "1 2"]])
def test_the_default_length_fits_every_prompt(prompts: list[str]) -> None:
    longest = max(len(prompt.split()) or 1 for prompt in prompts)
    assert megatron_job({"prompts": prompts}, TOKENIZER, LIMITS).max_new_tokens == 16 - longest


def test_top_p_0_is_greedy_for_openais_clients_and_off_for_megatrons() -> None:
    fields = {"prompt": "1", "top_p": 0, "top_k": 5}
    assert completion_job(fields, TOKENIZER, LIMITS).job.sampling.greedy
    assert not completion_job({"prompt": "1"}, TOKENIZER, LIMITS).job.sampling.greedy
    assert not megatron_job({"prompts": ["1"], "top_p": 0}, TOKENIZER, LIMITS).sampling.greedy


@pytest.mark.parametrize("options", [5, [], "", False])
def test_options_must_be_an_object(options: object) -> None:
    with pytest.raises(RequestError, match="stream_options must be a JSON object"):
        completion_job({"prompt": "1", "stream": True, "stream_options": options}, TOKENIZER, LIMITS)


def test_stream_options_are_optional_and_may_request_the_usage() -> None:
    assert not completion_job({"prompt": "1", "stream_options": None}, TOKENIZER, LIMITS).usage
    assert completion_job({"prompt": "1", "stream_options": {"include_usage": True}}, TOKENIZER, LIMITS).usage
