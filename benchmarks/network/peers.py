"""Peers for data parallelism: torch's DistributedDataParallel with its communication hooks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import PEER_VOCAB, VOCAB, PlainGPT, Shape
from megatron.config.run import RunConfig
from megatron.data.batch import Batch
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import Topology
from megatron.models.context import ForwardContext
from megatron.models.losses import Targets
from megatron.models.rank_context import RankContext
from megatron.models.stages import build_stages
from megatron.parallel.tensor.collectives import TensorComm

WARMUP_STEPS = 2
"""Exact steps before powerSGD_hook begins."""


class _OurLoss(nn.Module):
    """Our model as a module whose output is the loss."""

    def __init__(self, plan: dict[str, Any], config: RunConfig, topology: Topology) -> None:
        super().__init__()
        comm = TensorComm(topology.tp, Ledger(), CompressionPlan({}))
        rank = RankContext(config.model, comm, topology.device, torch.float32, config.recompute)
        (self.stage,) = build_stages(rank, topology.layout, 0, plan["vocab"], 1)

    def forward(self, batch: Batch) -> Tensor:
        out_sbh = self.stage(batch.tokens_bs, ForwardContext())
        assert batch.labels_bs is not None
        assert batch.loss_mask_bs is not None
        return self.stage.loss(out_sbh, Targets(batch.labels_bs, batch.loss_mask_bs)).objective


class _PlainLoss(nn.Module):
    """A model of torch's modules with fp32 weights under autocast, whose output is the loss."""

    def __init__(self, plan: dict[str, Any], config: RunConfig) -> None:
        super().__init__()
        model = config.model
        shape = Shape(model.num_layers, model.hidden_size, model.seq_length, 1, plan["vocab"])
        self.model = PlainGPT(shape, PEER_VOCAB if shape.vocab == VOCAB else shape.vocab)

    def forward(self, batch: Batch) -> Tensor:
        assert batch.tokens_bs is not None
        with torch.autocast(batch.tokens_bs.device.type, torch.bfloat16):
            loss: Tensor = self.model(batch.tokens_bs, batch.labels_bs)
        return loss


def peer_step(
    kind: str, rank: int, plan: dict[str, Any], config: RunConfig, topology: Topology, batches: list[Batch]
) -> Callable[[int], dict[str, float]]:
    """Build a replica; return a function that takes a step and return its times.

    Args:
        kind: ddp, ddp-fp16, ddp-bf16 or ddp-powersgd.
        rank: rank of powerSGD_hook.
        plan: plan of the benchmark.
        config: configuration of the model.
        topology, batches: topology and micro-batches of this rank; data-parallel only.
    """
    cuda = topology.device.type == "cuda"
    model = _PlainLoss(plan, config).to(topology.device) if cuda else _OurLoss(plan, config, topology)
    # With several buckets over gloo, the hook's later rounds start in a different order on each rank, and collide.
    bucket_mb = 100_000 if kind == "ddp-powersgd" and not cuda else None
    replica = DistributedDataParallel(model, process_group=topology.dp.pg, bucket_cap_mb=bucket_mb)
    if kind == "ddp-fp16":
        replica.register_comm_hook(topology.dp.pg, default_hooks.fp16_compress_hook)
    elif kind == "ddp-bf16":
        replica.register_comm_hook(topology.dp.pg, default_hooks.bf16_compress_hook)
    elif kind == "ddp-powersgd":
        state = powerSGD_hook.PowerSGDState(
            topology.dp.pg, matrix_approximation_rank=rank, start_powerSGD_iter=WARMUP_STEPS, min_compression_rate=1
        )
        replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-3, fused=True)

    def step(iteration: int) -> dict[str, float]:
        topology.control.barrier()
        start, computed, total = time.perf_counter(), 0.0, 0.0
        optimizer.zero_grad()
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            batch_start = time.perf_counter()
            with nullcontext() if last else replica.no_sync():
                loss = replica(batch)
                (loss / len(batches)).backward()
            total += float(loss.detach()) / len(batches)
            computed += 0.0 if last else time.perf_counter() - batch_start
        torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        compute = computed * len(batches) / max(len(batches) - 1, 1)
        times = {"compute_s": compute, "coded_s": 0.0, "waited_s": max(seconds - compute, 0.0)}
        return {"seconds": seconds, "loss": total, **times}

    return step
