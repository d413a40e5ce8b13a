"""Tiny training runs on random tokens, for tests that compare layouts and models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megatron.config.run import RunConfig
from megatron.config.steps import StepSizes
from megatron.data.batch import Batch
from megatron.distributed.process_group import LaunchEnvironment
from megatron.distributed.topology import Topology, build_topology, single_process
from megatron.models.gpt import GPTStage
from megatron.optimizer.schedules import LRSchedule
from megatron.planner.settings import Settings
from megatron.training.assembly import Engines, build_engines, groups_by_node, make_layout
from megatron.training.flushless import flush_pipeline
from megatron.training.loss_guard import LossGuard
from megatron.training.persistence import RunCheckpoints
from megatron.training.progress_state import Progress
from megatron.training.step import take_batches, train_step
from megatron.training.timers import Timers
from tests.support.device import backend_of_tests, own_device

VOCAB = 97

BASE: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "make_vocab_size_divisible_by": 1,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": 0.05,
    },
    "training": {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 30, "seed": 7, "compile": "off"},
    "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "lr_decay_style": "constant"},
    "data": {"data_path": ["unused"]},
    "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": VOCAB - 1},
}
"""Layers are compiled only where a test asks for it: on a GPU every rank would spend its time on that."""

ODD: dict[str, dict[str, Any]] = {"model": {"seq_length": 12}, "training": {"global_batch_size": 12}}
"""Sizes that differ from powers of two by a factor of three, also on four replicas: tokens of a micro-batch, and
micro-batches. Divided by them, numbers that are rounded to fp32 on some layouts alone differ."""

T5: dict[str, dict[str, Any]] = {
    "model": {"model_type": "t5", "decoder_seq_length": 8},
    "tokenizer": {"tokenizer_type": "BertWordPieceCase", "vocab_file": "unused", "vocab_extra_ids": 8},
}
"""Changes that make a model of ``BASE`` a T5."""


def tiny_config(changes: Mapping[str, Mapping[str, Any]], world_size: int) -> RunConfig:
    """A resolved configuration: ``BASE`` with some fields of some sections replaced.

    8-bit products are taken on CPUs, too, where a run's flags refuse them: they are the reference's there.
    """
    merged = merge(BASE, {"parallel": {"distributed_backend": backend_of_tests()}}, changes)
    fp8 = merged.get("precision", {}).pop("fp8", None)
    config = RunConfig.from_dict(merged).resolve(world_size, cuda_available=backend_of_tests() == "nccl")
    return replace(config, precision=replace(config.precision, fp8=fp8))


def merge(*sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Merges the fields of all sections; later values win."""
    merged: dict[str, dict[str, Any]] = {}
    for section_changes in sections:
        for name, section in section_changes.items():
            merged.setdefault(name, {}).update(section)
    return merged


def tiny_tokens(draw: int, seq_length: int, masked: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (seq_length + 1) and loss mask (seq_length) of a sample: learnable, since each token predicts the next."""
    generator = torch.Generator().manual_seed(1000 + draw)
    steps = torch.randint(1, 4, (seq_length + 1,), generator=generator)
    tokens = (torch.cumsum(steps, 0) * 5 + draw) % VOCAB
    mask = torch.ones(seq_length)
    if masked:
        mask = (torch.rand(seq_length, generator=generator) > 0.3).float()
    return tokens, mask


def tiny_pairs(draws: Sequence[int], length: int) -> dict[str, torch.Tensor]:
    """Samples of BERT as tensors of a batch: two sentences, some words of them masked, and padding."""
    rows = []
    for draw in draws:
        generator = torch.Generator().manual_seed(5000 + draw)
        text = int(torch.randint(length // 2, length + 1, (), generator=generator))
        positions = torch.arange(length)
        labels = torch.where(positions < text, tiny_tokens(draw, length)[0][:length], 0)
        mask = (torch.rand(length, generator=generator) < 0.3) & (positions < text)
        swapped = int(torch.randint(2, (), generator=generator))
        types = ((positions >= text // (2 + swapped)) & (positions < text)).long()
        segments = (positions >= text).int()
        tokens = torch.where(mask, VOCAB - 1, labels)
        rows.append((tokens, labels, mask.float(), segments, types, torch.tensor(swapped)))
    names = ("tokens_bs", "labels_bs", "loss_mask_bs", "segment_ids_bs", "types_bs", "order_b")
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def tiny_spans(draws: Sequence[int], length: int, decoder_length: int) -> dict[str, torch.Tensor]:
    """Samples of T5 as tensors of a batch: an encoder's text, a decoder's text that follows from it, and padding
    behind both."""
    rows = []
    for draw in draws:
        generator = torch.Generator().manual_seed(9000 + draw)
        sizes = [int(torch.randint(n // 2, n + 1, (), generator=generator)) for n in (length, decoder_length)]
        tokens = tiny_tokens(draw, length)[0][:length]
        decoder_tokens = tiny_tokens(draw + 1, decoder_length)[0]
        pads = [(torch.arange(n) >= size).int() for n, size in zip((length, decoder_length), sizes, strict=True)]
        decoder_inputs, labels = (
            decoder_tokens[:-1].masked_fill(pads[1] > 0, 0),
            decoder_tokens[1:].masked_fill(pads[1] > 0, 0),
        )
        rows.append(
            (tokens.masked_fill(pads[0] > 0, 0), labels, 1.0 - pads[1].float(), pads[0], decoder_inputs, pads[1])
        )
    first = ("tokens_bs", "labels_bs", "loss_mask_bs", "segment_ids_bs")
    names = (*first, "decoder_tokens_bs", "decoder_segment_ids_bs")
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def tiny_texts(draws: Sequence[int], length: int, masked: bool) -> dict[str, torch.Tensor]:
    """Samples of GPT as tensors of a batch."""
    samples = [tiny_tokens(draw, length, masked) for draw in draws]
    tokens = torch.stack([tokens for tokens, _ in samples])
    return {
        "tokens_bs": tokens[:, :-1].contiguous(),
        "labels_bs": tokens[:, 1:].contiguous(),
        "loss_mask_bs": torch.stack([mask for _, mask in samples]),
        "position_ids_bs": torch.arange(length).expand(len(draws), length).contiguous(),
    }


def tiny_batches(
    config: RunConfig, topology: Topology, masked: bool, start: int = 0, epoch: int | None = None
) -> Iterator[Batch]:
    """Micro-batches of this rank, without end, in the order that the data loader keeps; ``epoch`` samples return."""
    micro = config.training.micro_batch_size
    at = start
    while True:
        first = at + topology.dp.rank * micro
        draws = list(range(first, first + micro))
        ids = [draw if epoch is None else draw % epoch for draw in draws]
        tensors = tiny_tensors(config, ids, masked)
        yield Batch(sample_ids_b=torch.tensor(ids), draw_ids_b=torch.tensor(draws), **tensors)
        at += micro * topology.dp.size


def tiny_tensors(config: RunConfig, ids: Sequence[int], masked: bool) -> dict[str, torch.Tensor]:
    model = config.model
    assert config.masks_labels or not masked, "a run whose loss masks exclude labels sets eod_mask_loss"
    if model.model_type == "t5":
        return tiny_spans(ids, model.seq_length, model.labels_of(0))
    if model.task_head == "classification":
        pairs = tiny_pairs(ids, model.seq_length)
        return {**pairs, "labels_bs": pairs["order_b"].unsqueeze(1), "loss_mask_bs": torch.ones(len(ids), 1)}
    return tiny_texts(ids, model.seq_length, masked) if model.causal else tiny_pairs(ids, model.seq_length)


@dataclass(frozen=True)
class Trace:
    """Losses, norms and bytes of a tiny run."""

    losses: list[float]
    grad_norms: list[float]
    bytes_by_point: dict[str, float]
    raw_by_point: dict[str, float]
    named: list[Mapping[str, float]] = field(default_factory=list)
    """All losses of each step, by name."""


def tiny_engines(changes: Mapping[str, Mapping[str, Any]], meshes: dict[object, Topology] | None = None) -> Engines:
    """Engines of this rank; uses torch's process group when there is one.

    ``meshes`` keeps the meshes for other runs of the same process: a mesh takes longer than some steps. Nodes are
    blocks of LOCAL_WORLD_SIZE ranks.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config = tiny_config(changes, world_size)
    layout, by_node, meshes = make_layout(config, world_size), groups_by_node(config), {} if meshes is None else meshes
    if (layout, by_node) not in meshes:
        alone = world_size == 1
        device = own_device(0 if alone else dist.get_rank())
        node = LaunchEnvironment.read().node
        meshes[layout, by_node] = single_process(device) if alone else build_topology(layout, device, node, by_node)
    return build_engines(config, meshes[layout, by_node], VOCAB)


def tiny_gpt(changes: Mapping[str, Mapping[str, Any]]) -> GPTStage:
    """A whole GPT on this process."""
    stage = tiny_engines(changes).stages[0]
    assert isinstance(stage, GPTStage)
    return stage


def tiny_checkpoints(
    engines: Engines, iteration: int = 0, loss_guard: LossGuard | None = None, settings: Settings = MappingProxyType({})
) -> RunCheckpoints:
    """The checkpoints of a run after some iterations of its engines."""
    config, training = engines.config, engines.config.training
    schedule = LRSchedule.from_options(
        config.optimizer,
        global_batch_size=training.global_batch_size,
        seq_length=config.model.seq_length,
        train_iters=training.train_iters,
        train_samples=None,
        train_tokens=None,
    )
    consumed = iteration * training.global_batch_size
    schedule.step(consumed)
    progress = Progress(iteration=iteration, consumed_samples=consumed)
    return RunCheckpoints(engines, schedule, progress, lambda line: None, loss_guard=loss_guard, settings=settings)


def tiny_run(changes: Mapping[str, Mapping[str, Any]], iterations: int, masked: bool = False) -> Trace:
    """Trains for some iterations; a collective call when there is a process group."""
    engines = tiny_engines(merge(changes, {"data": {"eod_mask_loss": masked}}))
    return tiny_train(engines, iterations, masked)


def tiny_train(
    engines: Engines,
    iterations: int,
    masked: bool = False,
    epoch: int | None = None,
    after_step: Callable[[Engines], None] = lambda engines: None,
    sizes: StepSizes | None = None,
    first: int = 0,
    rate_factors: Sequence[float] = (1.0,),
) -> Trace:
    """Trains given engines from their current weights, from iteration ``first`` on; ``after_step`` sees them after
    each. ``sizes`` may grow. Learning rate and weight decay are multiplied by ``rate_factors`` in turn."""
    config = engines.config
    start = first * config.training.global_batch_size
    batches = tiny_batches(config, engines.topology, masked, start, epoch)
    norms, named = [], []
    layout = engines.topology.layout
    count = config.training.global_batch_size // (config.training.micro_batch_size * layout.dp)
    consumed = 0
    for iteration in range(first, first + iterations):
        length = None if sizes is None else sizes.lengths.at(iteration)
        count = count if sizes is None else sizes.batches.num_micro_batches(consumed)
        consumed += 0 if sizes is None else sizes.batches.at(consumed)
        step_batches = take_batches(batches, count, engines.topology.device, length)
        factor = rate_factors[iteration % len(rate_factors)]
        rates = factor * config.optimizer.lr, factor * config.optimizer.weight_decay
        outcome = train_step(engines, step_batches, iteration, *rates, seq_length=length)
        after_step(engines)
        named.append(outcome.losses)
        norms.append(outcome.grad_norm if outcome.grad_norm is not None else float("nan"))
    flush_pipeline(engines, Timers())  # which tells the losses of the last step, if it was not flushed
    losses = [next(iter(step_losses.values())) for step_losses in named]
    accounts = engines.ledger.take_totals()
    sent, raw = ({p: account[kind] for p, account in accounts.items()} for kind in ("wire_bytes", "raw_bytes"))
    return Trace(losses, norms, sent, raw, named)
