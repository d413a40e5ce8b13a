"""A file by HTTP: resumed, compared, complete or not there under its name."""

from __future__ import annotations

import fcntl
import hashlib
import random
import re
from pathlib import Path

import pytest

from megatron.base.errors import UserError
from tests.support.disk import largest_file
from tests.unit.downloads.server import Published, git_name
from tools.downloads.fetching import Remote, Web, fetch

DATA = random.Random(0).randbytes(3_000_000)
SHA256 = hashlib.sha256(DATA).hexdigest()


class Side:
    """A file on a server and where it goes."""

    def __init__(self, published: Published, folder: Path) -> None:
        published.files["/host/file"] = DATA
        self.published = published
        self.paused: list[float] = []
        self.web = Web(published.address, self.paused.append)
        self.path = folder / "data" / "file"

    def remote(self, size: int | None = len(DATA), digest: str | None = f"sha256:{SHA256}") -> Remote:
        return Remote("https://host/file", self.path, size, digest)

    @property
    def ranges(self) -> list[str | None]:
        return [wanted for _, wanted, _ in self.published.asked]

    @property
    def tag(self) -> str:
        return f'"{git_name(DATA)}"'

    def left(self) -> list[str]:
        return sorted(path.name for path in self.path.parent.iterdir())


@pytest.fixture
def side(published: Published, tmp_path: Path) -> Side:
    return Side(published, tmp_path)


def test_a_file_arrives_whole_and_is_asked_for_once(side: Side) -> None:
    assert fetch(side.web, side.remote()) == f"3,000,000 bytes, sha256 {SHA256}, as published"
    assert side.path.read_bytes() == DATA
    assert side.left() == ["file"]
    assert fetch(side.web, side.remote()).endswith("as published; it was there")
    assert side.ranges == [None]


def test_a_connection_that_breaks_is_gone_on_with(side: Side) -> None:
    side.published.breaks["/host/file"] = [1_000_000, 1_500_000]
    fetch(side.web, side.remote())
    assert side.path.read_bytes() == DATA
    assert side.ranges == [None, "bytes=1000000-", "bytes=2500000-"]
    assert side.paused == [1.0, 1.0]


@pytest.mark.parametrize("digest", [f"sha256:{SHA256}", None])
def test_a_later_call_goes_on(side: Side, digest: str | None) -> None:
    side.published.breaks["/host/file"] = [1_000_000, *[0] * 5]
    with pytest.raises(UserError, match="the connection ended early; run it again to go on"):
        fetch(side.web, side.remote(digest=digest))
    assert side.left() == ["file.part", "file.part.version"]
    assert side.path.with_name("file.part").read_bytes() == DATA[:1_000_000]
    side.published.asked.clear()
    fetch(side.web, side.remote(digest=digest))
    ((_, wanted, version),) = side.published.asked
    assert (wanted, version) == ("bytes=1000000-", side.tag)
    assert side.path.read_bytes() == DATA
    assert side.left() == ["file"]


def test_another_version_is_sent_from_the_start(side: Side) -> None:
    side.published.breaks["/host/file"] = [1_000_000, *[0] * 5]
    with pytest.raises(UserError):
        fetch(side.web, side.remote(None, None))
    other = DATA[::-1]
    side.published.files["/host/file"] = other
    fetch(side.web, side.remote(None, None))
    assert side.path.read_bytes() == other


def test_a_part_that_nothing_tells_of_is_not_gone_on_with(side: Side) -> None:
    """Without a version and without a digest it may be of any file."""
    side.path.parent.mkdir()
    side.path.with_name("file.part").write_bytes(b"something else")
    fetch(side.web, side.remote(None, None))
    assert side.ranges == [None]
    assert side.path.read_bytes() == DATA


def test_servers_that_know_no_parts(side: Side) -> None:
    side.published.ranges = False
    side.published.breaks["/host/file"] = [1_000_000]
    fetch(side.web, side.remote())
    assert side.path.read_bytes() == DATA


def test_a_complete_part_only_gets_its_name(side: Side) -> None:
    """A call may have been killed before it gave the name."""
    side.path.parent.mkdir()
    side.path.with_name("file.part").write_bytes(DATA)
    fetch(side.web, side.remote(size=None))
    assert side.ranges == [f"bytes={len(DATA)}-"]
    assert side.path.read_bytes() == DATA


def test_a_part_that_is_too_long_is_dropped(side: Side) -> None:
    side.path.parent.mkdir()
    side.path.with_name("file.part").write_bytes(DATA + b"more")
    fetch(side.web, side.remote(size=None))
    assert side.ranges == [f"bytes={len(DATA) + 4}-", None]
    assert side.path.read_bytes() == DATA


def test_a_busy_server_is_asked_again_when_it_says(side: Side) -> None:
    side.published.statuses["/host/file"] = [503, 429]
    fetch(side.web, side.remote())
    assert side.paused == [3.0, 3.0]


def test_a_server_that_stays_busy_is_given_up(side: Side) -> None:
    side.published.statuses["/host/file"] = [503] * 9
    with pytest.raises(UserError, match=r"/host/file: answered with status 503 .*; run it again to go on"):
        fetch(side.web, side.remote())
    assert side.paused == [3.0, 3.0, 4.0, 8.0]


def test_what_is_not_there_is_said_at_once(side: Side) -> None:
    del side.published.files["/host/file"]
    with pytest.raises(UserError, match=r"http://127.0.0.1:\d+/host/file: answered with status 404"):
        fetch(side.web, side.remote())
    assert side.paused == []


def test_nobody_answers(side: Side) -> None:
    web = Web("http://127.0.0.1:9", side.paused.append)
    with pytest.raises(UserError, match=r"http://127.0.0.1:9/host/file: cannot be reached"):
        fetch(web, side.remote())


def test_another_content_is_refused_and_removed(side: Side) -> None:
    side.published.files["/host/file"] = DATA[:-1] + b"!"
    with pytest.raises(UserError, match=rf"file: its sha256 is \w+, but {SHA256} is published; it is removed"):
        fetch(side.web, side.remote())
    assert side.left() == []


def test_another_size_is_refused_before_it_is_downloaded(side: Side) -> None:
    with pytest.raises(UserError, match="has 3,000,000 bytes, but 7 are published"):
        fetch(side.web, side.remote(7))
    assert side.path.with_name("file.part").stat().st_size == 0


def test_a_server_that_sends_more_than_is_published_is_not_listened_to(side: Side) -> None:
    """It might never end."""
    side.published.lengths = False
    side.published.files["/host/file"] = bytes(200_000_000)
    with pytest.raises(UserError, match="sends more than the 7 bytes that are published"):
        fetch(side.web, side.remote(7))
    assert side.path.with_name("file.part").stat().st_size == 0


@pytest.mark.parametrize(
    ("status", "header", "said"),
    [
        ("200 OK", "Content-Length: abc", "names no size"),
        ("200 OK", "Content-Length: -5", "names no size"),
        ("200 OK", f"Content-Length: {'9' * 5000}", "names no size"),
        ("416 No", f"Content-Range: bytes */{'9' * 5000}", "sent a part of the file without saying which"),
        ("302 Found", "Location: http://[", "sends on to no address"),
        ("302 Found", "Location: /host/file", "infinite loop"),
        ("302 Found", "Location: file:///etc/passwd", "is not allowed"),
    ],
)
def test_an_answer_that_makes_no_sense_is_said_in_one_line(side: Side, status: str, header: str, said: str) -> None:
    side.published.raw["/host/file"] = f"HTTP/1.1 {status}\r\n{header}\r\nConnection: close\r\n\r\n12345".encode()
    with pytest.raises(UserError, match=f"host/file: .*{said}") as caught:
        fetch(side.web, side.remote(None, None))
    assert "\n" not in str(caught.value)


def test_a_file_that_was_there_is_never_overwritten(side: Side) -> None:
    side.path.parent.mkdir()
    side.path.write_bytes(b"mine")
    with pytest.raises(UserError, match="has 4 bytes, but 3,000,000 are published; move it away"):
        fetch(side.web, side.remote())
    assert side.path.read_bytes() == b"mine"
    assert fetch(side.web, side.remote(None, None)).endswith("none is published to compare with; it was there")


def test_a_server_that_does_not_say_how_long_a_file_is(side: Side) -> None:
    side.published.lengths = False
    fetch(side.web, side.remote(size=None))
    assert side.path.read_bytes() == DATA


def test_one_process_at_a_time(side: Side) -> None:
    side.path.parent.mkdir()
    with side.path.with_name("file.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="file: another process is downloading it"):
            fetch(side.web, side.remote())


def test_a_full_disk_is_said_and_what_is_there_is_kept(side: Side) -> None:
    with largest_file(1 << 20), pytest.raises(UserError, match=r"file: cannot be written .*; what is there is kept"):
        fetch(side.web, side.remote())
    fetch(side.web, side.remote())
    assert side.ranges == [None, f"bytes={1 << 20}-"]
    assert side.path.read_bytes() == DATA


@pytest.mark.parametrize(
    "mirror",
    [
        *("mirror.example", "ftp://mirror.example", "http://", "/folder", "http://[mirror", "http://:80"),
        *("http://mirror.example:port", "http://mirror.example:70000", "http://mirror.example/two words"),
        "http://mirror.example/K\u00f6ln",
    ],
)
def test_a_mirror_is_an_address(mirror: str) -> None:
    with pytest.raises(UserError, match=f"--mirror {re.escape(mirror)}: is no address of a web server"):
        Web(mirror)


def test_files_of_the_hub_come_with_what_is_published(published: Published) -> None:
    published.add_hub("datasets", "owner/set", {"a/x.parquet": b"large", "a/more words.txt": b"small"}, "a", ".parquet")
    page = "/huggingface.co/api/datasets/owner/set/tree/main/a"
    published.files[f"{page}#next"] = b"/api/datasets/owner/set/tree/main/a?cursor=2"
    published.files[f"{page}?cursor=2"] = b'[{"type": "file", "path": "a/y", "size": 1, "oid": "f00"}]'
    begin = "https://huggingface.co/datasets/owner/set/resolve/main/a/"
    assert Web(published.address).hub_files("datasets", "owner/set", "a") == [
        Remote(f"{begin}x.parquet", Path("a/x.parquet"), 5, f"sha256:{hashlib.sha256(b'large').hexdigest()}"),
        Remote(
            f"{begin}more%20words.txt", Path("a/more words.txt"), 5, "git:" + hashlib.sha1(b"blob 5\0small").hexdigest()
        ),
        Remote(f"{begin}y", Path("a/y"), 1, "git:f00"),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        *(b"<html>", b"[1]", b'[{"type": "file", "path": "x", "oid": "1"}]', b"{}x", b"[" * 100_000),
        *(b'[{"type": "file", "path": "x", "oid": "1", "size": %s}]' % size for size in (b"1e999", b"-4")),
    ],
)
def test_an_answer_that_is_no_list_of_files(published: Published, answer: bytes) -> None:
    published.files["/huggingface.co/api/models/owner/name/tree/main"] = answer
    with pytest.raises(UserError, match="owner/name/tree/main: is no list of files"):
        Web(published.address).hub_files("models", "owner/name")


@pytest.mark.parametrize("following", [b"/api/models/owner/name/tree/main", b"[/"])
def test_a_list_of_files_that_never_ends_or_goes_on_nowhere(published: Published, following: bytes) -> None:
    page = "/huggingface.co/api/models/owner/name/tree/main"
    published.files |= {page: b"[]", f"{page}#next": following}
    with pytest.raises(UserError, match="owner/name/tree/main: is no list of files"):
        Web(published.address).hub_files("models", "owner/name")
