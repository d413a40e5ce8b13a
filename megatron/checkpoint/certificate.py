"""``certificate.json``: statements of a run about itself, and digests of the files of its checkpoint.

The checkpoint's common values hold the same statements, and a resumed run continues from those. The file's own digest
detects damage; it is not a signature, and proves nothing about who wrote the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron.base.documents import unique_names
from megatron.base.errors import UserError
from megatron.base.regular import read_regular
from megatron.base.values import Values

CERTIFICATE = "certificate.json"
FORMAT = 2
"""Format of new certificates. The first format, which is read as well, has no uncompressed bytes, predicted increases,
loss checks, settings and uncompressed trials."""
_MAX_BYTES, _MAX_COUNT = 1 << 24, 1 << 62


@dataclass(frozen=True)
class TrafficSpan:
    """Traffic of the iterations that a process group has run.

    Args:
        after, until: the iterations after ``after``, up to ``until``.
        ranks: number of ranks.
        messages: number of messages and collectives that the ledger counted, over all ranks.
        ledger: bytes that all ranks sent, by communication point, as the ledger counted them.
        interfaces: bytes that the interfaces of all nodes sent, without headers; None if not compared.
        names: names of these interfaces.
        connections: bytes that the ranks' own connections sent, by the kernel's counters; None if these are unknown.
        reason: why the interfaces are not compared; empty if they are.
        uncompressed: bytes that all ranks would have sent without compression, by communication point.
    """

    after: int
    until: int
    ranks: int
    messages: int
    ledger: Mapping[str, int]
    interfaces: int | None = None
    names: Sequence[str] = ()
    connections: int | None = None
    reason: str = ""
    uncompressed: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def read(content: Mapping[str, Any], location: str) -> TrafficSpan:
        """Read a span; raise UserError for bad values."""
        values = Values(content, location)
        ledger = values.table("ledger")
        uncompressed = values.table("uncompressed", {})
        after = _count(values, "after")
        return TrafficSpan(
            after,
            _count(values, "until", minimum=after),
            _count(values, "ranks", minimum=1),
            _count(values, "messages"),
            {point: _count(ledger, point) for point in ledger},
            _count(values, "interfaces") if values.has("interfaces") else None,
            values.texts("names"),
            _count(values, "connections") if values.has("connections") else None,
            values.text("reason"),
            {point: _count(uncompressed, point) for point in uncompressed},
        )


@dataclass(frozen=True)
class SampledPoint:
    """Samples of a point's messages, over all ranks.

    Args:
        point: the communication point.
        residual: whether its compressor keeps a residual.
        samples: number of samples.
        worst_error: largest relative error of a sample: of the message plus the residual if there is one.
        sha256: digest of the sampled tensors.
    """

    point: str
    residual: bool
    samples: int
    worst_error: float
    sha256: str

    @staticmethod
    def read(content: Mapping[str, Any], location: str) -> SampledPoint:
        """Read an entry; raise UserError for bad values."""
        values = Values(content, location)
        return SampledPoint(
            values.text("point"),
            values.flag("residual"),
            _count(values, "samples", minimum=1),
            values.number("worst_error", minimum=0.0),
            values.text("sha256"),
        )


MAX_INCREASE = 1e6
"""Value in ``LossCheck`` of increases that are not finite, which JSON cannot hold, in percent."""


@dataclass(frozen=True)
class LossCheck:
    """A check of the loss under the compressors that a run has chosen.

    Args:
        iteration: number of iterations before it.
        increase: expected increase of the loss, in percent, at most ``MAX_INCREASE``.
        eased: point that switched to a gentler setting after the check, or to no compression; empty for none.
    """

    iteration: int
    increase: float
    eased: str = ""

    @staticmethod
    def read(content: Mapping[str, Any], location: str) -> LossCheck:
        """Read a check; raise UserError for bad values."""
        values = Values(content, location)
        return LossCheck(_count(values, "iteration"), values.number("increase", minimum=0.0), values.text("eased"))


@dataclass(frozen=True)
class AutoDecision:
    """A choice of ``--compress auto``.

    Args:
        specs: the specs in use: the chosen ones, or their replacements.
        predicted_s, uncompressed_s: predicted seconds of an iteration, with the chosen specs and settings, and with
            those of the user alone.
        trial_s: measured seconds of trial steps with the chosen specs and settings; None if none were run.
        measured_s: measured seconds of an iteration; None before the measurement.
        report: the choice as it was logged, with its reasons.
        increases: upper ends of the predicted increases of the loss when the compressors were chosen, in percent, by
            spec.
        checks: checks of the loss during the run, also those before the choice.
        uncompressed_trial_s: measured seconds of trial steps with the user's specs and settings alone; None if none
            were run.
        settings: flags of the chosen settings.
        after: number of iterations before the choice.
    """

    specs: Sequence[str]
    predicted_s: float
    uncompressed_s: float
    trial_s: float | None
    measured_s: float | None
    report: Sequence[str]
    increases: Mapping[str, float] = field(default_factory=dict)
    checks: Sequence[LossCheck] = ()
    uncompressed_trial_s: float | None = None
    settings: Sequence[str] = ()
    after: int = 0

    @staticmethod
    def read(content: Mapping[str, Any], location: str) -> AutoDecision:
        """Read a decision; raise UserError for bad values."""
        values = Values(content, location)
        increases = values.table("increases", {})
        checks = _tables(values, "checks") if values.has("checks") else []
        return AutoDecision(
            values.texts("specs"),
            values.number("predicted_s", minimum=0.0),
            values.number("uncompressed_s", minimum=0.0),
            values.number("trial_s", minimum=0.0) if values.has("trial_s") else None,
            values.number("measured_s", minimum=0.0) if values.has("measured_s") else None,
            values.texts("report"),
            {spec: increases.number(spec, minimum=0.0) for spec in increases},
            [LossCheck.read(check, f"{location}, checks") for check in checks],
            values.number("uncompressed_trial_s", minimum=0.0) if values.has("uncompressed_trial_s") else None,
            values.texts("settings") if values.has("settings") else [],
            _count(values, "after") if values.has("after") else 0,
        )


@dataclass(frozen=True)
class InputFile:
    """A file that a flag names, with the short fingerprint by which ranks compare it."""

    name: str
    path: str
    contents: str

    @staticmethod
    def read(content: Mapping[str, Any], location: str) -> InputFile:
        """Read an entry; raise UserError for bad values."""
        values = Values(content, location)
        return InputFile(values.text("name"), values.text("path"), values.text("contents"))


@dataclass(frozen=True)
class Statements:
    """A run's statements about itself.

    Args:
        code, kernels, torch: digests of the package and of its compiled kernels ("python" without), version of torch.
        inputs: the files that flags name.
        traffic: spans of iterations, in order.
        samples: sampled points.
        not_sampled: reasons why compressed points have no samples, by point.
        differences: first differences between ranks that must hold the same numbers.
        auto: choice of ``--compress auto``, if there was one.
    """

    code: str
    kernels: str
    torch: str
    inputs: Sequence[InputFile]
    traffic: Sequence[TrafficSpan]
    samples: Sequence[SampledPoint]
    not_sampled: Mapping[str, str] = field(default_factory=dict)
    differences: Sequence[str] = ()
    auto: AutoDecision | None = None

    def to_dict(self) -> dict[str, Any]:
        """The statements as plain values that JSON does not change."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    @staticmethod
    def read(content: Mapping[str, Any], location: str) -> Statements:
        """Read statements.

        Raises:
            UserError: for values that a run does not write; the message names them.
        """
        values = Values(content, location)
        reasons = values.table("not_sampled")
        return Statements(
            code=values.text("code"),
            kernels=values.text("kernels"),
            torch=values.text("torch"),
            inputs=[InputFile.read(entry, f"{location}, inputs") for entry in _tables(values, "inputs")],
            traffic=[TrafficSpan.read(entry, f"{location}, traffic") for entry in _tables(values, "traffic")],
            samples=[SampledPoint.read(entry, f"{location}, samples") for entry in _tables(values, "samples")],
            not_sampled={point: reasons.text(point) for point in reasons},
            differences=values.texts("differences"),
            auto=AutoDecision.read(values.table("auto"), f"{location}, auto") if values.has("auto") else None,
        )


def _count(values: Values, name: str, minimum: int = 0) -> int:
    return values.integer(name, minimum=minimum, maximum=_MAX_COUNT)


def _tables(values: Values, name: str) -> list[Mapping[str, Any]]:
    entries = values.listed(name)
    return [Values({name: entry}, values.location).table(name) for entry in entries]


@dataclass(frozen=True)
class Certificate:
    """Content of ``certificate.json``.

    Args:
        iteration, ranks: iteration of the checkpoint, and number of ranks that wrote it.
        files: SHA-256 of each other file of the checkpoint.
        statements: the run's statements.
    """

    iteration: int
    ranks: int
    files: Mapping[str, str]
    statements: Statements

    def render(self) -> bytes:
        """The content of the file."""
        content = {
            "format": FORMAT,
            "iteration": self.iteration,
            "ranks": self.ranks,
            "files": dict(self.files),
            "statements": self.statements.to_dict(),
        }
        return (json.dumps({"sha256": _digest(content), "content": content}, indent=1) + "\n").encode()


def _digest(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_certificate(folder: Path) -> Certificate:
    """Read and check ``certificate.json``.

    Raises:
        UserError: when it is missing, damaged, or of another format; the message names the file.
    """
    path = folder / CERTIFICATE
    try:
        data = read_regular(path, _MAX_BYTES)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: it was saved without --certificate, or removed") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    try:
        sealed = json.loads(data, object_pairs_hook=unique_names)
        content = sealed["content"]
        intact = sealed["sha256"] == _digest(content) and isinstance(content, dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise UserError(f"{path} is damaged: its digest does not match")
    if content.get("format") not in (1, FORMAT):
        raise UserError(f"{path} has format {content.get('format')!r}; this version reads formats 1 and {FORMAT}")
    values = Values(content, str(path))
    files = values.table("files")
    for name in files:
        if Path(name).name != name or "\0" in name:
            raise values.wrong(f"files: {name!r} is not the name of a file in this folder")
    return Certificate(
        _count(values, "iteration"),
        _count(values, "ranks", minimum=1),
        {name: files.text(name) for name in files},
        Statements.read(values.table("statements"), str(path)),
    )
