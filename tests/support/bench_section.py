"""A section of the GPU benchmark with rows that succeed, fail and crash; run by tests in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence

from benchmarks.gpu.setting import Claim, Setting
from benchmarks.rows import RowLog
from benchmarks.tables import Cells, Column

TITLE, NOTE, COLUMNS = "Ends", "How rows end.", (Column("row", "name"), Column("value", "value", ".2f"))
WEIGHT, PATIENCE_SECONDS = 1.0, 20.0


def keys(setting: Setting) -> list[str]:
    return ["good", "raises", "dies", "hangs", "gives up", "cut short", "last"]


def measure(setting: Setting, names: Sequence[str], report: RowLog) -> None:
    for key in names:
        report.begin(key)
        if key == "raises":
            raise MemoryError("out of memory: 3 GiB are missing")
        if key == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if key == "hangs":
            (setting.out / "hanging").write_text(str(os.getpid()))
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            time.sleep(1000)
        if key == "gives up":
            report.failed(key, "nothing to measure it with")
            continue
        report.row(key, name=key, value=1.0, path=os.environ["PYTHONPATH"])
        if key == "cut short":
            with report.path.open("a") as file:
                file.write('{"row": "last", "cells": {"na')
                file.flush()
                os._exit(9)


def tidy() -> None:
    pass


def claims(rows: Mapping[str, Cells]) -> list[Claim]:
    return [Claim("value", 0.5, tuple(cells["value"] for cells in rows.values()))]
