"""Measurement of this machine: device rates, links, and ratios of measured to predicted times.

Under torchrun all ranks measure at the same time, as in training. Device rates are averaged over the ranks, and the
slowest link between neighbors counts. A single process cannot measure links.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.compression.points import Point
from megatron.compression.spec import Spec
from megatron.config.run import RunConfig
from megatron.distributed.agreement import run_together, take_from_rank_0
from megatron.distributed.clock import clock_of
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger, gather_rows
from megatron.distributed.policy import CompressionPlan
from megatron.distributed.topology import Topology
from megatron.kernels.ops import finite_norm
from megatron.kernels.products import product
from megatron.parallel.data.buffer import replaces_grads
from megatron.parallel.expert.dispatcher import ExpertComm
from megatron.planner.choice import Choice, make_choice
from megatron.planner.cluster import CODING, STEP_PARTS, Cluster, Device, LinkSpec
from megatron.planner.costs import STEADY, TP_POINTS, run_dry, wires_of
from megatron.planner.dry_run import CostTally, DryBackend, ExpertLoad
from megatron.planner.links import SIDES, measure_links
from megatron.planner.piece_costs import EMBEDDING, kind_of, piece_of
from megatron.planner.pieces import Pieces, run_message
from megatron.planner.stages import Stages

RATES = ("peak_tflops", "memory_gbyte_per_s", "op_us")
"""Measured rates of a device."""

_SECONDS = 0.1
"""Seconds spent on measuring a rate."""

_UPDATE_ELEMENTS = 1 << 24
"""Maximum number of parameters in the timed optimizer step."""


class ComputeTimer:
    """A wall-clock timer; time spent neither coding nor waiting counts as computing.

    Args:
        device: the device to synchronize and time.
    """

    def __init__(self, device: torch.device) -> None:
        self.ledger = Ledger(clock=clock_of(device))
        self.synchronize = self.ledger.clock.synchronize
        self._start = 0.0

    def __enter__(self) -> ComputeTimer:
        self._restart()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _restart(self) -> None:
        self.synchronize()
        self.ledger.clear()
        self._start = time.perf_counter()

    def take(self) -> CostTally:
        """Return the times since the last call."""
        self.synchronize()
        spent = time.perf_counter() - self._start
        accounts = self.ledger.accounts.values()
        coding, waited = sum(account.coded_s for account in accounts), sum(account.waited_s for account in accounts)
        self._restart()
        return CostTally(spent - coding - waited, coding, waited)


class LiveBackend(DryBackend):
    """A backend that runs pieces on a real device.

    Args:
        device: torch's device.
        tp: group of the tensor-parallel ranks; None for this process alone.
        repeats: repetitions of each piece, of which the median counts; the first is a warm-up.
    """

    attention = staticmethod(F.scaled_dot_product_attention)

    def __init__(self, device: torch.device, tp: Group | None = None, repeats: int = 3) -> None:
        self.torch_device = device
        self.repeats = repeats
        self.tp = tp

    def recorder(self) -> ComputeTimer:
        """Return a new timer."""
        return ComputeTimer(self.torch_device)

    def group(self, size: int, recorder: Any, nodes: int = 0) -> Group:
        """Return the group of the tensor-parallel ranks, or of this process alone; not split by node."""
        if size > 1 and self.tp is not None:
            return self.tp
        return Group(None, (0,), 0, "this process", "none")

    def experts(
        self, size: int, recorder: Any, plan: CompressionPlan, expert_load: ExpertLoad, folded: bool
    ) -> ExpertComm:
        """Expert points of this process alone: it holds its experts, and the router chooses by token contents."""
        return ExpertComm(self.group(1, recorder), recorder.ledger, plan)

    def fill(self, x: Tensor) -> Tensor:
        """Fill a tensor with small random numbers, large enough to avoid slow denormals."""
        return x.normal_(0.0, 0.02)


def measure_rate(run: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Measure runs per second."""
    run()
    synchronize()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < _SECONDS:
        run()
        synchronize()
        count += 1
    return count / (time.perf_counter() - start)


def measure_device(dtype: torch.dtype, backend: LiveBackend) -> Device:
    """Measure the rates of this process's device.

    Args:
        dtype: dtype of the training.
        backend: backend of the device.
    """
    device, synchronize = backend.torch_device, backend.recorder().synchronize
    cuda = device.type == "cuda"
    side = 8192 if cuda else 1024
    a, b = (backend.fill(torch.empty((side, side), dtype=dtype, device=device)) for _ in range(2))
    products = measure_rate(lambda: product(a, b), synchronize)
    large = torch.zeros((1 << 28) if cuda else (1 << 23), device=device)
    other = torch.empty_like(large)
    copies = measure_rate(lambda: other.copy_(large), synchronize)
    few = torch.zeros(16, device=device)
    small = measure_rate(lambda: [few.add_(1.0) for _ in range(100)], lambda: None) * 100
    if cuda:
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        name = torch.cuda.get_device_name(device)
    else:
        memory, name = 4.0, "CPU process"
    return Device(
        name=name,
        peak_tflops=2 * side**3 * products / 1e12,
        efficiency=1.0,
        memory_gib=memory,
        memory_gbyte_per_s=2 * large.numel() * 4 * copies / 1e9,
        op_us=1e6 / small,
    )


class Corrections:
    """Ratios of measured to predicted times, for the parts of a step and for compressors.

    Args:
        config: resolved configuration.
        vocab_size: entries of the vocabulary.
        choice: the layout; its compressors are ignored.
        cluster: measured rates of the backend's devices and links.
        backend: backend that measures real times.
    """

    def __init__(
        self, config: RunConfig, vocab_size: int, choice: Choice, cluster: Cluster, backend: LiveBackend
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.choice = dataclasses.replace(choice, specs=())
        self.device = cluster.device
        self.backend = backend
        self.stages = Stages(config, cluster, vocab_size)
        self.book = self.stages.book
        self.layer = piece_of(config.model, 0)

    def _pieces(self, specs: Mapping[Point, Spec], backend: DryBackend) -> Pieces:
        plan = CompressionPlan(specs, 0, self.choice.pp)
        plan.begin_step(STEADY)
        return Pieces(self.choice.configure(self.config), self.vocab_size, backend, plan, STEADY)

    def measure_parts(self) -> dict[str, float]:
        """Measure the factor of each part of ``STEP_PARTS``, by name."""
        factors: dict[str, float] = {}
        names = self.stages.names
        for name in names:
            kind = kind_of(name)
            if f"{kind} forward" in factors:
                continue
            dry, real = self.book.piece(self.choice, name), self._pieces({}, self.backend).piece(name)
            factors[f"{kind} forward"] = real.forward.seconds / dry.forward.seconds
            factors[f"{kind} backward"] = real.backward.seconds / dry.backward.seconds
            if name == self.layer and self.choice.tp > 1:
                computed = self.stages.passes(self.choice, wires_of(self.stages.cluster, self.choice))[name].tensor_s
                factors["tensor parallel"] = (real.forward.waited_s + real.backward.waited_s) / computed
        elements = self.book.piece(self.choice, self.layer).parameters * self.config.model.num_layers
        elements = min(elements, _UPDATE_ELEMENTS)
        computed = elements * 36 / (self.device.memory_gbyte_per_s * 1e9)
        # Adam's update, the norm of fp32 gradients, and clearing them where training does.
        torch_device = self.backend.torch_device
        parameter = self.backend.fill(torch.empty(elements, device=torch_device)).requires_grad_()
        gradient = parameter.grad = self.backend.fill(torch.empty_like(parameter))
        adam = torch.optim.AdamW([parameter], lr=1e-3, fused=True)

        def update() -> None:
            finite_norm(gradient)
            adam.step()
            if not replaces_grads(torch_device):
                gradient.zero_()

        factors["optimizer"] = 1.0 / measure_rate(update, self.backend.recorder().synchronize) / computed
        return factors

    def predict_coding(self, text: str) -> float:
        """Predict the seconds of a compressor's encoding and decoding, without its factor."""
        return run_dry((text,), lambda: self._sum_coding(text, DryBackend(self.device)))

    def measure_coding(self, text: str, predicted_s: float) -> float:
        """Measure the factor of a compressor's encoding and decoding."""
        real_s = self._sum_coding(text, self.backend)
        return real_s / predicted_s if predicted_s and real_s else 1.0

    def _sum_coding(self, text: str, backend: DryBackend) -> float:
        specs = self.book.specs(dataclasses.replace(self.choice, specs=(text,)))  # experts=default stands for several
        return sum(self._coding_s(*entry, backend) for entry in specs.items())

    def _coding_s(self, point: Point, spec: Spec, backend: DryBackend) -> float:
        pieces = self._pieces({point: spec}, backend)
        if point in TP_POINTS:
            piece = pieces.piece(self.layer)
            return piece.forward.coding_s + piece.backward.coding_s
        if point in (Point.DP_GRAD, Point.OUTER):
            return pieces.reduction(self.layer, replicas=1, point=point).coding_s
        if point is Point.EMBED_GRAD:
            shape = self.book.piece(self.choice, EMBEDDING).tied_shape
            return pieces.embedding_reduction(shape, math.prod(shape), replicas=1).coding_s if shape else 0.0
        model, keys = self.config.model, self.choice.micro_batch
        shape = (model.seq_length, keys, model.hidden_size)
        if point.is_expert_point:
            # One row for each expert of a token; the number of rows per rank hardly affects the speed.
            shape = (model.moe_router_topk * model.seq_length * keys, 1, model.hidden_size)
        dtype = model.residual_dtype(self.config.precision.params_dtype)
        sent = run_message(pieces.plan.codec(point), torch.Size(shape), dtype, backend, keys, self.vocab_size)
        return sent.encode_s + sent.decode_s


def configure_measurement(config: RunConfig, world_size: int) -> RunConfig:
    """Configure the model for measuring: no pipeline, and tensor-parallel as planned if there are several ranks."""
    tp = config.parallel.tensor_model_parallel_size if world_size > 1 else 1
    replicas = max(world_size // tp, 1)
    choice = Choice(tp, 1, replicas, micro_batch=config.training.micro_batch_size, sequence_parallel=tp > 1)
    training = dataclasses.replace(config.training, global_batch_size=replicas * config.training.micro_batch_size)
    backend: Literal["nccl", "gloo"] = "nccl" if torch.cuda.is_available() else "gloo"
    parallel = dataclasses.replace(config.parallel, distributed_backend=backend)
    measured_config = dataclasses.replace(config, training=training, parallel=parallel)
    return choice.configure(measured_config).resolve(world_size, cuda_available=torch.cuda.is_available())


def measure_all(
    config: RunConfig, vocab_size: int, specs: Sequence[str], topology: Topology | None, ranks_per_node: int
) -> dict[str, float]:
    """Measure every value of a cluster description that can be measured.

    Args:
        config: configuration, resolved for these ranks.
        vocab_size: entries of the vocabulary.
        specs: compressors to time; they need not be valid together in one run.
        topology: the mesh of all ranks; None for this process alone.
        ranks_per_node: ranks that share a node.
    """
    if topology is None:
        torch_device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        choice = Choice(1, 1, 1, micro_batch=config.training.micro_batch_size)
        backend, values = LiveBackend(torch_device), {}
    else:
        choice, backend = make_choice(config, topology.layout.world_size), LiveBackend(topology.device, topology.tp)
        values = measure_links(topology, ranks_per_node)
    # A failure on any rank fails all of them, before the others wait for it.
    pg = topology.control.pg if topology is not None else None
    device = run_together(pg, lambda: measure_device(config.precision.params_dtype, backend))
    # All ranks use the same rates, so that their corrections can be averaged.
    values |= _combine_over_ranks({name: float(getattr(device, name)) for name in RATES}, topology)
    world = topology.layout.world_size if topology is not None else 1
    cluster = fill_in_measured(values, Cluster(gpus=world, gpus_per_node=ranks_per_node, device=device))
    corrections = Corrections(config, vocab_size, choice, cluster, backend)
    values |= run_together(pg, corrections.measure_parts)
    # Predicted on one rank, since the others may share its processors.
    is_first = topology is None or topology.rank == 0
    predicted = run_together(pg, lambda: [corrections.predict_coding(text) for text in specs] if is_first else [])
    predicted_s = dict(zip(specs, take_from_rank_0(pg, predicted), strict=True))
    values |= run_together(
        pg, lambda: {CODING + text: corrections.measure_coding(text, predicted_s[text]) for text in specs}
    )
    return _combine_over_ranks(values, topology)


def _combine_over_ranks(values: dict[str, float], topology: Topology | None) -> dict[str, float]:
    """Average each value over the ranks that measured it; for links take the slowest, which all others wait for."""
    if topology is None:
        return values
    return combine_rows(list(values), gather_rows(topology.control, Ledger(), list(values.values())))


def combine_rows(names: Sequence[str], rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Combine a row of values per rank as ``_combine_over_ranks`` does; NaN stands for a value not measured."""
    columns = [[x for x in column if not math.isnan(x)] for column in zip(*rows, strict=True)]
    slowest: dict[str, Callable[[list[float]], float]] = {
        **{f"{side}_gbit": min for side in SIDES},
        **{f"{side}_us": max for side in SIDES},
    }
    return {name: slowest.get(name, statistics.fmean)(column) for name, column in zip(names, columns, strict=True)}


def fill_in_measured(measured: Mapping[str, float], base: Cluster) -> Cluster:
    """Fill the measured values into ``base``; the measured rate of matrix products is taken as the peak.

    Args:
        measured: the measured values.
        base: the source of values that were not measured: names, sizes, links and corrections.
    """

    def link(side: str, default: LinkSpec) -> LinkSpec:
        return LinkSpec(measured[f"{side}_gbit"], measured[f"{side}_us"]) if f"{side}_gbit" in measured else default

    corrections = {name: value for name, value in measured.items() if name in STEP_PARTS or name.startswith(CODING)}
    corrections = {**base.corrections, **corrections}
    return dataclasses.replace(
        base,
        device=dataclasses.replace(
            base.device,
            peak_tflops=measured["peak_tflops"],
            efficiency=1.0,
            memory_gbyte_per_s=measured["memory_gbyte_per_s"],
            op_us=measured["op_us"],
        ),
        inside=link("inside", base.inside),
        across=link("across", base.across),
        corrections=corrections,
    )
