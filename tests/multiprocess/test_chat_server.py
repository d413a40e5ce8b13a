"""The server's OpenAI endpoints by OpenAI's own client, and a chat's answer by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from megatron.convert.command import main as convert
from tests.support.chat_model import END, write_chat_model
from tests.support.server import Client, serving

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("warm")]

MESSAGES: Any = [{"role": "system", "content": "brief"}, {"role": "user", "content": "what is this?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    write_chat_model(folder / "hf")
    assert convert(["--load", str(folder / "hf"), "--save", str(folder / "saved"), "--to", "megatron-cc"]) == 0
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Client]:
    with serving(folder / "saved") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.host}:{server.port}/v1", api_key="none", max_retries=0)


def _peer_answer(folder: Path, new: int, **options: Any) -> tuple[list[int], list[int], str]:
    """The prompt's ids, and the ids and text that transformers continue it with, greedily."""
    peer = PreTrainedTokenizerFast.from_pretrained(folder / "hf")
    ids = peer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    model = GPT2LMHeadModel.from_pretrained(folder / "hf")
    row = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0, **options)[
        0
    ].tolist()
    continuation = row[len(ids) :]
    return ids, continuation, peer.decode(continuation[:-1] if continuation[-1] == peer.eos_token_id else continuation)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.7}])
def test_a_chat_goes_on_as_transformers_does(folder: Path, client: openai.OpenAI, options: dict[str, float]) -> None:
    ids, continuation, text = _peer_answer(folder, 12, **options)
    answer = client.chat.completions.create(
        model="any", messages=MESSAGES, temperature=0, max_completion_tokens=12, logprobs=True, top_logprobs=2,
        extra_body=options,
    )  # fmt: skip
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(continuation))
    assert choice.finish_reason == ("stop" if len(continuation) < 12 else "length")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == len(continuation)
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    if not options:
        for token in choice.logprobs.content:
            assert token.logprob == max(other.logprob for other in token.top_logprobs)


def test_a_streamed_chat_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "any",
        "messages": MESSAGES,
        "max_tokens": 9,
        "seed": 4,
        "n": 2,
        "temperature": 0.7,
    }
    answer = client.chat.completions.create(**request)
    events = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert {event.object for event in events} == {"chat.completion.chunk"}
    assert events[-1].choices == []
    assert events[-1].usage == answer.usage
    for number, choice in enumerate(answer.choices):
        chunks = [event.choices[0] for event in events[:-1] if event.choices[0].index == number]
        assert chunks[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in chunks) == choice.message.content
        assert [piece.finish_reason for piece in chunks] == [*[None] * (len(chunks) - 1), choice.finish_reason]


def test_stop_tokens_and_biases_are_applied(client: openai.OpenAI) -> None:
    def complete(**changes: Any) -> Any:
        changes = {"temperature": 0, "max_tokens": 4, "logprobs": 1, **changes}
        return client.completions.create(model="any", prompt=[72, 73], **changes)

    always = complete(logit_bias={"70": 100})
    assert always.choices[0].text == always.choices[0].logprobs.tokens[0] * 4
    stopped = complete(logit_bias={"70": 100}, extra_body={"stop_token_ids": [70]})
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    assert stopped.usage.completion_tokens == 1
    varied = complete(logit_bias={"70": 5.0, "71": 4.9}, presence_penalty=2, frequency_penalty=2)
    assert len(set(varied.choices[0].logprobs.tokens)) > 1
    narrow = [complete(temperature=1, seed=seed, extra_body={"top_k": 1, "min_p": 0.2}, top_p=0.9) for seed in range(3)]
    assert {answer.choices[0].text for answer in narrow} == {complete().choices[0].text}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": []}, "1 to 1024"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]: role"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\]: content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"messages\[0\]: content"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"max_tokens": 500}, "max_tokens"),
        ({"logit_bias": {"-1": 3}}, "logit_bias"),
        ({"logit_bias": {"5": 300}}, "logit_bias"),
        ({"logit_bias": {str(number): 1 for number in range(301)}}, "at most 300"),
        ({"extra_body": {"stop_token_ids": [9999]}}, "stop_token_ids"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"extra_body": {"best_off": 3}}, "unknown field best_off"),
    ],
)
def test_bad_chats_are_refused_in_openais_form(client: openai.OpenAI, body: dict[str, Any], reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as refusal:
        client.chat.completions.create(**{"model": "any", "messages": MESSAGES, **body})
    assert refusal.value.type == "invalid_request_error"


def test_parts_and_returned_messages_are_understood(client: openai.OpenAI) -> None:
    def ask(messages: Any) -> Any:
        return client.chat.completions.create(model="any", messages=messages, temperature=0, max_tokens=5)

    first = ask([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
    assert first == ask([{"role": "user", "content": "a\nb"}]).model_copy(
        update={"id": first.id, "created": first.created}
    )
    again = ask(
        [{"role": "user", "content": "a"}, first.choices[0].message.model_dump(), {"role": "user", "content": "b"}]
    )
    assert END not in again.choices[0].message.content
