"""Fine-tuning on a task, and evaluation of fine-tuned models: a run of the regular trainer on labeled samples."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from megatron.base.errors import UserError
from megatron.checkpoint.files import Iteration
from megatron.checkpoint.find import read_tracker
from megatron.checkpoint.load import saved_config
from megatron.checkpoint.vocabulary import saved_vocab_size
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.flags import ParsedRun
from megatron.config.merge import merge_checkpoint_config
from megatron.config.model import ModelConfig
from megatron.config.model_types import check_model_type
from megatron.config.run import RunConfig
from megatron.config.tasks import Task, TaskConfig, build_task_run, parse_task
from megatron.convert.hugging_face import is_hf
from megatron.data.build import Datasets
from megatron.data.tasks.dataset import TaskDataset
from megatron.data.tasks.epochs import Epochs
from megatron.data.tasks.examples import ExampleFile
from megatron.data.tasks.glue import read_glue
from megatron.data.tasks.race import read_race
from megatron.distributed.process_group import LaunchEnvironment
from megatron.evaluation.task_metrics import check_packages, compute_metrics
from megatron.models.classification import POOLING
from megatron.tokenizer.api import Tokenizer
from megatron.training.console import make_output_last
from megatron.training.pretrain import Job, fit_tokenizer, train
from megatron.training.program import Ranks, run_program


@dataclass(frozen=True)
class TaskData:
    """Labeled samples of a run.

    Args:
        task_config: flags of the task.
        task: definition of the task.
        training, validation: contents of the files.
    """

    task_config: TaskConfig
    task: Task
    training: Sequence[ExampleFile]
    validation: Sequence[ExampleFile]

    def sizes(self, config: RunConfig) -> tuple[int, int]:
        """Number of training samples of an epoch, before the order drops any, and number of validation samples."""
        return self._order(config, 1).draws, _count_samples(self.validation)

    def datasets(self, config: RunConfig, tokenizer: Tokenizer | None) -> Datasets:
        """Build the datasets of a resolved run (UserError if there is no tokenizer)."""
        if tokenizer is None:
            raise UserError(
                "a task needs a tokenizer: give --tokenizer-type, such as BertWordPieceLowerCase --vocab-file FILE"
            )
        model = config.model
        size = config.training.global_batch_size // model.sequences_per_sample
        orders = self._order(config, size), Epochs(_count_samples(self.validation), size, keep_last=True, shuffle=False)

        def build(files: Sequence[ExampleFile], order: Epochs, epochs: int) -> TaskDataset:
            examples = [example for file in files for example in file.examples]
            most = self.task.max_first_tokens
            return TaskDataset(examples, order, epochs, tokenizer, model, max_first_tokens=most)

        training = build(self.training, orders[0], self.task_config.epochs) if self.task_config.epochs else None
        return training, build(self.validation, orders[1], 1), None

    def _order(self, config: RunConfig, size: int) -> Epochs:
        """Training order, in batches of ``size`` samples."""
        recurring = config.data.sample_order == "fixed"
        samples, keeps = _count_samples(self.training), self.task_config.keep_last_batch
        return Epochs(samples, size, keep_last=keeps, recurring=recurring, seed=config.training.seed)


def _count_samples(files: Sequence[ExampleFile]) -> int:
    return sum(len(file.examples) for file in files)


def read_data(task_config: TaskConfig, task: Task) -> TaskData:
    """Read the files that the flags name.

    Raises:
        UserError: when a file cannot be read, or does not have the task's format; the message names file and line.
    """

    def read(paths: Sequence[str], flag: str) -> list[ExampleFile]:
        if task.folders:
            return [read_race(path, flag) for path in paths]
        return [read_glue(task_config.task, path, flag) for path in paths]

    training = read(task_config.train_data, "--train-data") if task_config.epochs else []
    return TaskData(task_config, task, training, read(task_config.valid_data, "--valid-data"))


def adopt_initial_checkpoint(parsed: ParsedRun, task: Task) -> tuple[str, Iteration] | None:
    """Set the model's shape from the initial checkpoint: --load, else --pretrained-checkpoint.

    Returns:
        Folder and iteration of the pretrained model, if the run starts from it.

    Raises:
        UserError: when the checkpoint holds another kind of model, or a flag contradicts its shape.
    """
    checkpoint, model_config = parsed.config.checkpoint, parsed.config.model
    load = checkpoint.load
    if load is not None and _holds_checkpoint(checkpoint):
        saved, iteration = saved_config(load, checkpoint.ckpt_step)
        check_model_type(
            f"--load {load}",
            saved.model.type_and_task,
            model_config.type_and_task,
            _suggest_type(saved.model, model_config),
        )
        _adopt_shape(parsed, saved, load, iteration, task)
        return None
    folder = checkpoint.pretrained_checkpoint
    if folder is None:
        return None
    if read_tracker(folder) is None:
        reason = "is a Hugging Face folder" if is_hf(Path(folder)) else "holds no checkpoint"
        raise UserError(
            f"--pretrained-checkpoint {folder} {reason}; name the folder that --save, or tools/ckpt_convert.py --to "
            "megatron-cc, wrote to"
        )
    saved, iteration = saved_config(folder)
    flag = f"--pretrained-checkpoint {folder}"
    check_model_type(flag, saved.model.type_and_task, model_config.model_type, _suggest_type(saved.model, model_config))
    if saved.model.has_experts:
        raise UserError(f"{flag} holds a model with experts, which tasks do not support; name that of a dense model")
    _adopt_shape(parsed, saved, folder, iteration, task)
    return folder, iteration


def _suggest_type(saved: ModelConfig, model: ModelConfig) -> str:
    """Suggest the flag for a checkpoint of another type that can be fine-tuned; empty for other types."""
    differs = saved.model_type != model.model_type and saved.model_type in POOLING
    return f"give --model-type {saved.model_type}" if differs else ""


def _adopt_shape(parsed: ParsedRun, saved: RunConfig, root: str, iteration: Iteration, task: Task) -> None:
    saved = replace(saved, model=task.on(saved.model))
    merged = merge_checkpoint_config(parsed.config, parsed.explicit, saved, "")
    tokenizer = fit_tokenizer(merged.tokenizer, saved_vocab_size(root, iteration), parsed)
    parsed.config = replace(merged, tokenizer=tokenizer)


def check_batches(config: RunConfig, task_config: TaskConfig) -> None:
    """Check that a resumed run has the same batches and epochs as before, in which its position is counted.

    Args:
        config: configuration returned by ``build_task_run``.
        task_config: flags of the task.

    Raises:
        UserError: when batch size or epoch length differ.
    """
    checkpoint = config.checkpoint
    load = checkpoint.load
    trains = task_config.epochs and not config.validation.skip_train
    if load is None or checkpoint.finetune or not trains or not _holds_checkpoint(checkpoint):
        return
    saved, iteration = saved_config(load, checkpoint.ckpt_step)
    if not isinstance(iteration, int):
        return
    sequences, anew = config.model.sequences_per_sample, "--finetune to start over with its weights"
    saved_batch, batch = (run.training.global_batch_size // sequences for run in (saved, config))
    if saved_batch != batch:
        raise UserError(
            f"--load {load} continues with global batches of {saved_batch} samples, but this run has {batch}: give "
            f"--global-batch-size {saved_batch}, or {anew}"
        )
    saved_epoch, epoch = saved.validation.eval_interval, config.validation.eval_interval
    if saved_epoch != epoch:
        raise UserError(
            f"--load {load} continues with epochs of {saved_epoch} iterations, but this run has {epoch}: give the same "
            f"--train-data, --sample-order and --keep-last, or {anew}"
        )


def _holds_checkpoint(checkpoint: CheckpointConfig) -> bool:
    """Return whether --load holds a checkpoint, or --ckpt-step requires a checkpoint there."""
    load = checkpoint.load
    return load is not None and (checkpoint.ckpt_step is not None or read_tracker(load) is not None)


def main(argv: Sequence[str] | None = None) -> int:
    """Fine-tune or evaluate on this rank; return the exit status."""
    make_output_last()

    def body(ranks: Ranks) -> None:
        check_packages()
        parsed, task_flags, task = parse_task(list(sys.argv[1:] if argv is None else argv))
        ranks.env = env = LaunchEnvironment.read(parsed.config.parallel.local_rank)
        pretrained = adopt_initial_checkpoint(parsed, task)
        data = read_data(task_flags, task)
        parsed.config = build_task_run(parsed, task_flags, env.world_size, data.sizes(parsed.config))
        check_batches(parsed.config, task_flags)
        config = parsed.resolve(env.world_size, cuda_available=torch.cuda.is_available())
        score_outputs = partial(compute_metrics, task, data.validation)
        job = Job(data.datasets, pretrained, score_outputs, {"task": task_flags})
        # Notes on the samples left out of the files.
        file_notes = [file.note for file in (*data.training, *data.validation) if file.note]
        train(ranks, config, [*parsed.notes, *file_notes], parsed.flag_fields, job)

    return run_program(body)
