#!/usr/bin/env python
"""Fetches the pages of URLs and writes their texts as JSON lines.

    python tools/openwebtext/fetch_pages.py clean_urls.txt pages.jsonl.zst
    python tools/openwebtext/fetch_pages.py clean_urls.txt pages.jsonl.zst --connections 128 \\
        --user-agent "name-of-your-lab (mail@lab.edu)"

Reads a URL a line, as blacklist_urls.py writes them. Each host is asked once at a time, with a pause between two pages
(--delay), and only for what its robots.txt allows (--ignore-robots asks for all); so are those that redirections lead
to. trafilatura takes the text out of a page, without menus and comments; plain texts stay as they are. Pages that are
too large, too slow, of another kind or of a private network are left out; the report counts them by reason.

What is fetched is in OUTPUT.fetched, not compressed, until all is: the same command goes on where an earlier one was
interrupted. Memory: about 180 bytes for each URL, 10,000 URLs ahead, and the pages on their way (--max-bytes each, at
most --connections and 4 for each of the --workers). Hosts take turns among these 10,000 URLs: shuffle a list in which
those of a host stand together.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.openwebtext.fetch_pages")

from megatron.base.atomic import holding
from megatron.base.errors import UserError
from megatron.base.fields import check_fields
from megatron.base.option import field_options
from megatron.data.cleaning.command import Report, Tool, add_common, check_apart, progress
from megatron.data.cleaning.fetching import OF_PAGES, UNREACHED, Limits, Page, fetch_all, host_of
from megatron.data.cleaning.filtering import encode
from megatron.data.lines import lines, writing
from megatron.data.processes import in_processes
from tools.openwebtext.blacklist_urls import page_of

GOES_ON = "what is fetched is kept; the same command goes on"

_OUTAGE = 100
"""Hosts in a row that cannot be reached, after which one that could be is asked again."""

_BEGIN, _LIMITS = b'{"url": "', b'{"limits": '
"""Of a line of the record, and of its first."""


def _quiet() -> None:
    import trafilatura

    for name in (trafilatura.__name__, "urllib3"):  # what becomes of each page is in the report
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _extract(page: Page) -> dict[str, str]:
    """The line of the record: a URL with its text, or with the reason why there is none."""
    if page.failed:
        return {"url": page.url, "failed": page.failed}
    if page.kind == "text/plain":
        text = page.body.decode("utf-8", "replace").strip()
    else:
        import trafilatura

        try:
            text = trafilatura.extract(page.body, include_comments=False, deduplicate=False) or ""
        except Exception:  # of lxml and of others: a page may be anything
            text = ""
    if not text:
        return {"url": page.url, "failed": "without a text"}
    return {"url": page.url, "text": text}


def _settled(rows: Iterable[dict[str, str]], is_up: Callable[[], bool]) -> Iterator[dict[str, str]]:
    """Lines for the record. Those of hosts that cannot be reached wait until another can be.

    Args:
        rows: as they come.
        is_up: whether a host that could be reached still can.

    Raises:
        UserError: when the network seems to be down; what waits is asked for again by the next run.
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
                    f"{_OUTAGE} hosts in a row cannot be reached, {row['url']} the last: see to the network; {GOES_ON}"
                )
        yield from waiting
        waiting.clear()
        hosts.clear()
    yield from waiting


class _Record:
    """What was fetched, a line each, on disk as it comes; the first line says within what limits.

    Raises:
        UserError: when the file is another, or of other limits.
    """

    def __init__(self, path: Path, stream: BinaryIO, limits: Limits) -> None:
        self.path, self.stream = path, stream
        self.done: set[bytes] = set()
        self.reached = ""
        """The last URL whose page was had."""
        first = _LIMITS + json.dumps(limits.of_pages).encode() + b"}\n"
        whole = 0
        for line in stream:
            half = not line.endswith(b"\n")  # left by an interrupted run
            try:
                if not line.startswith((_BEGIN if whole else _LIMITS)[: len(line)]):
                    raise ValueError
                if whole and not half:
                    self._take(json.loads(line))
            except (ValueError, AttributeError) as error:
                raise UserError(f"{path}: is no record of an interrupted run; remove it") from error
            if not (whole or half) and line != first:
                raise UserError(
                    f"{path}: was begun with another --max-bytes, --ignore-robots or --allow-private-hosts; "
                    "give those again, or remove it"
                )
            whole += 0 if half else len(line)
        stream.seek(whole)
        stream.truncate()
        if not whole:
            stream.write(first)

    def _take(self, found: dict[str, str]) -> None:
        self.done.add(page_of(found["url"]))
        if "text" in found:
            self.reached = found["url"]

    def add(self, found: dict[str, str]) -> None:
        self.stream.write(encode(found) + b"\n")
        self.stream.flush()
        self._take(found)

    def rows(self) -> Iterator[dict[str, str]]:
        self.stream.seek(0)
        self.stream.readline()
        yield from map(json.loads, self.stream)


@contextmanager
def _recording(path: Path, limits: Limits) -> Iterator[_Record]:
    """The record of one run at a time.

    Raises:
        UserError: when it cannot be written, or another run does.
    """
    try:
        with path.open("a+b") as stream, holding(path, where_there_are_locks=True):
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                raise UserError(f"{path}: another run has just ended; start again")
            stream.seek(0)
            yield _Record(path, stream, limits)
    except BlockingIOError as error:
        raise UserError(f"{path}: another run is fetching these pages; wait for it") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def run(options: argparse.Namespace) -> Report:
    """Fetches the pages of a file of URLs.

    Raises:
        UserError: when the file cannot be read, or no page can be fetched.
    """
    from megatron.data.cleaning.requesting import Fetcher

    limits: Limits = options.limits
    output = Path(options.output)
    next(lines(options.input), None)  # a file that cannot be read leaves no record, which other limits would not fit
    wanted: set[bytes] = set()
    fetch = Fetcher(limits)
    _quiet()
    with _recording(_record_of(output), limits) as record:

        def missing() -> Iterator[str]:
            for line in lines(options.input):
                url = line.decode("utf-8", "replace")
                page = page_of(url)
                if page not in wanted:
                    wanted.add(page)
                    if page not in record.done:
                        yield url

        def is_up() -> bool:
            return bool(record.reached) and fetch(record.reached).failed not in UNREACHED

        pages = fetch_all(missing(), fetch, limits.connections, limits.delay, limits.patience)
        with progress((), "pages", "page") as bar:
            for found in _settled(in_processes(_extract, pages, options.workers, _quiet), is_up):
                record.add(found)
                bar.update()
        report = _write(options.input, wanted, record, output)
        record.path.unlink(missing_ok=True)
    return report


def _write(source: str, wanted: set[bytes], record: _Record, output: Path) -> Report:
    """The texts of all pages that are wanted, and what became of the others."""
    report = Report(pages=0, written=0)
    with writing(output) as write:
        for row in record.rows():
            if page_of(row["url"]) not in wanted:
                continue
            report.add("pages")
            if "failed" in row:
                report.add(row["failed"])
            else:
                report.add("written")
                write(encode(row))
        if not report["written"]:
            record.path.unlink(missing_ok=True)  # so that all are asked for again when the network is back
            raise UserError(f"{source}: no page could be fetched ({report})")
    return report


FLAGS = list(field_options("fetching", Limits))
"""Of what fetching may cost."""


def add_limits(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the flags of ``Limits``."""
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


def words_of(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The flags of ``add_limits`` as words: those that tell which pages are had, and the others."""
    counted, free = list[str](), list[str]()
    for field in FLAGS:
        value = getattr(options, field.name)
        if not field.is_switch or value != field.default:
            word = f"--{field.flag}" if field.is_switch else f"--{field.flag}={value}"
            (counted if field.name in OF_PAGES else free).append(word)
    return counted, free


def _limits_of(options: argparse.Namespace) -> Limits:
    """What the flags of ``add_limits`` say.

    Raises:
        UserError: when they make no sense.
    """
    limits = Limits(**{field.name: getattr(options, field.name) for field in FLAGS})
    if not limits.agent.isprintable() or not limits.agent.strip() or not limits.agent.isascii():
        raise UserError(f"--user-agent {limits.agent!r}: give a name of ASCII letters")
    check_fields("fetching", limits)
    return limits


def _record_of(output: Path) -> Path:
    """Where the record of what is fetched is."""
    return output.with_name(output.name + ".fetched")


def check(options: argparse.Namespace) -> None:
    """Checks the flags, and puts what they say of fetching into ``options.limits``.

    Raises:
        UserError: when they make no sense.
    """
    options.limits = _limits_of(options)
    check_apart([options.input], [options.output, _record_of(Path(options.output)), options.report])
    if Path(options.input).exists() and not Path(options.input).is_file():
        raise UserError(f"{options.input}: is no plain file, and will be read twice; name one")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help="file of URLs, one a line")
    parser.add_argument("output", help="file for the texts, as JSON lines")
    add_limits(parser)
    add_common(parser, bad_lines=False)


main = Tool("fetch_pages.py", __doc__, add_flags, run, check, GOES_ON)
