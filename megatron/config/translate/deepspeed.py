"""Translation of Megatron-DeepSpeed flags: ZeRO stages, checkpoint tags, and the DeepSpeed file."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from megatron.base.documents import read_json
from megatron.base.errors import UserError
from megatron.base.option import derived
from megatron.base.user_text import Note
from megatron.base.value_type import ValueType
from megatron.config.translate.curriculum import key_of, read_curriculum
from megatron.config.translate.rules import Dialect, ExplicitValues, SectionValues


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """Flags of Megatron-DeepSpeed, translated."""

    zero_stage: float | None = derived("0", "ZeRO: 1 is the same as --use-distributed-optimizer, 0 is off.", minimum=0)
    deepspeed_config: str | None = derived(
        "none",
        "DeepSpeed's JSON file, for batch sizes, fp16, bf16, clipping and ZeRO stage; settings that are not "
        "available are refused by name.",
        metavar="FILE",
    )
    load_tag: str | None = derived("the newest", "Same as --ckpt-step N for the tag global_stepN.", metavar="TAG")


def _translate(theirs: SectionValues, explicit: ExplicitValues, note: Note) -> None:
    """Translate the flags. Raises UserError for unavailable or contradictory settings."""
    if theirs.zero_stage is not None:
        _zero(theirs, "zero_stage", theirs.zero_stage, f"--zero-stage {theirs.zero_stage:g}", note)
    if theirs.load_tag is not None:
        if "checkpoint.load" not in explicit:
            raise UserError("--load-tag needs --load FOLDER; add it or leave --load-tag out")
        number = re.fullmatch(r"(?:global_step|iter_)?([0-9]{1,18})", theirs.load_tag)
        if number is None:
            raise UserError(f"--load-tag {theirs.load_tag}: expected global_stepN; or use --ckpt-step N")
        step = int(number[1])
        theirs.set_field("load_tag", "checkpoint.ckpt_step", step, f"--load-tag {theirs.load_tag}")
        note(f"--load-tag {theirs.load_tag} means --ckpt-step {step}")
    if theirs.deepspeed_config is not None:
        _DeepSpeedFile(theirs, explicit, note).translate()


def _zero(theirs: SectionValues, source_name: str, stage: Any, location: str, note: Note) -> None:
    if stage not in (0, 1) or isinstance(stage, bool):
        raise UserError(
            f"{location}: gradients and parameters are not sharded; use stage 1 (--use-distributed-optimizer), or 0"
        )
    if stage == 1:
        note(f"{location} means --use-distributed-optimizer")
    theirs.set_field(source_name, "parallel.use_distributed_optimizer", stage == 1, location)


_IGNORED_KEYS = """
    steps_per_print wall_clock_breakdown prescale_gradients dataloader_drop_last dump_state memory_breakdown
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer aio comms_logger flops_profiler tensorboard wandb
    csv_monitor activation_checkpointing checkpoint disable_allgather
"""
"""Keys without effect on training and checkpoints."""

_IGNORED_ZERO_KEYS = """
    stage allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size
    contiguous_gradients elastic_checkpoint round_robin_gradients ignore_unused_parameters
"""

_ALTERNATIVES = {
    "optimizer": "give --optimizer, --lr and its other values as flags, and remove it from the file",
    "scheduler": "give --lr-decay-style and its other values as flags, and remove it from the file",
    "data_efficiency": "of these, only growing sequences are available; switch it off and use curriculum_learning",
}

_COUNT = ValueType(element=int, minimum=1)
_NUMBER, _SWITCH = ValueType(element=float), ValueType(element=bool)
_POWER = ValueType(element=float, minimum=0, maximum=127)

_VALUES = {
    "train_batch_size": ("training.global_batch_size", _COUNT),
    "train_micro_batch_size_per_gpu": ("training.micro_batch_size", _COUNT),
    "gradient_clipping": ("optimizer.clip_grad", _NUMBER),
}
"""Keys that hold the value of one of our fields, which has this type."""

_PRECISION = ("loss_scale_window", "hysteresis", "min_loss_scale")

_SOURCE = "deepspeed_config"
_AUTO = "auto"
"""Value of keys that defer to the flags."""


class _DeepSpeedFile:
    """DeepSpeed configuration file. Flags may repeat its values but not contradict them.

    Args:
        flags: flag values, including the path of the file.
        explicit: explicit values of our fields; values of the file are added.
        note: called with a line on the keys that were used, and a line on keys without effect.
    """

    def __init__(self, flags: SectionValues, explicit: ExplicitValues, note: Note) -> None:
        self.path = f"--deepspeed-config {flags.deepspeed_config}"
        self.content = read_json(flags.deepspeed_config, self.path)
        self.flags = flags
        self.explicit = explicit
        self.note = note
        self.used: list[str] = []
        self.ignored: list[str] = []

    def translate(self) -> None:
        """Translate every key. Raises UserError for the first that is unavailable or contradicts a flag."""
        handlers: dict[str, Callable[[str, Any], None]] = {
            "fp16": self._fp16,
            "bf16": self._bf16,
            "bfloat16": self._bf16,
            "zero_optimization": self._zero,
            "data_types": self._data_types,
            "curriculum_learning": self._curriculum,
        }
        for key, value in self.content.items():
            if value == _AUTO or value is None:
                continue
            if key in handlers:
                handlers[key](key, value)
            elif key in _VALUES:
                path, kind = _VALUES[key]
                self._set(key, path, self._read(kind, key, value))
            elif key == "gradient_accumulation_steps":
                self._read(_COUNT, key, value)
                self.used.append(key)
            elif key in _IGNORED_KEYS.split() or (isinstance(value, dict) and value.get("enabled") is False):
                self.ignored.append(key)
            else:
                raise UserError(
                    f"{self.path}: {key}: {_ALTERNATIVES.get(key, 'is not available; remove it from the file')}"
                )
        steps = self.content.get("gradient_accumulation_steps")
        if steps not in (None, _AUTO):
            global_batch = self.explicit.get("training.global_batch_size")
            micro_batch = self.explicit.get("training.micro_batch_size")
            location = f"{self.path}: gradient_accumulation_steps {steps}"
            if global_batch is None or micro_batch is None:
                raise UserError(f"{location} needs both batch sizes; add --global-batch-size and --micro-batch-size")
            if micro_batch > 0 and global_batch % (micro_batch * steps) != 0:  # the flags' bounds are checked later
                raise UserError(
                    f"{location} x a micro batch of {micro_batch} does not divide the global batch of {global_batch}"
                )
        if self.used:
            self.note(f"{self.path}: used: {', '.join(self.used)}")
        if self.ignored:
            self.note(f"{self.path}: no effect: {', '.join(self.ignored)}")

    def _set(self, key: str, path: str, value: Any) -> None:
        self.flags.set_field(_SOURCE, path, value, f"{self.path}: {key} {value}")
        self.used.append(key)

    def _read(self, kind: ValueType, key: str, value: Any) -> Any:
        return kind.from_json(value, f"{self.path}: {key}")

    def _mapping(self, key: str, value: Any, known_names: Collection[str]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise UserError(f"{self.path}: {key} must hold names and values, not a {type(value).__name__}")
        for name in value:
            if name not in known_names:
                raise UserError(f"{self.path}: {key}.{name} is not available; remove it from the file")
        return value

    def _fp16(self, key: str, value: Any) -> None:
        names = ("enabled", "loss_scale", "initial_scale_power", "auto_cast", *_PRECISION)
        values = {name: entry for name, entry in self._mapping(key, value, names).items() if entry not in (None, _AUTO)}
        if not self._format(key, values, "precision.fp16"):
            return
        if values.get("auto_cast", False) is not False:
            raise UserError(f"{self.path}: {key}.auto_cast is not available; remove it from the file")
        scale = self._read(_NUMBER, f"{key}.loss_scale", values.get("loss_scale", 0))
        if scale:
            self._set(f"{key}.loss_scale", "precision.loss_scale", scale)
        if "initial_scale_power" in values:
            power = self._read(_POWER, f"{key}.initial_scale_power", values["initial_scale_power"])
            self._set(f"{key}.initial_scale_power", "precision.initial_loss_scale", 2.0**power)
        for name in _PRECISION:
            if name in values:
                kind = _NUMBER if name == "min_loss_scale" else _COUNT
                self._set(f"{key}.{name}", f"precision.{name}", self._read(kind, f"{key}.{name}", values[name]))

    def _bf16(self, key: str, value: Any) -> None:
        values = self._mapping(key, value, ("enabled",))
        if values.get("enabled") != _AUTO:
            self._format(key, values, "precision.bf16")

    def _format(self, key: str, values: dict[str, Any], path: str) -> bool:
        """Translate the switch of a number format; return whether it is on."""
        on: bool = self._read(_SWITCH, f"{key}.enabled", values.get("enabled", False))
        other = "precision.bf16" if path == "precision.fp16" else "precision.fp16"
        if on and self.explicit.get(other):
            raise UserError(f"{self.path}: {key} and --{other.partition('.')[2]} exclude each other; keep one format")
        if "enabled" in values:
            self.flags.set_field(_SOURCE, path, on, f"{self.path}: {key}.enabled {str(on).lower()}")
        (self.used if on else self.ignored).append(key)
        return on

    def _zero(self, key: str, value: Any) -> None:
        values = dict(value) if isinstance(value, dict) else value
        if isinstance(values, dict):
            stage = values.get("stage", 0)
            _zero(self.flags, _SOURCE, stage, f"{self.path}: {key}.stage {stage}", lambda line: None)
            values = {name: entry for name, entry in values.items() if not name.startswith("stage3_")}
        self._mapping(key, values, _IGNORED_ZERO_KEYS.split())
        self.used.append(f"{key}.stage")
        self.ignored += [f"{key}.{name}" for name in values if name != "stage"]

    def _curriculum(self, key: str, value: Any) -> None:
        location = f"{self.path}: {key}"
        if not isinstance(value, dict):
            raise UserError(f"{location} must hold names and values, not a {type(value).__name__}")
        settings = read_curriculum(value, location, self.ignored.append)
        if settings is None:
            self.ignored.append(key)
            return
        for path, setting in settings.items():
            name = key_of(path.partition(".")[2], settings["curriculum.curriculum_type"])
            self.flags.set_field(_SOURCE, path, setting, f"{location}.{name} {setting}")
        self.used.append(key)

    def _data_types(self, key: str, value: Any) -> None:
        kind = self._mapping(key, value, ("grad_accum_dtype",)).get("grad_accum_dtype")
        if kind not in (None, _AUTO, "fp32"):
            raise UserError(f"{self.path}: {key}.grad_accum_dtype {kind} is not available; use fp32")
        if kind == "fp32":
            self._set(f"{key}.grad_accum_dtype", "parallel.accumulate_allreduce_grads_in_fp32", True)


DEEPSPEED = Dialect(section="deepspeed", config=DeepSpeedConfig, translate=_translate)
