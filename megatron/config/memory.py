"""Lower bound on the memory of a rank, computed without allocation, so that oversized runs are refused at startup."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.base.errors import UserError
from megatron.base.user_text import flag_of
from megatron.config.run import RunConfig

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")


@dataclass(frozen=True)
class MemoryItem:
    """Memory item: its bytes, its purpose, and the flags that determine it."""

    nbytes: int
    description: str
    flags: tuple[str, ...]


def format_bytes(nbytes: float) -> str:
    """Human-readable number of bytes, such as 1.5 GB."""
    size, unit = nbytes, 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}" if size < 1e6 else f"{size:.1e} {_UNITS[unit]}"


def min_memory_items(config: RunConfig, world_size: int, vocab_size: int | None = None) -> list[MemoryItem]:
    """Minimum memory of a rank of the first pipeline stage, by item.

    Counts parameters, gradients, optimizer state, island state, the widest activations of a micro-batch, and the tokens
    of a step; other memory depends on the machine, the compressors and the schedule.

    Args:
        config: the resolved configuration.
        world_size: number of processes.
        vocab_size: entries of the tokenizer; None: ``--vocab-size``, if given.
    """
    model, parallel, training = config.model, config.parallel, config.training
    tensor = parallel.tensor_model_parallel_size
    matrices = model.attention_products + (3 if model.gated else 2) * model.ffn_hidden_size * model.hidden_size
    stages = parallel.pipeline_model_parallel_size
    split = parallel.pipeline_model_parallel_split_rank if model.decoder_layers else None
    parameters = model.num_layers // (split or stages) * matrices
    # Expert parameters, minus those of the dense MLPs that they replace. The sum is divided by the tensor-parallel size
    # below; cancel that for experts that are not tensor-parallel.
    layers = range(model.num_layers // (split or stages))
    shares = parallel.expert_model_parallel_size / (
        parallel.tensor_model_parallel_size if parallel.folds_experts else 1
    )
    expert_matrices = (3 if model.gated else 2) * model.hidden_size
    expert_counts = [count for layer, count in model.expert_layers.items() if layer in layers]
    widths = (int(count / shares) * (model.moe_ffn_hidden_size or 0) - model.ffn_hidden_size for count in expert_counts)
    parameters += expert_matrices * sum(widths)
    if stages == 1:
        parameters += len(model.decoder_layers) * (matrices + model.attention_products)
    entries = (vocab_size if vocab_size is not None else config.tokenizer.vocab_size) or 0
    step = model.make_vocab_size_divisible_by * tensor
    positions = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
    parameter_size, matrix_parameter_size = (
        _rank_parameter_bytes(config, world_size, matrix) for matrix in (False, True)
    )
    width = _bytes_per_number(config)
    tokens = model.seq_length * training.micro_batch_size
    channels = model.ffn_hidden_size + model.qkv_channels
    row = model.hidden_size // (tensor if parallel.sequence_parallel else 1) + channels // tensor
    batch = training.global_batch_size // config.replicas(world_size) * model.seq_length
    experts = ("num_experts", "moe_ffn_hidden_size") if model.has_experts else ()
    shape = ("num_layers", "hidden_size", "ffn_hidden_size", *experts, "num_attention_heads", "kv_channels")
    return [
        MemoryItem(
            parameters // tensor * matrix_parameter_size, "the weights of its layers", _format_flags(model, *shape)
        ),
        MemoryItem(
            -(-entries // step) * step // tensor * model.hidden_size * parameter_size,
            "the embedding",
            (f"--vocab-size {entries}", *_format_flags(model, "make_vocab_size_divisible_by", "hidden_size")),
        ),
        MemoryItem(
            positions * model.hidden_size * parameter_size,
            "the positions",
            _format_flags(model, "max_position_embeddings", "hidden_size"),
        ),
        MemoryItem(
            tokens * row * width,
            "one micro-batch",
            (
                *_format_flags(training, "micro_batch_size"),
                *_format_flags(model, "seq_length", "hidden_size", "ffn_hidden_size"),
            ),
        ),
        MemoryItem(
            batch * 8,
            "the tokens of a step",
            (*_format_flags(training, "global_batch_size"), *_format_flags(model, "seq_length")),
        ),
    ]


def _format_flags(section: object, *names: str) -> tuple[str, ...]:
    flags = []
    for name in names:
        value = getattr(section, name)
        words = value if isinstance(value, list) else [value]
        flags.append(f"{flag_of(name)} {' '.join(map(str, words))}")
    return tuple(flags)


def _bytes_per_number(config: RunConfig) -> int:
    precision = config.precision
    return 2 if precision.fp16 or precision.bf16 else 8 if precision.fp64 else 4


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes per parameter on a rank.

    Args:
        weight: the parameter itself.
        gradient: its accumulated gradient.
        optimizer: moments, and the master copy of a 16-bit or compressed-gather parameter; sharded by the distributed
            optimizer.
    """

    weight: int
    gradient: int
    optimizer: int


def parameter_bytes(config: RunConfig, gathers_compressed: bool, matrix: bool = False) -> ParameterBytes:
    """Bytes per parameter in training.

    Args:
        config: the resolved configuration.
        gathers_compressed: updated parameters are gathered through a compressor.
        matrix: the parameter belongs to a matrix of a layer, for which Muon keeps a single moment.
    """
    width = _bytes_per_number(config)
    gradient = max(width, 4) if config.parallel.accumulate_allreduce_grads_in_fp32 else width
    optimizer = config.optimizer
    moments = int(optimizer.sgd_momentum > 0) if optimizer.optimizer == "sgd" else 2
    if optimizer.optimizer == "muon" and matrix:
        moments = 1
    parallel = config.parallel
    copies = int(width == 2 or gathers_compressed or parallel.looks_ahead)
    copies += parallel.delay > 0 and parallel.delay_correction != "none"
    return ParameterBytes(width, gradient, (moments + copies) * max(width, 4))


def _rank_parameter_bytes(config: RunConfig, world_size: int, matrix: bool) -> int:
    """Bytes per parameter on a rank; sharded optimizer state is divided by the number of replicas."""
    from megatron.compression.points import Point  # imports torch; parsing flags must not
    from megatron.compression.schedule import RunLength

    sharded, iterations = config.parallel.use_distributed_optimizer, config.training.planned_iters
    specs = config.compression.specs(RunLength(iterations))
    gather, outer = specs.get(Point.PARAM_GATHER), specs.get(Point.OUTER)
    size = parameter_bytes(config, sharded and gather is not None and not gather.identity, matrix)
    if config.validation.skip_train:
        return size.weight
    replicas = config.parallel.data_parallel_size(world_size) if sharded else 1
    versions = 3 if config.parallel.overlaps_steps else 1
    nbytes = size.weight * versions + size.gradient * (1 + config.parallel.delay) + size.optimizer // replicas
    if outer is None or iterations is None or outer.activation.warmup_iters >= iterations:
        return nbytes
    # Anchor, momentum and pseudo-gradient of islands, without residuals.
    number, options = max(_bytes_per_number(config), 4), outer.outer_options
    offloaded = options.offload and config.parallel.distributed_backend == "nccl"
    return nbytes + (0 if offloaded else number * options.copies) // replicas + number // options.fragments


def check_memory(
    config: RunConfig, world_size: int, available: int, location: str, vocab_size: int | None = None
) -> None:
    """Check that a run fits into memory; raise UserError with the bytes otherwise.

    Args:
        config, world_size, vocab_size: see ``min_memory_items``.
        available: bytes per rank.
        location: location of this memory, for the message.
    """
    needs = min_memory_items(config, world_size, vocab_size)
    total = sum(need.nbytes for need in needs)
    if total <= available:
        return
    largest = max(needs, key=lambda need: need.nbytes)
    raise UserError(
        f"each rank needs at least {format_bytes(total)} of memory, but {format_bytes(available)} are available "
        f"{location}; {format_bytes(largest.nbytes)} are for {largest.description} "
        f"({', '.join(largest.flags)}): lower these, or split the model over more processes "
        "(--tensor-model-parallel-size, --pipeline-model-parallel-size, --use-distributed-optimizer)"
    )


def memory_of_this_machine() -> int:
    """Bytes of memory and swap space, limited by the control group of this process."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("SwapTotal:"):
                total += int(line.split()[1]) * 1024
    for path in _CGROUPS:
        with suppress(OSError, ValueError):
            total = min(total, int(Path(path).read_text()))
    return total
