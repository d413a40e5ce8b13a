"""Communication between islands and the time it adds to a run: in synchronous iterations and in outer rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.compression.outer import RoundSchedule
from megatron.compression.points import Point
from megatron.diloco.fragments import fragment_of
from megatron.planner.choice import Choice
from megatron.planner.cluster import Cluster, Wire
from megatron.planner.costs import Wires, wires_of
from megatron.planner.dry_run import Collective
from megatron.planner.names import EMBEDDING, HEAD, piece_of
from megatron.planner.stages import Stages, sent_bytes

FIRST, OF_EXPERTS, ALL = "first", "experts", "all"
"""Replicas that communicate for a stage of an island: the first, one per distinct set of experts, or all."""

_ASKED = 6
_ASKED_OF_EACH = 4
"""Requests per round to the rendezvous server: a fixed number, and a number for each island."""

_MOVED = 40
"""Bytes read and written per updated fp32 parameter in a round: pseudo-gradient, outer step, parameters."""

_SMALL = 64.0
"""Bytes of a small vector of totals."""


@dataclass(frozen=True)
class Share:
    """Part of a stage in a collective over islands.

    Args:
        speakers: the replicas that take part.
        stage: the pipeline stage.
        collective: the collective of each of their tensor-parallel ranks.
    """

    speakers: str
    stage: int
    collective: Collective


@dataclass(frozen=True)
class Transfer:
    """Costs of the exchange of a fragment.

    Args:
        rounds_s: seconds of each of its consecutive rounds of collectives.
        coding_s: seconds of encoding and decoding.
        nbytes: bytes that leave an island.
        kept: bytes of the compressors' state on the fullest rank.
    """

    rounds_s: tuple[float, ...]
    coding_s: float
    nbytes: float
    kept: float

    def waited_s(self, delay: int, step_s: float) -> float:
        """Seconds not hidden by ``delay`` steps; a completed round is noticed, and the next started, after a step."""
        at, step = 0.0, 0
        for seconds in self.rounds_s:
            at = max(at, step * step_s) + seconds
            while step < delay and step * step_s < at:
                step += 1
        return max(0.0, at - delay * step_s)


@dataclass(frozen=True)
class OuterPlan:
    """Time, traffic and memory that islands add to a run.

    Args:
        every: inner steps of a round.
        in_step, local: number of synchronous iterations, and of iterations in which islands train independently.
        in_step_s: seconds that sums over islands add to a synchronous iteration.
        round_s: seconds for which training waits in a round of all fragments.
        transfer_s: seconds of the transfers of a round, hidden or not.
        run_s: seconds that rounds add to the run.
        in_step_bytes, round_bytes: bytes that leave an island in a synchronous iteration, and in a round.
        mean_bytes: bytes that leave an island per iteration, on average.
        memory_bytes: anchor, momentum, residual and pseudo-gradients on the fullest rank.
        loss_percent: predicted increase of the loss, in percent; None where no similar run was measured.
        beyond: settings outside the measured range.
    """

    every: int
    in_step: int
    local: int
    in_step_s: float
    round_s: float
    transfer_s: float
    run_s: float
    in_step_bytes: float
    round_bytes: float
    mean_bytes: float
    memory_bytes: float
    loss_percent: float | None = None
    beyond: tuple[str, ...] = ()

    @property
    def iterations(self) -> int:
        """Iterations of the run."""
        return self.in_step + self.local

    @property
    def mean_in_step_s(self) -> float:
        """Mean seconds that synchronous sums add to an iteration."""
        return self.in_step * self.in_step_s / self.iterations

    @property
    def mean_rounds_s(self) -> float:
        """Mean seconds that rounds add to an iteration."""
        return self.run_s / self.iterations


@dataclass(frozen=True)
class OuterTerms:
    """Terms of the outer plans of a layout and a spec of ``outer``, independent of the step time.

    Args:
        schedule: when fragments are sent.
        in_step_s, in_step_bytes: see ``OuterPlan``.
        inside_s: seconds of a fragment's round besides transfers.
        transfers: the exchange of each fragment.
        memory_bytes: see ``OuterPlan``.
    """

    schedule: RoundSchedule
    in_step_s: float
    in_step_bytes: float
    inside_s: float
    transfers: tuple[Transfer, ...]
    memory_bytes: float

    @property
    def local(self) -> int:
        """Iterations in which islands train independently."""
        return self.schedule.end - self.schedule.start

    def sendings(self) -> list[int]:
        """Number of times each fragment is sent before the end of the run, when all fragments are sent again."""
        count = len(self.transfers)
        turns = max(self.local - 1, 0) // self.schedule.options.turn
        return [turns // count + (fragment < turns % count) for fragment in range(count)]

    def waited_s(self, step_s: float) -> list[float]:
        """Seconds for which training waits for each fragment."""
        delay = self.schedule.options.delay
        return [self.inside_s + transfer.coding_s + transfer.waited_s(delay, step_s) for transfer in self.transfers]

    def rounds_s(self, step_s: float) -> float:
        """Seconds that rounds add to the run; the last fragments are always waited for, regardless of ``delay``."""
        usual = sum(n * wait for n, wait in zip(self.sendings(), self.waited_s(step_s), strict=True))
        last = sum(self.inside_s + transfer.coding_s + sum(transfer.rounds_s) for transfer in self.transfers)
        return usual + (last if self.local else 0.0)

    def added_s(self, step_s: float) -> float:
        """Mean seconds that islands add to an iteration, given seconds per step; not increasing in ``step_s``."""
        return (self.schedule.start * self.in_step_s + self.rounds_s(step_s)) / self.schedule.end

    def plan(self, step_s: float) -> OuterPlan:
        """The outer plan of a run, without the predicted loss."""
        start, last = self.schedule.start, 1 if self.local else 0
        sent = sum((n + last) * transfer.nbytes for n, transfer in zip(self.sendings(), self.transfers, strict=True))
        return OuterPlan(
            self.schedule.options.every,
            start,
            self.local,
            self.in_step_s,
            sum(self.waited_s(step_s)),
            sum(sum(transfer.rounds_s) for transfer in self.transfers),
            self.rounds_s(step_s),
            self.in_step_bytes,
            sum(transfer.nbytes for transfer in self.transfers),
            (start * self.in_step_bytes + sent) / self.schedule.end,
            self.memory_bytes,
        )


class OuterCosts:
    """The costs of the point ``outer`` for choices of several islands.

    Args:
        stages: the stages of an island.
    """

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self._in_step: dict[Choice, tuple[float, float]] = {}
        self._transfers: dict[object, Transfer] = {}
        self._terms: dict[tuple[Choice, str], OuterTerms] = {}
        self._crowds: dict[object, list[tuple[Wire, list[Counter[tuple[str, int]]]]]] = {}

    @property
    def width(self) -> int:
        """Bytes per element of a pseudo-gradient."""
        return max(self.stages.param_bytes, 4)

    def in_step(self, choice: Choice) -> tuple[float, float]:
        """Seconds that exact sums of each replica's share add to a synchronous step, and bytes leaving an island."""
        key = layout_of(choice)
        if key not in self._in_step:
            shares = []
            for stage in range(key.pp):
                duplicates = self._tied(key) if stage == key.pp - 1 else 0
                for elements, replicas in self.stages.parts(key, stage):
                    nbytes = (elements - duplicates) * self.stages.grad_bytes / replicas
                    shares.append(Share(ALL, stage, Collective("all-reduce", nbytes)))
                    duplicates = 0
            self._in_step[key] = self._seconds(key, shares) + self._totals_s(key), self._sent(key, shares)
        return self._in_step[key]

    def _compressed_in_step(self, choice: Choice, transfers: Sequence[Transfer]) -> tuple[float, float]:
        """``in_step`` where the compressor of ``outer`` sums the gradients."""
        wires = wires_of(self.stages.cluster, choice)
        seconds = max(self._told_on(choice, stage, 1, wires) for stage in range(choice.pp))
        seconds += sum(transfer.coding_s + sum(transfer.rounds_s) for transfer in transfers)
        return seconds + self._totals_s(choice), sum(transfer.nbytes for transfer in transfers)

    def _totals_s(self, choice: Choice) -> float:
        return 2 * self._seconds(choice, [Share(FIRST, 0, Collective("all-reduce", _SMALL))])

    def _tied(self, choice: Choice) -> float:
        duplicated = self.stages.book.tied and choice.pp > 1
        return self.stages.tied_elements(replace(choice, sharded=False)) if duplicated else 0

    def terms(self, choice: Choice, outer: str) -> OuterTerms:
        """Cached terms of the outer plans of a layout and a spec of ``outer``."""
        key = layout_of(choice), outer
        if key not in self._terms:
            self._terms[key] = self._found(replace(key[0], specs=(outer,)))
        return self._terms[key]

    def _found(self, choice: Choice) -> OuterTerms:
        iterations = self.stages.config.training.planned_iters
        assert iterations is not None
        spec = self.stages.book.specs(choice)[Point.OUTER]
        schedule = RoundSchedule(spec.outer, min(spec.activation.warmup_iters, iterations), iterations)
        transfers = [self.transfer(choice, fragment) for fragment in range(spec.outer.fragments)]
        copies = 0 if spec.outer.offload else spec.outer.copies
        memory = self._memory_bytes(choice, copies, transfers)
        inside_s = self._inside_s(choice, spec.outer.fragments)
        compressed = spec.outer.in_step == "compressed"
        in_step = self._compressed_in_step(choice, transfers) if compressed else self.in_step(choice)
        return OuterTerms(schedule, *in_step, inside_s, tuple(transfers), memory)

    def _memory_bytes(self, choice: Choice, copies: int, transfers: Sequence[Transfer]) -> float:
        """Bytes of anchor, momentum, residuals and one fragment's pseudo-gradient on the fullest rank."""
        ranks = range(choice.pp)
        outer_state = copies * self.width * max(self.stages.owned(choice, rank) for rank in ranks)
        difference = self.width * max(self.stages.elements(choice, rank) for rank in ranks) / len(transfers)
        return outer_state + difference + sum(transfer.kept for transfer in transfers)

    def transfer(self, choice: Choice, fragment: int) -> Transfer:
        """Cached exchange of a fragment with the other islands."""
        spec = self.stages.book.specs(choice)[Point.OUTER]
        layout = (choice.mesh, choice.chunks, choice.sequence_parallel, choice.islands)
        activation = (spec.activation.first_stages, spec.activation.last_stages)
        codec = (spec.name, repr(spec.options), repr(spec.schedules), spec.feedback, activation)
        key = (*layout, *codec, spec.outer.fragments, fragment)
        if key not in self._transfers:
            self._transfers[key] = self._exchanged(choice, fragment, spec.outer.fragments)
        return self._transfers[key]

    def _exchanged(self, choice: Choice, fragment: int, fragments: int) -> Transfer:
        book = self.stages.book
        rounds: list[list[Share]] = []
        coding_s = state_bytes = 0.0
        for stage in range(choice.pp):
            contents = self._contents(choice, stage, fragment, fragments)
            costs = [
                (n, speakers, book.difference(choice, name, stage, speakers == OF_EXPERTS))
                for name, n in contents.items()
                for speakers in (FIRST, OF_EXPERTS)
            ]
            for n, speakers, cost in costs:
                for number, collectives in enumerate(cost.rounds):
                    rounds.extend([] for _ in range(number + 1 - len(rounds)))
                    rounds[number] += [
                        Share(speakers, stage, replace(collective, nbytes=n * collective.nbytes))
                        for collective in collectives
                    ]
            coding_s = max(coding_s, sum(n * cost.coding_s for n, _, cost in costs))
            state_bytes = max(state_bytes, sum(n * cost.state_bytes for n, _, cost in costs))
        return Transfer(
            tuple(self._seconds(choice, shares) for shares in rounds),
            coding_s * book.coding(choice, Point.OUTER),
            sum(self._sent(choice, shares) for shares in rounds),
            state_bytes,
        )

    def _contents(self, choice: Choice, stage: int, fragment: int, fragments: int) -> Counter[str]:
        """Number of each piece of a fragment on a pipeline rank."""
        model = self.stages.config.model
        layers, virtual = model.num_layers, choice.pp * choice.chunks
        stage_layers = layers // virtual
        counts: Counter[str] = Counter()
        for chunk in range(stage, virtual, choice.pp):
            names = [
                (f"layers.{i}.", piece_of(model, i)) for i in range(chunk * stage_layers, (chunk + 1) * stage_layers)
            ]
            names += [(EMBEDDING, EMBEDDING)] if chunk == 0 else []
            names += [(HEAD, HEAD)] if chunk == virtual - 1 else []
            counts.update(piece for name, piece in names if fragment_of(name, layers, fragments) == fragment)
        return counts

    def _inside_s(self, choice: Choice, fragments: int) -> float:
        """Seconds of a fragment's round besides transfers: pseudo-gradient, rendezvous, outer step, local traffic."""
        wires = wires_of(self.stages.cluster, choice)
        local_s = max(self._told_on(choice, stage, fragments, wires) for stage in range(choice.pp))
        requests = _ASKED + _ASKED_OF_EACH * choice.islands
        meeting = 2 * requests * max(wire.latency_s for wire, _ in self._crowd(choice))
        tied_s = wires.ends.collective("broadcast", self._tied(choice) * self.width / fragments, 2)
        return local_s + tied_s + meeting + wires.world.collective("all-reduce", _SMALL, choice.world_size)

    def _told_on(self, choice: Choice, stage: int, fragments: int, wires: Wires) -> float:
        stages, seconds = self.stages, 0.0
        for (elements, size), wire in zip(stages.parts(choice, stage), (wires.dp, wires.expert_dp), strict=False):
            nbytes = elements * self.width / fragments
            seconds += wire.collective("broadcast", nbytes, size)
            if choice.sharded:
                seconds += wire.collective("all-reduce", nbytes, size)
                seconds += wire.collective("all-gather", float(elements * stages.param_bytes), size)
        moved = stages.owned(choice, stage) * _MOVED * self.width / 4 / fragments
        return seconds + moved / (stages.cluster.device.memory_gbyte_per_s * 1e9)

    def _sent(self, choice: Choice, shares: Sequence[Share]) -> float:
        """Bytes that leave an island."""
        ranks = {FIRST: choice.tp, OF_EXPERTS: choice.expert_ranks, ALL: choice.tp * choice.dp}
        return sum(ranks[share.speakers] * sent_bytes([share.collective], choice.islands) for share in shares)

    def _seconds(self, choice: Choice, shares: Sequence[Share]) -> float:
        """Seconds of collectives over islands; those of a kind run concurrently, and the busiest link decides."""
        total = 0.0
        for kind in dict.fromkeys(share.collective.kind for share in shares):
            kind_shares = [share for share in shares if share.collective.kind == kind]
            slowest = 0.0
            for wire, blocks in self._crowd(choice):
                load = max(
                    sum(block[share.speakers, share.stage] * share.collective.nbytes for share in kind_shares)
                    for block in blocks
                )
                slowest = max(slowest, wire.collective(kind, load, choice.islands))
            total += slowest
        return total

    def _crowd(self, choice: Choice) -> list[tuple[Wire, list[Counter[tuple[str, int]]]]]:
        """The links between islands, and the number of speakers behind each link by kind and stage."""
        key = choice.mesh, choice.islands
        if key not in self._crowds:
            speakers = _speakers(choice)
            self._crowds[key] = [
                (wire, _blocks(speakers, size)) for size, wire in _links(self.stages.cluster, choice.world_size)
            ]
        return self._crowds[key]


def layout_of(choice: Choice) -> Choice:
    """The fields of a choice that determine communication between islands; the others are reset."""
    plain = Choice(choice.tp, choice.pp, choice.dp, choice.ep, islands=choice.islands, folded=choice.folded)
    return replace(plain, chunks=choice.chunks, sequence_parallel=choice.sequence_parallel, sharded=choice.sharded)


def _speakers(choice: Choice) -> list[tuple[int, str, int]]:
    """Rank, kind and stage of each speaker of an island."""
    return [
        ((stage * choice.dp + replica) * choice.tp + tensor_rank, kind, stage)
        for kind, replicas in ((FIRST, 1), (OF_EXPERTS, choice.expert_ranks // choice.tp), (ALL, choice.dp))
        for stage in range(choice.pp)
        for replica in range(replicas)
        for tensor_rank in range(choice.tp)
    ]


def _blocks(speakers: Sequence[tuple[int, str, int]], size: int) -> list[Counter[tuple[str, int]]]:
    """Number of speakers by kind and stage in each block of ``size`` consecutive ranks."""
    blocks: dict[int, Counter[tuple[str, int]]] = {}
    for rank, kind, stage in speakers:
        blocks.setdefault(rank // size, Counter())[kind, stage] += 1
    return list(blocks.values())


def _links(cluster: Cluster, world: int) -> list[tuple[int, Wire]]:
    """The links shared by islands of ``world`` ranks, each with the number of ranks behind it."""
    islands = cluster.gpus // world
    if cluster.gpus <= cluster.gpus_per_node:
        return [(1, Wire(cluster.inside.gbit_per_s * 1e9 / 8, cluster.inside.latency_us * 1e-6, islands))]
    levels = [(cluster.gpus_per_node, cluster.across)]
    if cluster.sites > 1:
        levels.append((cluster.site_gpus, cluster.between_sites))
    return [
        (size, Wire(link.gbit_per_s * 1e9 / 8, link.latency_us * 1e-6, max(1, size // world))) for size, link in levels
    ]
