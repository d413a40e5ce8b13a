"""``--certificate``: a run's statements about its traffic, for the certificates of its checkpoints."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from megatron.base.code_digest import code_digest
from megatron.base.regular import fingerprint
from megatron.checkpoint.certificate import AutoDecision, InputFile, SampledPoint, Statements, TrafficSpan
from megatron.compression.api import Codec, RoundCompressor
from megatron.compression.audit import Sample, audit, why_not_sampled
from megatron.compression.identity import IdentityRounds
from megatron.compression.points import Point
from megatron.config.run import run_sections
from megatron.distributed.agreement import gather_texts
from megatron.distributed.interfaces import SentCounts, read_sent
from megatron.distributed.ledger import Ledger
from megatron.distributed.observer import Observer, StepSampler
from megatron.distributed.topology import Topology
from megatron.kernels.native import kernels_digest
from megatron.planner.auto import AutoChoice
from megatron.planner.auto_report import report
from megatron.planner.settings import flags_of
from megatron.training.assembly import Engines
from megatron.training.identity import input_files
from megatron.training.loss_guard import LossGuard
from megatron.training.replica_check import disagreements
from megatron.training.saved_choice import describe_choice, specs_in_use
from megatron.training.step_time_check import StepTimeCheck

C = TypeVar("C", Codec, RoundCompressor)

SAMPLING_INTERVAL = 64
"""Iterations between samples, after iterations 1, 2, 4, ... of the run."""


class CertificateRecord:
    """The statements in a run's newest checkpoint; a run without ``--certificate`` passes them on."""

    def __init__(self) -> None:
        self.statements: Statements | None = None

    def state_dict(self) -> dict[str, Any]:
        """The statements as plain values; empty before the first."""
        return {} if self.statements is None else self.statements.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the statements.

        Raises:
            UserError: for values that a run does not write.
        """
        self.statements = Statements.read(state, "the certificate's statements in the checkpoint") if state else None


def is_sampled(iteration: int) -> bool:
    """Whether messages of an iteration, counted from 1, are sampled."""
    return iteration & (iteration - 1) == 0 or iteration % SAMPLING_INTERVAL == 0


class MessageSampler(StepSampler):
    """Sampler of a message of each compressed point in some steps.

    ``entries`` are the samples so far, by point and whether its compressor keeps a residual.
    """

    def __init__(self, observers: list[Observer]) -> None:
        super().__init__(observers)
        self._steps = 0
        self._messages: Counter[Point] = Counter()
        self._messages_before: Counter[Point] = Counter()
        self._samples: list[tuple[Point, Sample]] = []
        self.entries: dict[tuple[str, bool], SampledPoint] = {}

    def join(self) -> None:
        """Join the observers for the next step."""
        self.leave()
        self._steps += 1
        self._messages_before, self._messages = self._messages, Counter()
        self.watch(True)

    def leave(self) -> None:
        """Leave the observers, and evaluate the samples."""
        self.watch(False)
        for point, sample in self._samples:
            error = sample.relative_error()
            if math.isfinite(error):  # otherwise the step is skipped
                key = point.value, sample.residual is not None
                before = self.entries.get(key, SampledPoint(*key, 0, 0.0, ""))
                digest = sha256(before.sha256.encode() + sample.intended.cpu().numpy().tobytes()).hexdigest()
                worst_error = max(before.worst_error, error)
                self.entries[key] = SampledPoint(*key, before.samples + 1, worst_error, digest)
        self._samples = []

    def audit(self, point: Point, compressor: C) -> C:
        if isinstance(compressor, IdentityRounds) or why_not_sampled(compressor) is not None:
            return compressor
        number = self._messages[point]
        self._messages[point] += 1
        if number != self._steps % max(self._messages_before[point], 1):
            return compressor
        return audit(compressor, self._steps, partial(self._record, point))

    def _record(self, point: Point, sample: Sample) -> None:
        self._samples.append((point, sample))


class TrafficCounter:
    """Bytes that this rank sent by its ledger, its connections and its interfaces, and bytes that it would have sent
    without compression, while the counter runs.

    Args:
        topology: the ranks, which call ``start`` and ``stop`` together.
        ledger: ledger of this rank.
    """

    def __init__(self, topology: Topology, ledger: Ledger) -> None:
        self._barrier, self._ledger = topology.control.barrier, ledger
        self._before: tuple[Counter[Point], Counter[Point], int, SentCounts] | None = None
        self.sent: Counter[str] = Counter()
        self.uncompressed: Counter[str] = Counter()
        self.messages = 0
        self.interfaces: Counter[str] = Counter()
        self.lost_interfaces: set[str] = set()
        self.connections: int | None = 0
        self.namespace = ""
        self.reason = ""

    def _read(self) -> tuple[Counter[Point], Counter[Point], int, SentCounts]:
        self._barrier()  # everything sent so far has arrived
        try:
            counts = read_sent()
        except (OSError, ValueError, IndexError) as error:
            counts, self.reason = SentCounts("", {}, {}), f"the counters of interfaces cannot be read here ({error})"
        sent, uncompressed = self._ledger.sent_bytes.copy(), self._ledger.uncompressed_bytes.copy()
        messages = self._ledger.sent_messages
        self._barrier()  # nobody sends before all have read
        return sent, uncompressed, messages, counts

    def start(self) -> None:
        """Start or continue counting."""
        self._before = self._read()

    def stop(self) -> None:
        """Pause counting."""
        if self._before is None:
            return
        sent_before, uncompressed_before, messages_before, before = self._before
        sent, uncompressed, messages, counts = self._read()
        self._before, self.namespace = None, counts.namespace
        self.messages += messages - messages_before
        self.sent.update({point.value: sent[point] - sent_before[point] for point in sent})
        self.uncompressed.update(
            {point.value: uncompressed[point] - uncompressed_before[point] for point in uncompressed}
        )
        for name in sorted(counts.interfaces.keys() | before.interfaces.keys()):
            first, last = before.interfaces.get(name, 0), counts.interfaces.get(name, -1)
            if last < first:  # it is gone, or another one has its name
                self.lost_interfaces.add(name)
            else:
                self.interfaces[name] += last - first
        added = sum(n - before.connections.get(name, 0) for name, n in counts.connections.items())
        readable = self.connections is not None and bool(counts.connections)
        self.connections = (self.connections or 0) + added if readable else None


class RunCertificate:
    """Collector of a run's statements. Every rank has one, and calls its methods.

    Args:
        engines: engines of this rank.
        sections: sections of the command's flags beside the configuration's, by name.
        choice: the choice of ``--compress auto``, if this run has made one.
        time_check: the check of step times under that choice.
        loss_guard: the checks of the loss under that choice, or under the checkpoint's.
    """

    def __init__(
        self,
        engines: Engines,
        sections: Mapping[str, Any] = MappingProxyType({}),
        choice: AutoChoice | None = None,
        time_check: StepTimeCheck | None = None,
        loss_guard: LossGuard | None = None,
    ) -> None:
        self.engines, self.topology = engines, engines.topology
        self.sampler = MessageSampler(engines.ledger.observers)
        self.traffic = TrafficCounter(engines.topology, engines.ledger)
        self._choice, self._time_check, self._loss_guard = choice, time_check, loss_guard
        all_sections = {**{name: getattr(engines.config, name) for name in run_sections()}, **sections}
        first = self.topology.rank == 0
        self._inputs = [
            InputFile(name, str(path), fingerprint(path)) for name, path in input_files(all_sections) if first
        ]
        self._start = 0
        self._saved: Statements | None = None
        outer = engines.outer
        self._round_steps = 0 if outer is None else outer.options.every

    def begin(self, iteration: int, saved: Statements | None) -> None:
        """Begin at an iteration, with the statements of the checkpoint that the run goes on from, if any."""
        described = describe_choice(self.engines.config, self.topology.layout, self.engines.plan)
        keeps_choice = described and self._choice is None
        if keeps_choice and saved and saved.auto and list(saved.auto.specs) != specs_in_use(described):
            saved = replace(saved, auto=None)  # a run without --certificate has chosen in between
        self._start, self._saved = iteration, saved
        self.traffic.start()

    def begin_step(self, iteration: int) -> None:
        """Begin a step, counted from 0; sample its messages if it, or the round of islands after it, is due."""
        every, number = self._round_steps, iteration + 1
        if is_sampled(number) or (every and number % every == 0 and is_sampled(number // every)):
            self.sampler.join()

    def end_step(self) -> None:
        """End a step and the round after it: evaluations are not sampled."""
        self.sampler.leave()

    def collect(self, iteration: int) -> Statements:
        """Stop counting, and return the statements after some iterations, the same on every rank.

        ``traffic.start`` continues counting.
        """
        self.sampler.leave()
        self.traffic.stop()
        # The report holds predictions, which other ranks may round differently.
        decision = self._auto_decision() if self.topology.rank == 0 else None
        row = {
            "namespace": self.traffic.namespace,
            "reason": self.traffic.reason,
            "interfaces": self.traffic.interfaces,
            "lost_interfaces": sorted(self.traffic.lost_interfaces),
            "connections": self.traffic.connections,
            "sent": self.traffic.sent,
            "uncompressed": self.traffic.uncompressed,
            "messages": self.traffic.messages,
            "samples": [[*key, e.samples, e.worst_error, e.sha256] for key, e in self.sampler.entries.items()],
            "inputs": [[file.name, file.path, file.contents] for file in self._inputs],
            "auto": decision and asdict(decision),
        }
        group = self.topology.control.pg if self.topology.layout.world_size > 1 else None
        rows = [json.loads(text) for text in gather_texts(group, json.dumps(row))]
        saved = self._saved
        # Samples of the checkpoint, and after them those of all ranks, by point.
        samples: dict[tuple[str, bool], SampledPoint] = {}
        new_samples = [SampledPoint(*entry) for row in rows for entry in row["samples"]]
        for entry in [*(saved.samples if saved else ()), *new_samples]:
            key = entry.point, entry.residual
            before = samples.get(key, SampledPoint(*key, 0, 0.0, ""))
            digest = sha256((before.sha256 + entry.sha256).encode()).hexdigest()
            worst_error = max(before.worst_error, entry.worst_error)
            samples[key] = SampledPoint(*key, before.samples + entry.samples, worst_error, digest)
        plan, not_sampled = self.engines.plan, dict[str, str]()
        sampled_points = {name for name, _ in samples}
        for point, spec in plan.specs.items():
            if point.value not in sampled_points:
                sends_messages = spec.registration.codec is not None and not point.is_reduction
                reason = why_not_sampled(plan.codec(point)) if sends_messages else None
                not_sampled[point.value] = reason or "no message of a sampled step left anything out so far"
        return Statements(
            code=code_digest(),
            kernels=kernels_digest(),
            torch=torch.__version__,
            inputs=[InputFile(*file) for file in rows[0]["inputs"]],
            traffic=[*(saved.traffic if saved else ()), self._traffic_span(rows, iteration)],
            samples=[samples[key] for key in sorted(samples)],
            not_sampled=not_sampled,
            differences=disagreements(self.engines)[:3],
            auto=rows[0]["auto"] and AutoDecision.read(rows[0]["auto"], "the choice"),
        )

    def _traffic_span(self, rows: list[dict[str, Any]], iteration: int) -> TrafficSpan:
        # The sum of counters has no zeros.
        sent, uncompressed = (
            dict(sum((Counter(row[kind]) for row in rows), Counter())) for kind in ("sent", "uncompressed")
        )
        interfaces: Counter[str] = Counter()
        for row in {row["namespace"]: row for row in reversed(rows)}.values():  # the first rank of each node
            interfaces.update(row["interfaces"])
        names = sorted(name for name, count in interfaces.items() if count)
        connections = [row["connections"] for row in rows]
        connections_sum = None if None in connections else sum(connections)
        reason = self._why_not_compared() or next((row["reason"] for row in rows if row["reason"]), "")
        messages = sum(row["messages"] for row in rows)
        span = partial(TrafficSpan, self._start, iteration, len(rows), messages, sent, uncompressed=uncompressed)
        if reason:
            return span(reason=reason)
        lost = sorted({name for row in rows for name in row["lost_interfaces"]})
        if lost and sum(interfaces.values()) < sum(sent.values()):
            reason = f"the counters of {', '.join(lost)} were removed or reset meanwhile"
            return span(names=names, connections=connections_sum, reason=reason)
        return span(sum(interfaces.values()), names, connections_sum)

    def _why_not_compared(self) -> str:
        config = self.engines.config
        if self.topology.layout.world_size == 1:
            return "a single rank sends nothing"
        if config.parallel.distributed_backend != "gloo":
            return "NCCL also sends by other ways than network interfaces"
        if config.islands.several:
            return "other islands may use the same interfaces"
        return ""

    def _auto_decision(self) -> AutoDecision | None:
        """The decision about the newest choice of the run, with the specs that are in use."""
        config, choice, saved = self.engines.config, self._choice, self._saved.auto if self._saved else None
        described = describe_choice(config, self.topology.layout, self.engines.plan)
        if not described:
            return None
        new_checks = [] if self._loss_guard is None else self._loss_guard.checks
        checks = [*(saved.checks if saved else ()), *new_checks]
        if choice is None:
            return saved and replace(saved, specs=specs_in_use(described), checks=checks)
        return AutoDecision(
            specs=specs_in_use(described),
            predicted_s=choice.chosen.prediction.seconds,
            uncompressed_s=choice.plain.prediction.seconds,
            trial_s=choice.chosen.trial_s,
            measured_s=None if self._time_check is None else self._time_check.measured_s,
            report=report(choice, config.compression.max_loss_increase).splitlines(),
            increases={each.spec: each.increase for each in choice.chosen.candidates.values()},
            checks=checks,
            uncompressed_trial_s=choice.plain.trial_s,
            settings=flags_of(choice.chosen.settings),
            after=self._start,
        )
