"""Chat templates: the prompts of transformers, and bounds on templates."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from megatron.base.errors import UserError
from megatron.tokenizer.chat import ChatTemplate, read_chat_template
from megatron.tokenizer.chat_render import render
from tests.support.chat_model import END, TEMPLATE, write_chat_model

MESSAGES = [
    {"role": "system", "content": "Be  brief. \u00e9\u20ac"},
    {"role": "user", "content": " hello\n"},
    {"role": "assistant", "content": "hi", "name": "a"},
]
TEMPLATES = {
    "turns": TEMPLATE,
    "json, loops and namespaces": (
        "{%- set ns = namespace(n=0) -%}\n    {%- for m in messages %}\n{% if loop.index == 3 %}{% break %}{% endif %}"
        "{%- set ns.n = ns.n + 1 %}{{ bos_token }}{{ m | tojson }}{{ m.role.upper() }}{{ eos_token }}\n"
        "  {% endfor %}{{ ns.n }}"
    ),
    "marks of training": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "options": "{{ mood }}{{ unknown }}{% if tools is defined and tools %}x{% endif %}{{ messages | length }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    peer = PreTrainedTokenizerFast.from_pretrained(folder, bos_token="<|im_start|>")
    template = read_chat_template(folder)
    assert template is not None
    assert template.source == TEMPLATES[name]
    for prompted in (True, False):
        options: dict[str, Any] = {"add_generation_prompt": prompted, "mood": "glad"}
        expected = peer.apply_chat_template(MESSAGES, tokenize=False, **options)
        variables = {**peer.special_tokens_map, **options, "messages": MESSAGES}
        assert render(template.source, variables) == expected


def test_undefined_variables_render_as_in_transformers() -> None:
    source = (
        "{% if tools is not none %}tools: {{ tools }}{% endif %}{% if documents is not none %}documents{% endif %}"
        "{{ add_generation_prompt is defined }}{{ messages[0].content }}"
    )
    peer: Any = render_jinja_template([MESSAGES], chat_template=source)  # prompts, and marks of training
    assert [ChatTemplate(source, {}).render(MESSAGES, {})] == peer[0]
    assert ChatTemplate(source, {}).render(MESSAGES, {"tools": ["a"]}).startswith("tools: ")


def test_the_template_is_read_from_either_file(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path)
    template = read_chat_template(folder)
    assert template is not None
    assert template.names["eos_token"] == END
    text = template.render(MESSAGES[1:2], {"add_generation_prompt": True})
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes {{ eos_token }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": END}))
    template = read_chat_template(folder)
    assert template is not None
    assert template.render([], {}) == f"yes {END}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    assert read_chat_template(folder) is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ raise_exception.__globals__.keys() }}", "SecurityError"),
        ("{{ 'x' * 10 ** 9 }}", "memory"),
        ("{{ 'x' * 10 ** 7 }}", "too long"),
    ],
)
def test_a_forbidden_template_is_refused(source: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as refusal:
        ChatTemplate(source, {}).render(MESSAGES, {})
    assert "\n" not in str(refusal.value)


def test_an_endless_template_is_stopped() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    start = time.monotonic()
    with pytest.raises(UserError, match="takes longer than 1 s"):
        ChatTemplate(endless, {}, seconds=1.0).render(MESSAGES, {})
    assert time.monotonic() - start < 10
