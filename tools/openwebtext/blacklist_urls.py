#!/usr/bin/env python
"""Keeps the URLs that may lead to a text: of sites and files that hold any, well formed, and each once.

    python tools/openwebtext/blacklist_urls.py folder_of_txt_files clean_urls.txt
    python tools/openwebtext/blacklist_urls.py urls clean.txt --domains-file more_domains.txt

Reads every .txt (.txt.gz, .txt.zst) in the folder, one URL a line. Left out are sites that show pictures, films, music,
goods or posts, files that are no pages, URLs of at most 8 characters or of no form, and repetitions. Memory: a
fingerprint of 16 bytes of each URL that is kept (about 90 bytes in Python's set).
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.blacklist_urls")

from megatron.base.errors import UserError
from megatron.data.cleaning.command import Report, Tool, add_common, check_apart, progress
from megatron.data.lines import lines, writing

LISTS = Path(__file__).resolve().parent / "lists"


def words_of(path: str | Path) -> frozenset[str]:
    """The words of a file, one a line.

    Raises:
        UserError: when it cannot be read.
    """
    return frozenset(line.decode("utf-8", "replace").strip(".").lower() for line in lines(path))


LEAST = 9
"""Characters of a URL that is kept."""


@cache
def _parts() -> Any:
    """Cuts a host into its parts, by the public suffixes as the package knows them; nothing is fetched."""
    import tldextract

    return tldextract.TLDExtract(suffix_list_urls=())


def reason_against(url: str, domains: Collection[str], extensions: Collection[str]) -> str | None:
    """Why a URL is left out, if it is.

    Args:
        url: of a page.
        domains: registered names to leave out, whatever stands before and behind them.
        extensions: endings of files to leave out.
    """
    if len(url) < LEAST:
        return "too short"
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return "malformed"
    if parts.scheme not in ("http", "https") or not host or any(c.isspace() for c in url):
        return "malformed"
    name = _parts()(host)
    if not name.domain or not (name.suffix or host.replace(".", "").isdigit() or ":" in host):
        return "malformed"
    if name.domain.lower() in domains:
        return "of a site without texts"
    last = parts.path.rsplit("/", 1)[-1]
    if "." in last and last.rsplit(".", 1)[-1].lower() in extensions:
        return "of a file that is no page"
    return None


def page_of(url: str) -> bytes:
    """A fingerprint of the page that a URL leads to, whatever part of it."""
    return hashlib.blake2b(url.split("#", 1)[0].encode("utf-8", "surrogatepass"), digest_size=16).digest()


def files_of(folder: Path) -> list[Path]:
    """The files of URLs in a folder."""
    ends = (".txt", ".txt.gz", ".txt.zst")
    return sorted(path for path in folder.glob("*.txt*") if path.name.endswith(ends) and not path.name.startswith("."))


def run(options: argparse.Namespace) -> Report:
    """Filters the URLs of a folder.

    Raises:
        UserError: when there are none.
    """
    folder = Path(options.input)
    own = Path(options.output).resolve()
    files = [path for path in files_of(folder) if path.resolve() != own]
    if not files:
        raise UserError(f"{folder}: holds no .txt files")
    check_apart([*files, options.domains_file, options.extensions_file], [options.output, options.report])
    domains, extensions = words_of(LISTS / "domains.txt"), words_of(LISTS / "extensions.txt")
    if options.domains_file is not None:
        domains |= words_of(options.domains_file)
    if options.extensions_file is not None:
        extensions |= words_of(options.extensions_file)
    report, seen = Report(URLs=0), set[bytes]()
    with writing(options.output) as write:
        for line in progress((line for path in files for line in lines(path)), "URLs", "URL"):
            report.add("URLs")
            url = line.decode("utf-8", "replace")
            reason = "malformed" if "\ufffd" in url else reason_against(url, domains, extensions)
            fingerprint = page_of(url)
            if reason is None and fingerprint in seen:
                reason = "repeated"
            if reason is not None:
                report.add(reason)
                continue
            seen.add(fingerprint)
            write(url.encode())
            report.add("written")
    return report


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help="folder of .txt files")
    parser.add_argument("output", help="file for the URLs that are kept")
    parser.add_argument("--domains-file", metavar="FILE", help="further names of sites to leave out, one a line")
    parser.add_argument("--extensions-file", metavar="FILE", help="further endings to leave out, one a line")
    add_common(parser, workers=False, bad_lines=False)


main = Tool("blacklist_urls.py", __doc__, add_flags, run)
