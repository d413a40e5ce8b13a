"""Saving and loading."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from megatron.base.errors import UserError
from megatron.base.option import Condition, derived, field_options, option
from megatron.base.user_text import Note

_RESUMED_RUN = Condition(
    lambda run, _: run.checkpoint.resumes, "nothing of it is loaded anyway (--load without --finetune does that)"
)
_OTHER_FOLDER = Condition(
    lambda run, _: not (run.checkpoint.resumes and run.checkpoint.saves_where_it_loads),
    "--load goes on from the checkpoints of --save",
)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: their folder holds iter_NNNNNNN folders and the name of the last complete one."""

    save: str | None = derived("nothing is saved", "Folder to save into.", metavar="FOLDER", common="save and resume")
    save_interval: int | None = derived(
        "only at the end",
        "Number of iterations between checkpoints.",
        unit="iterations",
        minimum=1,
        common="save and resume",
    )
    load: str | None = derived("start afresh", "Folder to resume from.", metavar="FOLDER", common="save and resume")
    ckpt_step: int | None = derived(
        "the newest", "Iteration to load from --load.", unit="iterations", minimum=0, aliases=("iteration",)
    )
    overwrite_checkpoints: bool = option(
        False,
        "Save into a folder that holds checkpoints of another run, and replace those of the same iterations. "
        "Without this flag, such a folder is refused unless --load resumes from it.",
        only_if=(_OTHER_FOLDER,),
    )
    finetune: bool = option(
        False,
        "Load only the weights: counters, optimizer, random state and schedules start afresh.",
        common="save and resume",
    )
    pretrained_checkpoint: str | None = derived(
        "random weights",
        "Folder of a checkpoint to start from, as with --finetune, if --load has no checkpoint yet.",
        metavar="FOLDER",
    )
    moe_use_upcycling: bool = option(
        False,
        "Start from the weights of a dense model in --load: each expert is a copy of its layer's MLP. Everything "
        "else starts as with --finetune.",
    )
    no_save_optim: bool = option(False, "Do not save the optimizer state.")
    no_load_optim: bool = option(False, "Do not load the optimizer state.", only_if=(_RESUMED_RUN,))
    no_load_lr_state: bool = option(
        False,
        "Do not load the position in the learning-rate schedule: warm-up and decay start afresh while iterations "
        "continue.",
        only_if=(_RESUMED_RUN,),
    )
    use_checkpoint_args: bool = option(
        False, "Take the model's shape from the checkpoint instead of from the flags.", common="save and resume"
    )
    exit_on_missing_checkpoint: bool = option(False, "Stop if --load has no checkpoint, instead of starting afresh.")
    async_save: bool = option(False, "Write checkpoints while training continues.")
    keep_last: int | None = derived(
        "all",
        "Keep only this many of the newest checkpoints, plus the newest that was followed by an update.",
        unit="checkpoints",
        minimum=1,
    )
    certificate: bool | None = derived(
        "on with --compress auto and --save",
        "Write a certificate into each checkpoint, which megatron-cc-verify checks: digests of files, "
        "configuration, code, kernels and data, the bytes sent next to the interfaces' counters, samples of what "
        "compressors sent, and whether replicas are equal.",
    )

    @property
    def resumes(self) -> bool:
        """Whether a checkpoint is loaded with its counters and schedules."""
        return self.load is not None and not self.finetune

    @property
    def saves_where_it_loads(self) -> bool:
        """Whether --save and --load are the same folder, in any spelling."""
        if self.load is None or self.save is None:
            return False
        return os.path.realpath(self.load) == os.path.realpath(self.save)

    @property
    def source(self) -> str:
        """Flag and folder of the checkpoint that the run starts from."""
        flag = "--load" if self.load != self.pretrained_checkpoint else "--pretrained-checkpoint"
        return f"{flag} {self.load}"

    @property
    def loads_weights_only(self) -> bool:
        """Whether the optimizer and the compressors start from scratch."""
        return self.finetune or self.no_load_optim


def resolve_checkpoint(checkpoint: CheckpointConfig, certifies: bool, note: Note) -> CheckpointConfig:
    """Fill the settings that follow from others; ``certifies``: a run that saves writes certificates by default."""
    if checkpoint.certificate is None:
        checkpoint = replace(checkpoint, certificate=certifies and checkpoint.save is not None)
    if not checkpoint.moe_use_upcycling or checkpoint.finetune:
        return checkpoint
    note("--moe-use-upcycling means --finetune: counters, optimizer and schedules start afresh")
    return replace(checkpoint, finetune=True)


def check_checkpoint(checkpoint: CheckpointConfig) -> None:
    """Check that every setting has the flags it depends on; raise UserError otherwise."""
    flags = {field.name: f"--{field.flag}" for field in field_options("checkpoint", type(checkpoint))}
    save_settings = (
        "save_interval",
        "async_save",
        "keep_last",
        "overwrite_checkpoints",
        "certificate",
        "no_save_optim",
    )
    load_settings = ("ckpt_step", "moe_use_upcycling", "finetune", "use_checkpoint_args", "exit_on_missing_checkpoint")
    for folder_name, names in (("save", save_settings), ("load", load_settings)):
        for name in names if getattr(checkpoint, folder_name) is None else ():
            value = getattr(checkpoint, name)
            if value is not None and value is not False:
                raise UserError(f"{flags[name]} needs --{folder_name} FOLDER; add it or leave {flags[name]} out")
