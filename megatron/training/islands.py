"""Paths, checkpoints and start of a run that trains as one of several islands."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from megatron.base.errors import UserError
from megatron.checkpoint.files import TRACKER
from megatron.checkpoint.find import complete_iterations, read_tracker
from megatron.checkpoint.load import saved_config
from megatron.compression.outer import RoundSchedule
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.islands import (
    fill_from_environment,
    island_file,
    island_folder,
    max_wait_seconds,
    parse_address_flag,
)
from megatron.config.run import RunConfig, run_sections
from megatron.diloco.joining import Joining
from megatron.diloco.membership import Islands
from megatron.diloco.rounds import Rounds
from megatron.diloco.startup import refusal_key
from megatron.diloco.store import IslandStore
from megatron.distributed.agreement import gather_texts, run_together, take_from_rank_0
from megatron.distributed.errors import CommunicationError
from megatron.distributed.process_group import LaunchEnvironment
from megatron.distributed.topology import Topology
from megatron.kernels import native
from megatron.training.assembly import Engines
from megatron.training.identity import identity_of
from megatron.training.persistence import RunCheckpoints
from megatron.training.report import Reporter
from megatron.training.saved_run import SavedRun

_FOLDERS = ("tensorboard_dir", "wandb_save_dir", "profile_trace")
_FILES = ("log_txt_file", "log_json_file")
_OWN_FLAGS = (
    "--save",
    "--load",
    "--island",
    "--islands-address",
    "--ckpt-step",
    "--finetune",
    "--overwrite-checkpoints",
)
_SECONDS_TO_REFUSE = 5.0
_MAX_OFFERED = 64
"""Maximum number of checkpoints that an island offers to the others, newest first."""


def adapt_to_island(config: RunConfig) -> RunConfig:
    """Adapt a run's configuration to this island, so that its checkpoints and logs are separate from the others'.

    An island loads its own checkpoint. If it has none because the number of islands has grown, it loads another
    island's. If no island has a checkpoint but the folder itself holds a run, all islands start from that run.

    Raises:
        UserError: when the launcher's variables are not numbers.
    """
    islands = fill_from_environment(config.islands)
    number = islands.island
    if not islands.several or number is None:
        return replace(config, islands=islands)
    checkpoint, logging = config.checkpoint, config.logging
    if checkpoint.save is not None:
        checkpoint = replace(checkpoint, save=island_folder(checkpoint.save, number))
    if checkpoint.load is not None:
        root = Path(checkpoint.load)
        loaded = island_folder(str(root), number)
        if not _holds_checkpoints(loaded):
            island_count = 0
            while _holds_checkpoints(island_folder(str(root), island_count)):
                island_count += 1
            if island_count:
                # An island below that count without a checkpoint has lost its steps, and joins the others.
                saved, _ = saved_config(island_folder(str(root), 0), None)
                loaded = loaded if number < saved.islands.islands else island_folder(str(root), number % island_count)
            else:
                loaded = str(root) if (root / TRACKER).exists() else loaded
        checkpoint = replace(checkpoint, load=loaded)
    own_paths: dict[str, Any] = {}
    for names, path_of in ((_FOLDERS, island_folder), (_FILES, island_file)):
        own_paths |= {name: path_of(path, number) for name in names if (path := getattr(logging, name)) is not None}
    return replace(config, islands=islands, checkpoint=checkpoint, logging=replace(logging, **own_paths))


def _holds_checkpoints(folder: str) -> bool:
    """Whether a folder holds checkpoints; a folder created only for saving does not."""
    return any(Path(folder).glob("iter_*"))


def folders_of_others(
    config: RunConfig, saved: SavedRun | None, topology: Topology, synchronous_steps: int = 0
) -> list[str]:
    """Return the folders of all islands that saved a checkpoint, if this run has other islands; otherwise none.

    Args:
        config, saved, topology: the run, the checkpoint that it starts from, and the ranks.
        synchronous_steps: number of steps at the start of the run that islands take together.

    Raises:
        UserError: on every rank, when the checkpoint was saved in the middle of a round, which would be lost, or when
            islands would return to synchronous steps.
    """
    root, number = config.checkpoint.load, config.islands.island
    outer = {} if saved is None else saved.common["outer"]
    if root is None or saved is None or config.checkpoint.loads_weights_only or not outer.get("begun"):
        return []
    iteration = saved.progress.iteration
    if iteration < synchronous_steps:
        raise UserError(
            f"--load {root}: islands have taken steps of their own by iteration {iteration}, and with "
            f"warmup={synchronous_steps} (a third of the run, unless it is written) they would go in step again; write "
            f"warmup={iteration} or less at --compress outer=..., or begin with new moments (--no-load-optim)"
        )
    checkpoint_config, _ = run_together(topology.control.pg, lambda: saved_config(root, config.checkpoint.ckpt_step))
    saved_count, island_count = checkpoint_config.islands.islands, config.islands.islands
    # A late island may have copied another island's last checkpoint to its own folder.
    takes_over = number is not None and Path(root).name == Path(island_folder("", number)).name
    if saved_count == island_count and (
        not config.islands.several or checkpoint_config.islands.island == number or takes_over
    ):
        return []
    if outer["together"] != iteration:
        raise UserError(
            f"--load {root}: {saved_count} islands were under way to a round at iteration {iteration}, and "
            f"now there are {island_count} or others; load a checkpoint of the end of a round (--ckpt-step), with "
            "fragments=1, delay=0 and mixing=0, or of as many islands"
        )
    parent, own_number = str(Path(root).parent), checkpoint_config.islands.island or 0
    # State that is not averaged stays as in the folder that is read last.
    numbers = [*(other for other in range(saved_count) if other != own_number), own_number]
    return [island_folder(parent, other) for other in numbers] if saved_count > 1 else [root]


def begin_rounds(
    engines: Engines,
    checkpoints: RunCheckpoints,
    reporter: Reporter,
    islands: Islands | None,
    begins: bool,
    train_iters: int,
) -> Rounds | None:
    """Build the rounds of this island, and send its state to islands that lack it; None without rounds.

    Args:
        engines, checkpoints, reporter: the run.
        islands: membership; None for a single island.
        begins: whether this island starts with the others; otherwise it joins them later.
        train_iters: iterations of the whole run.
    """
    outer = engines.outer
    if outer is None or (islands is None and engines.config.islands.several):
        return None
    start = engines.plan.activation(Point.OUTER).warmup_iters
    joining = None
    if islands is not None:
        joining = Joining(engines.stages, outer, islands, checkpoints.stateful_parts, reporter.line)
    if joining is not None and begins:
        joining.admit_islands_at_start()
    section, save = engines.config.islands, engines.config.checkpoint.save
    folder = str(Path(save).resolve()) if save else ""
    schedule = RoundSchedule(outer.options, start, train_iters)
    return Rounds(
        outer,
        schedule,
        islands,
        reporter.report_round,
        joining,
        checkpoint_folder=folder,
        linger_seconds=section.islands_linger_seconds,
        left_behind=not begins,
    )


def reach_islands(
    config: RunConfig, topology: Topology, log: Callable[[str], None]
) -> tuple[RunConfig, Islands | None]:
    """Connect to the islands' store and agree on the newest checkpoint that enough islands have.

    Args:
        config: the resolved configuration.
        topology: the ranks.
        log: prints lines for the user, on rank 0.

    Returns:
        The configuration with that checkpoint, or with none if another island will send its state; and the islands,
        None for a run with a single island.

    Raises:
        UserError: on every rank of all islands, when too few islands come.
        CommunicationError: when the store does not answer.
    """
    section = config.islands
    if not section.several or config.validation.skip_train:
        return config, None
    assert section.island is not None
    seconds = max_wait_seconds(config.parallel)
    islands = Islands(
        IslandStore(*_address(config), seconds, log),
        section.island,
        section.islands,
        section.quorum,
        section.islands_timeout_seconds,
        seconds,
        topology.control.pg,
        topology.device,
        log,
    )
    checkpoint, group = config.checkpoint, topology.control.pg
    local_iterations = run_together(group, lambda: _loadable_iterations(checkpoint) if topology.rank == 0 else [])
    iterations = take_from_rank_0(group, local_iterations)
    outer = config.compression.specs(RunLength(config.training.planned_iters))[Point.OUTER]
    # A new run from a checkpoint's weights starts with synchronous steps, or with equal outer parameters.
    warmup = math.inf if checkpoint.finetune else outer.activation.warmup_iters
    chosen = islands.start.choose_iteration(iterations, warmup)
    if chosen is None or iterations[:1] == [chosen]:
        return config, islands
    newest = str(iterations[0]) if iterations else "none"
    too = ", too" if chosen in iterations else ", and is sent the state of another"
    log(f"the newest checkpoint that enough islands have is of iteration {chosen}; this one has {newest}{too}")
    if chosen in iterations:
        return replace(config, checkpoint=replace(checkpoint, ckpt_step=chosen)), islands
    return replace(config, checkpoint=replace(checkpoint, load=None, ckpt_step=None)), islands


def _loadable_iterations(checkpoint: CheckpointConfig) -> list[int]:
    """Iterations of the checkpoints that an island can start from, newest first.

    The checkpoint that would be loaded is listed even if it is incomplete, so that damage is reported instead of
    silently avoided. Later checkpoints, left by an earlier run that went further, are not listed.

    Raises:
        UserError: when no checkpoint can be used.
    """
    if checkpoint.load is None:
        return []
    if checkpoint.ckpt_step is not None:
        return [checkpoint.ckpt_step]
    newest = read_tracker(checkpoint.load)
    if not isinstance(newest, int):
        return []
    older = (iteration for iteration in complete_iterations(checkpoint.load) if iteration < newest)
    return [newest, *islice(older, _MAX_OFFERED - 1)]


def join_islands(engines: Engines, env: LaunchEnvironment, iteration: int, islands: Islands | None) -> bool:
    """Join the other islands, if any; return whether this island starts with them: otherwise it joins them later.

    Args:
        engines: engines of this rank, with their initial weights and state.
        env: environment of this process.
        iteration: number of iterations that this island has completed.
        islands: the other islands.

    Raises:
        UserError: on every rank of all islands, when they cannot train together.
        CommunicationError: when they do not come.
    """
    if islands is None:
        return True
    config, topology, outer = engines.config, engines.topology, engines.outer
    assert outer is not None
    # All islands need equal settings, since each updates its own copy of the outer parameters, and equal kernels,
    # which differ from pure torch in the last digits.
    sections: dict[str, Any] = {name: getattr(config, name) for name in run_sections()}
    kernels = "none" if native.problem_on(topology.device.type) else "compiled"
    everything = {"the number of processes": str(env.world_size), "kernels": kernels, **identity_of(sections)}
    identity = {name: value for name, value in everything.items() if name not in _OWN_FLAGS}
    # They also need equal outer parameters at the start, or equal weights before those exist.
    shared = outer.outer.outer_params or outer.outer.mains
    integer_dtypes = {4: torch.int32, 8: torch.int64}
    sums = [int(x.view(integer_dtypes[x.itemsize]).sum(dtype=torch.int64)) for x in shared]
    gathered_sums = gather_texts(topology.control.pg, json.dumps(sums))
    fingerprint = blake2b("\n".join(gathered_sums).encode(), digest_size=8).hexdigest()
    in_step = iteration < engines.sync_warmup.steps
    begins = islands.begin_generation(iteration, in_step, identity, fingerprint)
    if islands.starts_synchronously:
        engines.sync_warmup.group = islands.make_group(range(islands.count), "joint", max_wait_seconds(config.parallel))
    return begins


def _address(config: RunConfig) -> tuple[str, int]:
    """Return host and port of the store."""
    assert config.islands.islands_address is not None
    return parse_address_flag(config.islands.islands_address)


@contextmanager
def reporting_refusal(config: RunConfig, topology: Topology) -> Iterator[None]:
    """Tell the other islands, which wait at the start, why this island will not join, if the block raises an error."""
    try:
        yield
    except UserError as error:
        if config.islands.several and not config.validation.skip_train and topology.rank == 0:
            with suppress(CommunicationError):
                store = IslandStore(*_address(config), _SECONDS_TO_REFUSE)
                store.switch_generation(store.newest_generation())
                store.put(refusal_key(config.islands.island or 0), str(error))
        raise
