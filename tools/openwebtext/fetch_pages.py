#!/usr/bin/env python
"""Fetches the pages of URLs and writes their texts as JSON lines.

    python tools/openwebtext/fetch_pages.py clean_urls.txt pages.jsonl.zst
    python tools/openwebtext/fetch_pages.py clean_urls.txt pages.jsonl.zst --connections 128 \\
        --user-agent "name-of-your-lab (mail@lab.edu)"

Reads one URL per line, as blacklist_urls.py writes them. Pages of a host are fetched one at a time, with a pause
between them (--delay), and only if its robots.txt allows it (unless --ignore-robots), redirections included.
trafilatura extracts the text of a page, without menus and comments; plain texts stay as they are. Pages that are too
large, too slow, of another kind or of a private network are dropped; the report counts them by reason.

Until all pages are fetched, the results are in OUTPUT.fetched, not compressed: run the command again to continue after
an interruption. Hosts take turns, those with the most pages first, eight for each of the --connections. Memory: about
350 bytes for each URL, and the pages in flight (--max-bytes each, at most 3 for each of the --connections and 4 for
each of the --workers).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.fetch_pages")

from megatron.base.atomic import hold_lock
from megatron.base.errors import UserError
from megatron.base.fields import check_fields
from megatron.base.option import field_options
from megatron.data.lines import lines, writing
from megatron.data.processes import map_in_processes
from tools.openwebtext.blacklist_urls import page_of
from tools.openwebtext.cleaning.command import Report, Tool, add_common, check_apart, progress
from tools.openwebtext.cleaning.filtering import encode
from tools.openwebtext.cleaning.pages import RECORDED_LIMITS, UNREACHED, Limits, Page, host_of

RESUMABLE = "fetched pages are kept; run the command again to continue"

_OUTAGE = 100
"""Consecutive unreachable hosts after which a host that was reachable is tried again."""

_ROW, _HEADER = b'{"url": "', b'{"limits": '
"""First bytes of a line of the record, and of its first line."""


def _silence_libraries() -> None:
    import trafilatura

    for name in (trafilatura.__name__, "urllib3"):  # the report counts each page
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _extract(page: Page) -> dict[str, str]:
    """Extract a page's text; return the row of the record, a URL with its text or with the reason for its lack."""
    if page.failed:
        return {"url": page.url, "failed": page.failed}
    if page.media_type == "text/plain":
        text = page.body.decode("utf-8", "replace").strip()
    else:
        import trafilatura

        _silence_libraries()
        try:
            text = trafilatura.extract(page.body, include_comments=False, deduplicate=False) or ""
        except Exception:  # pages may trigger any error of lxml and others
            text = ""
    return {"url": page.url, "text": text} if text else {"url": page.url, "failed": "without a text"}


def _check_network(rows: Iterable[dict[str, str]], is_up: Callable[[], bool]) -> Iterator[dict[str, str]]:
    """Yield rows; those of unreachable hosts wait until another host is reached.

    Raises:
        UserError: when the network seems to be down; the waiting rows are left to the next run.
    """
    waiting: list[dict[str, str]] = []
    hosts: set[str] = set()
    for row in rows:
        waiting.append(row)
        if row.get("failed") in UNREACHED:
            hosts.add(host_of(row["url"]))
            if len(hosts) < _OUTAGE:
                continue
            if not is_up():
                raise UserError(
                    f"{_OUTAGE} hosts in a row cannot be reached, the last at {row['url']}; check the network; "
                    f"{RESUMABLE}"
                )
        yield from waiting
        waiting.clear()
        hosts.clear()
    yield from waiting


def _read_record(path: Path, stream: BinaryIO, limits: Limits) -> dict[bytes, str]:
    """Read the record of an interrupted run, and remove an incomplete last line; a new record gets its first line.

    Returns:
        The page of each fetched URL, and the URL if the page has a text, else "".

    Raises:
        UserError: when the file is not a record, or has other limits.
    """
    header = _HEADER + json.dumps([getattr(limits, name) for name in RECORDED_LIMITS]).encode() + b"}\n"
    end, pages = 0, dict[bytes, str]()
    for line in stream:
        is_complete = line.endswith(b"\n")
        try:
            if not line.startswith((_ROW if end else _HEADER)[: len(line)]):
                raise ValueError
            if end and is_complete:
                row = json.loads(line)
                pages[page_of(row["url"])] = row["url"] if "text" in row else ""
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path}: is not the record of an interrupted run; remove it") from error
        if not end and is_complete and line != header:
            raise UserError(
                f"{path}: was started with another --max-bytes, --ignore-robots or --allow-private-hosts; "
                "use the same flags, or remove it"
            )
        end += len(line) if is_complete else 0
    stream.truncate(end)
    if not end:
        stream.write(header)
    return pages


def run(options: argparse.Namespace) -> Report:
    """Fetch the pages of a file of URLs.

    Raises:
        UserError: when the file cannot be read, no page can be fetched, or another run fetches them.
    """
    from tools.openwebtext.cleaning.fetching import Fetcher

    _silence_libraries()
    fetch = Fetcher(options.limits)
    next(lines(options.input), None)  # fail before a record with these limits is created
    path = _record_of(Path(options.output))
    try:
        with path.open("a+b") as stream, hold_lock(path, if_supported=True):
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                raise UserError(f"{path}: another run has just ended; try again")
            stream.seek(0)
            return _fetch(options, fetch, path, stream)
    except BlockingIOError as error:
        raise UserError(f"{path}: another run is fetching these pages; wait for it") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def _fetch(options: argparse.Namespace, fetch: Callable[[str], Page], path: Path, record: BinaryIO) -> Report:
    from tools.openwebtext.cleaning.fetching import fetch_all

    limits: Limits = options.limits
    fetched = _read_record(path, record, limits)
    reached_urls = [url for url in fetched.values() if url][-1:]
    urls: dict[bytes, str] = {}
    for line in lines(options.input):
        url = line.decode("utf-8", "replace")
        urls.setdefault(page_of(url), url)
    missing = [url for page, url in urls.items() if page not in fetched]
    del fetched

    def is_up() -> bool:
        return bool(reached_urls) and fetch(reached_urls[0]).failed not in UNREACHED

    pages = fetch_all(missing, fetch, limits.connections, limits.delay, limits.patience)
    rows = map_in_processes(_extract, pages, options.workers)
    for row in _check_network(progress(rows, "pages", "page"), is_up):
        record.write(encode(row) + b"\n")
        record.flush()
        if "text" in row:
            reached_urls = [row["url"]]
    report = Report(pages=0, written=0)
    record.seek(0)
    record.readline()
    with writing(options.output) as write:
        for row in map(json.loads, record):
            if page_of(row["url"]) in urls:
                report["pages"] += 1
                report[row.get("failed", "written")] += 1
                if "text" in row:
                    write(encode(row))
        if not report["written"]:
            path.unlink()  # so that all pages are fetched again when the network is back
            raise UserError(f"{options.input}: no page could be fetched ({report})")
    path.unlink()
    return report


FLAGS = list(field_options("fetching", Limits))
"""Flags of ``Limits``."""


def add_limits(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flags of ``Limits``."""
    for field in FLAGS:
        flag, text = f"--{field.flag}", field.option.help
        if field.is_switch:
            action = "store_false" if field.option.off_switch else "store_true"
            parser.add_argument(flag, dest=field.name, action=action, help=text)
        else:
            parser.add_argument(
                flag, dest=field.name, type=field.element, default=field.default, metavar=field.option.metavar,
                help=f"{text} ({field.default})",
            )  # fmt: skip


def limit_flags(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Command-line words of the flags of ``add_limits``: those that affect which pages are fetched, and the others."""
    counted, free = list[str](), list[str]()
    for field in FLAGS:
        value = getattr(options, field.name)
        if not field.is_switch or value != field.default:
            word = f"--{field.flag}" if field.is_switch else f"--{field.flag}={value}"
            (counted if field.name in RECORDED_LIMITS else free).append(word)
    return counted, free


def _record_of(output: Path) -> Path:
    """Path of the record of fetched pages."""
    return output.with_name(output.name + ".fetched")


def check(options: argparse.Namespace) -> None:
    """Check the flags, and set ``options.limits``.

    Raises:
        UserError: when a flag is invalid.
    """
    limits = Limits(**{field.name: getattr(options, field.name) for field in FLAGS})
    if not limits.agent.isprintable() or not limits.agent.strip() or not limits.agent.isascii():
        raise UserError(f"--user-agent {limits.agent!r}: give a name of ASCII letters")
    check_fields("fetching", limits)
    options.limits = limits
    check_apart([options.input], [options.output, _record_of(Path(options.output)), options.report])
    if Path(options.input).exists() and not Path(options.input).is_file():
        raise UserError(f"{options.input}: is not a regular file, which is needed because it is read twice")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help="file of URLs, one per line")
    parser.add_argument("output", help="file for the texts, as JSON lines")
    add_limits(parser)
    add_common(parser, bad_lines=False)


main = Tool("fetch_pages.py", __doc__, add_flags, run, check, RESUMABLE)
