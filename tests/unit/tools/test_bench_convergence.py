"""The table of the convergence benchmark, from logs as runs write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.bench_convergence import CASES, log_of, table


def _log(path: Path, loss: float, sent: float, finished: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    events: list[dict[str, Any]] = [
        {"kind": "train", "iteration": i, "comm": {"pp-backward": {"wire_bytes": sent}, "control": {"wire_bytes": 9}}}
        for i in (1, 2)
    ]
    events.append({"kind": "validation", "iteration": 2, "lm_loss": 9.0})
    if finished:
        events.append({"kind": "test", "iteration": 2, "lm_loss": loss})
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_losses_are_compared_seed_by_seed_and_bytes_averaged(tmp_path: Path) -> None:
    for seed, loss in ((1, 4.0), (2, 5.0)):
        _log(log_of(tmp_path, "dense", seed, 2), loss, 8000.0)
        _log(log_of(tmp_path, "CB", seed, 2), loss * 1.01, 2000.0, finished=seed == 1)
    rows = table(tmp_path, ["dense", "CB", "CB+FE"], [1, 2], 2).splitlines()
    assert len(rows) == 4
    assert rows[2].startswith("| dense | 2 | 4.5000 ± 0.7071 | +0.00% | 0.0 | 8.0 |")
    assert rows[3].startswith("| CB | 1 | 4.0400 ± 0.0000 | +1.00% | 0.0 | 2.0 |")


def test_every_case_is_made_of_specs_that_can_be_read() -> None:
    from megatron.compression.registry import BUILTIN, Registry
    from megatron.compression.schedule import RunLength
    from megatron.compression.spec import read_specs

    for specs in CASES.values():
        assert len(read_specs(specs, Registry(BUILTIN), RunLength(1000))) == len(specs)
