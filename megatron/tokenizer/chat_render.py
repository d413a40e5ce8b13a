"""Program that renders a chat template, with JSON input and output.

Templates are untrusted: they run in a sandbox, in a process with limits on memory and CPU time that its parent kills
after a timeout. The program is run by path, so that it starts without importing this package.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 29
CPU_SECONDS = 5
MAX_CHARACTERS = 1 << 22


class GenerationBlocks(Extension):
    """Support for ``generation`` blocks, which mark assistant text for training; rendered as their content."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(source: str, variables: dict[str, Any]) -> str:
    """Render a template, with the helper functions that ``transformers`` provides."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source).render(**variables)


def main() -> None:
    """Read ``source`` and ``variables``; write ``text``, or ``error``."""
    request = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # limits regular files, not pipes
    try:
        text = render(request["source"], request["variables"])
        text.encode()
        answer = {"text": text} if len(text) <= MAX_CHARACTERS else {"error": "its output is too long"}
    except MemoryError:
        answer = {"error": "it needs too much memory"}
    except Exception as error:  # a template may raise anything
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
