"""Section network: hosts with shaped links whose ranks share one GPU over NCCL, beside torch's DDP with its hooks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace

from benchmarks.gpu.setting import Claim, Setting
from benchmarks.lab.hosts import LabError, check_permission
from benchmarks.lab.removal import clean
from benchmarks.network.cases import FP32, Bench, NetworkCase
from benchmarks.network.cuda_cases import CUDA_BENCHES, PAIRS
from benchmarks.network.run import Measurement
from benchmarks.network.run import measure as measure_layout
from benchmarks.network.setups import Setup
from benchmarks.rows import RowLog
from benchmarks.tables import Cells, Column

TITLE = "Slow networks"
NOTE = (
    "Hosts are network namespaces with links shaped by tc tbf, ranks of all hosts share one GPU over NCCL's sockets;"
    " the same as make bench-network. Seconds of an iteration are the slowest rank's, medians of up to three. The limit"
    " is the time that the bytes of the host that sent most take on its link. Waits and coding are means over ranks."
    " No side's layers are compiled."
)
COLUMNS = (
    Column("layout", "layout"),
    Column("link", "setup"),
    Column("case", "case"),
    Column("s / iteration", "seconds", ".3f"),
    Column("limit, s", "limit", ".3f"),
    Column("limit/measured", "of_limit", ".2f"),
    Column("tokens/s", "tokens_per_s", ",.0f"),
    Column("MB a host", "host_mb", ",.1f"),
    Column("coding s", "coded_s", ".3f"),
    Column("waited s", "waited_s", ".3f"),
)
WEIGHT = 12.0
PATIENCE_SECONDS = 120.0
STEPS, LONG_SECONDS = 3, 3.0
UNSHAPED = "unshaped"
ALL, BESIDE_DDP, OTHERS = slice(None), slice(PAIRS), slice(PAIRS, None)
PASSES = (
    ("dp4", ("1 Gb/s",), BESIDE_DDP),
    ("pp4", ("100 Mb/s",), ALL),
    ("dp4", ("1 Gb/s",), OTHERS),
    ("3d", ("1 Gb/s",), ALL),
    ("pp4", (UNSHAPED, "10 Gb/s", "1 Gb/s"), ALL),
    ("dp4", (UNSHAPED, "10 Gb/s"), ALL),
    ("3d", (UNSHAPED, "10 Gb/s", "100 Mb/s"), ALL),
    ("dp4", ("100 Mb/s",), ALL),
)
"""Layouts, links and cases, in the order of what is wanted of them and of how long they take."""

_TOY_CASES = (FP32, NetworkCase("torch DDP", peer="ddp"))
_TOY_LINK = Setup("50 Mb/s", 0.0, "a toy's", 50e6)
TOY = {"dp2": Bench(2, 1, 1, 1, (2, 64, 32), 2, (_TOY_LINK,), _TOY_CASES, "gradients")}
TOY_PASSES = (("dp2", (UNSHAPED, "50 Mb/s"), ALL),)


def _layouts(setting: Setting) -> Iterator[tuple[str, Bench, tuple[str, ...]]]:
    """Layouts with the links and cases of each pass."""
    for name, links, cases in TOY_PASSES if setting.toy else PASSES:
        bench = (TOY if setting.toy else CUDA_BENCHES)[name]
        setups = tuple(setup for setup in bench.setups if setup.name in links)
        yield name, replace(bench, setups=setups, cases=bench.cases[cases]), links


def key_of(layout: str, link: str, case: str) -> str:
    """The key of a row."""
    return f"{layout}, {link}, {case}"


def keys(setting: Setting) -> list[str]:
    """Keys of every case on every link, in the order of their passes."""
    return [
        key_of(name, link, case.name)
        for name, bench, links in _layouts(setting)
        for case in bench.cases
        for link in links
    ]


def measure(setting: Setting, wanted: Sequence[str], report: RowLog) -> None:
    """Measures one pass after another; each makes its hosts and removes them."""
    try:
        check_permission()
    except LabError as error:
        raise SystemExit(str(error)) from None
    clean()
    chosen = set(wanted)
    for name, bench, links in _layouts(setting):
        left = [key_of(name, link, case.name) for case in bench.cases for link in links]
        left = [key for key in left if key in chosen]
        if not left:
            continue
        report.begin(left[0])

        def begins(link: str, case: str, name: str = name) -> bool:
            key = key_of(name, link, case)
            if key in chosen:
                report.begin(key)
            return key in chosen

        rows = measure_layout(
            name, bench, bench.setups, STEPS, setting.out, unshaped=UNSHAPED in links, wanted=begins,
            long_seconds=LONG_SECONDS,
        )  # fmt: skip
        with closing(rows):
            for row in rows:
                report.row(key_of(name, row.setup, row.case), **_cells(row))


def _cells(row: Measurement) -> Cells:
    limit = None if row.rate is None else row.host_mb * 8e6 / row.rate
    return {**asdict(row), "limit": limit, "of_limit": None if limit is None else limit / row.seconds}


def tidy() -> None:
    """Removes the hosts of a killed section, and ends their ranks."""
    if shutil.which("ip") is not None:
        clean()


_RATIOS = (
    ("dp4", "1 Gb/s", "torch DDP", "fp32 traffic", 1.0),
    ("dp4", "1 Gb/s", "torch DDP, bf16 hook", "bf16 traffic", 1.0),
    ("dp4", "1 Gb/s", "torch DDP, powerSGD_hook, rank 4", "powersgd, rank 4", 1.0),
    ("dp4", "1 Gb/s", "torch DDP, powerSGD_hook, rank 32", "powersgd, rank 32", 1.0),
    ("dp4", "1 Gb/s", "powersgd, rank 4, no overlap", "powersgd, rank 4", 1.0),
    ("dp4", "1 Gb/s", "bf16 traffic, no overlap", "bf16 traffic", 1.0),
    ("dp4", "1 Gb/s", "fp32 traffic, no overlap", "fp32 traffic", 1.0),
    ("pp4", "100 Mb/s", "bf16 traffic", "fixpoint 4/8 bits", 2.4),
    ("pp4", "100 Mb/s", "bf16 traffic", "fixpoint 4/8 bits, eager 1F1B", 2.6),
)
"""Layout, link, whose seconds, over whose, and how many times they are wanted to be."""


def claims(rows: Mapping[str, Cells]) -> list[Claim]:
    """Claims: seconds of one case over another's."""
    made = []
    for layout, link, slow, fast, least in _RATIOS:
        pair = [rows.get(key_of(layout, link, case)) for case in (slow, fast)]
        if pair[0] is not None and pair[1] is not None:
            value = pair[0]["seconds"] / pair[1]["seconds"]
            made.append(Claim(f"network, {layout} at {link}: seconds of {slow} over {fast}", least, (value,)))
    return made
