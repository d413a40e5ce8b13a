"""Filling derived values and checking a run as a whole. Pure: nothing here touches devices or files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace

from megatron.base.errors import UserError
from megatron.base.fields import check_fields
from megatron.base.option import field_options, is_unset
from megatron.config.check_compression import check_compression
from megatron.config.check_model import check_model, check_vocabulary
from megatron.config.check_parallel import check_layout, check_parallel
from megatron.config.check_training import check_batches, check_length, check_schedules
from megatron.config.checkpoint import check_checkpoint
from megatron.config.data import check_data
from megatron.config.logs import check_logs
from megatron.config.run import RunConfig, run_sections
from megatron.config.tokenizer import check_tokenizer

Note = Callable[[str], None]


def resolve_run(config: RunConfig, world_size: int, *, cuda_available: bool, notes: list[str] | None) -> RunConfig:
    """See `RunConfig.resolve`."""
    collected = [] if notes is None else notes

    def note(line: str) -> None:
        if line not in collected:
            collected.append(line)

    if world_size < 1:
        raise UserError(f"the world size is {world_size}; start at least one process")
    config = _resolve_tokenizer(config, note)
    _check_all_required(config)
    for section in run_sections():
        check_fields(section, getattr(config, section))
    config = _resolve_model(config)
    check_model(config)
    check_layout(config, world_size)
    if config.tokenizer.vocab_size is not None and config.tokenizer.tokenizer_type in (None, "NullTokenizer"):
        end = config.tokenizer.tokenizer_type is not None  # of documents, which that tokenizer adds
        check_vocabulary(
            config.tokenizer.vocab_size + end,
            config.model.make_vocab_size_divisible_by,
            config.parallel.tensor_model_parallel_size,
        )
    config = _resolve_parallel(config, cuda_available, note)
    config = _resolve_recompute(config)
    config = _resolve_training(config, world_size, note)
    config = _resolve_optimizer(config, note)
    check_parallel(config, cuda_available)
    check_batches(config, world_size)
    check_schedules(config)
    check_data(config.data, skip_train=config.validation.skip_train)
    check_tokenizer(config.tokenizer)
    check_logs(config.logging, config.parallel)
    check_checkpoint(config.checkpoint)
    check_compression(config, world_size, note)
    return config


def _check_all_required(config: RunConfig) -> None:
    missing = []
    for section, cls in run_sections().items():
        values = getattr(config, section)
        missing += [
            f"--{described.flag}"
            for described in field_options(section, cls)
            if described.option.required and getattr(values, described.name) is None
        ]
    training = config.training
    if training.train_iters is None and training.train_samples is None and training.train_tokens is None:
        missing.append("one of --train-iters, --train-samples and --train-tokens")
    if config.tokenizer.tokenizer_type is None and config.tokenizer.vocab_size is None:
        missing.append("--tokenizer-type (or --vocab-size)")
    if missing:
        raise UserError(f"not given but required: {', '.join(missing)}; add {'it' if len(missing) == 1 else 'them'}")


def _resolve_tokenizer(config: RunConfig, note: Note) -> RunConfig:
    tokenizer = config.tokenizer.with_type()
    if tokenizer == config.tokenizer:
        return config
    note(f"--vocab-file with --merge-file means --tokenizer-type {tokenizer.tokenizer_type}")
    return replace(config, tokenizer=tokenizer)


def _resolve_model(config: RunConfig) -> RunConfig:
    model = config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if is_unset(model.kv_channels):
        if hidden % heads != 0:
            raise UserError(
                f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}; change one of "
                "them, or give the width of a head with --kv-channels"
            )
        model = replace(model, kv_channels=hidden // heads)
    if is_unset(model.ffn_hidden_size):
        width = 8 * hidden // 3 // 64 * 64 if model.swiglu else 4 * hidden
        if width == 0:
            raise UserError(f"--swiglu: --hidden-size {hidden} is too small for a default; give --ffn-hidden-size")
        model = replace(model, ffn_hidden_size=width)
    if is_unset(model.num_query_groups):
        model = replace(model, num_query_groups=heads)
    if is_unset(model.max_position_embeddings):
        model = replace(model, max_position_embeddings=model.seq_length)
    return replace(config, model=model)


def _resolve_parallel(config: RunConfig, cuda_available: bool, note: Note) -> RunConfig:
    parallel = config.parallel
    if config.precision.bf16 and not parallel.accumulate_allreduce_grads_in_fp32:
        if parallel.ddp_impl == "torch":
            raise UserError(
                "--DDP-impl torch cannot accumulate gradients in fp32, which --bf16 needs; use --DDP-impl local"
            )
        note("--bf16 turns --accumulate-allreduce-grads-in-fp32 on")
        parallel = replace(parallel, accumulate_allreduce_grads_in_fp32=True)
    if is_unset(parallel.distributed_backend):
        parallel = replace(parallel, distributed_backend="nccl" if cuda_available else "gloo")
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        note("--sequence-parallel: no effect, there is one tensor-parallel rank")
        parallel = replace(parallel, sequence_parallel=False)
    layers_per_stage = config.model.num_layers // parallel.pipeline_model_parallel_size
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    chunks = parallel.virtual_pipeline_model_parallel_size
    if per_chunk is not None:
        if layers_per_stage % per_chunk != 0:
            raise UserError(
                f"--num-layers-per-virtual-pipeline-stage {per_chunk} does not divide the {layers_per_stage} "
                "layers of a pipeline stage (--num-layers / --pipeline-model-parallel-size); choose a divisor"
            )
        if chunks is not None and chunks != layers_per_stage // per_chunk:
            raise UserError(
                f"--num-layers-per-virtual-pipeline-stage {per_chunk} makes {layers_per_stage // per_chunk} "
                f"chunks, not --virtual-pipeline-model-parallel-size {chunks}; give only one of them"
            )
        parallel = replace(parallel, virtual_pipeline_model_parallel_size=layers_per_stage // per_chunk)
    elif chunks is not None:
        if layers_per_stage % chunks != 0:
            raise UserError(
                f"--virtual-pipeline-model-parallel-size {chunks} does not divide the {layers_per_stage} "
                "layers of a pipeline stage (--num-layers / --pipeline-model-parallel-size); choose a divisor"
            )
        parallel = replace(parallel, num_layers_per_virtual_pipeline_stage=layers_per_stage // chunks)
    return replace(config, parallel=parallel)


def _resolve_recompute(config: RunConfig) -> RunConfig:
    recompute = config.recompute
    if recompute.recompute_granularity == "full" and recompute.recompute_method is None:
        return replace(config, recompute=replace(recompute, recompute_method="uniform"))
    return config


def _resolve_training(config: RunConfig, world_size: int, note: Note) -> RunConfig:
    training = config.training
    if training.train_tokens is not None:
        if training.train_iters is not None:
            raise UserError("--train-iters and --train-tokens exclude each other; leave one of them out")
        whole = training.train_tokens // config.model.seq_length
        if whole == 0:
            raise UserError(
                f"--train-tokens {training.train_tokens} is less than one sequence of --seq-length "
                f"{config.model.seq_length}; give more tokens"
            )
        if training.train_samples is None or whole < training.train_samples:
            note(
                f"--train-tokens {training.train_tokens} ends the run after {whole} samples of "
                f"{config.model.seq_length} tokens"
            )
            training = replace(training, train_samples=whole)
    if is_unset(training.global_batch_size):
        if training.rampup_batch_size is not None:
            raise UserError("--rampup-batch-size needs the final batch size; add --global-batch-size")
        size = training.micro_batch_size * config.data_parallel_size(world_size)
        training = replace(training, global_batch_size=size)
    config = replace(config, training=training)
    check_length(config)
    return config


def _resolve_optimizer(config: RunConfig, note: Note) -> RunConfig:
    optimizer, training = config.optimizer, config.training
    seq_length = config.model.seq_length
    for tokens_name, samples_name, unset in (
        ("lr_decay_tokens", "lr_decay_samples", None),
        ("lr_warmup_tokens", "lr_warmup_samples", 0),
    ):
        tokens = getattr(optimizer, tokens_name)
        if tokens is None:
            continue
        flag, other = f"--{tokens_name.replace('_', '-')}", f"--{samples_name.replace('_', '-')}"
        if training.train_samples is None:
            raise UserError(f"{flag} needs a run counted in samples; give --train-samples or {_iters(other)}")
        whole = tokens // seq_length
        if getattr(optimizer, samples_name) not in (unset, whole):
            raise UserError(f"{flag} and {other} exclude each other; leave one of them out")
        note(f"{flag} {tokens} is taken as {whole} samples of {seq_length} tokens")
        optimizer = dataclasses.replace(optimizer, **{samples_name: whole})
    if training.train_iters is not None and optimizer.lr_decay_iters is None:
        optimizer = replace(optimizer, lr_decay_iters=training.train_iters)
    if training.train_samples is not None and optimizer.lr_decay_samples is None:
        optimizer = replace(optimizer, lr_decay_samples=training.train_samples)
    if optimizer.weight_decay_incr_style == "constant":
        for value, flag in (
            (optimizer.start_weight_decay, "--start-weight-decay"),
            (optimizer.end_weight_decay, "--end-weight-decay"),
        ):
            if value not in (None, optimizer.weight_decay):
                raise UserError(f"{flag} needs a growing weight decay; add --weight-decay-incr-style linear or cosine")
        optimizer = replace(
            optimizer, start_weight_decay=optimizer.weight_decay, end_weight_decay=optimizer.weight_decay
        )
    return replace(config, optimizer=optimizer)


def _iters(samples_flag: str) -> str:
    return samples_flag.replace("samples", "iters")
