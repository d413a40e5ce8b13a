"""Parser and checks of the specs of communication points, ``POINT=NAME[,key=value...]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""A single all-reduce of the embedding's gradient over the replicas of all stages that hold it."""

_FEEDBACKS = {True: ("off", *get_args(SumResidual)), False: ("off", *get_args(MessageResidual))}
"""Kinds of residual of reductions and of messages."""

_STATELESS = {
    Point.TP_FWD: "recomputation and evaluation run it again",
    Point.TP_BWD: "recomputation and evaluation run it again",
    Point.PARAM_GATHER: "the next difference makes up for what this one lost",
    **dict.fromkeys(EXPERT_POINTS, "its rows are of other tokens each time"),
}

COMMON = {
    "when": "all or epilogue: which gradients go back compressed (pp-backward)",
    "stages": "all, first:N or last:N: which pipeline stages compress what they send",
    "warmup": "iterations, a fraction of the run (0.1), or epochs (1epochs), that go uncompressed",
    "error-feedback": "off; local or aggregate for all-reduces; lazy, lazy-reset within each iteration, or lazy-mean "
    "over the tokens, for messages ('on' is the compressor's default)",
    "feedback-decay": "factor of the residual at each step, or round of islands: 1 keeps all of it (all-reduces)",
    "fused": "on or off: one all-reduce over the replicas of all stages that hold the embedding (embedding)",
    "eval": "on or off: compress in evaluation (pp-forward, tp-forward, ep-dispatch-forward, ep-combine-forward)",
}
"""Options common to all compressors, with their help."""

OF_POINT: Mapping[Point, type[Any]] = {Point.OUTER: OuterOptions}
"""Options classes of points, independent of the compressor."""


@dataclass(frozen=True)
class Spec:
    """The compressor of a communication point, with its options.

    Args:
        point: the point.
        name: name of the compressor.
        registration: the compressor's registration.
        options: an instance of its options class.
        activation: iterations, stages and messages that are compressed.
        feedback: "off", "local", "aggregate", "lazy", "lazy-reset" or "lazy-mean".
        fused: a single embedding all-reduce over the replicas of all its stages (``embedding`` only).
        schedules: options that change over the run, by field; ``options`` holds their first values.
        of_point: an instance of the point's options class; None if the point has no options.
        preset: name of the preset that set some of these options; empty without a preset.
        decay: factor of a reduction's residual, each time it is added.
    """

    point: Point
    name: str
    registration: Registration
    options: Any
    activation: Activation = field(default_factory=Activation)
    feedback: str = "off"
    fused: bool = False
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    of_point: Any = None
    preset: str = ""
    decay: float = 1.0

    @property
    def outer(self) -> OuterOptions:
        """Options of the point ``outer``."""
        assert isinstance(self.of_point, OuterOptions)
        return self.of_point

    def options_at(self, iteration: int, tuned: Mapping[str, float] | None = None) -> Any:
        """Options at an iteration; ``tuned`` are values chosen by a controller."""
        warmup = self.activation.warmup_iters
        values = {name: schedule.at(iteration, warmup) for name, schedule in self.schedules.items()}
        values |= tuned or {}
        if not values:
            return self.options
        kinds = {name: type(getattr(self.options, name)) for name in values}
        return replace(self.options, **{n: kinds[n](round(v) if kinds[n] is int else v) for n, v in values.items()})

    def variants(self) -> list[Any]:
        """Options with the lowest and with the highest values that they can take during the run."""
        limits = {name: schedule.extremes for name, schedule in self.schedules.items()}
        limits |= self.compressor().tuned_limits()
        return [self.options_at(0, {name: pair[end] for name, pair in limits.items()}) for end in (0, 1)]

    def in_evaluation(self) -> Spec:
        """The same spec, with compression in evaluation if the point and the compressor allow it."""
        if not self.point.forward or self.remembered_samples:
            return self
        return replace(self, activation=replace(self.activation, evaluation=True))

    @property
    def identity(self) -> bool:
        """Whether the traffic is not compressed."""
        return self.registration.identity

    @property
    def remembered_samples(self) -> int:
        """Number of samples that each end of a message remembers."""
        return 0 if self.registration.codec is None else self.codec().traits.samples

    def compressor(self, options: Any = None) -> Compressor:
        """A new compressor with these options (default: the initial options), without error feedback."""
        factory = self.registration.rounds if self.point.is_reduction else self.registration.codec
        assert factory is not None
        return factory(self.options if options is None else options)

    def controller(self) -> Controller | None:
        """A new controller, or None if the compressor has no controller."""
        compressor = self.compressor()
        return compressor.controller() if isinstance(compressor, RoundCompressor) else None

    def rounds(self, options: Any = None) -> RoundCompressor:
        """A new round compressor with these options (default: the initial options)."""
        assert self.registration.rounds is not None
        inner = self.registration.rounds(self.options if options is None else options)
        if self.feedback == "off":
            return inner
        return ErrorFeedback(inner, cast(SumResidual, self.feedback), self.decay)

    def codec(self, options: Any = None) -> Codec:
        """A new codec with these options (default: the initial options)."""
        assert self.registration.codec is not None
        inner = self.registration.codec(self.options if options is None else options)
        return inner if self.feedback == "off" else ErrorFeedbackCodec(inner, cast(MessageResidual, self.feedback))


def read_specs(texts: Sequence[str], registry: Registry, length: RunLength) -> dict[Point, Spec]:
    """Parse the specs of a run, by point.

    Args:
        texts: specs in the form ``POINT=NAME[,key=value...]``.
        registry: the available compressors.
        length: length of the run, for warm-ups given as a fraction of it.

    Raises:
        UserError: for the first spec that cannot be parsed or cannot be used.
    """
    specs: dict[Point, Spec] = {}
    for text in texts:
        for each in specs_by_point(text):
            try:
                spec = read_spec(each, registry, length)
            except UserError as error:
                raise UserError(f"--compress {text}: {error}") from error
            if spec.point in specs:
                raise UserError(f"--compress {text}: {spec.point.value} is given twice; leave one out")
            specs[spec.point] = spec
    return specs


def specs_by_point(text: str) -> list[str]:
    """Expand a spec to a spec for each point that the name before the equals sign stands for.

    Raises:
        UserError: for ``experts=`` with an unknown word, or with an option that the word already sets.
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
                raise UserError(f"--compress {text}: {word} chooses {key}; leave it out, or give each leg a spec")
        return [f"{point.value}={codec}{comma}{options_text}" for point, codec in codecs.items()]
    return [f"{point.value}{equals}{spec_text}" for point in EXPERT_LEGS.get(point_name, ())] or [text]


def read_spec(text: str, registry: Registry, length: RunLength) -> Spec:
    """Parse a single spec; see ``read_specs``, which prefixes errors with the spec."""
    head, *words = [word.strip() for word in text.split(",")]
    point_name, equals, name = (head_word.strip().lower() for head_word in head.partition("="))
    if not equals or not name:
        raise UserError("write POINT=NAME[,key=value...], such as dp-grad=powersgd,rank=32")
    point = _point(point_name)
    values = _parse_values(words)
    alias = point is Point.EMBED_GRAD and name == FUSED
    try:
        registration = registry["none" if alias else name]
    except KeyError as error:
        raise UserError(f"{error.args[0]}{nearest(name, registry.names)}") from None
    try:
        registration.check_point(point, name)
    except UserError as error:
        fitting = [other for other in registry.names if serves(registry[other], point, other)]
        use = [f"; use {other}" for other in registration.instead if _takes(point, other, registry, length)][:1]
        raise UserError(f"{error}{''.join(use)}; {point.value} takes {', '.join(fitting)}") from None
    common = {key: values.pop(key).lower() for key in COMMON if key in values}
    preset, of_point = _of_point(point, values)
    if not registration.no_feedback:
        common = {key: value for key, value in PRESETS.get(preset, {}).items() if key in COMMON} | common
    flags = [option.flag for option in field_options(name, registration.config)] + list(COMMON)
    flags += [PRESET, *_flags_of(point)] if point in OF_POINT else []
    for key in values:
        if key not in flags:
            raise UserError(f"{name} has no option {key!r}{nearest(key, flags)}; its options are: {', '.join(flags)}")
    schedules = _schedules(registration, name, values, length)
    options = options_from_words(registration.config, values, name)
    for field_name, schedule in schedules.items():
        for number in schedule.values:
            replace(options, **{field_name: type(getattr(options, field_name))(number)})
    feedback = _feedback(point, registration, name, common.get("error-feedback"))
    spec = Spec(
        point,
        name,
        registration,
        options,
        _activation(point, common, length),
        feedback,
        alias or _fused(point, common.get("fused", "off")),
        schedules,
        of_point,
        preset,
        _decay(point, feedback, common.get("feedback-decay", "1")),
    )
    if spec.activation.evaluation and spec.remembered_samples:
        raise UserError(f"eval=on: {name} remembers training samples, and evaluation has others; leave it out")
    problem = spec.compressor().problem(spec.activation)
    if problem:
        raise UserError(problem)
    return spec


def _parse_values(words: Sequence[str]) -> dict[str, str]:
    """Parse ``key=value`` words."""
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value.strip():
            raise UserError(f"{word!r} is not key=value")
        key = key.strip().lower().replace("_", "-")
        if key in values:
            raise UserError(f"{key} is given twice; leave one out")
        values[key] = value.strip()
    return values


def _flags_of(point: Point) -> list[str]:
    """Names of the options of a point's options class."""
    return [option.flag for option in field_options(point.value, OF_POINT[point])]


def _of_point(point: Point, values: dict[str, str]) -> tuple[str, Any]:
    """Remove the point's options from ``values``, and return the preset's name and the point's options."""
    if point not in OF_POINT:
        return "", None
    preset = values.pop(PRESET, "").lower()
    why = NOT_OFFERED.get(preset.removesuffix("-like"))
    if why:
        raise UserError(f"{PRESET}={preset}: {why}; the choices are {', '.join(PRESETS)}")
    if preset and preset not in PRESETS:
        raise UserError(f"{PRESET}={preset}: the choices are {', '.join(PRESETS)}{nearest(preset, list(PRESETS))}")
    written = {key: values.pop(key) for key in _flags_of(point) if key in values}
    words = {key: value for key, value in PRESETS.get(preset, {}).items() if key not in COMMON} | written
    return preset, options_from_words(OF_POINT[point], words, point.value)


def _schedules(registration: Registration, name: str, values: dict[str, str], length: RunLength) -> dict[str, Schedule]:
    """Parse the options that change over the run, and replace them in ``values`` by their first values."""
    schedules = {}
    options = {option.flag: option for option in field_options(name, registration.config)}
    for key, text in values.items():
        if "@" not in text and "~" not in text:
            continue
        if not options[key].option.scheduled:
            able = ", ".join(flag for flag, option in options.items() if option.option.scheduled) or "none"
            raise UserError(f"{key}={text}: {key} cannot change over the run; of {name}'s options can: {able}")
        schedule = replace(read_schedule(text, length), integral=options[key].option.whole_ramp)
        if schedule.ramp and schedule.integral and any(value % 1 for value in schedule.values):
            raise UserError(
                f"{key}={text}: a ramp of {key} goes through whole numbers; use those, or steps for a fraction"
            )
        for value in schedule.extremes:
            options_from_words(registration.config, {key: f"{value:g}"}, name)
        schedules[options[key].name] = schedule
        first = schedule.at(0)
        values[key] = str(round(first)) if options[key].element is int else repr(first)
    return schedules


def _point(name: str) -> Point:
    choices = {point.value: point for point in Point if point.compressible}
    if name not in choices:
        raise UserError(
            f"{name}: no such communication point{nearest(name, list(choices))}; the points are {', '.join(choices)}"
        )
    return choices[name]


def _activation(point: Point, common: Mapping[str, str], length: RunLength) -> Activation:
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
    if "stages" in common and point in (Point.EMBED_GRAD,):
        raise UserError("stages: the embedding is on the first and the last stage only; leave it out")
    text = common.get("warmup", "")
    warmup = read_iterations(text, length, f"warmup={text}") if text else _usual_warmup(point, length)
    warms_up = any(digit in text for digit in "123456789")
    return Activation(warmup, first, last, when == "epilogue", evaluation == "on", warms_up=warms_up)


def _usual_warmup(point: Point, length: RunLength) -> int:
    """Default warm-up. Islands go in step for the first third of the run, because earlier rounds increase the loss."""
    if point is not Point.OUTER:
        return 0
    if length.train_iters is None:
        raise UserError(
            "warmup: islands go in step for a third of the run, which needs --train-iters; write iterations"
        )
    return length.train_iters // 3


def _fused(point: Point, text: str) -> bool:
    if text not in ("on", "off"):
        raise UserError(f"fused={text}: write on or off")
    if text == "on" and point is not Point.EMBED_GRAD:
        raise UserError(f"fused=on: only the embedding's all-reduces can be fused, not {point.value}; leave it out")
    return text == "on"


def _feedback(point: Point, registration: Registration, name: str, kind: str | None) -> str:
    usual = registration.usual_feedback(point)
    if kind is None:
        return usual
    if kind == "on":
        kind = usual if usual != "off" else "local" if point.is_reduction else "lazy"
    kinds = _FEEDBACKS[point.is_reduction]
    if kind not in kinds:
        raise UserError(f"error-feedback={kind}: the choices at {point.value} are on, {', '.join(kinds)}")
    if kind != "off" and not point.keeps_state:
        raise UserError(f"error-feedback={kind}: {point.value} keeps no state ({_STATELESS[point]}); leave it out")
    if kind != "off" and registration.no_feedback:
        raise UserError(f"error-feedback={kind}: {name} {registration.no_feedback}; leave it out")
    return kind


def _decay(point: Point, feedback: str, text: str) -> float:
    try:
        decay = read_number(text)
    except ValueError:
        decay = 0.0
    option_text = f"feedback-decay={text}"
    if not 0.0 < decay <= 1.0:
        raise UserError(f"{option_text}: write a number above 0, and at most 1")
    if decay < 1.0 and not point.is_reduction:
        raise UserError(f"{option_text}: {point.value} sends messages, whose residual is kept whole; leave it out")
    if decay < 1.0 and feedback == "off":
        raise UserError(f"{option_text}: there is no residual; add error-feedback=on, or leave it out")
    return decay


def _takes(point: Point, spec: str, registry: Registry, length: RunLength) -> bool:
    """Whether a point accepts a spec, given without the point."""
    name = spec.partition(",")[0]
    if name not in registry.names or not serves(registry[name], point, name):
        return False
    try:
        read_spec(f"{point.value}={spec}", registry, length)
    except UserError:
        return False
    return True


def serves(registration: Registration, point: Point, name: str) -> bool:
    try:
        registration.check_point(point, name)
    except UserError:
        return False
    return True
