"""Curriculum learning over the sequence length (Li et al. 2022), with the schedules of DeepSpeed.

The length of a step depends only on its number. Full-length samples are truncated to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import floor
from typing import Literal

from megatron.base.errors import UserError, describe_failure
from megatron.base.option import derived, option
from megatron.base.user_function import load_function
from megatron.base.user_text import flag_of
from megatron.config.conditions import needs, unless, when
from megatron.config.lengths import LengthSchedule
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig

MAX_CUSTOM = 10**6
"""Maximum number of steps of a custom schedule, which is evaluated for all steps at startup."""
_MAX_STEPS = 10**9
_MAX_LENGTHS = 1 << 16

_NEEDS = {
    "fixed_linear": ("curriculum_seqlen_min", "curriculum_seqlen_steps"),
    "fixed_root": ("curriculum_seqlen_min", "curriculum_seqlen_steps"),
    "fixed_discrete": ("curriculum_discrete_seqlens", "curriculum_discrete_steps"),
    "custom": ("curriculum_function", "curriculum_seqlen_steps"),
}


_LEARNING = needs("curriculum.curriculum_learning")


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Sequence lengths that grow to --seq-length over the first part of the run. Evaluations use the full length."""

    curriculum_learning: bool = option(False, "Start with short sequences; see docs/guides/curriculum.md.")
    curriculum_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] = option(
        "fixed_linear",
        "How the length grows: linearly, as a root of the step, from a list, or by your own function.",
        only_if=(_LEARNING,),
    )
    curriculum_seqlen_min: int | None = derived(
        "needed by fixed_linear and fixed_root",
        "Length of the first sequences.",
        unit="tokens",
        minimum=1,
        only_if=(_LEARNING, when("curriculum.curriculum_type", "fixed_linear", "fixed_root")),
    )
    curriculum_seqlen_step: int = option(
        8,
        "Lengths are multiples of this; 8 and more suit tensor cores.",
        unit="tokens",
        minimum=1,
        only_if=(_LEARNING, when("curriculum.curriculum_type", "fixed_linear", "fixed_root")),
    )
    curriculum_seqlen_steps: int | None = derived(
        "needed, but for fixed_discrete",
        "Iterations after which sequences have full length.",
        unit="iterations",
        minimum=1,
        maximum=_MAX_STEPS,
        only_if=(_LEARNING, unless("curriculum.curriculum_type", "fixed_discrete")),
    )
    curriculum_root_degree: float = option(
        2.0,
        "Degree of the root of fixed_root: 2 is the square root, 1 is linear.",
        minimum=1,
        maximum=100,
        only_if=(_LEARNING, when("curriculum.curriculum_type", "fixed_root")),
    )
    curriculum_discrete_seqlens: list[int] | None = derived(  # noqa: RUF009
        "needed by fixed_discrete",
        "Lengths in order; the last one is --seq-length.",
        unit="tokens",
        minimum=1,
        only_if=(_LEARNING, when("curriculum.curriculum_type", "fixed_discrete")),
    )
    curriculum_discrete_steps: list[int] | None = derived(  # noqa: RUF009
        "needed by fixed_discrete",
        "Last iteration of each length except the final one, which remains.",
        unit="iterations",
        minimum=1,
        maximum=_MAX_STEPS,
        only_if=(_LEARNING, when("curriculum.curriculum_type", "fixed_discrete")),
    )
    curriculum_function: str | None = derived(
        "needed by custom",
        "Python file with a function seqlen(step) that returns the length of a step (the first is 1); called for "
        "the first --curriculum-seqlen-steps steps, before the run starts.",
        metavar="FILE",
        contents="file",
        only_if=(_LEARNING, when("curriculum.curriculum_type", "custom")),
    )


Naming = Callable[[str], str]
"""Maps a field to its name in messages: its flag, or its location in a file."""


def lengths_of(curriculum: CurriculumConfig, seq_length: int, naming: Naming = flag_of) -> LengthSchedule:
    """Sequence-length schedule of a run.

    Args:
        curriculum: the section, with fields within their bounds.
        seq_length: full sequence length.
        naming: maps a field of the section, or ``seq_length``, to its name in messages.

    Raises:
        UserError: when the lengths do not grow to the full length.
    """
    if not curriculum.curriculum_learning:
        return LengthSchedule.constant(seq_length)
    kind = curriculum.curriculum_type
    missing = [naming(name) for name in _NEEDS[kind] if getattr(curriculum, name) is None]
    if missing:
        raise UserError(
            f"{naming('curriculum_learning')} by {naming('curriculum_type')} {kind} needs {' and '.join(missing)}; add "
            f"{'it' if len(missing) == 1 else 'them'}"
        )
    if kind == "fixed_discrete":
        lengths, ends = curriculum.curriculum_discrete_seqlens, curriculum.curriculum_discrete_steps
        assert lengths is not None
        assert ends is not None
        names = naming("curriculum_discrete_seqlens"), naming("curriculum_discrete_steps")
        if len(lengths) != len(ends) + 1:
            raise UserError(
                f"{names[0]} holds {len(lengths)} lengths and {names[1]} {len(ends)} steps; give one step less than "
                "lengths, since the last one stays"
            )
        for name, values in zip(names, (lengths, ends), strict=True):
            for before, after in pairwise(values):
                if after <= before:
                    raise UserError(f"{name} decreases, from {before} to {after}; give ascending numbers")
        if lengths[-1] != seq_length:
            raise UserError(
                f"{names[0]} ends with {lengths[-1]}, not with {naming('seq_length')} {seq_length}; let it end there"
            )
        return LengthSchedule(tuple(lengths), (0, *ends))
    if kind == "custom":
        return _custom_lengths(curriculum, seq_length, naming)
    return _formula_lengths(curriculum, seq_length, naming)


def _formula_lengths(curriculum: CurriculumConfig, full: int, naming: Naming) -> LengthSchedule:
    """Root schedule: linear in a root of the step number, rounded down to multiples of the length increment."""
    shortest, multiple, steps = (
        curriculum.curriculum_seqlen_min,
        curriculum.curriculum_seqlen_step,
        curriculum.curriculum_seqlen_steps,
    )
    assert shortest is not None
    assert steps is not None
    degree = curriculum.curriculum_root_degree if curriculum.curriculum_type == "fixed_root" else 1.0
    if shortest > full:
        raise UserError(
            f"{naming('curriculum_seqlen_min')} {shortest} is above {naming('seq_length')} {full}; lower it"
        )
    for name, length in (("curriculum_seqlen_min", shortest), ("seq_length", full)):
        if length % multiple:
            raise UserError(
                f"{naming('curriculum_seqlen_step')} {multiple} does not divide {naming(name)} {length}; "
                "choose one that does"
            )

    count = min((full - shortest) // multiple, steps)
    if count > _MAX_LENGTHS:
        raise UserError(
            f"{naming('curriculum_seqlen_step')} {multiple} makes {count} lengths, more than {_MAX_LENGTHS}; raise it"
        )

    def length_of(step: int) -> int:
        length = floor((step / steps) ** (1.0 / degree) * (full - shortest) + shortest)
        return min(max(length - length % multiple, shortest), full)

    return LengthSchedule.growing(length_of, steps, full)


def _custom_lengths(curriculum: CurriculumConfig, full: int, naming: Naming) -> LengthSchedule:
    """Lengths from a user function, called for all steps now, so that a bad length fails at startup."""
    steps, text = curriculum.curriculum_seqlen_steps, curriculum.curriculum_function
    assert steps is not None
    assert text is not None
    flag = f"{naming('curriculum_function')} {text}"
    if steps > MAX_CUSTOM:
        raise UserError(
            f"{naming('curriculum_seqlen_steps')} {steps}: a function may cover at most {MAX_CUSTOM}; lower it"
        )
    function = load_function(flag, text, "seqlen(step)")
    lengths: list[int] = []
    for step in range(1, steps + 1):
        try:
            length = function(step)
        except (Exception, SystemExit) as error:
            raise UserError(f"{flag} fails at step {step}: {describe_failure(error, text)}") from error
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= full:
            raise UserError(
                f"{flag} returns {length!r:.60} for step {step}; it must be an integer from 1 to "
                f"{naming('seq_length')} {full}"
            )
        if lengths and length < lengths[-1]:
            raise UserError(f"{flag} decreases at step {step}, from {lengths[-1]} to {length}; let it grow")
        lengths.append(length)
    return LengthSchedule.growing(lambda step: lengths[step - 1], steps, full)


def check_curriculum(curriculum: CurriculumConfig, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that the layout can split every length of the curriculum; raise UserError otherwise."""
    if curriculum.curriculum_learning and model.decoder_layers:
        raise UserError(
            "--curriculum-learning truncates samples, which would remove text that T5's decoder predicts; leave it out"
        )
    divisor = parallel.message_parts
    indivisible_lengths = [length for length in lengths_of(curriculum, model.seq_length).lengths if length % divisor]
    if indivisible_lengths:
        shortest, multiple = curriculum.curriculum_seqlen_min, curriculum.curriculum_seqlen_step
        flags = f"--curriculum-seqlen-min {shortest} --curriculum-seqlen-step {multiple}"
        if curriculum.curriculum_type == "fixed_discrete":
            flags = f"--curriculum-discrete-seqlens {' '.join(map(str, curriculum.curriculum_discrete_seqlens or []))}"
        elif curriculum.curriculum_type == "custom":
            flags = f"--curriculum-function {curriculum.curriculum_function}"
        raise UserError(
            f"{parallel.splitting_flag}: {flags} leads to sequences of "
            f"{indivisible_lengths[0]} tokens, which --tensor-model-parallel-size {divisor} does not "
            f"divide; use multiples of {divisor}"
        )
