"""A training command from its command line to the end, with one clear error on every rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch

from megatron.base.errors import UserError
from megatron.base.memory import keep_freed_memory
from megatron.checkpoint.files import Iteration
from megatron.checkpoint.folder_lock import FolderLock
from megatron.checkpoint.load import saved_config
from megatron.checkpoint.ownership import owned_save_folder
from megatron.checkpoint.vocabulary import saved_vocab_size
from megatron.config.curriculum import lengths_of
from megatron.config.experts import ExpertsConfig
from megatron.config.flags import ParsedRun, parse_program
from megatron.config.lengths import LengthSchedule
from megatron.config.merge import merge_checkpoint_config
from megatron.config.model_types import ModelType, check_model_type
from megatron.config.run import RunConfig, run_sections
from megatron.config.skipped import SkippedIterations
from megatron.config.steps import StepSizes
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.training import batch_schedule
from megatron.data.build import Datasets, build_datasets
from megatron.data.build_masked import build_bert_datasets, build_t5_datasets
from megatron.distributed.agreement import gather_texts, run_together
from megatron.distributed.process_group import LaunchEnvironment, pick_device
from megatron.distributed.topology import Topology, build_topology, single_process
from megatron.optimizer.step_summary import ExitReason
from megatron.tokenizer.api import Tokenizer
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.vocabulary import fit_vocab_size, model_entries
from megatron.training.announce import log_config, rank_0_log
from megatron.training.assembly import groups_by_node, make_layout
from megatron.training.auto_compression import check_auto
from megatron.training.compression_notes import run_length
from megatron.training.console import make_output_last
from megatron.training.determinism import make_deterministic
from megatron.training.evaluation import test_sets, validation_sets
from megatron.training.islands import adapt_to_island, reach_islands, reporting_refusal
from megatron.training.kernel_check import check_kernels
from megatron.training.machine_check import check_machine, check_room
from megatron.training.planned_schedule import check_pipeline_cluster
from megatron.training.program import Ranks, run_program
from megatron.training.progress_state import Progress
from megatron.training.run_plan import RunPlan, ScoreOutputs
from megatron.training.run_segment import ChosenRun, RunParts, choose_or_keep, resuming_config, train_segment
from megatron.training.saved_run import check_saved_model_type, find_saved, with_pretrained
from megatron.training.trial_steps import free_memory


@dataclass(frozen=True)
class Job:
    """Data, starting point and scoring of a run that is not pretraining.

    Args:
        datasets: builds the data sets from the resolved configuration and the tokenizer; None to build them from the
            flags.
        pretrained: folder and iteration of a language model that a new run starts from.
        score_outputs: see ``RunPlan``.
        sections: more sections of the flags, by name, in which all ranks must agree.
        after_choice: work once the compressors are chosen, in place of training.
    """

    datasets: Callable[[RunConfig, Tokenizer | None], Datasets] | None = None
    pretrained: tuple[str, Iteration] | None = None
    score_outputs: ScoreOutputs | None = None
    sections: Mapping[str, Any] = field(default_factory=dict)
    after_choice: Callable[[RunParts, ChosenRun], None] | None = None


def main(argv: Sequence[str] | None = None, model_type: ModelType = "gpt") -> int:
    """Train a model of some kind on this rank: the program behind ``pretrain_gpt.py``, ``pretrain_bert.py`` and
    ``pretrain_t5.py``. Returns the exit status."""
    make_output_last()

    def body(ranks: Ranks) -> None:
        parsed = parse_program(list(sys.argv[1:] if argv is None else argv), model_type)
        ranks.env = env = LaunchEnvironment.read(parsed.config.parallel.local_rank)
        train(ranks, resolve(parsed, env), parsed.notes, parsed.flag_fields)

    return run_program(body)


def train(
    ranks: Ranks, config: RunConfig, notes: Sequence[str], flag_fields: Collection[str] = (), job: Job = Job()
) -> None:
    """Join the other ranks and train.

    Args:
        ranks: the ranks of the command.
        config: the resolved configuration.
        notes: notes on the flags.
        flag_fields: dotted names (``section.field``) of the fields that flags set.
        job: data and starting point.

    Raises:
        UserError: on every rank, for settings or input that cannot be used.
    """
    env, parallel = ranks.env, config.parallel
    if job.score_outputs is not None and config.islands.several:
        raise UserError("--islands: a task is learned on one island; leave the flag out")
    check_auto(config, env.world_size)
    check_pipeline_cluster(config, env.world_size)
    cuda = parallel.distributed_backend == "nccl"
    if config.training.deterministic_mode:
        make_deterministic(cuda=cuda)
    if not cuda:
        keep_freed_memory()
    check_machine(config, env)
    writes = env.rank == 0 and not config.validation.skip_train
    with owned_save_folder(config.checkpoint, print) if writes else nullcontext() as lock:
        ranks.join(
            parallel.distributed_backend,
            parallel.distributed_timeout_minutes,
            {**{name: getattr(config, name) for name in run_sections()}, **job.sections},
            peer_timeout_seconds=parallel.peer_timeout_seconds,
        )
        run(ranks, config, notes, flag_fields, lock, job)


def resolve(parsed: ParsedRun, env: LaunchEnvironment) -> RunConfig:
    """Return the checked configuration for this world size.

    Raises:
        UserError: when settings cannot work; no process group exists yet.
    """
    parsed.config = adapt_to_island(with_pretrained(parsed.config, parsed.notes.append))
    checkpoint = parsed.config.checkpoint
    if checkpoint.use_checkpoint_args:
        if checkpoint.load is None:
            raise UserError("--use-checkpoint-args takes the model's shape from --load, which is missing")
        saved, iteration = saved_config(checkpoint.load, checkpoint.ckpt_step)
        check_model_type(checkpoint.source, saved.model.type_and_task, parsed.config.model.type_and_task)
        if checkpoint.moe_use_upcycling:  # the experts come from the flags
            experts = {each.name: getattr(parsed.config.model, each.name) for each in fields(ExpertsConfig)}
            saved = replace(saved, model=replace(saved.model, **experts))
        parsed.config = merged = merge_checkpoint_config(parsed.config, parsed.explicit, saved)
        tokenizer = fit_tokenizer(merged.tokenizer, saved_vocab_size(checkpoint.load, iteration), parsed)
        parsed.config = replace(merged, tokenizer=tokenizer)
    return parsed.resolve(env.world_size, cuda_available=torch.cuda.is_available())


def fit_tokenizer(tokenizer: TokenizerConfig, entries: int, parsed: ParsedRun) -> TokenizerConfig:
    """Fit the tokenizer to a checkpoint's model, which may have more vocabulary entries.

    Raises:
        UserError: when --vocab-size does not match that model.
    """
    result = fit_vocab_size(tokenizer, entries)
    if "tokenizer.vocab_size" in parsed.explicit and result != tokenizer:
        raise UserError(
            f"--vocab-size: {tokenizer.vocab_size} was given but the checkpoint's model needs {result.vocab_size}; "
            "leave the flag out"
        )
    return result


def run(
    ranks: Ranks,
    config: RunConfig,
    notes: Sequence[str],
    flag_fields: Collection[str] = (),
    lock: FolderLock | None = None,
    job: Job = Job(),
) -> None:
    """Build everything and train.

    Args:
        ranks: the ranks of the command, which have met.
        config: the resolved configuration.
        notes: notes on the flags.
        flag_fields: dotted names (``section.field``) of the fields that flags set.
        lock: lock of the folder that rank 0 saves to.
        job: data and starting point.

    Raises:
        UserError: on every rank, for data, files or checkpoints that cannot be used.
    """
    env = ranks.env
    device = pick_device(config.parallel.distributed_backend, env.local_rank)
    if env.world_size == 1:
        topology = single_process(device)
    else:
        topology = build_topology(make_layout(config, env.world_size), device, env.node, groups_by_node(config))

    def log(text: str) -> None:
        if topology.is_last_rank:
            print(text, flush=True)

    with reporting_refusal(config, topology):
        log_config(config, [*notes, *filter(None, [check_kernels(topology)])], job.sections, log)
        config, islands = reach_islands(config, topology, rank_0_log(topology))
        skipped = SkippedIterations.parse(config.training.iterations_to_skip)
        training, model = config.training, config.model
        batches = batch_schedule(training, model.seq_length, training.micro_batch_size, config.replicas(env.world_size))
        sizes = StepSizes(batches, _build_length_schedule(config, topology), skipped)
        saved = find_saved(config.checkpoint, topology, rank_0_log(topology))
        if saved is not None:
            check_saved_model_type(config.checkpoint, saved, config.model.type_and_task, topology)
        position = saved.progress if saved is not None else Progress()
        train_iters = _count_iterations(config, sizes, position)
        datasets, vocab_size = run_together(
            topology.control.pg, lambda: _open_data(config, env, train_iters, position, job)
        )
        plan = RunPlan(
            train_iters,
            sizes,
            train_set=datasets[0],
            valid_sets=validation_sets(config, datasets[1]),
            test_sets=test_sets(config, datasets[2]),
            started=ranks.started,
            score_outputs=job.score_outputs,
        )
        run_together(topology.control.pg, lambda: check_room(config, env, vocab_size))
        length = run_length(train_iters, datasets[0], sizes.batches)
        # A flag that repeats a default may be given on some ranks only.
        gathered = gather_texts(topology.control.pg, " ".join(flag_fields))
        parts = RunParts(
            env,
            topology,
            plan,
            datasets,
            vocab_size,
            length,
            islands,
            lock,
            job.sections,
            job.pretrained,
            frozenset(" ".join(gathered).split()),
            log,
        )
        chosen = choose_or_keep(parts, config, saved)
        if job.after_choice is not None:
            job.after_choice(parts, chosen)
            return
    while train_segment(parts, chosen) is ExitReason.CHOICE:
        free_memory()
        config = resuming_config(config)
        saved = find_saved(config.checkpoint, topology, rank_0_log(topology))
        chosen = choose_or_keep(parts, config, saved, again=True)


def _build_length_schedule(config: RunConfig, topology: Topology) -> LengthSchedule:
    """Build the schedule of sequence lengths. All ranks must agree on it, since it decides the shapes of messages.

    Raises:
        UserError: on every rank, when a function of the user's returns different lengths on different ranks.
    """
    group = topology.control.pg
    lengths = run_together(group, lambda: lengths_of(config.curriculum, config.model.seq_length))
    if len(set(gather_texts(group, str(hash(lengths))))) > 1:
        raise UserError(
            f"--curriculum-function {config.curriculum.curriculum_function}: ranks got different lengths; return the "
            "same for the same step, whatever was asked before"
        )
    return lengths


def _count_iterations(config: RunConfig, sizes: StepSizes, position: Progress) -> int:
    """Count the iterations of the whole run: as configured, or those done plus those that use up the remaining
    samples."""
    training = config.training
    if training.train_iters is not None:
        return training.train_iters
    assert training.train_samples is not None
    remaining_iterations = sizes.batches.iterations_for(training.train_samples, position.consumed_samples)
    if sizes.lengths.grows and training.train_tokens is not None:
        tokens = max(training.train_tokens - position.tokens(config.model.seq_length), 0)
        remaining_iterations = min(
            remaining_iterations, sizes.steps_within(tokens, position.iteration, position.consumed_samples)[0]
        )
    return position.iteration + remaining_iterations


def _open_data(
    config: RunConfig, env: LaunchEnvironment, train_iters: int, position: Progress, job: Job
) -> tuple[Datasets, int]:
    """Build the data sets, and return the model's vocabulary size; one rank of each machine checks the tokens.

    Args:
        config: the resolved configuration.
        env: environment of this process.
        train_iters: iterations of the whole run.
        position: position of the run, which may have used another batch size so far.
        job: data and starting point.
    """
    tokenizer = None if config.tokenizer.tokenizer_type is None else build_tokenizer(config.tokenizer)
    data = config.data
    if tokenizer is not None:
        entries, vocab_size, eod = model_entries(config.tokenizer, tokenizer), tokenizer.vocab_size, tokenizer.eod
    else:
        if data.eod_mask_loss or data.reset_position_ids or data.reset_attention_mask:
            raise UserError(
                "--eod-mask-loss, --reset-position-ids and --reset-attention-mask look for the end of a document: "
                "give --tokenizer-type, or leave them out"
            )
        assert config.tokenizer.vocab_size is not None
        entries, vocab_size, eod = config.tokenizer.vocab_size, config.tokenizer.vocab_size, -1
    if job.datasets is not None:
        return job.datasets(config, tokenizer), entries
    batch_size, validation = config.training.global_batch_size, config.validation
    remaining_iterations = max(train_iters - position.iteration, 0)
    train_samples = config.training.train_samples or position.consumed_samples + remaining_iterations * batch_size
    evaluations = 1 if validation.fixed_validation else train_iters // validation.eval_interval + 1
    evaluation_samples = validation.eval_iters * batch_size
    valid_samples = None if validation.full_validation else evaluations * evaluation_samples
    samples = (train_samples, valid_samples, evaluation_samples)
    check_tokens = env.local_rank == 0
    if not config.model.causal:
        model = config.model
        build: Callable[..., Datasets]
        if model.model_type == "t5":
            assert tokenizer is not None
            assert model.decoder_seq_length is not None
            encoder_length, decoder_length = model.seq_length, model.decoder_seq_length
            build = partial(build_t5_datasets, encoder_seq_length=encoder_length, decoder_seq_length=decoder_length)
        elif tokenizer is None:
            raise UserError("BERT masks words: give --tokenizer-type BertWordPieceLowerCase or BertWordPieceCase")
        else:
            build = partial(build_bert_datasets, seq_length=model.seq_length, binary_head=model.bert_binary_head)
        datasets = build(
            data,
            seed=config.training.seed,
            train_valid_test_num_samples=samples,
            tokenizer=tokenizer,
            mask_prob=data.mask_prob,
            short_seq_prob=data.short_seq_prob,
            check_tokens=check_tokens,
        )
    else:
        datasets = build_datasets(
            data,
            seq_length=config.model.seq_length,
            seed=config.training.seed,
            train_valid_test_num_samples=samples,
            eod_token=eod,
            vocab_size=vocab_size,
            check_tokens=check_tokens,
        )
    if datasets[0] is None and not validation.skip_train:
        raise UserError("there is no document to train on: raise the first share of --split, or give --train-data-path")
    return datasets, entries
