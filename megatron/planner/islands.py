"""Communication between islands, and the time that it adds to a run in synchronous iterations and in outer rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.compression.outer import RoundSchedule
from megatron.compression.points import Point
from megatron.diloco.fragments import fragment_index
from megatron.planner.choice import Choice
from megatron.planner.cluster import Wire, inside_wire
from megatron.planner.costs import Wires, wires_of
from megatron.planner.dry_run import Collective
from megatron.planner.piece_costs import EMBEDDING, HEAD, piece_of
from megatron.planner.stages import Stages, sent_bytes

FIRST, OF_EXPERTS, ALL = "first", "experts", "all"
"""Replicas that communicate for a stage of an island: the first, one per distinct set of experts, or all."""

_REQUESTS, _REQUESTS_PER_ISLAND = 6, 4
"""Requests per round to the rendezvous server: a fixed number, and a number for each island."""

_UPDATE_BYTES = 40
"""Bytes read and written per updated fp32 parameter in a round: pseudo-gradient, outer step, parameters."""

_TOTALS_BYTES = 64.0
"""Bytes of a small vector of totals."""


@dataclass(frozen=True)
class Share:
    """Part of a stage in a collective over islands.

    Args:
        participants: kind of the replicas that take part.
        stage: the pipeline stage.
        collective: the collective of each of their tensor-parallel ranks.
    """

    participants: str
    stage: int
    collective: Collective


@dataclass(frozen=True)
class Transfer:
    """Costs of the exchange of a fragment.

    Args:
        rounds_s: seconds of each of its consecutive rounds of collectives.
        coding_s: seconds of encoding and decoding.
        nbytes: bytes that leave an island.
        state_bytes: bytes of the compressors' state on the fullest rank.
    """

    rounds_s: tuple[float, ...]
    coding_s: float
    nbytes: float
    state_bytes: float

    def waited_s(self, delay: int, step_s: float) -> float:
        """Seconds not hidden by ``delay`` steps. Rounds are started, and noticed to be complete, only between steps."""
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
        round_s: seconds for which training waits in a round of every fragment.
        transfer_s: seconds of the transfers of a round, hidden or not.
        run_s: seconds that rounds add to the run.
        in_step_bytes, round_bytes: bytes that leave an island in a synchronous iteration, and in a round.
        mean_bytes: bytes that leave an island per iteration, on average.
        memory_bytes: outer parameters, momentum, residuals and pseudo-gradients on the fullest rank.
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

    @property
    def mean_in_step_s(self) -> float:
        """Mean seconds that synchronous sums add to an iteration."""
        return self.in_step * self.in_step_s / (self.in_step + self.local)

    @property
    def mean_rounds_s(self) -> float:
        """Mean seconds that rounds add to an iteration."""
        return self.run_s / (self.in_step + self.local)


class OuterCosts:
    """The costs of the point ``outer`` for choices of several islands.

    Args:
        stages: the stages of an island.
    """

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self._transfers: dict[Choice, list[Transfer]] = {}
        self._shared_links: dict[object, list[tuple[Wire, list[Counter[tuple[str, int]]]]]] = {}

    @property
    def width(self) -> int:
        """Bytes per element of a pseudo-gradient."""
        return max(self.stages.param_bytes, 4)

    def plan(self, choice: Choice, step_s: float) -> OuterPlan:
        """The outer plan of a choice with a spec of ``outer``; ``step_s``: seconds of a step of an island."""
        iterations = self.stages.config.training.planned_iters
        assert iterations is not None
        spec, transfers = self.stages.book.specs(choice)[Point.OUTER], self.transfers(choice)
        schedule = RoundSchedule(spec.outer_options, min(spec.activation.warmup_iters, iterations), iterations)
        wires = wires_of(self.stages.cluster, choice)
        if spec.outer_options.in_step == "compressed":
            in_step_s = max(self._replica_exchange_s(choice, stage, 1, wires) for stage in range(choice.pp))
            in_step_s += sum(transfer.coding_s + sum(transfer.rounds_s) for transfer in transfers)
            in_step_s += self._totals_s(choice)
            in_step_bytes = sum(transfer.nbytes for transfer in transfers)
        else:
            in_step_s, in_step_bytes = self.in_step(choice)
        local_steps, count = schedule.end - schedule.start, len(transfers)
        # Before the end of the run, fragments are sent in turn; at the end, all are sent again.
        turns = max(local_steps - 1, 0) // spec.outer_options.turn
        times_sent = [turns // count + (fragment < turns % count) for fragment in range(count)]
        # A round of a fragment without transfers: pseudo-gradient, rendezvous, outer step, traffic inside the island.
        inside_s = max(self._replica_exchange_s(choice, stage, count, wires) for stage in range(choice.pp))
        tied_bytes = self._duplicate_elements(choice) * self.width / count
        inside_s += wires.ends.collective("broadcast", tied_bytes, 2)
        requests = _REQUESTS + _REQUESTS_PER_ISLAND * choice.islands
        inside_s += 2 * requests * max(wire.latency_s for wire, _ in self._links_with_participants(choice))
        inside_s += wires.world.collective("all-reduce", _TOTALS_BYTES, choice.world_size)
        fixed_s = [inside_s + transfer.coding_s for transfer in transfers]
        waited_s = [
            fixed + transfer.waited_s(spec.outer_options.delay, step_s)
            for fixed, transfer in zip(fixed_s, transfers, strict=True)
        ]
        transfer_s = sum(sum(transfer.rounds_s) for transfer in transfers)
        round_bytes = sum(transfer.nbytes for transfer in transfers)
        run_s = sum(n * seconds for n, seconds in zip(times_sent, waited_s, strict=True))
        sent = sum(n * transfer.nbytes for n, transfer in zip(times_sent, transfers, strict=True))
        if local_steps:  # The last transfers are always waited for, regardless of ``delay``.
            run_s, sent = run_s + sum(fixed_s) + transfer_s, sent + round_bytes
        return OuterPlan(
            spec.outer_options.every,
            schedule.start,
            local_steps,
            in_step_s,
            sum(waited_s),
            transfer_s,
            run_s,
            in_step_bytes,
            round_bytes,
            (schedule.start * in_step_bytes + sent) / schedule.end,
            self.memory_bytes(choice),
        )

    def in_step(self, choice: Choice) -> tuple[float, float]:
        """Seconds that exact sums of each replica's share add to a synchronous step, and bytes leaving an island."""
        shares = []
        for stage in range(choice.pp):
            duplicates = self._duplicate_elements(choice) if stage == choice.pp - 1 else 0
            for elements, replicas in self.stages.count_replicas(choice, stage):
                nbytes = (elements - duplicates) * self.stages.grad_bytes / replicas
                shares.append(Share(ALL, stage, Collective("all-reduce", nbytes)))
                duplicates = 0
        return self._seconds(choice, shares) + self._totals_s(choice), self._sent(choice, shares)

    def _totals_s(self, choice: Choice) -> float:
        return 2 * self._seconds(choice, [Share(FIRST, 0, Collective("all-reduce", _TOTALS_BYTES))])

    def _duplicate_elements(self, choice: Choice) -> float:
        """Number of elements of the last stage's copy of a tied embedding, which the first stage exchanges."""
        duplicated = self.stages.book.tied and choice.splits_tie
        return self.stages.tied_elements(replace(choice, sharded=False)) if duplicated else 0

    def memory_bytes(self, choice: Choice) -> float:
        """Bytes of outer parameters, momentum, residuals and a fragment's pseudo-gradient on the fullest rank."""
        options, transfers = self.stages.book.specs(choice)[Point.OUTER].outer_options, self.transfers(choice)
        copies = 0 if options.offload else options.copies
        outer_state = copies * self.width * max(self.stages.owned(choice, rank) for rank in range(choice.pp))
        elements = max(self.stages.elements(choice, rank) for rank in range(choice.pp))
        pseudo_gradient = self.width * elements / options.fragments
        return outer_state + pseudo_gradient + sum(transfer.state_bytes for transfer in transfers)

    def transfers(self, choice: Choice) -> list[Transfer]:
        """Return the exchange of each fragment, cached for all choices of the same layout."""
        plain = Choice(choice.tp, choice.pp, choice.dp, choice.ep, islands=choice.islands, folded=choice.folded)
        key = replace(
            plain, chunks=choice.chunks, sequence_parallel=choice.sequence_parallel, specs=(choice.outer_spec,)
        )
        if choice.in_v_form:
            key = replace(key, schedule=choice.schedule)
        if key not in self._transfers:
            fragments = self.stages.book.specs(choice)[Point.OUTER].outer_options.fragments
            self._transfers[key] = [self._transfer(key, number, fragments) for number in range(fragments)]
        return self._transfers[key]

    def _transfer(self, choice: Choice, fragment: int, fragments: int) -> Transfer:
        """Predict the exchange of a fragment with the other islands."""
        book = self.stages.book
        rounds: list[list[Share]] = []
        coding_s = state_bytes = 0.0
        for stage in range(choice.pp):
            contents = self._count_pieces(choice, stage, fragment, fragments)
            costs = [
                (n, participants, book.pseudo_gradient_reduction(choice, name, stage, participants == OF_EXPERTS))
                for name, n in contents.items()
                for participants in (FIRST, OF_EXPERTS)
            ]
            for n, participants, cost in costs:
                for number, collectives in enumerate(cost.rounds):
                    rounds.extend([] for _ in range(number + 1 - len(rounds)))
                    rounds[number] += [
                        Share(participants, stage, replace(collective, nbytes=n * collective.nbytes))
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

    def _count_pieces(self, choice: Choice, stage: int, fragment: int, fragments: int) -> Counter[str]:
        """Number of each piece of a fragment on a pipeline rank."""
        model = self.stages.config.model
        layers, virtual = model.num_layers, choice.pp * choice.chunks
        stage_layers = layers // virtual
        counts: Counter[str] = Counter()
        for chunk in choice.placement.virtual_stages(stage):
            names = [
                (f"layers.{i}.", piece_of(model, i)) for i in range(chunk * stage_layers, (chunk + 1) * stage_layers)
            ]
            names += [(EMBEDDING, EMBEDDING)] if chunk == 0 else []
            names += [(HEAD, HEAD)] if chunk == virtual - 1 else []
            counts.update(piece for name, piece in names if fragment_index(name, layers, fragments) == fragment)
        return counts

    def _replica_exchange_s(self, choice: Choice, stage: int, fragments: int, wires: Wires) -> float:
        """Seconds that a stage's replicas take to collect and broadcast a fragment, and to update their parameters."""
        stages, seconds = self.stages, 0.0
        for (elements, size), wire in zip(
            stages.count_replicas(choice, stage), (wires.dp, wires.expert_dp), strict=False
        ):
            nbytes = elements * self.width / fragments
            seconds += wire.collective("broadcast", nbytes, size)
            if choice.sharded:
                seconds += wire.collective("all-reduce", nbytes, size)
                seconds += wire.collective("all-gather", float(elements * stages.param_bytes), size)
        moved = stages.owned(choice, stage) * _UPDATE_BYTES * self.width / 4 / fragments
        return seconds + moved / (stages.cluster.device.memory_gbyte_per_s * 1e9)

    def _sent(self, choice: Choice, shares: Sequence[Share]) -> float:
        """Bytes that leave an island."""
        ranks = {FIRST: choice.tp, OF_EXPERTS: choice.expert_ranks, ALL: choice.tp * choice.dp}
        return sum(ranks[share.participants] * sent_bytes([share.collective], choice.islands) for share in shares)

    def _seconds(self, choice: Choice, shares: Sequence[Share]) -> float:
        """Seconds of collectives over islands; those of a kind run concurrently, and the busiest link decides."""
        total = 0.0
        for kind in dict.fromkeys(share.collective.kind for share in shares):
            kind_shares = [share for share in shares if share.collective.kind == kind]
            slowest = 0.0
            for wire, blocks in self._links_with_participants(choice):
                load = max(
                    sum(block[share.participants, share.stage] * share.collective.nbytes for share in kind_shares)
                    for block in blocks
                )
                slowest = max(slowest, wire.collective(kind, load, choice.islands))
            total += slowest
        return total

    def _links_with_participants(self, choice: Choice) -> list[tuple[Wire, list[Counter[tuple[str, int]]]]]:
        """Return the links between islands; for each, the participants of each block of ranks by kind and stage."""
        key = choice.mesh, choice.islands
        if key not in self._shared_links:
            # Rank, kind and stage of each replica that takes part.
            participants = [
                ((stage * choice.dp + replica) * choice.tp + tensor_rank, kind, stage)
                for kind, replicas in ((FIRST, 1), (OF_EXPERTS, choice.expert_ranks // choice.tp), (ALL, choice.dp))
                for stage in range(choice.pp)
                for replica in range(replicas)
                for tensor_rank in range(choice.tp)
            ]
            cluster, world = self.stages.cluster, choice.world_size
            # Number of consecutive ranks behind each kind of link.
            if cluster.gpus <= cluster.gpus_per_node:
                links = [(1, inside_wire(cluster, cluster.gpus // world))]
            else:
                levels = [(cluster.gpus_per_node, cluster.across)]
                if cluster.sites > 1:
                    levels.append((cluster.site_gpus, cluster.between_sites))
                links = [
                    (size, Wire(link.gbit_per_s * 1e9 / 8, link.latency_us * 1e-6, max(1, size // world)))
                    for size, link in levels
                ]
            self._shared_links[key] = []
            for size, wire in links:
                blocks: dict[int, Counter[tuple[str, int]]] = {}
                for rank, kind, stage in participants:
                    blocks.setdefault(rank // size, Counter())[kind, stage] += 1
                self._shared_links[key].append((wire, list(blocks.values())))
        return self._shared_links[key]
