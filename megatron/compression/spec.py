"""Parser of ``--compress`` values, ``POINT=NAME[,key=value...]``, and their checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

from megatron.base.errors import UserError
from megatron.base.fields import options_from_words
from megatron.base.option import field_options
from megatron.base.parse_numbers import read_number
from megatron.base.user_text import nearest
from megatron.compression.api import Codec, Compressor, Controller, RoundCompressor
from megatron.compression.error_feedback import ErrorFeedback, ErrorFeedbackCodec, MessageResidual, SumResidual
from megatron.compression.outer import NOT_OFFERED, PRESET, PRESETS, OuterOptions
from megatron.compression.points import EXPERT_CODECS, EXPERT_LEGS, EXPERT_POINTS, EXPERTS, Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.schedule import Activation, RunLength, Schedule, read_iterations, read_schedule, read_stages

FUSED = "fused"
"""Name that stands for an uncompressed embedding all-reduce over all replicas of all stages with the embedding."""

_RESIDUAL_KINDS = {True: ("off", *get_args(SumResidual)), False: ("off", *get_args(MessageResidual))}
"""Values of ``error-feedback`` for reductions and for messages."""

_STATELESS_REASONS = {
    Point.TP_FWD: "recomputation and evaluation run it again",
    Point.TP_BWD: "recomputation and evaluation run it again",
    Point.PARAM_GATHER: "the next difference includes what the last message lost",
    **dict.fromkeys(EXPERT_POINTS, "each message has other tokens"),
}

COMMON = {
    "when": "all or epilogue: which gradients are compressed (pp-backward)",
    "stages": "all, first:N or last:N: pipeline stages that compress their messages",
    "warmup": "uncompressed first iterations: a number, a fraction of the run (0.1), or epochs (1epochs)",
    "error-feedback": "off; local or aggregate for all-reduces; lazy, lazy-reset within each iteration, or lazy-mean "
    "over the tokens, for messages ('on' selects the compressor's default)",
    "feedback-decay": "factor of the residual per step, or per round of islands: 1 keeps it unchanged (all-reduces)",
    "fused": "on or off: a single all-reduce over all replicas of all stages with the embedding (embedding)",
    "eval": "on or off: compress in evaluation (pp-forward, tp-forward, ep-dispatch-forward, ep-combine-forward)",
}
"""Options common to all compressors, with help texts."""


@dataclass(frozen=True)
class Spec:
    """A communication point's compressor with all options.

    Args:
        point: the point.
        name: name of the compressor.
        registration: the compressor's registration.
        options: an instance of its options class.
        activation: which iterations, stages and messages are compressed.
        feedback: "off", "local", "aggregate", "lazy", "lazy-reset" or "lazy-mean".
        fused: a single all-reduce over all replicas of all stages with the embedding (``embedding`` only).
        schedules: schedules of options that change over the run, by field; ``options`` holds the first values.
        outer_options: options of the point ``outer``; the defaults at other points.
        preset: name of the preset; empty without a preset.
        decay: factor that multiplies a reduction's residual before it is added.
    """

    point: Point
    name: str
    registration: Registration
    options: Any
    activation: Activation = field(default_factory=Activation)
    feedback: str = "off"
    fused: bool = False
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    outer_options: OuterOptions = field(default_factory=OuterOptions)
    preset: str = ""
    decay: float = 1.0

    def options_at(self, iteration: int, tuned: Mapping[str, float] | None = None) -> Any:
        """Options in an iteration; ``tuned`` are values chosen by a controller."""
        warmup = self.activation.warmup_iters
        values = {name: schedule.at(iteration, warmup) for name, schedule in self.schedules.items()}
        values |= tuned or {}
        if not values:
            return self.options
        types = {name: type(getattr(self.options, name)) for name in values}
        values = {name: round(value) if types[name] is int else types[name](value) for name, value in values.items()}
        return replace(self.options, **values)

    def extreme_options(self) -> list[Any]:
        """Options with the lowest values during the run, and options with the highest values."""
        limits = {name: schedule.extremes for name, schedule in self.schedules.items()}
        limits |= self.make_compressor().tuned_limits()
        return [self.options_at(0, {name: pair[end] for name, pair in limits.items()}) for end in (0, 1)]

    def with_evaluation(self) -> Spec:
        """Copy of the spec with compression in evaluation, if the point and the compressor support it."""
        if not self.point.forward or self.remembered_samples:
            return self
        return replace(self, activation=replace(self.activation, evaluation=True))

    @property
    def identity(self) -> bool:
        """Whether the traffic is not compressed."""
        return self.registration.identity

    @property
    def remembered_samples(self) -> int:
        """Number of samples that sender and receiver each remember."""
        return 0 if self.registration.codec is None else self.make_codec().traits.samples

    def make_compressor(self, options: Any = None) -> Compressor:
        """Create a compressor with these options (default: the initial options), without error feedback."""
        factory = self.registration.rounds if self.point.is_reduction else self.registration.codec
        assert factory is not None
        return factory(self.options if options is None else options)

    def make_controller(self) -> Controller | None:
        """Create the compressor's controller; None if it has none."""
        compressor = self.make_compressor()
        return compressor.controller() if isinstance(compressor, RoundCompressor) else None

    def make_rounds(self, options: Any = None) -> RoundCompressor:
        """Create a round compressor with these options (default: the initial options)."""
        assert self.registration.rounds is not None
        inner = self.registration.rounds(self.options if options is None else options)
        if self.feedback == "off":
            return inner
        return ErrorFeedback(inner, cast(SumResidual, self.feedback), self.decay)

    def make_codec(self, options: Any = None) -> Codec:
        """Create a codec with these options (default: the initial options)."""
        assert self.registration.codec is not None
        inner = self.registration.codec(self.options if options is None else options)
        return inner if self.feedback == "off" else ErrorFeedbackCodec(inner, cast(MessageResidual, self.feedback))


def read_specs(texts: Sequence[str], registry: Registry, length: RunLength) -> dict[Point, Spec]:
    """Parse the specs of a run, by point.

    Args:
        texts: specs in the form ``POINT=NAME[,key=value...]``.
        registry: available compressors.
        length: length of the run, for warm-ups in fractions of the run or in epochs.

    Raises:
        UserError: for the first spec with an error.
    """
    specs: dict[Point, Spec] = {}
    for text in texts:
        for each in expand_spec(text):
            try:
                spec = read_spec(each, registry, length)
            except UserError as error:
                raise UserError(f"--compress {text}: {error}") from error
            if spec.point in specs:
                raise UserError(f"--compress {text}: {spec.point.value} is given twice; leave one out")
            specs[spec.point] = spec
    return specs


def point_name(text: str) -> str:
    """Name before the ``=`` of a value of ``--compress``: a point, or several points such as ``experts``."""
    return text.partition("=")[0].strip().lower()


def named_points(texts: Iterable[str]) -> set[str]:
    """Names of all points that values of ``--compress`` serve."""
    return {point_name(each) for text in texts for each in expand_spec(text)}


def expand_spec(text: str) -> list[str]:
    """Expand a spec for several points to a spec for each point.

    Raises:
        UserError: when the word after ``experts=`` is unknown, or an option is one that the word already sets.
    """
    point_name, equals, spec_text = text.partition("=")
    point_name = point_name.strip().lower()
    if point_name == EXPERTS:
        word, comma, options_text = spec_text.partition(",")
        codecs = EXPERT_CODECS.get(word.strip().lower())
        if codecs is None:
            near = nearest(word.strip(), list(EXPERT_CODECS))
            raise UserError(f"--compress {text}: write {EXPERTS}={' or '.join(EXPERT_CODECS)}{near}")
        for key in (option_text.partition("=")[0].strip() for option_text in options_text.split(",") if options_text):
            if key.lower().replace("_", "-") not in COMMON:
                raise UserError(f"--compress {text}: {word} sets {key}; leave it out, or write a spec for each point")
        return [f"{point.value}={codec}{comma}{options_text}" for point, codec in codecs.items()]
    return [f"{point.value}{equals}{spec_text}" for point in EXPERT_LEGS.get(point_name, ())] or [text]


def read_spec(text: str, registry: Registry, length: RunLength) -> Spec:
    """Parse a single spec. ``read_specs`` adds the spec to error messages."""
    head, *words = [word.strip() for word in text.split(",")]
    point_name, equals, name = (head_word.strip().lower() for head_word in head.partition("="))
    if not equals or not name:
        near = "" if equals else nearest(point_name, ["auto"])
        raise UserError(f"write POINT=NAME[,key=value...], such as dp-grad=powersgd,rank=32{near}")
    points = {point.value: point for point in Point if point.compressible}
    if point_name not in points:
        near = nearest(point_name, list(points))
        raise UserError(f"{point_name}: no such communication point{near}; the points are {', '.join(points)}")
    point = points[point_name]
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value.strip():
            raise UserError(f"{word!r} is not key=value")
        key = key.strip().lower().replace("_", "-")
        if key in values:
            raise UserError(f"{key} is given twice; leave one out")
        values[key] = value.strip()
    is_fused_name = point is Point.EMBED_GRAD and name == FUSED
    try:
        registration = registry["none" if is_fused_name else name]
    except KeyError as error:
        raise UserError(f"{error.args[0]}{nearest(name, registry.names)}") from None
    try:
        registration.check_serves(point, name)
    except UserError as error:
        fitting = [other for other in registry.names if can_serve(registry[other], point, other)]
        accepted = (spec for spec in registration.alternatives if _accepts_spec(point, spec, registry, length))
        advice = next((f"; use {spec}" for spec in accepted), "")
        raise UserError(f"{error}{advice}; {point.value} takes {', '.join(fitting)}") from None
    common = {key: values.pop(key).lower() for key in COMMON if key in values}
    preset, outer_options, outer_flags = "", OuterOptions(), list[str]()
    if point is Point.OUTER:
        outer_flags = [PRESET, *(option.flag for option in field_options(point.value, OuterOptions))]
        preset = values.pop(PRESET, "").lower()
        reason = NOT_OFFERED.get(preset.removesuffix("-like"))
        if reason:
            raise UserError(f"{PRESET}={preset}: {reason}; the choices are {', '.join(PRESETS)}")
        if preset and preset not in PRESETS:
            raise UserError(f"{PRESET}={preset}: the choices are {', '.join(PRESETS)}{nearest(preset, list(PRESETS))}")
        point_values = {key: value for key, value in PRESETS.get(preset, {}).items() if key not in COMMON}
        point_values |= {key: values.pop(key) for key in outer_flags if key in values}
        outer_options = options_from_words(OuterOptions, point_values, point.value)
    if not registration.no_feedback:
        common = {key: value for key, value in PRESETS.get(preset, {}).items() if key in COMMON} | common
    flags = [option.flag for option in field_options(name, registration.config)] + list(COMMON)
    flags += outer_flags
    for key in values:
        if key not in flags:
            raise UserError(f"{name} has no option {key!r}{nearest(key, flags)}; its options are: {', '.join(flags)}")
    schedules = _read_schedules(values, registration, name, length)
    options = options_from_words(registration.config, values, name)
    for field_name, schedule in schedules.items():
        for number in schedule.values:
            replace(options, **{field_name: type(getattr(options, field_name))(number)})
    feedback = _parse_feedback(point, registration, name, common.get("error-feedback"))
    fused = "off" if is_fused_name else common.get("fused", "off")
    if fused not in ("on", "off"):
        raise UserError(f"fused={fused}: write on or off")
    if fused == "on" and point is not Point.EMBED_GRAD:
        raise UserError(f"fused=on: only the embedding's all-reduces can be fused, not {point.value}; leave it out")
    spec = Spec(
        point,
        name,
        registration,
        options,
        _parse_activation(point, common, length),
        feedback,
        is_fused_name or fused == "on",
        schedules,
        outer_options,
        preset,
        _parse_decay(point, feedback, common.get("feedback-decay", "1")),
    )
    if spec.decay < 1.0 and spec.make_rounds().traits.scales_residual:
        raise UserError(f"feedback-decay={spec.decay:g}: {name} itself scales the residual here; leave it out")
    if spec.activation.evaluation and spec.remembered_samples:
        raise UserError(f"eval=on: {name} remembers training samples, but evaluation has other samples; leave it out")
    problem = spec.make_compressor().problem(spec.activation)
    if problem:
        raise UserError(problem)
    return spec


def _read_schedules(
    values: dict[str, str], registration: Registration, name: str, length: RunLength
) -> dict[str, Schedule]:
    """Read the options that change over the run, and replace each of them in ``values`` with its first value."""
    schedules = {}
    declared = {option.flag: option for option in field_options(name, registration.config)}
    for key, value in values.items():
        if "@" not in value and "~" not in value:
            continue
        if not declared[key].option.scheduled:
            scheduled = ", ".join(flag for flag, option in declared.items() if option.option.scheduled) or "none"
            raise UserError(f"{key}={value}: {key} cannot change over the run; {name}'s options that can: {scheduled}")
        schedule = replace(read_schedule(value, length), integral=declared[key].option.whole_ramp)
        if schedule.ramp and schedule.integral and any(number % 1 for number in schedule.values):
            raise UserError(
                f"{key}={value}: a ramp of {key} goes through integers; write integers, or steps instead of a ramp"
            )
        for number in schedule.extremes:
            options_from_words(registration.config, {key: f"{number:g}"}, name)
        schedules[declared[key].name] = schedule
        first = schedule.at(0)
        values[key] = str(round(first)) if declared[key].element is int else repr(first)
    return schedules


def _parse_activation(point: Point, common: Mapping[str, str], length: RunLength) -> Activation:
    when = common.get("when", "all")
    if when not in ("all", "epilogue"):
        raise UserError(f"when={when}: the choices are all and epilogue")
    if when == "epilogue" and point is not Point.PP_BWD:
        raise UserError(f"when=epilogue: only pp-backward has an epilogue, {point.value} does not; leave it out")
    evaluation = common.get("eval", "off")
    if evaluation not in ("on", "off"):
        raise UserError(f"eval={evaluation}: write on or off")
    if evaluation == "on" and not point.forward:
        raise UserError(f"eval=on: evaluation sends nothing at {point.value}; leave it out")
    first, last = read_stages(common.get("stages", "all"))
    if "stages" in common and point is Point.EMBED_GRAD:
        raise UserError("stages: the embedding is on the first and the last stage only; leave it out")
    text = common.get("warmup", "")
    if text:
        warmup = read_iterations(text, length, f"warmup={text}")
    elif point is not Point.OUTER:
        warmup = 0
    elif length.train_iters is None:
        raise UserError("warmup: the default is a third of the run, which needs --train-iters; write warmup=ITERATIONS")
    else:
        warmup = length.train_iters // 3  # earlier rounds increase the loss
    warms_up = any(digit in text for digit in "123456789")
    return Activation(warmup, first, last, when == "epilogue", evaluation == "on", warms_up=warms_up)


def _parse_feedback(point: Point, registration: Registration, name: str, kind: str | None) -> str:
    default = registration.default_feedback(point)
    if kind is None:
        return default
    if kind == "on":
        kind = default if default != "off" else "local" if point.is_reduction else "lazy"
    kinds = _RESIDUAL_KINDS[point.is_reduction]
    if kind not in kinds:
        raise UserError(f"error-feedback={kind}: the choices at {point.value} are on, {', '.join(kinds)}")
    if kind != "off" and point in _STATELESS_REASONS:
        raise UserError(
            f"error-feedback={kind}: {point.value} has no state ({_STATELESS_REASONS[point]}); leave it out"
        )
    if kind != "off" and registration.no_feedback:
        raise UserError(f"error-feedback={kind}: {name} {registration.no_feedback}; leave it out")
    return kind


def _parse_decay(point: Point, feedback: str, text: str) -> float:
    try:
        decay = read_number(text)
    except ValueError:
        decay = 0.0
    option_text = f"feedback-decay={text}"
    if not 0.0 < decay <= 1.0:
        raise UserError(f"{option_text}: write a number above 0 and at most 1")
    if decay < 1.0 and not point.is_reduction:
        raise UserError(f"{option_text}: residuals of messages ({point.value}) do not decay; leave it out")
    if decay < 1.0 and feedback == "off":
        raise UserError(f"{option_text}: there is no residual; add error-feedback=on, or leave it out")
    return decay


def _accepts_spec(point: Point, spec: str, registry: Registry, length: RunLength) -> bool:
    """Whether a point accepts a spec without ``POINT=``."""
    name = spec.partition(",")[0]
    if name not in registry.names or not can_serve(registry[name], point, name):
        return False
    try:
        read_spec(f"{point.value}={spec}", registry, length)
    except UserError:
        return False
    return True


def can_serve(registration: Registration, point: Point, name: str) -> bool:
    """Whether a compressor can serve a point."""
    try:
        registration.check_serves(point, name)
    except UserError:
        return False
    return True
