"""Learning rates and weight decays against megatron-core's scheduler, in another process.

The `megatron` namespaces collide, so the script below imports megatron-core alone (see tests/README.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer.schedules import LRSchedule

ORACLE = os.environ.get("MEGATRON_CORE_ORACLE")
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(not ORACLE, reason="MEGATRON_CORE_ORACLE names no folder with megatron-core"),
]

BATCH, ITERATIONS = 4, 60
LENGTHS = {"lr_warmup_iters": 7, "lr_decay_iters": 50}
CASES: list[dict[str, Any]] = [
    *({"lr_decay_style": style} for style in ("constant", "linear", "cosine", "inverse-square-root")),
    *(
        {"lr_decay_style": "WSD", "lr_wsd_decay_style": style, "lr_wsd_decay_iters": 13}
        for style in ("exponential", "linear", "cosine", "minus_sqrt")
    ),
    {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": 43, "lr_warmup_init": 2e-4},
    {"lr_decay_style": "cosine", "lr_warmup_init": 1e-3},
]

SCRIPT = """
import importlib.util, json, sys, types
folder, cases = sys.argv[1], json.loads(sys.argv[2])
for name in ("megatron", "megatron.core"):
    module = types.ModuleType(name)
    module.__path__ = [f"{folder}/{name.replace('.', '/')}"]
    sys.modules[name] = module
logs = types.ModuleType("megatron.core.utils")
logs.log_single_rank = lambda *args: None
sys.modules[logs.__name__] = logs
optimizers = types.ModuleType("megatron.core.optimizer")
optimizers.MegatronOptimizer = object
sys.modules[optimizers.__name__] = optimizers
path = f"{folder}/megatron/core/optimizer_param_scheduler.py"
spec = importlib.util.spec_from_file_location("megatron.core.optimizer_param_scheduler", path)
scheduler = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = scheduler
spec.loader.exec_module(scheduler)
answers = []
for case in cases:
    iterations, batch = case.pop("iterations"), case.pop("batch")
    groups = [{"lr": 0.0, "weight_decay": 0.0}, {"lr": 0.0, "weight_decay": 0.0, **case.pop("group")}]
    optimizer = types.SimpleNamespace(param_groups=groups)
    made = scheduler.OptimizerParamScheduler(optimizer, **case)
    rows = []
    for _ in range(iterations):
        rows.append([groups[0]["lr"], groups[0]["weight_decay"], groups[1]["lr"]])
        made.step(batch)
    answers.append(rows)
print(json.dumps(answers))
"""


def _case(options: OptimizerConfig) -> dict[str, Any]:
    """Arguments of megatron-core's scheduler for these options."""
    annealing = options.lr_wsd_decay_iters
    return {
        "init_lr": options.lr_warmup_init,
        "max_lr": options.lr,
        "min_lr": options.min_lr,
        "lr_warmup_steps": options.lr_warmup_iters * BATCH,
        "lr_decay_steps": (options.lr_decay_iters or 0) * BATCH,
        "lr_decay_style": options.lr_decay_style,
        "start_wd": options.start_weight_decay,
        "end_wd": options.end_weight_decay,
        "wd_incr_steps": ITERATIONS * BATCH,
        "wd_incr_style": options.weight_decay_incr_style,
        "use_checkpoint_opt_param_scheduler": False,
        "wsd_decay_steps": None if annealing is None else annealing * BATCH,
        "lr_wsd_decay_style": options.lr_wsd_decay_style,
        "group": {"max_lr": options.decoupled_lr, "min_lr": options.decoupled_min_lr},
        "iterations": ITERATIONS,
        "batch": BATCH,
    }


def test_rates_of_each_step_match_megatron_core() -> None:
    growing = {"start_weight_decay": 0.01, "end_weight_decay": 0.2, "weight_decay_incr_style": "cosine"}
    rates = {"lr": 1e-3, "min_lr": 1e-4, "decoupled_lr": 7e-3, "decoupled_min_lr": 3e-5}
    options = [OptimizerConfig(**{**rates, **LENGTHS, **growing, **case}) for case in CASES]
    cases = json.dumps([_case(option) for option in options])
    command = [sys.executable, "-c", SCRIPT, str(ORACLE), cases]
    done = subprocess.run(command, cwd=Path("/"), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for option, rows in zip(options, json.loads(done.stdout), strict=True):
        schedule = LRSchedule.from_options(option, global_batch_size=BATCH, seq_length=16, train_iters=ITERATIONS)
        for row in rows:
            assert list(schedule.rates) == pytest.approx(row, rel=1e-12)
            schedule.step(BATCH)
