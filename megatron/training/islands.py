"""One island of several: its folders, and how it meets the others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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
from megatron.config.islands import file_of, folder_of, host_and_port, longest_wait, with_variables
from megatron.config.run import RunConfig, run_sections
from megatron.kernels import native
from megatron.topology.agree import gather_texts, together
from megatron.topology.errors import CommunicationError
from megatron.topology.islands import Islands
from megatron.topology.launch import LaunchEnvironment
from megatron.topology.meeting_place import MeetingPlace
from megatron.topology.starting import refusal_of
from megatron.topology.topology import Topology
from megatron.training.assembly import Engines
from megatron.training.identity import identity_of
from megatron.training.joining import Joining
from megatron.training.persistence import RunCheckpoints
from megatron.training.report import Reporter
from megatron.training.rounds import Rounds, RunEnd
from megatron.training.saved_run import SavedRun

_FOLDERS = ("tensorboard_dir", "wandb_save_dir", "profile_trace")
_FILES = ("log_txt_file", "log_json_file")
_ITS_OWN = ("--save", "--load", "--island", "--islands-address", "--ckpt-step", "--finetune", "--overwrite-checkpoints")
_SECONDS_TO_REFUSE = 5.0
_MOST_OFFERED = 64
"""Checkpoints of which an island tells the others, the newest ones."""


def of_island(config: RunConfig) -> RunConfig:
    """The configuration of this island: what it saves and logs is apart from the others'.

    It loads its own checkpoint. Where there is none, it loads that of another island, when the number of islands has
    grown; and where there are no islands' but the folder itself is that of a run, all islands begin with this run's.

    Raises:
        UserError: when the launcher's variables are no numbers.
    """
    islands = with_variables(config.islands)
    number = islands.island
    if not islands.several or number is None:
        return replace(config, islands=islands)
    checkpoint, logging = config.checkpoint, config.logging
    if checkpoint.save is not None:
        checkpoint = replace(checkpoint, save=folder_of(checkpoint.save, number))
    if checkpoint.load is not None:
        checkpoint = replace(checkpoint, load=_loaded(Path(checkpoint.load), number))
    moved: dict[str, Any] = {}
    for names, place in ((_FOLDERS, folder_of), (_FILES, file_of)):
        moved |= {name: place(path, number) for name in names if (path := getattr(logging, name)) is not None}
    return replace(config, islands=islands, checkpoint=checkpoint, logging=replace(logging, **moved))


def _loaded(root: Path, number: int) -> str:
    """The folder that an island loads."""
    own = folder_of(str(root), number)
    if _holds_checkpoints(own):
        return own
    others = 0
    while _holds_checkpoints(folder_of(str(root), others)):
        others += 1
    if others:
        # One of the islands that saved these and has not saved itself has lost its steps, and joins the others.
        saved, _ = saved_config(folder_of(str(root), 0), None)
        return own if number < saved.islands.islands else folder_of(str(root), number % others)
    return str(root) if (root / TRACKER).exists() else own


def _holds_checkpoints(folder: str) -> bool:
    """Whether a folder holds any; one that an island has only made to save to does not."""
    return any(Path(folder).glob("iter_*"))


def folders_of_others(
    config: RunConfig, saved: SavedRun | None, topology: Topology, steps_in_step: int = 0
) -> list[str]:
    """Folders of all islands that a checkpoint was saved by, where this run has others than that one; else none.

    Args:
        config, saved, topology: the run, the checkpoint that it begins with, and the ranks.
        steps_in_step: steps that islands take as one at the beginning of the run.

    Raises:
        UserError: on every rank, when islands were under way to a round then, so that something would be lost, or when
            they would go in step again.
    """
    root, number = config.checkpoint.load, config.islands.island
    outer = {} if saved is None else saved.common["outer"]
    if root is None or saved is None or config.checkpoint.loads_weights_only or not outer.get("begun"):
        return []
    iteration = saved.progress.iteration
    if iteration < steps_in_step:
        raise UserError(
            f"--load {root}: islands have taken steps of their own by iteration {iteration}, and with "
            f"warmup={steps_in_step} (a third of the run, unless it is written) they would go in step again; write "
            f"warmup={iteration} or less at --compress outer=..., or begin with new moments (--no-load-optim)"
        )
    there, _ = together(topology.control.pg, lambda: saved_config(root, config.checkpoint.ckpt_step))
    before, now = there.islands.islands, config.islands.islands
    # An island that was late may have copied the last checkpoint of another one to its own folder.
    takes_over = number is not None and Path(root).name == Path(folder_of("", number)).name
    if before == now and (not config.islands.several or there.islands.island == number or takes_over):
        return []
    if outer["together"] != iteration:
        raise UserError(
            f"--load {root}: {before} islands were under way to a round at iteration {iteration}, and "
            f"now there are {now} or others; load a checkpoint of the end of a round (--ckpt-step), with fragments=1, "
            "delay=0 and mixing=0, or of as many islands"
        )
    parent, own = str(Path(root).parent), there.islands.island or 0
    # The last one that is read is the one whose other state stays.
    numbers = [*(other for other in range(before) if other != own), own]
    return [folder_of(parent, other) for other in numbers] if before > 1 else [root]


@dataclass(frozen=True)
class Met:
    """This island among the others, after they have met.

    Args:
        islands: membership; None for a single island.
        begins: whether it begins with the others; else it joins them.
    """

    islands: Islands | None = None
    begins: bool = True

    def leave(self) -> None:
        """Ends this island's part."""
        if self.islands is not None:
            self.islands.leave()


def begin_rounds(
    engines: Engines, checkpoints: RunCheckpoints, reporter: Reporter, met: Met, train_iters: int
) -> Rounds | None:
    """Builds the rounds of this island, and sends its state to islands that have come without it; None where there are
    none.

    Args:
        engines, checkpoints, reporter: the run.
        met: this island among the others.
        train_iters: iterations of the whole run.
    """
    outer, islands = engines.outer, met.islands
    if outer is None or (islands is None and engines.config.islands.several):
        return None
    start = engines.plan.activation(Point.OUTER).warmup_iters
    joining = None if islands is None else Joining(engines, outer, islands, checkpoints.parts, reporter.line)
    if joining is not None and met.begins:
        joining.let_in_those_behind()
    section, save = engines.config.islands, engines.config.checkpoint.save
    end = RunEnd(str(Path(save).resolve()) if save else "", section.islands_linger_seconds)
    return Rounds(outer, RoundSchedule(outer.options, start, train_iters), islands, reporter.of_islands, joining, end)


def reach_islands(
    config: RunConfig, topology: Topology, log: Callable[[str], None]
) -> tuple[RunConfig, Islands | None]:
    """Reaches the place where islands meet, and agrees with them on the newest checkpoint that enough of them have.

    Args:
        config: the resolved configuration.
        topology: the ranks.
        log: prints lines for the user, on rank 0.

    Returns:
        The configuration with that checkpoint, or without any where this island is sent the state of another; and the
        islands, None for a run that meets no others.

    Raises:
        UserError: on every rank of all islands, when too few of them come.
        CommunicationError: when nothing answers there.
    """
    section = config.islands
    if not section.several or config.validation.skip_train:
        return config, None
    assert section.island is not None
    seconds = longest_wait(config.parallel)
    islands = Islands(
        MeetingPlace(*_where(config), seconds, log),
        section.island,
        section.islands,
        section.quorum,
        section.islands_timeout_seconds,
        seconds,
        topology.control.pg,
        topology.device,
        log,
    )
    return _with_checkpoint(config, islands, topology, log), islands


def _with_checkpoint(config: RunConfig, islands: Islands, topology: Topology, log: Callable[[str], None]) -> RunConfig:
    """The configuration with the checkpoint on which islands agree; see ``reach_islands``."""
    given = config.checkpoint
    group = topology.control.pg
    seen = together(group, lambda: _held_iterations(given) if topology.rank == 0 else [])
    held = json.loads(gather_texts(group, json.dumps(seen))[0])
    outer = config.compression.specs(RunLength(config.training.planned_iters))[Point.OUTER]
    # A run that begins anew with the weights of a checkpoint goes in step, or from an anchor that all have.
    chosen = islands.start.choose_iteration(held, math.inf if given.finetune else outer.activation.warmup_iters)
    if chosen is None or held[:1] == [chosen]:
        return config
    what = str(held[0]) if held else "none"
    too = ", too" if chosen in held else ", and is sent the state of another"
    log(f"the newest checkpoint that enough islands have is of iteration {chosen}; this one has {what}{too}")
    begun = replace(given, ckpt_step=chosen) if chosen in held else replace(given, load=None, ckpt_step=None)
    return replace(config, checkpoint=begun)


def _held_iterations(checkpoint: CheckpointConfig) -> list[int]:
    """Iterations of the checkpoints that an island can begin with, newest first.

    The one that would be loaded is among them, complete or not: damage is told, and not avoided in silence. What a run
    left that went further before is none of this run's.

    Raises:
        UserError: when there is none that can be used.
    """
    if checkpoint.load is None:
        return []
    if checkpoint.ckpt_step is not None:
        return [checkpoint.ckpt_step]
    newest = read_tracker(checkpoint.load)
    if not isinstance(newest, int):
        return []
    older = (iteration for iteration in complete_iterations(checkpoint.load) if iteration < newest)
    return [newest, *islice(older, _MOST_OFFERED - 1)]


def meet_islands(engines: Engines, env: LaunchEnvironment, iteration: int, islands: Islands | None) -> Met:
    """Meets the other islands, if any.

    Args:
        engines: engines of this rank, with what they begin with.
        env: environment of this process.
        iteration: iterations that this island has done.
        islands: the other islands.

    Raises:
        UserError: on every rank of all islands, when they cannot go together.
        CommunicationError: when they do not come.
    """
    if islands is None:
        return Met()
    config = engines.config
    in_step = iteration < engines.joint.steps
    begins = islands.begin(iteration, in_step, _identity(config, env, engines.topology.device), _fingerprint(engines))
    if islands.in_step:
        engines.joint.group = islands.group_of(range(islands.count), "joint", longest_wait(config.parallel))
    return Met(islands, begins)


def _where(config: RunConfig) -> tuple[str, int]:
    """Host and port of the meeting place."""
    assert config.islands.islands_address is not None
    return host_and_port(config.islands.islands_address, "--islands-address")


@contextmanager
def refusing(config: RunConfig, topology: Topology) -> Iterator[None]:
    """Tells the other islands, which wait at the start, why this one does not come to it."""
    try:
        yield
    except UserError as error:
        if config.islands.several and not config.validation.skip_train and topology.rank == 0:
            with suppress(CommunicationError):
                place = MeetingPlace(*_where(config), _SECONDS_TO_REFUSE)
                place.take_generation(place.newest_generation())
                place.put(refusal_of(config.islands.island or 0), str(error))
        raise


def _fingerprint(engines: Engines) -> str:
    """Sums over what islands must have in common when they begin: the anchor, or the weights where there is none."""
    outer = engines.outer
    assert outer is not None
    common = outer.outer.anchor or outer.outer.mains
    whole = {4: torch.int32, 8: torch.int64}
    sums = [int(x.view(whole[x.itemsize]).sum(dtype=torch.int64)) for x in common]
    everyones = gather_texts(engines.topology.control.pg, json.dumps(sums))
    return blake2b("\n".join(everyones).encode(), digest_size=8).hexdigest()


def _identity(config: RunConfig, env: LaunchEnvironment, device: torch.device) -> Mapping[str, str]:
    """What must be the same on all islands. Each moves its own anchor, and kernels differ from pure torch in their last
    digits."""
    sections: dict[str, Any] = {name: getattr(config, name) for name in run_sections()}
    kernels = "none" if native.problem_on(device.type) else "compiled"
    everything = {"the number of processes": str(env.world_size), "kernels": kernels, **identity_of(sections)}
    return {name: value for name, value in everything.items() if name not in _ITS_OWN}
