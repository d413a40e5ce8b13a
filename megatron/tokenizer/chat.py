"""Chat templates, which render messages as a prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError
from megatron.config.tokenizer import TokenizerConfig
from megatron.tokenizer import chat_render
from megatron.tokenizer.special_tokens import read_special_tokens

_SECONDS = 10.0
"""Default time limit for rendering a template."""

_DEFAULTS: Mapping[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": False}
"""Default values of template variables, as in transformers."""


class ChatTemplate:
    """Chat template of a tokenizer folder, rendered in a separate process with bounded time and memory.

    Args:
        source: Jinja source of the template.
        names: special tokens available to the template, by kind (bos_token, eos_token ...).
        seconds: time limit for rendering.
    """

    def __init__(self, source: str, names: Mapping[str, str], seconds: float = _SECONDS) -> None:
        self.source = source
        self.names = dict(names)
        self._seconds = seconds

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Render messages as a prompt.

        Args:
            messages: messages with role and content.
            options: additional template variables.

        Raises:
            UserError: when the template rejects the messages, or fails.
        """
        variables = {**_DEFAULTS, **self.names, **options, "messages": list(messages)}
        try:
            process = subprocess.run(
                [sys.executable, "-I", chat_render.__file__],
                input=json.dumps({"source": self.source, "variables": variables}).encode(),
                capture_output=True,
                timeout=self._seconds,
            )
            answer = json.loads(process.stdout)
        except subprocess.TimeoutExpired:
            answer = {"error": f"it takes longer than {self._seconds:g} s"}
        except ValueError:
            answer = {"error": "it took too much time or memory"}
        if "text" not in answer:
            raise UserError(f"the chat template failed: {answer.get('error')}")
        return str(answer["text"])


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Read the chat template of a tokenizer folder from chat_template.jinja, or else from tokenizer_config.json.

    If tokenizer_config.json has several templates, it returns the template named "default".
    """
    special = read_special_tokens(folder)
    source = special.config.get("chat_template")
    if isinstance(source, list):
        templates = [entry for entry in source if isinstance(entry, dict)]
        source = next((entry.get("template") for entry in templates if entry.get("name") == "default"), None)
    try:
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--tokenizer-model {folder}: its chat_template.jinja cannot be read ({error})") from None
    return ChatTemplate(source, special.by_kind) if isinstance(source, str) else None


def open_chat_template(flags: TokenizerConfig) -> ChatTemplate | None:
    """Read the chat template of a tokenizer; None if it has no template.

    Only Hugging Face folders are supported: templates write special tokens as text, and other tokenizers do not parse
    special tokens in a text.
    """
    folder = Path(flags.tokenizer_model or "")
    return read_chat_template(folder) if flags.tokenizer_model and folder.is_dir() else None
