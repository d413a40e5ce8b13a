"""A section of the GPU benchmark whose rows come to different ends; run by tests in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from benchmarks.gpu.setting import Setting
from benchmarks.report import Column
from benchmarks.rows import RowLog

TITLE, NOTE, COLUMNS = "Ends", "How rows end.", (Column("row", "name"), Column("value", "value", ".2f"))
WEIGHT, PATIENCE_SECONDS = 1.0, 20.0
KEYS = ["good", "raises", "dies", "hangs", "gives up", "cut short", "last"]


def keys(setting: Setting) -> list[str]:
    return KEYS


def measure(setting: Setting, row_keys: Sequence[str], log: RowLog) -> None:
    for key in row_keys:
        log.begin(key)
        if key == "raises":
            raise MemoryError("out of memory: 3 GiB are missing")
        if key == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if key == "hangs":
            (setting.out / "hanging").write_text(str(os.getpid()))
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            time.sleep(1000)
        if key == "gives up":
            log.failed(key, "nothing to measure it with")
            continue
        log.row(key, name=key, value=1.0, path=os.environ["PYTHONPATH"])
        if key == "cut short":
            with log.path.open("a") as file:
                file.write('{"row": "last", "cells": {"na')
                file.flush()
                os._exit(9)
