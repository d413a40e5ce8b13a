"""Chat requests: fields that contradict each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.inference.server.chat import chat_job
from megatron.inference.server.requests import Completion, RequestError, RequestLimits
from megatron.tokenizer.chat import ChatTemplate
from megatron.tokenizer.null import NullTokenizer


class FirstMessage(ChatTemplate):
    """Chat template that renders the first message, without a process."""

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Return the first message."""
        return str(messages[0]["content"])


def _parse(**fields: object) -> Completion:
    body = {"messages": [{"role": "user", "content": "1 2"}], **fields}
    return chat_job(body, FirstMessage("", {}), NullTokenizer(96), RequestLimits(window=16, tokens=200))


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": False}, {"logprobs": None}])
def test_alternatives_without_probabilities_are_refused(logprobs: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=r"top_logprobs needs logprobs: true") as refusal:
        _parse(top_logprobs=2, **logprobs)
    assert refusal.value.status == 400
    assert "\n" not in str(refusal.value)
    assert _parse(top_logprobs=0, **logprobs).job.top is None
    assert _parse(**logprobs).job.top is None


def test_alternatives_are_checked_with_and_without_probabilities() -> None:
    assert _parse(logprobs=True, top_logprobs=2).job.top == 2
    assert _parse(logprobs=True).job.top == 0
    for logprobs in (True, False):
        with pytest.raises(UserError, match="top_logprobs is 21"):
            _parse(logprobs=logprobs, top_logprobs=21)
