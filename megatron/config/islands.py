"""Islands: separate worlds that train the same model and exchange pseudo-gradients at the point ``outer``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.base.addresses import EXAMPLE, read_address
from megatron.base.errors import UserError
from megatron.base.option import Condition, derived, option
from megatron.base.parse_numbers import read_whole
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.training import TrainingConfig

if TYPE_CHECKING:  # the compressors import torch; parsing flags must not
    from megatron.compression.points import Point
    from megatron.compression.spec import Spec

MAX_ISLANDS = 1 << 12
_SHARE_OF_TIMEOUT = 0.9
ISLAND_VARIABLE = "MEGATRON_ISLAND"
ADDRESS_VARIABLE = "MEGATRON_ISLANDS_ADDRESS"
"""Environment variables set by tools/launch.py: number of the island, and address of the rendezvous of islands."""


_ISLANDS = Condition(lambda run, _: run.islands.several, "there is one island")


@dataclass(frozen=True, kw_only=True)
class IslandsConfig:
    """Islands that train one model: each is a separate run, and they communicate only at the point outer."""

    islands: int = option(
        1,
        "Number of islands. Each is a separate world (with its own launcher, ranks and layout) and takes its "
        "share of the global batch. They first sum gradients in every step, and then exchange differences every "
        "few steps, as --compress outer=... says. tools/launch.py --islands starts all of them on one machine.",
        minimum=1,
        maximum=MAX_ISLANDS,
        common="compress",
    )
    island: int | None = derived(
        f"{ISLAND_VARIABLE} of the environment, which tools/launch.py sets",
        "Number of this island, from 0.",
        minimum=0,
        maximum=MAX_ISLANDS,
    )
    islands_address: str | None = derived(
        f"{ADDRESS_VARIABLE} of the environment, which tools/launch.py sets",
        "Address where the islands meet: that of tools/launch.py --serve-islands.",
        metavar="HOST:PORT",
    )
    islands_quorum: int | None = derived(
        "all islands",
        "Minimum number of islands in a round. With fewer, the run saves and ends.",
        unit="islands",
        minimum=1,
        maximum=MAX_ISLANDS,
    )
    islands_timeout_seconds: float = option(
        60.0,
        "How long a round waits for an island before the others continue without it.",
        unit="seconds",
        minimum=1,
        maximum=86_400,
        only_if=(_ISLANDS,),
    )

    islands_linger_seconds: float = option(
        0.0,
        "How long finished islands wait to send their state to an island that arrives late.",
        unit="seconds",
        minimum=0,
        maximum=604_800,
        only_if=(_ISLANDS,),
    )

    @property
    def several(self) -> bool:
        """Whether there is more than one island."""
        return self.islands > 1

    @property
    def quorum(self) -> int:
        """Minimum number of islands in a round."""
        return self.islands if self.islands_quorum is None else self.islands_quorum


def fill_from_environment(islands: IslandsConfig, environment: Mapping[str, str] = os.environ) -> IslandsConfig:
    """Fill unset settings from environment variables of the launcher.

    Raises UserError for a variable that is not a number.
    """
    if not islands.several:
        return islands
    number, address = environment.get(ISLAND_VARIABLE), environment.get(ADDRESS_VARIABLE)
    if islands.island is None and number is not None:
        try:
            islands = replace(islands, island=read_whole(number))
        except ValueError as error:
            raise UserError(f"the environment variable {ISLAND_VARIABLE}: {number[:60]!r} {error}") from None
    if islands.islands_address is None and address is not None:
        islands = replace(islands, islands_address=address)
    return islands


def island_folder(path: str, island: int) -> str:
    """Folder of an island in a shared folder."""
    return str(Path(path) / f"island_{island}")


def island_file(path: str, island: int) -> str:
    """Path of the file of an island, next to those of the other islands."""
    file_path = Path(path)
    return str(file_path.with_name(f"{file_path.stem}.island_{island}{file_path.suffix}"))


def max_wait_seconds(parallel: ParallelConfig) -> float:
    """Seconds that rank 0 of an island may wait for other islands, as its other ranks wait for it."""
    return _SHARE_OF_TIMEOUT * 60 * parallel.distributed_timeout_minutes


def parse_address_flag(address: str) -> tuple[str, int]:
    """Split HOST:PORT of --islands-address into host and port. Raises UserError for anything else."""
    try:
        return read_address(address)
    except ValueError:
        raise UserError(f"--islands-address {address[:200]}: {EXAMPLE}") from None


def check_islands(
    islands: IslandsConfig,
    parallel: ParallelConfig,
    training: TrainingConfig,
    model: ModelConfig,
    specs: Mapping[Point, Spec],
) -> None:
    """Check the islands and their exchange against the compressor specs; raise UserError for contradictions."""
    from megatron.compression.points import Point

    for value, flag in (
        (islands.island, "--island"),
        (islands.islands_address, "--islands-address"),
        (islands.islands_quorum, "--islands-quorum"),
    ):
        if value is not None and not islands.several:
            raise UserError(f"{flag} {value}: there is one island; add --islands, or leave it out")
    outer, dp_grad = specs.get(Point.OUTER), specs.get(Point.DP_GRAD)
    if islands.several:
        flag = f"--islands {islands.islands}"
        if outer is None:
            raise UserError(
                f"{flag}: their exchange is not configured; add --compress "
                "outer=fixpoint,bits=4,every=30, or outer=identity,every=1,outer-lr=1,outer-momentum=0 for plain "
                "averaging"
            )
        if islands.island is None or islands.islands_address is None:
            missing = "--island" if islands.island is None else "--islands-address"
            raise UserError(f"{flag}: {missing} is missing; add it, or start all islands by tools/launch.py {flag}")
        if islands.island >= islands.islands:
            raise UserError(
                f"--island {islands.island}: the islands of {flag} are 0 to {islands.islands - 1}; correct one"
            )
        parse_address_flag(islands.islands_address)
        if islands.quorum > islands.islands:
            raise UserError(f"--islands-quorum {islands.quorum} is above {flag}; lower it")
        limit = max_wait_seconds(parallel)
        if islands.islands_timeout_seconds > limit:
            raise UserError(
                f"--islands-timeout-seconds {islands.islands_timeout_seconds:g} is above {limit:g}, nine tenths of "
                f"--distributed-timeout-minutes {parallel.distributed_timeout_minutes:g}; raise that, or lower it"
            )
        if parallel.ddp_impl == "torch":
            raise UserError(f"{flag}: --DDP-impl torch reduces gradients itself; use --DDP-impl local")
        if parallel.no_allreduce:
            raise UserError(
                f"{flag}: --no-allreduce leaves the sums out that islands begin with; leave one of them out"
            )
    if islands.several and dp_grad is not None and dp_grad.make_rounds().traits.clips_first:
        raise UserError(
            f"--islands {islands.islands}: --compress dp-grad={dp_grad.name} clips each replica's gradient by itself, "
            "unlike islands in the synchronous warm-up; leave one of them out"
        )
    if outer is not None:
        flag = f"--compress outer={outer.name}"
        if outer.preset and not islands.several:
            raise UserError(
                f"{flag}: outer-preset={outer.preset} is for several islands, and there is one; add --islands, or "
                "write the options out"
            )
        if outer.make_rounds().traits.levels and islands.several:
            raise UserError(f"{flag}: sums in two levels need nodes, which islands are not; use another compressor")
        iterations, start = training.planned_iters, outer.activation.warmup_iters
        if iterations is None:
            raise UserError(f"{flag}: the last round is at the end of the run; give --train-iters or --train-samples")
        every = outer.outer_options.every
        if start < iterations < start + every:
            raise UserError(
                f"{flag}: every={every} is above the {iterations - start} steps that warmup={start} leaves of "
                f"--train-iters {iterations}; lower one of them, or write warmup={iterations} for none"
            )
        layers = max(model.num_layers, model.decoder_num_layers or 0)
        if outer.outer_options.fragments > layers:
            raise UserError(
                f"--compress outer={outer.name}: fragments={outer.outer_options.fragments}: a fragment is made of "
                f"layers, and there are {layers}; write at most that"
            )
