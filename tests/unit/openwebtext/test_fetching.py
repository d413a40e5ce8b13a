"""Pages are fetched from hosts in turn, within bounds, each once, and what is interrupted goes on."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.unit.openwebtext.support import read
from tools.openwebtext import fetch_pages, pipeline
from tools.openwebtext.fetching import Limits, fetch_all
from tools.openwebtext.requesting import Fetcher

STORY = (
    "The old house by the river had been empty for many years when family number {0} came. They painted door {0}, "
    "mended roof {0} and planted {0} apple trees, and in the evening they sat outside and listened to the water. "
)
ROBOTS = "User-agent: *\nDisallow: /secret\nAllow: /secret/open\nDisallow: /*.pdf$\n"


def page(number: int, repeat: int = 6) -> str:
    story = "".join(f"<p>{STORY.format(f'{number}-{part}')}</p>" for part in range(repeat))
    return f"<html><head><title>t</title></head><body><nav>Home About</nav><article>{story}</article></body></html>"


class Site(BaseHTTPRequestHandler):
    """A site whose paths say what they do."""

    asked: ClassVar[Counter[str]] = Counter()
    at_once: ClassVar[Counter[str]] = Counter()
    most_at_once: ClassVar[Counter[str]] = Counter()
    lock = threading.Lock()

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes, kind: str = "text/html", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        host = self.headers["Host"]
        with Site.lock:
            Site.asked[self.path] += 1
            Site.at_once[host] += 1
            Site.most_at_once[host] = max(Site.most_at_once[host], Site.at_once[host])
        try:
            self.respond()
        except OSError:
            pass  # the fetcher has gone, as it should
        finally:
            with Site.lock:
                Site.at_once[host] -= 1

    def respond(self) -> None:
        name = self.path.strip("/").split("/")[0]
        if self.path == "/robots.txt":
            self.answer(200, ROBOTS.encode(), "text/plain")
        elif name.startswith("story"):
            self.answer(200, page(int(name[5:])).encode())
        elif name == "plain":
            self.answer(200, "Ä plain text.".encode(), "text/plain; charset=utf-8")
        elif name == "packed":
            self.answer(200, gzip.compress(page(77).encode()), Content_Encoding="gzip")
        elif name == "bomb":
            self.answer(200, gzip.compress(bytes(50_000_000)), Content_Encoding="gzip")
        elif name == "picture":
            self.answer(200, b"\x89PNG", "image/png")
        elif name == "moved":
            self.answer(302, b"", Location="/story5")
        elif name == "circle":
            self.answer(302, b"", Location="/circle")
        elif name == "away":
            self.answer(302, b"", Location=f"http://127.0.0.77:{self.headers['Host'].split(':')[1]}{self.path[5:]}")
        elif name == "heavy":
            self.send_response(302)
            self.send_header("Location", "/story6")
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(b"x" * 100_000)
        elif name == "file":
            self.answer(302, b"", Location="file:///etc/passwd")
        elif name == "silent":
            time.sleep(1.0)
        elif name == "drip":
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b"x" * 70_000)
                time.sleep(0.1)
        elif name == "trickle":
            self.answer(200, b"", Content_Length="1000")
            for _ in range(100):
                self.wfile.write(b"x")
                time.sleep(0.1)
        elif name == "headers":
            for _ in range(200):
                self.wfile.write(b"HTTP/1.0 200 OK\r\n" if _ == 0 else b"X: y\r\n"[_ % 6 :][:1])
                time.sleep(0.1)
        elif name == "stuck":
            time.sleep(30)
        elif name == "busy":
            self.answer(503 if Site.asked[self.path] < 2 else 200, page(9).encode())
        elif name == "empty":
            self.answer(200, b"<html><body></body></html>")
        elif name == "garbage":
            self.answer(200, bytes(range(256)) * 50)
        else:
            self.answer(404, b"not here")


@pytest.fixture
def site() -> Iterator[str]:
    """Port of a site that listens on every loopback address."""
    Site.asked, Site.at_once, Site.most_at_once = Counter(), Counter(), Counter()
    server = ThreadingHTTPServer(("0.0.0.0", 0), Site)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield str(server.server_address[1])
    server.shutdown()
    server.server_close()


PATIENT = Limits(delay=0.0, timeout=20.0, private=True, max_bytes=1_000_000)
HASTY = replace(PATIENT, timeout=0.4)


@pytest.mark.parametrize(
    ("path", "failed"),
    [
        ("/story1", ""),
        ("/plain", ""),
        ("/packed", ""),
        ("/moved", ""),
        ("/busy", ""),
        ("/bomb", "too large"),
        ("/picture", "no text but another kind of file"),
        ("/circle", "redirected too often"),
        ("/heavy", ""),
        ("/away/story3", ""),
        ("/away/secret", "refused by robots.txt"),
        ("/file", "could not be reached"),
        ("/silent", "timed out"),
        ("/drip", "timed out"),
        ("/trickle", "timed out"),
        ("/headers", "timed out"),
        ("/nothing", "answered with status 404"),
        ("/secret/story1", "refused by robots.txt"),
        ("/secret/open", "answered with status 404"),
        ("/a/b.pdf", "refused by robots.txt"),
        ("/a/b.pdf?x", "answered with status 404"),
    ],
)
def test_a_page_comes_or_its_reason(path: str, failed: str, site: str) -> None:
    limits = replace(HASTY, max_bytes=50_000_000) if failed == "timed out" else PATIENT
    url = f"http://127.0.0.1:{site}{path}"
    start = time.monotonic()
    (found,) = fetch_all([url], Fetcher(limits), 4, 0.0, min(limits.patience, 2.0) if path == "/headers" else 100.0)
    assert time.monotonic() - start < 8
    assert found.url == url
    assert found.failed == failed
    assert bool(found.body) == (not failed)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.1.2.3", "169.254.169.254", "[::1]", "0.0.0.0"])
def test_hosts_of_private_networks_are_not_asked(host: str, site: str) -> None:
    assert Fetcher(Limits(timeout=0.5))(f"http://{host}:{site}/story1").failed == "of a private network"
    assert not Site.asked


@pytest.mark.parametrize(
    "url",
    ["http://", "http://[", "nonsense", "http://no-such-host.invalid/", "http://a:b/", "ftp://x/y", "http://\ud800/"],
)
def test_urls_of_no_form_fail_alone(url: str) -> None:
    assert Fetcher(HASTY)(url).failed == "could not be reached"


def test_one_request_at_a_time_to_a_host_and_several_hosts_at_once(site: str) -> None:
    urls = [f"http://127.0.0.{1 + number % 4}:{site}/story{number}" for number in range(40)]
    found = list(fetch_all(urls, Fetcher(PATIENT), connections=16, delay=0.0))
    assert sorted(page.url for page in found) == sorted(urls)
    assert not any(page.failed for page in found)
    assert set(Site.most_at_once.values()) == {1}
    assert Site.asked["/robots.txt"] == 4


def test_redirections_heed_the_hosts_that_they_lead_to(site: str) -> None:
    urls = [f"http://127.0.0.{1 + number}:{site}/away/story{number}" for number in range(20)]
    found = list(fetch_all(urls, Fetcher(PATIENT), connections=16, delay=0.0))
    assert {page.url: b"family number" in page.body for page in found} == dict.fromkeys(urls, True)
    assert set(Site.most_at_once.values()) == {1}


def fetched(source: Path, output: Path, *flags: str) -> int:
    common = ["--allow-private-hosts", "--delay", "0", "--timeout", "20", "--workers", "1"]
    return fetch_pages.main([str(source), str(output), *common, *flags])


@pytest.mark.parametrize("workers", ["1", "2"])
def test_texts_without_menus(workers: str, site: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = ["story1", "plain", "empty", "garbage", "nothing", "secret", "story1#again"]
    source, output = tmp_path / "urls.txt", tmp_path / "pages.jsonl.zst"
    source.write_text("".join(f"http://127.0.0.1:{site}/{path}\n" for path in paths))
    assert fetched(source, output, "--workers", workers) == 0
    texts = {row["url"].rsplit("/", 1)[1]: row["text"] for row in read(output)}
    assert texts["plain"] == "Ä plain text."
    assert STORY.format("1-0").strip() in texts["story1"]
    assert "Home" not in texts["story1"]
    assert set(texts) - {"garbage"} == {"plain", "story1"}
    said = capsys.readouterr().out
    assert "6 pages" in said
    assert "1 answered with status 404" in said
    assert "1 refused by robots.txt" in said
    assert Site.asked["/secret"] == 0
    assert [path.name for path in tmp_path.iterdir() if path not in (source, output)] == []


LIMITS = '{"limits": [5000000, true, true]}\n'


def test_an_interrupted_fetch_goes_on(site: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "urls.txt", tmp_path / "pages.jsonl"
    urls = [f"http://127.0.0.1:{site}/story{number}" for number in range(6)]
    source.write_text("\n".join(urls))
    record = tmp_path / "pages.jsonl.fetched"
    done = [
        {"url": urls[0], "text": "kept"},
        {"url": urls[3], "failed": "timed out"},
        {"url": "http://not-wanted.org/", "text": "x"},
    ]
    record.write_text(LIMITS + "".join(json.dumps(row) + "\n" for row in done) + '{"url": "http://127.0.0.1')
    assert fetched(source, output, "--ignore-robots") == 2
    assert "was begun with another --max-bytes, --ignore-robots" in capsys.readouterr().err
    assert fetched(source, output) == 0
    found = {row["url"]: row["text"] for row in read(output)}
    assert found[urls[0]] == "kept"
    assert set(found) == set(urls) - {urls[3]}
    assert Site.asked["/story0"] == Site.asked["/story3"] == 0
    assert Site.asked["/story1"] == 1
    assert not record.exists()


@pytest.mark.parametrize(
    "text",
    ["my notes", '["a"]\n', '{"url": "a"}\n', *(LIMITS + t for t in ('{"url": 3}\n', '{"url": "a", }\n', "notes\n"))],
)
def test_a_file_that_is_no_record_stays(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output, record = tmp_path / "urls.txt", tmp_path / "pages.jsonl", tmp_path / "pages.jsonl.fetched"
    source.write_text("http://127.0.0.1:9/story1\n")
    record.write_text(text)
    assert fetched(source, output) == 2
    assert "is no record" in capsys.readouterr().err
    assert record.read_text() == text


def test_a_line_without_its_end_is_half_a_line(site: str, tmp_path: Path) -> None:
    source, output = tmp_path / "urls.txt", tmp_path / "pages.jsonl"
    urls = [f"http://127.0.0.1:{site}/story{number}" for number in range(3)]
    source.write_text("\n".join(urls))
    (tmp_path / "pages.jsonl.fetched").write_text(LIMITS + json.dumps({"url": urls[1], "text": "half"}))
    assert fetched(source, output) == 0
    assert {row["url"] for row in read(output)} == set(urls)


def test_a_network_that_fails_loses_nothing(site: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output, record = tmp_path / "urls.txt", tmp_path / "pages.jsonl", tmp_path / "pages.jsonl.fetched"
    dead = [f"http://127.0.1.{number}:9/" for number in range(120)]
    source.write_text("\n".join([f"http://127.0.0.1:{site}/story1", *dead[:50]]))
    assert fetched(source, output) == 0
    source.write_text("\n".join([f"http://127.0.0.1:{site}/story1", *dead]))
    # Many hosts may be dead while the network is not: one that could be reached is asked again.
    assert fetched(source, output) == 0
    assert [row["url"] for row in read(output)] == [f"http://127.0.0.1:{site}/story1"]
    source.write_text("\n".join(dead))
    assert fetched(source, output) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "100 hosts in a row cannot be reached" in said
    assert record.read_text() == LIMITS
    # A page of an earlier run does not answer any more.
    record.write_text(LIMITS + json.dumps({"url": "http://127.0.1.200:9/", "text": "x"}) + "\n")
    assert fetched(source, output) == 2
    assert len(record.read_text().splitlines()) == 2


def test_what_is_read_twice_is_a_file_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "urls"
    os.mkfifo(source)
    assert fetched(source, tmp_path / "out") == 2
    assert "no plain file" in capsys.readouterr().err
    (tmp_path / "out.fetched").write_text("http://127.0.0.1:9/\n")
    assert fetched(tmp_path / "out.fetched", tmp_path / "out") == 2
    assert "read and overwritten" in capsys.readouterr().err


def test_who_stops_a_fetch_need_not_wait(site: str, tmp_path: Path) -> None:
    source = tmp_path / "urls.txt"
    paths = ["story1", "story2", "story3", "stuck"]
    source.write_text("".join(f"http://127.0.0.{n}:{site}/{path}\n" for n, path in enumerate(paths, 1)))
    common = ["--allow-private-hosts", "--timeout", "30", "--workers", "1"]
    command = [sys.executable, fetch_pages.__file__, str(source), str(tmp_path / "pages.jsonl"), *common]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        record = tmp_path / "pages.jsonl.fetched"
        while not (record.exists() and record.read_text().endswith("\n") and Site.asked["/stuck"]):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=5)
    assert process.returncode == 130
    assert said.splitlines()[-1] == f"fetch_pages: interrupted; {fetch_pages.GOES_ON}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pages.jsonl.fetched", "urls.txt"]


@pytest.mark.parametrize("library", ["requests", "trafilatura"])
def test_a_library_that_is_missing_is_one_line(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "tools.openwebtext.requesting")
    (tmp_path / "urls").write_text("http://127.0.0.1:9/\n")
    assert fetched(tmp_path / "urls", tmp_path / "out") == 2
    assert f"error: {library} is missing: pip install 'megatron-cc[cleaning]'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["urls"]


def test_a_network_that_is_down_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "urls.txt", tmp_path / "pages.jsonl"
    source.write_text("http://127.0.0.1:9/story1\nhttp://127.0.0.1:9/story2\n")
    assert fetched(source, output) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("fetch_pages: error: ")
    assert "no page could be fetched" in said
    assert "2 could not be reached" in said
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
def test_bad_limits_are_one_line(flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "urls.txt"
    source.write_text("http://127.0.0.1:9/\n")
    assert fetched(source, tmp_path / "out.jsonl", *flags) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fetch_pages: error: {flags[0]}")
    assert said.count("\n") == 1


def test_a_cleaning_begins_with_urls(site: str, tmp_path: Path) -> None:
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
    asked = sum(Site.asked.values())
    assert pipeline.main([*command, *limits]) == 0
    assert sum(Site.asked.values()) == asked


def test_a_cleaning_needs_something_to_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline.main(["--output-path", str(tmp_path / "out")]) == 2
    assert "--json is missing" in capsys.readouterr().err
