"""Each page is fetched once, its text extracted, and an interrupted fetch continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cleanup import heed_signals
from tests.unit.openwebtext.site import STORY, Site
from tests.unit.openwebtext.support import Refusal, read
from tools.openwebtext import fetch_pages, pipeline


def fetched(source: Path, output: Path, *flags: str) -> int:
    common = ["--allow-private-hosts", "--delay", "0", "--timeout", "20", "--workers", "1"]
    return fetch_pages.main([str(source), str(output), *common, *flags])


@pytest.mark.parametrize("workers", ["1", "2"])
def test_texts_are_extracted_without_menus(
    workers: str, site: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ["story1", "plain", "empty", "garbage", "nothing", "secret", "story1#again"]
    source, output = tmp_path / "urls.txt", tmp_path / "pages.jsonl.zst"
    source.write_text("".join(f"http://127.0.0.1:{site}/{path}\n" for path in paths))
    assert fetched(source, output, "--workers", workers) == 0
    texts = {row["url"].rsplit("/", 1)[1]: row["text"] for row in read(output)}
    assert texts["plain"] == "Ä plain text."
    assert STORY.format("1-0").strip() in texts["story1"]
    assert "Home" not in texts["story1"]
    assert set(texts) - {"garbage"} == {"plain", "story1"}
    report = capsys.readouterr().out
    assert "6 pages" in report
    assert "1 answered with status 404" in report
    assert "1 refused by robots.txt" in report
    assert Site.requests["/secret"] == 0
    assert [path.name for path in tmp_path.iterdir() if path not in (source, output)] == []


LIMITS = '{"limits": [5000000, true, true]}\n'


def test_an_interrupted_fetch_continues(site: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "urls.txt", tmp_path / "pages.jsonl"
    urls = [f"http://127.0.0.1:{site}/story{number}" for number in range(6)]
    source.write_text("\n".join(urls))
    record = tmp_path / "pages.jsonl.fetched"
    done = [
        {"url": urls[0], "text": "kept"},
        {"url": urls[3], "failed": "timed out"},
        {"url": "http://not-wanted.org/", "text": "x"},
    ]
    half_line = json.dumps({"url": urls[5], "text": "half"})
    record.write_text(LIMITS + "".join(json.dumps(row) + "\n" for row in done) + half_line)
    assert fetched(source, output, "--ignore-robots") == 2
    assert "was started with another --max-bytes, --ignore-robots" in capsys.readouterr().err
    assert fetched(source, output) == 0
    texts = {row["url"]: row["text"] for row in read(output)}
    assert texts[urls[0]] == "kept"
    assert set(texts) == set(urls) - {urls[3]}
    assert Site.requests["/story0"] == Site.requests["/story3"] == 0
    assert Site.requests["/story1"] == Site.requests["/story5"] == 1
    assert not record.exists()


@pytest.mark.parametrize(
    "text",
    ["my notes", '["a"]\n', '{"url": "a"}\n', *(LIMITS + t for t in ('{"url": 3}\n', '{"url": "a", }\n', "notes\n"))],
)
def test_a_file_that_is_not_a_record_stays(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output, record = tmp_path / "urls.txt", tmp_path / "pages.jsonl", tmp_path / "pages.jsonl.fetched"
    source.write_text("http://127.0.0.1:9/story1\n")
    record.write_text(text)
    assert fetched(source, output) == 2
    assert "is not the record" in capsys.readouterr().err
    assert record.read_text() == text


def test_a_failing_network_loses_nothing(site: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output, record = tmp_path / "urls.txt", tmp_path / "pages.jsonl", tmp_path / "pages.jsonl.fetched"
    live, dead = f"http://127.0.0.1:{site}/story1", [f"http://127.0.1.{number}:9/" for number in range(120)]
    source.write_text("\n".join([live, *dead[:50]]))
    assert fetched(source, output) == 0
    rows = read(output)
    assert [row["url"] for row in rows] == [live]
    source.write_text("\n".join([live, *dead]))
    # Many hosts may be dead while the network is up: a page that was reached before is asked for again.
    record.write_text(LIMITS + json.dumps(rows[0]) + "\n")
    assert fetched(source, output) == 0
    assert read(output) == rows
    assert Site.requests["/story1"] > 1
    source.write_text("\n".join(dead))
    assert fetched(source, output) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "100 hosts in a row cannot be reached" in error
    assert record.read_text() == LIMITS
    # A page of an earlier run no longer answers.
    record.write_text(LIMITS + json.dumps({"url": "http://127.0.1.200:9/", "text": "x"}) + "\n")
    assert fetched(source, output) == 2
    assert len(record.read_text().splitlines()) == 2


def test_the_input_must_be_a_separate_plain_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "urls"
    os.mkfifo(source)
    assert fetched(source, tmp_path / "out") == 2
    assert "not a regular file" in capsys.readouterr().err
    (tmp_path / "out.fetched").write_text("http://127.0.0.1:9/\n")
    assert fetched(tmp_path / "out.fetched", tmp_path / "out") == 2
    assert "read and overwritten" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing", "folder", "damaged.gz"])
def test_an_unreadable_input_leaves_no_record(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "damaged.gz").write_bytes(b"http://127.0.0.1:9/")
    assert fetched(tmp_path / name, tmp_path / "out") == 2
    assert str(tmp_path / name) in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "damaged.gz"}


def test_an_interrupt_ends_a_fetch_at_once(site: str, tmp_path: Path) -> None:
    source = tmp_path / "urls.txt"
    paths = ["story1", "story2", "story3", "stuck"]
    source.write_text("".join(f"http://127.0.0.{n}:{site}/{path}\n" for n, path in enumerate(paths, 1)))
    common = ["--allow-private-hosts", "--timeout", "120", "--workers", "1"]
    command = [sys.executable, fetch_pages.__file__, str(source), str(tmp_path / "pages.jsonl"), *common]
    deadline = time.monotonic() + 60
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals) as process:
        try:
            record = tmp_path / "pages.jsonl.fetched"
            while not (record.exists() and record.read_text().endswith("\n") and Site.requests["/stuck"]):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == f"fetch_pages: interrupted; {fetch_pages.RESUMABLE}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pages.jsonl.fetched", "urls.txt"]


def test_a_dead_network_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "urls.txt", tmp_path / "pages.jsonl"
    source.write_text("http://127.0.0.1:9/story1\nhttp://127.0.0.1:9/story2\n")
    assert fetched(source, output) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("fetch_pages: error: ")
    assert "no page could be fetched" in error
    assert "2 could not be reached" in error
    assert [path.name for path in tmp_path.iterdir()] == ["urls.txt"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--connections", "0"),
        ("--connections", "100000"),
        ("--delay", "-1"),
        ("--timeout", "nan"),
        ("--timeout", "1e12"),
        ("--max-bytes", "0"),
        ("--user-agent", "a\nb"),
    ],
)
def test_bad_limits_are_one_line(flags: tuple[str, ...], tmp_path: Path, error_line: Callable[[], str]) -> None:
    source = tmp_path / "urls.txt"
    source.write_text("http://127.0.0.1:9/\n")
    assert fetched(source, tmp_path / "out.jsonl", *flags) == 2
    error = error_line()
    assert error.startswith(f"fetch_pages: error: {flags[0]}")


def test_a_cleaning_can_start_from_urls(site: str, tmp_path: Path) -> None:
    """From a folder of URLs to training data, and again without a request."""
    urls = tmp_path / "urls"
    urls.mkdir()
    (urls / "a.txt").write_text("".join(f"http://127.0.0.1:{site}/story{number}\n" for number in range(8)))
    out = tmp_path / "out"
    command = ["--urls", str(urls), "--output-path", str(out), "--workers", "1", "--threshold", "0.95"]
    limits = ["--allow-private-hosts", "--delay", "0"]
    assert pipeline.main([*command, *limits]) == 0
    rows = read(out / "train_data.json")
    assert sorted(row["url"].rsplit("/", 1)[1] for row in rows) == [f"story{number}" for number in range(8)]
    report = json.loads((out / "report.json").read_text())
    assert report["fetch_pages"]["counts"] == {"pages": 8, "written": 8}
    requests = sum(Site.requests.values())
    assert pipeline.main([*command, *limits]) == 0
    assert sum(Site.requests.values()) == requests


def test_a_cleaning_without_an_input_is_refused(tmp_path: Path, refused: Refusal) -> None:
    assert "--json is missing" in refused(pipeline, ["--output-path", str(tmp_path / "out")])
