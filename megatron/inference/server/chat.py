"""Parsing and validation of chat requests; the tokenizer's chat template turns messages into a prompt."""

from __future__ import annotations

from typing import Any

from megatron.inference.server.requests import (
    MAX_TOP,
    SHARED_FIELDS,
    Completion,
    Fields,
    RequestError,
    RequestLimits,
    default_new_tokens,
    openai_completion,
)
from megatron.tokenizer.api import Tokenizer
from megatron.tokenizer.chat import ChatTemplate

CHAT_FIELDS = [
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "add_generation_prompt",
    "chat_template_kwargs",
    "response_format",
    "tools",
    "tool_choice",
]
"""Fields of chat requests only."""

MAX_MESSAGES = 1024
MAX_ROLE = 64


def chat_job(body: object, template: ChatTemplate | None, tokenizer: Tokenizer, limits: RequestLimits) -> Completion:
    """Parse a request of ``POST /v1/chat/completions``.

    Raises:
        UserError: when the request is invalid, or the tokenizer has no template.
    """
    if template is None:
        raise RequestError("the tokenizer of this model has no chat template; POST /v1/completions takes texts")
    fields = Fields(body)
    fields.reject_unknown([*CHAT_FIELDS, *SHARED_FIELDS])
    fields.reject_unsupported("tools", [])
    fields.reject_unsupported("tool_choice", "none", "auto")
    fields.reject_unsupported("response_format", {"type": "text"})
    options = fields.nested("chat_template_kwargs")
    variables = {**options, "add_generation_prompt": fields.flag("add_generation_prompt", True)}
    top = fields.integer("top_logprobs", 0, minimum=0, maximum=MAX_TOP)
    with_logprobs = fields.flag("logprobs", False)
    if top and not with_logprobs:
        raise RequestError("top_logprobs needs logprobs: true; add it, or leave out top_logprobs")
    listed = fields.listed("messages")
    if not 0 < len(listed) <= MAX_MESSAGES:
        raise RequestError(f"messages holds {len(listed)} messages; it must hold 1 to {MAX_MESSAGES}")
    messages = [_message(value, f"messages[{index}]") for index, value in enumerate(listed)]
    prompt = tokenizer.tokenize(template.render(messages, variables))
    if not prompt:
        raise RequestError("messages: the chat template renders them as an empty prompt")
    name = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
    share = limits.tokens // fields.integer("n", 1) - len(prompt)
    new = fields.integer(name, default_new_tokens(share, [prompt], limits), maximum=limits.window)
    return openai_completion(fields, tokenizer, limits, [prompt], new, top=top if with_logprobs else None, echo=False)


def _message(value: object, path: str) -> dict[str, Any]:
    message = Fields(value, path)
    present_fields = {name: content for name, content in message.items() if content is not None}
    Fields(present_fields).reject_unknown(["role", "content", "name"])
    role, content = present_fields.get("role"), present_fields.get("content", "")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE:
        raise RequestError(f"{path}: role must be a text of 1 to {MAX_ROLE} characters")
    if isinstance(content, list):
        are_texts = all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        )
        content = "\n".join(part["text"] for part in content) if are_texts else None
    if not isinstance(content, str) or not isinstance(present_fields.get("name", ""), str):
        raise RequestError(f"{path}: content must be a text, or a list of parts of the type text")
    return {**present_fields, "content": content}
