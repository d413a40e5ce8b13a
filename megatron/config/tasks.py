"""Fine-tuning tasks: flags, task heads and run configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron.base.errors import UserError
from megatron.base.fields import check_fields
from megatron.base.option import derived, field_options, option, required
from megatron.base.user_text import flag_of
from megatron.config.check_model import check_task_head
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.collect import FlagTable
from megatron.config.flags import FlagParser, ParsedRun
from megatron.config.model import ModelConfig
from megatron.config.model_types import TaskHead
from megatron.config.run import RunConfig, run_sections
from megatron.config.translate import build_translator
from megatron.config.translate.rules import SWITCH, VALUE, KnownFlag

PROGRAM = "tasks/main.py"

Metric = Literal["accuracy", "F1", "Matthews", "Pearson", "Spearman"]


@dataclass(frozen=True)
class Task:
    """Fine-tuning task with labeled samples.

    Args:
        head: task head of the model.
        classes: number of classes, or of sequences per multiple-choice sample.
        metrics: evaluation metrics.
        folders: whether the data are folders, not files.
        max_first_tokens: maximum number of tokens of the first text; None: unlimited.
    """

    head: TaskHead = "classification"
    classes: int = 2
    metrics: tuple[Metric, ...] = ("accuracy",)
    folders: bool = False
    max_first_tokens: int | None = None

    def on(self, model: ModelConfig) -> ModelConfig:
        """Copy of the model with the head of the task."""
        return replace(model, task_head=self.head, task_classes=self.classes)


TASKS: Mapping[str, Task] = {
    "RACE": Task("choice", 4, folders=True, max_first_tokens=128),
    "MNLI": Task(classes=3),
    "QQP": Task(metrics=("accuracy", "F1")),
    "QNLI": Task(),
    "SST-2": Task(),
    "CoLA": Task(metrics=("Matthews", "accuracy")),
    "STS-B": Task("regression", 0, metrics=("Pearson", "Spearman")),
    "MRPC": Task(metrics=("accuracy", "F1")),
    "RTE": Task(),
}
"""Available fine-tuning tasks."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Fine-tuning for a task."""

    task: str = required("The task: " + ", ".join(TASKS) + ".", metavar="TASK", common="task")
    epochs: int = required(
        "Passes over the training data; 0 evaluates the checkpoint of --load.",
        unit="epochs",
        minimum=0,
        maximum=10**6,
        common="task",
    )
    train_data: list[str] = option(  # noqa: RUF009
        [], "Files (RACE: folders) of training samples.", metavar="FILE", contents="file", common="task"
    )
    valid_data: list[str] = option(  # noqa: RUF009
        [], "Files (RACE: folders) to evaluate after each epoch, each separately.", metavar="FILE",
        contents="file", common="task",
    )  # fmt: skip
    keep_last_batch: bool = option(
        False,
        "Also train on the samples that remain at the end of an epoch, as a smaller batch. Otherwise they wait "
        "for another epoch.",
        flag="keep-last",
    )


@dataclass(frozen=True, kw_only=True)
class TaskCheckpointConfig(CheckpointConfig):
    """Checkpoints of fine-tuning, where --keep-last is about batches."""

    pretrained_checkpoint: str | None = derived(
        "random weights",
        "Folder of the pretrained model, of any layout; used if --load has no checkpoint yet.",
        metavar="FOLDER",
    )

    keep_last: int | None = derived(
        "all", "Keep only this many of the newest checkpoints.", flag="keep-checkpoints", unit="checkpoints", minimum=1
    )


_RETRIEVAL = "retrieval tasks are not available; leave it out"
_OTHER_TASKS = (
    KnownFlag(name="overlapping-eval", arity=VALUE, refused=False, reason="only --task WIKITEXT103 reads it"),
    KnownFlag(name="strict-lambada", arity=SWITCH, refused=False, reason="only --task LAMBADA reads it"),
    *(
        KnownFlag(name=name, arity=VALUE, refused=False, reason="only retrieval tasks read it")
        for name in (
            *("faiss-match", "faiss-topk-retrievals", "eval-micro-batch-size", "train-hard-neg"),
            *("val-av-rank-hard-neg", "val-av-rank-other-neg"),
        )
    ),
    *(KnownFlag(name=name, arity=VALUE, refused=True, reason=_RETRIEVAL) for name in ("qa-data-dev", "qa-data-test")),
    *(KnownFlag(name=name, refused=True, reason=_RETRIEVAL) for name in ("faiss-use-gpu", "train-with-neg")),
)  # fmt: skip
"""Flags of Megatron tasks that no task here uses."""

_COUNTED = (
    *("training.train_iters", "training.train_samples", "training.train_tokens", "training.rampup_batch_size"),
    "training.step_batch_size_schedule",
    *("curriculum.curriculum_learning", "data.dataloader_type"),
)
_EVALUATED = ("data.multiple_validation_sets", "validation.full_validation", "validation.fixed_validation")
_COUNTED_IN_SAMPLES = ("lr_warmup_samples", "lr_decay_samples")
_PATHS = ("data.data_path", "data.train_data_path", "data.valid_data_path", "data.test_data_path")


def task_parser() -> FlagParser:
    """Parser of fine-tuning runs: the flags of training runs and of tasks."""
    sections = {**run_sections(), "checkpoint": TaskCheckpointConfig, "task": TaskConfig}
    names = {flag for name, cls in sections.items() for field in field_options(name, cls) for flag in field.flags}
    names |= {flag.name for flag in _OTHER_TASKS}
    flags = (*(flag for flag in build_translator().flags if flag.name not in names), *_OTHER_TASKS)
    table = FlagTable(sections, replace(build_translator(), flags=flags))
    return FlagParser(table, PROGRAM, f"Fine-tune a model for a task: {', '.join(TASKS)}.", short_help=True)


def parse_task(argv: Sequence[str]) -> tuple[ParsedRun, TaskConfig, Task]:
    """Parse the command line of a fine-tuning run, without the program name.

    Raises:
        UserError: when it is invalid; a single line.
    """
    parsed = task_parser().parse(argv, check=False)
    task_config: TaskConfig = parsed.sections.pop("task")
    run = ParsedRun.of(parsed)
    name = task_name(task_config.task) if task_config.task is not None else None
    if name not in TASKS:
        raise UserError(f"--task {task_config.task}: choose from {', '.join(TASKS)}")
    check_fields("task", task_config)
    task, explicit = TASKS[name], run.explicit
    for paths, instead in (
        (("model.task_head", "model.task_classes"), "--task determines it; leave it out"),
        (_COUNTED, "a task is trained for --epochs over --train-data; leave it out"),
        (_EVALUATED, "a task reads all of --valid-data in each evaluation; leave it out"),
        (_PATHS, "a task reads labeled files; give --train-data and --valid-data"),
    ):
        for path in paths:
            if path in explicit:
                raise UserError(f"{flag_of(path)}: {instead}")
    for counted in _COUNTED_IN_SAMPLES:
        if getattr(run.config.optimizer, counted):
            flag = flag_of(counted)
            raise UserError(f"{flag}: a task is counted in iterations; give {flag.replace('samples', 'iters')}")
    unused_flags = [flag_of(path) for path in ("validation.eval_interval", "validation.eval_iters") if path in explicit]
    if unused_flags:
        run.notes.append(
            f"{', '.join(unused_flags)}: no effect, the whole of --valid-data is evaluated after each epoch"
        )
    model = run.config.model
    if "model.model_type" not in explicit:
        model = replace(model, model_type="bert")
    run.config = replace(run.config, model=task.on(model))
    check_task_head(run.config.model)
    missing = ["--epochs"] if task_config.epochs is None else []
    missing += ["--valid-data"] if not task_config.valid_data else []
    missing += ["--train-data"] if task_config.epochs and not task_config.train_data else []
    if missing:
        raise UserError(f"not given but required for --task {name}: {', '.join(missing)}; add it")
    checkpoint = run.config.checkpoint
    if task_config.epochs == 0 and checkpoint.load is None and checkpoint.pretrained_checkpoint is None:
        raise UserError("--epochs 0 evaluates a checkpoint: give --load FOLDER")
    if run.config.data.sample_order == "megatron":
        raise UserError("--sample-order megatron is for pretraining only; give lazy or fixed")
    return run, replace(task_config, task=name), task


def task_name(word: str) -> str:
    """Canonical task name of a word in any spelling; the word itself if there is no such task."""
    names_by_spelling = {_normalize_name(name): name for name in TASKS}
    return names_by_spelling.get(_normalize_name(word), word)


def _normalize_name(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")


def build_task_run(parsed: ParsedRun, task: TaskConfig, world_size: int, samples: tuple[int, int]) -> RunConfig:
    """Unresolved run configuration of a task with its batches, iterations and evaluations.

    Micro-batch and global batch are multiplied by the number of sequences per sample, as in Megatron.

    Args:
        parsed, task: results of ``parse_task``; the model may come from a checkpoint.
        world_size: number of processes.
        samples: training samples per epoch, and validation samples.

    Raises:
        UserError: when there are fewer samples than a batch, or a size is out of bounds.
    """
    config, each = parsed.config, parsed.config.model.sequences_per_sample
    for section in ("parallel", "training"):
        check_fields(section, getattr(config, section))
    training, validation = config.training, config.validation
    if training.micro_batch_size is None:
        raise UserError("not given but required: --micro-batch-size; add it")
    replicas = max(config.replicas(world_size), 1)
    size = training.global_batch_size or training.micro_batch_size * replicas
    steps = -(-samples[0] // size) if task.keep_last_batch else samples[0] // size
    if task.epochs and not steps:
        raise UserError(
            f"--train-data holds {samples[0]} samples, less than one global batch of {size}: lower "
            "--global-batch-size, or add --keep-last"
        )
    checkpoint, optimizer = config.checkpoint, config.optimizer
    if task.epochs == 0:
        # Only the weights are needed, but the schedule must be valid for a run of a single iteration.
        loads = checkpoint.load is not None
        checkpoint = replace(checkpoint, no_load_optim=loads, no_load_lr_state=loads, exit_on_missing_checkpoint=loads)
        optimizer = replace(optimizer, lr=optimizer.lr or max(1e-5, optimizer.min_lr), lr_warmup_iters=0)
    elif checkpoint.save is not None and checkpoint.save_interval is None:
        checkpoint = replace(checkpoint, save_interval=steps)
    return replace(
        config,
        training=replace(
            training,
            micro_batch_size=training.micro_batch_size * each,
            global_batch_size=size * each,
            train_iters=max(task.epochs * steps, 1),
        ),
        validation=replace(
            validation,
            eval_iters=-(-samples[1] // size),
            eval_interval=max(steps, 1),
            skip_train=validation.skip_train or task.epochs == 0,
        ),
        checkpoint=checkpoint,
        optimizer=optimizer,
    )
