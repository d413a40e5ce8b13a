"""Section network: hosts with shaped links whose ranks share a GPU over NCCL, compared with torch's DDP and hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace

from benchmarks.gpu.setting import Setting
from benchmarks.lab.hosts import LabError, check_permission
from benchmarks.lab.removal import clean
from benchmarks.network.cases import CUDA_BENCHES, DDP, FP32, PEER_PAIRS, Bench
from benchmarks.network.run import measure as measure_layout
from benchmarks.network.setups import Setup
from benchmarks.report import Column
from benchmarks.rows import RowLog

TITLE = "Slow networks"
NOTE = (
    "Hosts are network namespaces with links shaped by tc tbf, ranks of all hosts share one GPU over NCCL's sockets;"
    " the same as make bench-network. Seconds of an iteration are the slowest rank's, medians of up to three. The limit"
    " is the time of the bytes of the host that sent most on its link. Waits and coding are means over ranks."
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
ALL, WITH_PEERS, WITHOUT_PEERS = slice(None), slice(PEER_PAIRS), slice(PEER_PAIRS, None)
PASSES = (
    ("dp4", ("1 Gb/s",), WITH_PEERS),
    ("pp4", ("100 Mb/s",), ALL),
    ("dp4", ("1 Gb/s",), WITHOUT_PEERS),
    ("3d", ("1 Gb/s",), ALL),
    ("pp4", (UNSHAPED, "10 Gb/s", "1 Gb/s"), ALL),
    ("dp4", (UNSHAPED, "10 Gb/s"), ALL),
    ("3d", (UNSHAPED, "10 Gb/s", "100 Mb/s"), ALL),
    ("dp4", ("100 Mb/s",), ALL),
)
"""Layouts, links and cases, the most important and shortest first."""

_TOY_LINK = Setup("50 Mb/s", 0.0, "a toy's", 50e6)
TOY_BENCHES = {"dp2": Bench(2, 1, 1, 1, (2, 64, 32), 2, (_TOY_LINK,), (FP32, DDP), "gradients")}
TOY_PASSES = (("dp2", (UNSHAPED, "50 Mb/s"), ALL),)


def _passes(setting: Setting) -> Iterator[tuple[str, Bench, tuple[str, ...]]]:
    """Layouts with the links and cases of each pass."""
    benches = TOY_BENCHES if setting.toy else CUDA_BENCHES
    for name, links, cases in TOY_PASSES if setting.toy else PASSES:
        setups = tuple(setup for setup in benches[name].setups if setup.name in links)
        yield name, replace(benches[name], setups=setups, cases=benches[name].cases[cases]), links


def key_of(layout: str, link: str, case: str) -> str:
    return f"{layout}, {link}, {case}"


def keys(setting: Setting) -> list[str]:
    """Keys of every case on every link, in the order of their passes."""
    return [
        key_of(name, link, case.name)
        for name, bench, links in _passes(setting)
        for case in bench.cases
        for link in links
    ]


def measure(setting: Setting, row_keys: Sequence[str], log: RowLog) -> None:
    """Measure one pass after another; each creates its hosts and removes them."""
    try:
        check_permission()
    except LabError as error:
        raise SystemExit(str(error)) from None
    clean()
    for name, bench, links in _passes(setting):
        missing = [key_of(name, link, case.name) for case in bench.cases for link in links]
        missing = [key for key in missing if key in row_keys]
        if not missing:
            continue
        log.begin(missing[0])

        def begin_if_missing(link: str, case: str, name: str = name, missing: Sequence[str] = missing) -> bool:
            key = key_of(name, link, case)
            if key in missing:
                log.begin(key)
            return key in missing

        rows = measure_layout(
            name, bench, bench.setups, STEPS, setting.out, unshaped=UNSHAPED in links, is_wanted=begin_if_missing,
            long_seconds=LONG_SECONDS,
        )  # fmt: skip
        with closing(rows):
            for row in rows:
                limit = None if row.rate is None else row.host_mb * 8e6 / row.rate
                share = None if limit is None else limit / row.seconds
                log.row(key_of(name, row.setup, row.case), **asdict(row), limit=limit, of_limit=share)
