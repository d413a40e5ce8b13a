"""Published files by HTTP: gone on with where an earlier call stopped, compared with what is published, then renamed.

A file that is not complete is called NAME.part. NAME.part.version holds what the server calls this version of it
(an ETag or a date); a server that has another one by then sends it from the start.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from tqdm import tqdm

from megatron.base.atomic import fsync_directory, holding
from megatron.base.errors import UserError
from megatron.base.numerals import checked_whole

T = TypeVar("T")

HUB = "https://huggingface.co"
_SECONDS = 60.0
"""That a server may take for the next bytes."""
_WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts that got nothing; after the last of them the download is given up."""
_LONGEST_WAIT = 120.0
"""That a busy server may ask for."""
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_CHUNK = 1 << 20


class _Broken(Exception):
    """A request that failed and may succeed later."""

    def __init__(self, reason: object, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


@dataclass(frozen=True)
class Remote:
    """A published file.

    Args:
        url: where it is published.
        path: where it goes.
        size: its bytes; None where only the server tells.
        digest: what is published of its content, as ``sha256:HEX`` or ``git:HEX`` (the name git has for it); None where
            nothing is.
    """

    url: str
    path: Path
    size: int | None = None
    digest: str | None = None

    @property
    def part(self) -> Path:
        """The file while it is not complete."""
        return self.path.with_name(self.path.name + ".part")

    @property
    def version(self) -> Path:
        """What the server calls the version that ``part`` is of."""
        return self.path.with_name(self.path.name + ".part.version")


class Web:
    """Servers, or a mirror that stands for all of them, asked patiently.

    Args:
        mirror: address of a server that has the file of https://HOST/PATH at MIRROR/HOST/PATH.
        pause: waits between attempts.

    Raises:
        UserError: when the mirror is no address.
    """

    def __init__(self, mirror: str | None = None, pause: Callable[[float], object] = time.sleep) -> None:
        if mirror is not None and not _is_address(mirror):
            raise UserError(f"--mirror {mirror}: is no address of a web server, such as http://mirror.example:8000")
        self._mirror = mirror.rstrip("/") if mirror is not None else None
        self._pause = pause

    def address(self, url: str) -> str:
        """Where the file of an address is asked for."""
        if self._mirror is None or url.startswith(f"{self._mirror}/"):
            return url
        parts = urlsplit(url)
        return f"{self._mirror}/{parts.netloc}{parts.path}" + (f"?{parts.query}" if parts.query else "")

    def open(self, url: str, headers: dict[str, str] | None = None) -> Any:
        """The server's answer, to be read and closed; status 416 is an answer, too.

        Raises:
            UserError: when the server refuses.
            _Broken: when it may answer later.
        """
        asked = {"User-Agent": "megatron-cc", "Accept-Encoding": "identity", **(headers or {})}
        request = urllib.request.Request(self.address(url), headers=asked)
        try:
            return urllib.request.urlopen(request, timeout=_SECONDS)
        except urllib.error.HTTPError as answer:
            if answer.code == 416:
                return answer
            with answer:
                said = f"answered with status {answer.code} ({answer.reason})"
                if answer.code in _BUSY:
                    raise _Broken(said, _seconds(answer.headers.get("Retry-After"))) from answer
            raise UserError(f"{request.full_url}: {said}") from answer
        except urllib.error.URLError as error:
            raise _Broken(f"cannot be reached ({error.reason})") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Broken(f"cannot be reached ({error or type(error).__name__})") from error
        except ValueError as error:
            raise UserError(f"{request.full_url}: sends on to no address ({error})") from error

    def persist(self, url: str, attempt: Callable[[], T], got: Callable[[], int] = lambda: 0) -> T:
        """Calls something again while it is broken, and gives up after some calls in a row that got nothing.

        Args:
            url: what is asked for, for messages.
            attempt: the call.
            got: bytes that are there by now.

        Raises:
            UserError: when it gives up.
        """
        failures = 0
        while True:
            before = got()
            try:
                return attempt()
            except _Broken as reason:
                failures = 0 if got() > before else failures + 1
                if failures > len(_WAITS):
                    raise UserError(f"{self.address(url)}: {reason}; run it again to go on") from reason
                wait = max(_WAITS[max(failures - 1, 0)], reason.after)
                tqdm.write(f"{self.address(url)}: {reason}; again in {wait:.0f} s")
                self._pause(wait)

    def read(self, url: str) -> tuple[bytes, str | None]:
        """The content of a short file, and where the server says that it continues.

        Raises:
            UserError: when it cannot be had.
        """

        def attempt() -> tuple[bytes, str | None]:
            with self.open(url) as answer:
                found = re.search(r'<([^>]*)>\s*;\s*rel="?next"?', answer.headers.get("Link") or "")
                return _read(answer, None), found[1] if found else None

        return self.persist(url, attempt)

    def hub_files(self, kind: str, repository: str, folder: str = "") -> list[Remote]:
        """The files of a folder on Hugging Face's hub, with their sizes and digests; paths are those on the hub.

        Args:
            kind: ``models`` or ``datasets``.
            repository: as OWNER/NAME.
            folder: a folder in it.

        Raises:
            UserError: when they cannot be had.
        """
        url: str | None = f"{HUB}/api/{kind}/{repository}/tree/main" + (f"/{quote(folder)}" if folder else "")
        begin = f"{HUB}/{'' if kind == 'models' else kind + '/'}{repository}/resolve/main/"
        files, asked = [], set[str]()
        while url is not None:
            page, following = self.read(url)
            asked.add(url)
            try:
                for entry in json.loads(page):
                    if entry["type"] == "file":
                        path, large = str(entry["path"]), entry.get("lfs")
                        digest = f"sha256:{large['oid']}" if large else f"git:{entry['oid']}"
                        size = checked_whole(int(entry["size"]))
                        if size < 0:
                            raise ValueError("is no size")
                        files.append(Remote(begin + quote(path), Path(path), size, digest))
                then = None if following is None else urljoin(url, following)
                if then in asked:
                    raise ValueError("begins again")
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise UserError(f"{self.address(url)}: is no list of files") from error
            url = then
        return files


def fetch(web: Web, remote: Remote) -> str:
    """Downloads a file unless it is there, and goes on with one that is there in part.

    Returns:
        What is known of the file, for the user.

    Raises:
        UserError: when it cannot be had or written, is not what is published, or another process downloads it.
    """
    try:
        if remote.path.exists():
            return f"{_compare(remote, remote.path)}; it was there"
        remote.path.parent.mkdir(parents=True, exist_ok=True)
        remote.part.touch()
        with holding(remote.part, where_there_are_locks=True):
            web.persist(remote.url, lambda: _go_on(web, remote), got=lambda: remote.part.stat().st_size)
            return _finish(remote)
    except BlockingIOError as error:
        raise UserError(f"{remote.path}: another process is downloading it") from error
    except OSError as error:
        raise UserError(f"{remote.path}: cannot be written ({error.strerror}); what is there is kept") from error


def _go_on(web: Web, remote: Remote) -> None:
    """Asks for what is missing, once."""
    have = remote.part.stat().st_size
    if have == remote.size:
        return
    with web.open(remote.url, _headers(remote, have)) as answer:
        begin, total = _extent(answer)
        address = web.address(remote.url)
        if answer.status == 416:
            if total == have:
                return
            os.truncate(remote.part, 0)
            raise _Broken("what was there is no part of the file, and is dropped")
        if begin not in (0, have):
            raise UserError(f"{address}: sent the bytes from {begin:,} on when asked for those from {have:,} on")
        if total is not None and total != (remote.size or total):
            raise UserError(f"{address}: has {total:,} bytes, but {remote.size:,} are published")
        os.truncate(remote.part, begin)
        if begin == 0:
            remote.version.write_text(_version(answer))
        _append(answer, remote, begin, total, address)
    if total is not None and remote.part.stat().st_size < total:
        raise _Broken("the connection ended early")


def _headers(remote: Remote, have: int) -> dict[str, str]:
    """Asks for the rest of a file, if it is still the same; without a way to tell, for all of it."""
    version = remote.version.read_text() if remote.version.exists() else ""
    if not have or have > (remote.size or have) or not (version or remote.digest):
        return {}
    return {"Range": f"bytes={have}-"} | ({"If-Range": version} if version else {})


def _append(answer: Any, remote: Remote, begin: int, total: int | None, address: str) -> None:
    """Writes what a server sends behind what there is; no more than is published, as it may never end."""
    have = begin
    bar = tqdm(desc=remote.path.name, total=total, initial=begin, unit="B", unit_scale=True, disable=None)
    with bar, remote.part.open("ab") as file:
        while data := _read(answer, _CHUNK):
            have += len(data)
            if remote.size and have > remote.size:
                file.truncate(0)
                raise UserError(f"{address}: sends more than the {remote.size:,} bytes that are published")
            file.write(data)
            bar.update(len(data))


def _read(answer: Any, most: int | None) -> bytes:
    """The next bytes of an answer.

    Raises:
        _Broken: when the connection fails.
    """
    try:
        data: bytes = answer.read() if most is None else answer.read(most)
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(f"the connection broke ({error or type(error).__name__})") from error
    return data


def _extent(answer: Any) -> tuple[int, int | None]:
    """The first byte that an answer sends, and the size of the file where that is said.

    Raises:
        _Broken: when the answer contradicts itself.
    """
    number = r"([0-9]{1,18})"
    found = re.fullmatch(rf"bytes (?:{number}-[0-9]+|\*)/(?:{number}|\*)", answer.headers.get("Content-Range") or "")
    if answer.status in (206, 416):
        if found is None:
            raise _Broken("sent a part of the file without saying which")
        return int(found[1] or 0), int(found[2]) if found[2] is not None else None
    length = answer.headers.get("Content-Length")
    if length is not None and not re.fullmatch(number, length):
        raise _Broken("names no size that a file can have")
    return 0, int(length) if length is not None else None


def _version(answer: Any) -> str:
    """What can be asked for later to get the rest of the same file; empty when the server names nothing."""
    tag: str = answer.headers.get("ETag") or ""
    return tag if tag.startswith('"') else answer.headers.get("Last-Modified") or ""


def _finish(remote: Remote) -> str:
    """Gives a complete file its name; removes one that is not what is published."""
    try:
        known = _compare(remote, remote.part)
    except UserError:
        remote.part.unlink()
        remote.version.unlink(missing_ok=True)
        raise
    with remote.part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(remote.part, remote.path)
    remote.version.unlink(missing_ok=True)
    fsync_directory(remote.path.parent)
    return known


def _compare(remote: Remote, path: Path) -> str:
    """Compares a file with what is published.

    Raises:
        UserError: when it is something else.
    """
    size = path.stat().st_size
    was = "; it is removed, run it again to download it once more" if path == remote.part else "; move it away"
    if size != (remote.size or size):
        raise UserError(f"{remote.path}: has {size:,} bytes, but {remote.size:,} are published{was}")
    name, _, published = (remote.digest or "sha256:").partition(":")
    digest = _digest(path, name)
    if published and digest != published:
        raise UserError(f"{remote.path}: its {name} is {digest}, but {published} is published{was}")
    return f"{size:,} bytes, {name} {digest}, " + ("as published" if published else "none is published to compare with")


def _digest(path: Path, name: str) -> str:
    """The SHA-256 of a file, or the name that git has for it."""
    content = hashlib.sha256() if name == "sha256" else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            content.update(data)
    return content.hexdigest()


def _is_address(text: str) -> bool:
    """Whether this is an address that a file can be asked for at; others would fail again at each attempt."""
    try:
        parts = urlsplit(text)
        named = bool(parts.hostname) and parts.port != 0  # also raises where it is no number of a port
    except ValueError:
        return False
    return named and parts.scheme in ("http", "https") and re.fullmatch(r"[!-~]+", text) is not None


def _seconds(text: str | None) -> float:
    """The seconds that a server asks to wait for; 0 for dates and for nothing."""
    return min(float(text), _LONGEST_WAIT) if text is not None and text.isdecimal() else 0.0
