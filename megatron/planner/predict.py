"""Prediction of a choice's step: time and its breakdown, memory, traffic, and utilization."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.compression.points import Point
from megatron.config.run import RunConfig
from megatron.models.flops import model_tflops
from megatron.models.stages import padded_vocab_size
from megatron.parallel.pipeline.bounds import list_bounds
from megatron.parallel.pipeline.schedule import WITH_WEIGHT_PASSES, ZERO_BUBBLE_V
from megatron.parallel.pipeline.simulate import Pipeline, RankTimes
from megatron.planner.choice import Choice
from megatron.planner.cluster import Cluster
from megatron.planner.costs import Wires, wires_of
from megatron.planner.footprint import internode_traffic, memory, traffic
from megatron.planner.islands import OuterCosts, OuterPlan
from megatron.planner.piece_costs import EMBEDDING
from megatron.planner.stages import StageCost, Stages, collective_seconds


@dataclass(frozen=True)
class Prediction:
    """The prediction of a step.

    Args:
        choice: the predicted choice.
        seconds: seconds of an iteration.
        parts: breakdown of ``seconds`` on the last pipeline rank to reduce its gradients; the values add up to it.
        memory: bytes on the fullest rank, by category.
        sent: bytes that a device sends in an iteration, by point, averaged over the pipeline ranks.
        across: the part of ``sent`` that leaves the node.
        tokens_per_s: tokens per second of the whole cluster.
        mfu: the model's FLOP/s over the devices' peak.
        outer: costs of islands; None without islands. With islands, ``seconds`` is the mean over all iterations of the
            run.
    """

    choice: Choice
    seconds: float
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    sent: Mapping[str, float]
    across: Mapping[str, float]
    tokens_per_s: float
    mfu: float
    outer: OuterPlan | None = None

    @property
    def memory_bytes(self) -> float:
        """Bytes on the fullest rank."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class _Iteration:
    """The times of an iteration, in seconds.

    Args:
        stage, time: costs and simulated times of the last pipeline rank to reduce its gradients.
        reduced_s: time at which its gradients are reduced.
        embedding_coding_s: encoding and decoding of the tied embedding's gradient.
        gather_s: all-gather of the parameters.
        seconds: the whole iteration.
    """

    stage: StageCost
    time: RankTimes
    reduced_s: float
    embedding_coding_s: float
    gather_s: float
    seconds: float


class Predictor(Stages):
    """Predictor of choices for a model on a cluster.

    Args:
        config: resolved configuration.
        cluster: the devices and links.
        vocab_size: entries of the vocabulary.
        imbalance: maximum over mean number of tokens per expert of a layer.

    ``slowdown`` is the ratio of the measured to the predicted seconds of an iteration; 1 until a run has measured it.
    All predicted times are multiplied by it, except those of the rounds of islands.
    """

    def __init__(self, config: RunConfig, cluster: Cluster, vocab_size: int, imbalance: float = 1.0) -> None:
        super().__init__(config, cluster, vocab_size, imbalance)
        self.slowdown = 1.0
        self._pipelines: dict[Choice, Pipeline] = {}
        self._bounds: dict[tuple[Choice, int], list[float]] = {}
        self._times: dict[Choice, Sequence[RankTimes]] = {}
        self._memory: dict[Choice, float] = {}
        self.outer = OuterCosts(self)

    def lower_bound(self, choice: Choice) -> float:
        """Lower bound on the seconds of a choice, cheaper to compute than its prediction."""
        return max(self.pass_bounds_s(choice))

    def pass_bounds_s(self, choice: Choice) -> list[float]:
        """Lower bounds on the seconds of a choice's passes.

        The changes that compressors of different points make to each of them add up; except those at the two
        tensor-parallel points, whose collectives may together hide behind the gradients of weights.
        """
        # The bound holds for any order of passes; reduction and optimizer only add time.
        schedule: Literal["zb-v", "zb-h1", "1f1b"] = "zb-h1" if choice.schedule in WITH_WEIGHT_PASSES else "1f1b"
        schedule = "zb-v" if choice.in_v_form else schedule
        passes_only = dataclasses.replace(_passes_only(choice), schedule=schedule, micro_batches=1)
        key = passes_only, choice.micro_batches
        if key not in self._bounds:
            if passes_only not in self._pipelines:
                self._pipelines[passes_only] = self.pipeline(passes_only, wires_of(self.cluster, passes_only))
            self._bounds[key] = list_bounds(self._pipelines[passes_only], choice.micro_batches, choice.flush)
        return [bound_s * self.slowdown for bound_s in self._bounds[key]]

    def times(self, choice: Choice, pipeline: Pipeline) -> Sequence[RankTimes]:
        """Simulated pipeline times, cached for all choices that differ only in their reductions."""
        passes_only = _passes_only(choice)
        if passes_only not in self._times:
            run = pipeline.run if choice.flush else pipeline.run_without_flush
            self._times[passes_only] = run(choice.micro_batches)
        return self._times[passes_only]

    def memory_bytes(self, choice: Choice) -> float:
        """Bytes on the fullest rank; cached, because a search repeatedly needs the bytes without compressors."""
        if choice not in self._memory:
            outer_bytes = self.outer.memory_bytes(choice) if choice.outer_spec else 0.0
            self._memory[choice] = sum(memory(self, choice).values()) + outer_bytes
        return self._memory[choice]

    def predict(self, choice: Choice) -> Prediction:
        """Predict a step of a choice.

        Raises:
            UserError: when a compressor cannot be planned.
        """
        if choice.outer_spec:
            inner_specs = tuple(spec for spec in choice.specs if spec != choice.outer_spec)
            return self._add_islands(self.predict(dataclasses.replace(choice, specs=inner_specs)), choice)
        wires = wires_of(self.cluster, choice)
        iteration = self._predict_times(choice, wires)
        stage, time, reduced_s = iteration.stage, iteration.time, iteration.reduced_s
        seconds = iteration.seconds * self.slowdown
        reduction_coding_s = stage.coding_s + iteration.embedding_coding_s
        passes = self.passes(choice, wires)
        exposed = choice.micro_batches * sum(n * passes[name].tensor_s for name, n in stage.pieces.items())
        tp_coding = choice.micro_batches * sum(n * passes[name].coding_s for name, n in stage.pieces.items())
        experts = choice.micro_batches * sum(n * passes[name].experts_s for name, n in stage.pieces.items())
        breakdown = {
            "compute": time.busy - exposed - tp_coding - experts,
            "tensor parallel": exposed,
            "expert parallel": experts,
            "pipeline": time.end - time.busy - time.coding,
            "coding": time.coding + tp_coding + reduction_coding_s,
            "gradients": reduced_s - time.end - reduction_coding_s,
            "optimizer": iteration.seconds - reduced_s - iteration.gather_s,
            "parameters": iteration.gather_s,
        }
        breakdown = {name: part_s * self.slowdown for name, part_s in breakdown.items()}
        sent = traffic(self, choice, wires)
        multiple = self.config.model.make_vocab_size_divisible_by
        tflops = model_tflops(
            self.config.model,
            padded_vocab_size(self.vocab_size, multiple, choice.tp),
            global_batch_size=choice.dp * choice.micro_batches * choice.micro_batch,
            seconds=seconds,
            world_size=choice.world_size,
        )
        tokens = choice.islands * choice.dp * choice.micro_batches * choice.micro_batch * self.config.model.seq_length
        return Prediction(
            choice,
            seconds,
            breakdown,
            memory(self, choice),
            sent,
            internode_traffic(self, choice, wires, sent),
            tokens / seconds,
            tflops / self.cluster.device.peak_tflops,
        )

    def seconds(self, choice: Choice) -> float:
        """Seconds of an iteration without islands, as ``predict`` returns them."""
        return self._predict_times(choice, wires_of(self.cluster, choice)).seconds * self.slowdown

    def passes_s(self, choice: Choice) -> float:
        """Seconds until the last pass of an iteration has ended."""
        times = self.times(choice, self.pipeline(choice, wires_of(self.cluster, choice)))
        return max(time.end for time in times) * self.slowdown

    def least_update_s(self, choice: Choice) -> float:
        """Lower bound on the seconds of an iteration beyond ``passes_s``.

        It does not depend on the compressors of the passes. The rank whose passes end last cannot reduce its gradients
        faster than a rank that waits for nothing. Then the last rank to reduce its gradients, possibly another one,
        updates its parameters, and all ranks gather theirs.
        """
        wires, ranks = wires_of(self.cluster, choice), range(choice.pp)
        reduction_s = min(self._least_reduction_s(choice, rank, wires) for rank in ranks)
        update_s = min(self._update_s(choice, rank) + self._orthogonal_s(choice, rank, wires) for rank in ranks)
        end_s = self._world_s(wires, choice) + self._slowest_gather_s(choice, wires)
        return (reduction_s + update_s + end_s) * self.slowdown

    def _least_reduction_s(self, choice: Choice, rank: int, wires: Wires) -> float:
        """Lower bound on the seconds from a rank's last pass to its reduced gradients."""
        stage = self.stage(choice, rank, wires)
        partial_s = collective_seconds([self.partial_reduction(choice, rank)], wires.tp, choice.tp)
        later_s = stage.coding_s - stage.first_coding_s
        if not choice.overlaps_reduction:
            return stage.first_coding_s + max(partial_s, sum(stage.rounds[:1])) + max(later_s, sum(stage.rounds[1:]))
        return stage.first_coding_s + partial_s + later_s

    def _predict_times(self, choice: Choice, wires: Wires) -> _Iteration:
        pipeline = self.pipeline(choice, wires)
        times = self.times(choice, pipeline)
        stages = [self.stage(choice, rank, wires) for rank in range(choice.pp)]
        reduced, embedding_coding_s = self._reduction_ends(choice, wires, pipeline, times, stages)
        slowest = max(range(choice.pp), key=lambda rank: reduced[rank])
        gather_s = self._slowest_gather_s(choice, wires)
        seconds = reduced[slowest] + self._world_s(wires, choice) + self._update_s(choice, slowest) + gather_s
        seconds += self._orthogonal_s(choice, slowest, wires)
        return _Iteration(stages[slowest], times[slowest], reduced[slowest], embedding_coding_s, gather_s, seconds)

    def _add_islands(self, inner: Prediction, choice: Choice) -> Prediction:
        """Predict the mean iteration of a run with islands.

        Args:
            inner: the prediction of a step of an island.
            choice: the choice with its spec of ``outer``.
        """
        plan = self.outer.plan(choice, inner.seconds)
        seconds = inner.seconds + plan.mean_in_step_s + plan.mean_rounds_s
        sent = plan.mean_bytes / choice.world_size
        across = {Point.OUTER.value: sent} if self.cluster.gpus > self.cluster.gpus_per_node else {}
        return dataclasses.replace(
            inner,
            choice=choice,
            seconds=seconds,
            parts={**inner.parts, "in step": plan.mean_in_step_s, "rounds": plan.mean_rounds_s},
            memory={**inner.memory, "islands": plan.memory_bytes},
            sent={**inner.sent, Point.OUTER.value: sent},
            across={**inner.across, **across},
            tokens_per_s=inner.tokens_per_s * inner.seconds / seconds,
            mfu=inner.mfu * inner.seconds / seconds,
            outer=plan,
        )

    def _reduction_ends(
        self, choice: Choice, wires: Wires, pipeline: Pipeline, times: Sequence[RankTimes], stages: Sequence[StageCost]
    ) -> tuple[list[float], float]:
        """Times at which each rank's gradients are reduced, and seconds of coding the tied embedding's gradient."""
        specs = self.book.specs(choice)
        needs_barrier = any(
            point in specs and specs[point].make_rounds().finalizes for point in (Point.DP_GRAD, Point.EMBED_GRAD)
        )
        barrier_s = max(time.end for time in times) + self._world_s(wires, choice)
        limit = self.bucket_elements(choice)
        ready = []
        for rank, (time, stage) in enumerate(zip(times, stages, strict=True)):
            end = time.end + stage.first_coding_s
            end += collective_seconds([self.partial_reduction(choice, rank)], wires.tp, choice.tp)
            coding, sent = stage.coding_s - stage.first_coding_s, sum(stage.rounds[1:])
            if choice.delay:
                # The last step's gradients are reduced in rounds that run beside this step's passes, with coding
                # between passes. Beside other kinds of parallelism, later rounds begin after the last pass.
                if choice.tp == choice.pp == choice.ep == 1:
                    ready.append(max(end + coding, stage.first_coding_s + sum(stage.rounds)))
                else:
                    ready.append(max(end, stage.first_coding_s + sum(stage.rounds[:1])) + coding + sent)
                continue
            elements = sum(count for count, _ in stage.parts)
            buckets = 1 if limit is None or not choice.overlap else max(1, -(-elements // limit))
            if stage.rounds:
                # The first round starts during backward: buckets fill one by one and are then encoded. If a rank has
                # weight passes, the last of them fill the buckets.
                separate = pipeline.kind in WITH_WEIGHT_PASSES and (rank > 0 or pipeline.kind == ZERO_BUBBLE_V)
                seconds = pipeline.weight_s if separate else pipeline.backward_s
                backward = sum(seconds[virtual] for virtual in pipeline.layout.virtual_stages(rank))
                round_end = 0.0
                for number in range(1, buckets + 1):
                    coded = time.end - backward * (1 - number / buckets) + stage.first_coding_s * number / buckets
                    round_end = max(round_end, coded) + stage.rounds[0] / buckets
                end = max(end, round_end)
            if needs_barrier:
                end = max(end, barrier_s)
            # Coding of a bucket overlaps with the messages of the other buckets.
            ready.append(end + max(coding, sent) + min(coding, sent) / buckets)
        tied = self.book.piece(choice, EMBEDDING).tied_shape
        if not tied or not choice.splits_tie:
            return ready, 0.0
        reduction = self.book.embedding_reduction(choice, tied, self.tied_elements(choice))
        fused = self.book.fused(choice)
        wire, size = (wires.holders, 2 * choice.dp) if fused else (wires.ends, 2)
        coding = reduction.coding_s * self.book.coding(choice, Point.EMBED_GRAD)
        levels = self.book.levels(choice, Point.EMBED_GRAD)
        embedding_s = coding + sum(
            collective_seconds(collectives, wire, size, levels) for collectives in reduction.rounds
        )
        ready[0] = ready[-1] = max(ready[0], ready[-1]) + embedding_s
        return ready, coding

    def _world_s(self, wires: Wires, choice: Choice) -> float:
        """Seconds of a small all-reduce over all ranks."""
        return wires.world.collective("all-reduce", 64.0, choice.world_size)

    def _update_s(self, choice: Choice, rank: int) -> float:
        """Seconds of clearing gradients, their norm, the optimizer update, and copies, bound by memory bandwidth."""
        owned, elements = self.owned(choice, rank), self.elements(choice, rank)
        grad, param = self.grad_bytes, self.param_bytes
        moved: float = elements * grad * (1 + 3 * choice.delay)  # cleared; checked and copied, if delayed
        moved += 0 if choice.flush else elements * 2 * param  # copied for the passes of the step before
        moved += owned * (2 * grad + 24 + (param if param < 4 else 0))
        return moved / (self.cluster.device.memory_gbyte_per_s * 1e9) * self.cluster.correction("optimizer")

    def _orthogonal_s(self, choice: Choice, rank: int, wires: Wires) -> float:
        """Seconds that Muon takes to gather matrices, orthogonalize them, and scatter them again."""
        steps, seconds = self.config.optimizer.muon_num_ns_steps, 0.0
        for work, wire in zip(self.matrices(choice, rank), (wires.dp, wires.expert_dp), strict=False):
            seconds += steps * work.flops / self.cluster.device.flops
            for sent, group, size in ((work.to_replicas, wire, work.replicas), (work.to_tensors, wires.tp, choice.tp)):
                if size > 1:
                    seconds += group.collective("all-to-all", sent * size / (size - 1), size)
        return seconds

    def _slowest_gather_s(self, choice: Choice, wires: Wires) -> float:
        """Seconds of the slowest rank's all-gather of updated parameters: all ranks start their updates together."""
        if not choice.sharded:
            return 0.0
        slowest_s, correction = 0.0, self.book.coding(choice, Point.PARAM_GATHER)
        for rank in range(choice.pp):
            seconds, group_wires = 0.0, (wires.dp, wires.expert_dp)
            for (elements, size), wire in zip(self.count_replicas(choice, rank), group_wires, strict=False):
                share = self.book.param_gather(choice, -(-elements // size), rank)
                coding = (share.encode_s + size * share.decode_s) * correction
                seconds += (coding + wire.collective("all-gather", share.nbytes * size, size)) if size > 1 else 0.0
            slowest_s = max(slowest_s, seconds)
        return slowest_s


def _passes_only(choice: Choice) -> Choice:
    """Reset the fields of a choice that do not affect its forward and backward passes."""
    specs = tuple(spec for spec in choice.specs if spec.startswith(("pp-", "tp-", "ep-")))
    return dataclasses.replace(choice, sharded=False, overlap=False, delay=0, specs=specs)
