#!/usr/bin/env python
"""Downloads vocabularies, checkpoints and texts; the scripts of dataset/ call it.

    python tools/downloads/download.py vocab
    python tools/downloads/download.py wikipedia 20231101.de --shards 1 --output-dir /data

Prints the URL and the path of each file, and downloads the files with curl (--dry-run only prints). Run again, it
continues an interrupted download, and compares existing files with the published ones.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.downloads.download")

from megatron.base.atomic import hold_lock
from megatron.base.errors import UserError
from tools.downloads.catalog import DATA, KINDS, REPO, Remote
from tools.openwebtext.cleaning.command import Report, Tool, check_at_least

MIRROR = "DATASET_MIRROR"
"""Environment variable for --mirror."""

_CURL = [
    "curl", "--fail", "--location", "--proto-redir", "=http,https", "--globoff", "--connect-timeout", "60",
    "--speed-limit", "1", "--speed-time", "60", "--retry", "4", "--continue-at", "-",
    "--write-out", "%{http_code} %{errormsg}",
]  # fmt: skip
_NO_RANGES = 33
"""Exit status of curl when a server cannot send a part of a file."""


def fetch(remote: Remote, url: str) -> str:
    """Download a file with curl, unless it exists, and verify it.

    Returns:
        Size and digest, for the user.

    Raises:
        UserError: when it cannot be downloaded, or differs from the published file.
    """
    if remote.path.exists():
        return f"{_verify(remote, remote.path, 'move it away')}; it already existed"
    part = remote.path.with_name(remote.path.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    try:
        with hold_lock(part, if_supported=True):
            _download(url, part, remote.size)
            try:
                summary = _verify(remote, part, "it is removed; run the command again to download it again")
            except UserError:
                part.unlink()
                raise
            part.replace(remote.path)
            return summary
    except BlockingIOError as error:
        raise UserError(f"{remote.path}: another process is downloading it") from error


def _download(url: str, part: Path, size: int | None) -> None:
    """Complete a partial file; continue after an interruption as long as data arrives."""
    progress = ["--progress-bar"] if sys.stderr.isatty() else ["--silent"]
    while (have := part.stat().st_size) != size:
        try:
            curl = subprocess.run([*_CURL, *progress, "--output", part, url], stdout=subprocess.PIPE, text=True)
        except FileNotFoundError as error:
            raise UserError("curl is missing: install it") from error
        status, _, message = curl.stdout.partition(" ")
        if curl.returncode == 0 or status == "416":  # nothing is missing; verification finds a wrong file
            return
        if curl.returncode == _NO_RANGES:
            os.truncate(part, 0)
        elif part.stat().st_size == have:
            raise UserError(f"{url}: {message.strip() or 'curl failed'}; run the command again to continue")


def _verify(remote: Remote, path: Path, advice: str) -> str:
    """Compare a file with the published size and digest."""
    size = path.stat().st_size
    if remote.size not in (None, size):
        raise UserError(f"{remote.path}: has {size:,} bytes, but {remote.size:,} are published; {advice}")
    name, _, published = remote.digest.partition(":")
    content = hashlib.sha1(b"blob %d\0" % size) if name == "git" else hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            content.update(data)
    digest = content.hexdigest()
    if published and digest != published:
        raise UserError(f"{remote.path}: its {name} is {digest}, but {published} is published; {advice}")
    note = "as published" if published else "no digest is published"
    return f"{size:,} bytes, {name or 'sha256'} {digest}, {note}"


def check(options: argparse.Namespace) -> None:
    """Check the flags."""
    kind = KINDS[options.what]
    if options.name is not None and options.name not in kind.names and "*" not in kind.names:
        raise UserError(f"{options.what} {options.name}: give {' or '.join(kind.names)}")
    if options.shards is not None and not kind.has_shards:
        raise UserError(f"--shards: {options.what} does not come in shards; drop it")
    check_at_least(options, shards=1)
    options.mirror = (options.mirror or os.environ.get(MIRROR) or "").rstrip("/")
    if options.mirror and not options.mirror.startswith(("http://", "https://")):
        raise UserError(f"--mirror {options.mirror}: is not the address of a web server")


def run(options: argparse.Namespace) -> Report:
    """Download a set."""
    kind = KINDS[options.what]
    name = options.name or kind.names[0]
    default_folder = REPO / "checkpoints" / name if options.what == "ckpt" else DATA
    plan = kind.plan(options.mirror, name, Path(options.output_dir or default_folder).absolute(), options.shards)
    urls = [
        options.mirror + remote.url.removeprefix("https:/") if options.mirror else remote.url for remote in plan.files
    ]
    for remote, url in zip(plan.files, urls, strict=True):
        size = f"{remote.size:,} bytes" if remote.size is not None else "of unknown size"
        print(f"{url}\n  -> {remote.path}, {size}", flush=True)
    report = Report(files=0)
    if not options.dry_run:
        for remote, url in zip(plan.files, urls, strict=True):
            print(f"{remote.path.name}: {fetch(remote, url)}", flush=True)
            report["files"] += 1
            report["bytes"] += remote.path.stat().st_size
        plan.finish()
        print(f"next: {plan.next}", flush=True)
    return report


def add_flags(parser: argparse.ArgumentParser) -> None:
    kinds = "; ".join(f"{name}: {kind.about} ({', '.join(kind.names)})" for name, kind in KINDS.items())
    parser.add_argument("what", choices=KINDS, metavar="WHAT", help=kinds)
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="set of this kind (the first); * stands for any on the hub"
    )
    parser.add_argument("--output-dir", metavar="DIR", help="folder (dataset/, or checkpoints/NAME for checkpoints)")
    parser.add_argument(
        "--mirror",
        metavar="URL",
        help=f"server that has https://HOST/PATH at URL/HOST/PATH (the variable {MIRROR}, or none)",
    )
    parser.add_argument("--shards", type=int, metavar="N", help="only the first files of a large set (all)")
    parser.add_argument("--dry-run", action="store_true", help="only print the URLs and paths")


main = Tool("download.py", __doc__, add_flags, run, check, interrupted="run the command again to continue")
