#!/usr/bin/env python
"""Keeps the URLs that may lead to a text: well formed, without repetitions, and of sites and files that contain text.

    python tools/openwebtext/blacklist_urls.py folder_of_txt_files clean_urls.txt
    python tools/openwebtext/blacklist_urls.py urls clean.txt --domains-file more_domains.txt

Reads every .txt (.txt.gz, .txt.zst) in the folder, one URL per line. Drops sites of pictures, films, music, goods or
posts, files other than pages, URLs of at most 8 characters, malformed URLs, and repetitions. Memory: a fingerprint of
16 bytes for each URL that is kept (about 90 bytes in Python's set).
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.blacklist_urls")

from megatron.base.errors import UserError
from megatron.data.lines import lines, writing
from tools.openwebtext.cleaning.command import Report, Tool, add_common, check_apart, progress

LISTS = Path(__file__).resolve().parent / "lists"


MIN_CHARACTERS = 9
"""Minimum length of a URL."""


def read_words(path: str | Path) -> frozenset[str]:
    """Words of a file, one per line."""
    return frozenset(line.decode("utf-8", "replace").strip(".").lower() for line in lines(path))


@cache
def _host_parser() -> Any:
    """Split a host by the public suffixes in the package; nothing is fetched."""
    import tldextract

    return tldextract.TLDExtract(suffix_list_urls=())


def url_filter(domain_files: list[Path], extension_files: list[Path]) -> Callable[[str], str | None]:
    """Make a function that returns the reason to drop a URL, or None to keep it.

    Args:
        domain_files: files of registered names to drop, with any subdomain and suffix.
        extension_files: files of file extensions to drop.
    """
    domains = frozenset[str]().union(*map(read_words, domain_files))
    extensions = frozenset[str]().union(*map(read_words, extension_files))

    def reason_against(url: str) -> str | None:
        if len(url) < MIN_CHARACTERS:
            return "too short"
        try:
            parts = urlsplit(url)
            host = parts.hostname
        except ValueError:
            return "malformed"
        if parts.scheme not in ("http", "https") or not host or any(c.isspace() or c == "\ufffd" for c in url):
            return "malformed"
        name = _host_parser()(host)
        if not name.domain or not (name.suffix or host.replace(".", "").isdigit() or ":" in host):
            return "malformed"
        if name.domain.lower() in domains:
            return "of a site without texts"
        _, dot, extension = parts.path.rsplit("/", 1)[-1].rpartition(".")
        return "of a file that is no page" if dot and extension.lower() in extensions else None

    return reason_against


def page_of(url: str) -> bytes:
    """Fingerprint of the page that a URL leads to, without the fragment."""
    return hashlib.blake2b(url.split("#", 1)[0].encode("utf-8", "surrogatepass"), digest_size=16).digest()


def files_of(folder: Path) -> list[Path]:
    """Files of URLs in a folder."""
    ends = (".txt", ".txt.gz", ".txt.zst")
    return sorted(path for path in folder.glob("*.txt*") if path.name.endswith(ends) and not path.name.startswith("."))


def run(options: argparse.Namespace) -> Report:
    """Filter the URLs of a folder.

    Raises:
        UserError: when there are none.
    """
    folder = Path(options.input)
    files = [path for path in files_of(folder) if path.resolve() != Path(options.output).resolve()]
    if not files:
        raise UserError(f"{folder}: holds no .txt files")
    check_apart([*files, options.domains_file, options.extensions_file], [options.output, options.report])
    reason_against = url_filter(
        [LISTS / "domains.txt", *filter(None, [options.domains_file])],
        [LISTS / "extensions.txt", *filter(None, [options.extensions_file])],
    )
    report, seen = Report(URLs=0), set[bytes]()
    with writing(options.output) as write:
        for line in progress((line for path in files for line in lines(path)), "URLs", "URL"):
            url = line.decode("utf-8", "replace")
            fingerprint = page_of(url)
            reason = reason_against(url) or ("repeated" if fingerprint in seen else None)
            report.update(["URLs", reason or "written"])
            if reason is None:
                seen.add(fingerprint)
                write(url.encode())
    return report


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help="folder of .txt files")
    parser.add_argument("output", help="file for the URLs that are kept")
    parser.add_argument("--domains-file", metavar="FILE", help="additional names of sites to drop, one per line")
    parser.add_argument("--extensions-file", metavar="FILE", help="additional file extensions to drop, one per line")
    add_common(parser, workers=False, bad_lines=False)


main = Tool("blacklist_urls.py", __doc__, add_flags, run)
