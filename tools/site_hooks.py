"""Hooks of MkDocs: links that leave docs/ are shown as paths of the repository, and code in tables without escapes."""

from __future__ import annotations

import html
import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)\s]*)\)")

_ESCAPED_CODE = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
"""Code in a table with an escaped pipe, which GitHub shows without the backslash and MkDocs with it."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links to files outside docs/ by their paths in the repository, and escaped pipes in code by entities."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace_link(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, link[2]))
        return link[0] if path.startswith("docs/") else f"`{path}`"

    def escape_pipes(match: re.Match[str]) -> str:
        return f"<code>{html.escape(match[1]).replace(chr(92) + '|', '&#124;')}</code>"

    return _ESCAPED_CODE.sub(escape_pipes, _LINK.sub(replace_link, markdown))
