#!/usr/bin/env python
"""Downloads what training needs; the scripts of dataset/ call it.

    python tools/downloads/download.py vocab
    python tools/downloads/download.py wikipedia 20231101.de --shards 1 --output-dir /data

Says first what comes from where and where it goes. Started again it goes on where it stopped, and compares what is
there with what is published. --dry-run only says.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

if __name__ == "__main__":
    from _clone import start_program

    start_program("tools.downloads.download")

from megatron.base.errors import UserError
from megatron.data.cleaning.command import Report, Tool, check_at_least
from tools.downloads.catalog import KINDS
from tools.downloads.fetching import Remote, Web, fetch

MIRROR = "DATASET_MIRROR"
"""The variable that names a mirror, as --mirror does."""


def check(options: argparse.Namespace) -> None:
    """Checks the flags.

    Raises:
        UserError: when they name what there is not.
    """
    kind = KINDS[options.what]
    if options.name is not None and options.name not in kind.names and "*" not in kind.names:
        raise UserError(f"{options.what} {options.name}: give {' or '.join(kind.names)}")
    if options.shards is not None and not kind.shards:
        raise UserError(f"--shards: {options.what} does not come in shards; drop it")
    check_at_least(options, shards=1)


def run(options: argparse.Namespace) -> Report:
    """Downloads a set.

    Raises:
        UserError: when it cannot be had.
    """
    kind = KINDS[options.what]
    name = options.name or kind.names[0]
    web = Web(options.mirror or os.environ.get(MIRROR) or None)
    folder = Path(options.output_dir).absolute() if options.output_dir is not None else kind.folder(name)
    plan = kind.plan(web, name, folder, options.shards)
    for remote in plan.files:
        size = f"{remote.size:,} bytes" if remote.size is not None else "of a size that the server tells"
        print(f"{web.address(remote.url)}\n  -> {remote.path}, {size}", flush=True)
    report = Report(files=0)
    if not options.dry_run:
        check_space(plan.files, folder)
        for remote in plan.files:
            print(f"{remote.path.name}: {fetch(web, remote)}", flush=True)
            report["files"] += 1
            report["bytes"] += remote.path.stat().st_size
        plan.then()
        print(f"next: {plan.next}", flush=True)
    return report


def check_space(files: list[Remote], folder: Path) -> None:
    """Checks that the disk has room for what is still to come, as far as sizes are known.

    Raises:
        UserError: when it has not.
    """
    missing = sum(
        (file.size or 0) - (file.part.stat().st_size if file.part.exists() else 0)
        for file in files
        if not file.path.exists()
    )
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if missing > free:
        raise UserError(f"{folder}: has room for {free:,} bytes, and {missing:,} are to come; give --output-dir")


def add_flags(parser: argparse.ArgumentParser) -> None:
    what = "; ".join(f"{name}: {kind.about} ({', '.join(kind.names)})" for name, kind in KINDS.items())
    parser.add_argument("what", choices=KINDS, metavar="WHAT", help=what)
    parser.add_argument("name", nargs="?", metavar="NAME", help="which (the first); * is any that there is on the hub")
    parser.add_argument("--output-dir", metavar="DIR", help="where to (dataset/, checkpoints go to checkpoints/NAME)")
    parser.add_argument(
        "--mirror",
        metavar="URL",
        help=f"server that has https://HOST/PATH at URL/HOST/PATH (the variable {MIRROR}, or none)",
    )
    parser.add_argument("--shards", type=int, metavar="N", help="only the first files of a large set (all)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be downloaded, and where to")


main = Tool("download.py", __doc__, add_flags, run, check, interrupted="run it again to go on")
