"""Timing of training steps with some compressors, in engines that are thrown away."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from functools import partial

import torch

from megatron.compression.schedule import RunLength
from megatron.config.logs import LoggingConfig
from megatron.config.run import RunConfig
from megatron.distributed.agreement import together
from megatron.distributed.ledger import Ledger, gather_rows
from megatron.distributed.topology import Topology
from megatron.training.assembly import build_engines
from megatron.training.run_plan import RunPlan
from megatron.training.step import open_loader, take_full_batch, train_step

_MAX_STEPS = 5
_MAX_SECONDS = 5.0
"""Long steps are fewer: after two, none follows when this time has passed."""


def time_steps(
    topology: Topology, vocab_size: int, length: RunLength, plan: RunPlan, consumed_samples: int, config: RunConfig
) -> float:
    """Time training steps past all warm-ups, in new engines. A collective call.

    Random numbers of the run, its data's position and its logs are as before.

    Args:
        topology: the ranks.
        vocab_size: entries of the vocabulary.
        length: length of the run, for warm-ups in fractions of it.
        plan: data of the run; all steps use its next samples, as many as in a full batch, of full length.
        consumed_samples: position of the run in its data.
        config: resolved configuration, with the compressors.

    Returns:
        Mean seconds of the later half of the steps, on the slowest rank; the same on all ranks.

    Raises:
        UserError: on every rank, when the engines cannot be built.
    """
    group, device = topology.control.pg, topology.device
    precision = config.precision
    if precision.fp16:  # the steps that search for a loss scale update nothing
        precision = dataclasses.replace(precision, loss_scale=1.0)
    trial_config = dataclasses.replace(config, logging=LoggingConfig(), precision=precision)
    engines = together(group, lambda: build_engines(trial_config, topology, vocab_size, length))
    assert plan.train_set is not None
    with open_loader(engines, plan.train_set, consumed_samples, trains=True) as loader:
        batches = together(group, partial(take_full_batch, engines, loader))
    seconds: list[float] = []
    while len(seconds) < _MAX_STEPS and (len(seconds) < 2 or sum(seconds) < _MAX_SECONDS):
        topology.control.barrier()
        start = time.perf_counter()
        step_iteration = engines.plan.warmup_iters + len(seconds)
        train_step(engines, batches, step_iteration, lr=0.0, weight_decay=0.0)
        engines.ledger.clock.synchronize()
        rows = gather_rows(topology.control, Ledger(), [time.perf_counter() - start])
        seconds.append(max(row[0] for row in rows))
    if engines.delayed is not None:
        engines.delayed.finish()
    for buffer in engines.buffers:
        buffer.release()
    del engines
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return statistics.fmean(seconds[len(seconds) // 2 :])
