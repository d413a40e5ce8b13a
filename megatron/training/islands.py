"""One island of several: its folders, and how it meets the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError
from megatron.checkpoint.files import TRACKER
from megatron.checkpoint.load import saved_config
from megatron.compression.outer import RoundSchedule
from megatron.compression.points import Point
from megatron.compression.schedule import RunLength
from megatron.config.islands import file_of, folder_of, host_and_port, with_variables
from megatron.config.run import RunConfig, run_sections
from megatron.topology.agree import together
from megatron.topology.group import Group
from megatron.topology.islands import Islands
from megatron.topology.launch import LaunchEnvironment
from megatron.topology.meeting_place import MeetingPlace
from megatron.topology.topology import Topology
from megatron.training.assembly import Engines
from megatron.training.identity import identity_of
from megatron.training.joining import Joining
from megatron.training.persistence import RunCheckpoints, SavedRun
from megatron.training.report import Reporter
from megatron.training.rounds import Rounds

_FOLDERS = ("tensorboard_dir", "wandb_save_dir", "profile_trace")
_FILES = ("log_txt_file", "log_json_file")
_ITS_OWN = ("--save", "--load", "--island", "--islands-address", "--ckpt-step", "--finetune", "--overwrite-checkpoints")
_SHARE_OF_TIMEOUT = 0.9
"""Ranks wait for a decision of rank 0 at most the whole time-out."""


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
    if Path(own).exists():
        return own
    others = 0
    while Path(folder_of(str(root), others)).exists():
        others += 1
    if others:
        return folder_of(str(root), number % others)
    return str(root) if (root / TRACKER).exists() else own


def folders_of_others(config: RunConfig, saved: SavedRun | None, topology: Topology) -> list[str]:
    """Folders of all islands that a checkpoint was saved by, where this run has others than that one; else none.

    Raises:
        UserError: on every rank, when islands were under way to a round then, so that something would be lost.
    """
    root, number = config.checkpoint.load, config.islands.island
    outer = {} if saved is None else saved.common["outer"]
    if root is None or saved is None or config.checkpoint.loads_weights_only or not outer.get("begun"):
        return []
    there, _ = together(topology.control.pg, lambda: saved_config(root, config.checkpoint.ckpt_step))
    before, now = there.islands.islands, config.islands.islands
    if before == now and (not config.islands.several or there.islands.island == number):
        return []
    if outer["together"] != saved.progress.iteration:
        raise UserError(
            f"--load {root}: {before} islands were under way to a round at iteration {saved.progress.iteration}, and "
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
        joint: this rank of all islands, where they go in step; None where they do not.
        begins: whether it begins with the others; else it joins them.
    """

    islands: Islands | None = None
    joint: Group | None = None
    begins: bool = True

    def leave(self) -> None:
        """Ends this island's part."""
        if self.islands is not None:
            self.islands.leave()


def build_rounds(
    engines: Engines, checkpoints: RunCheckpoints, reporter: Reporter, islands: Islands | None, train_iters: int
) -> Rounds | None:
    """Builds the rounds of this island; None where there are none.

    Args:
        engines, checkpoints, reporter: the run.
        islands: the other islands.
        train_iters: iterations of the whole run.
    """
    outer = engines.outer
    if outer is None or (islands is None and engines.config.islands.several):
        return None
    start = engines.plan.activation(Point.OUTER).warmup_iters
    joining = None if islands is None else Joining(engines, outer, islands, checkpoints.parts, reporter.line)
    return Rounds(outer, RoundSchedule(outer.options, start, train_iters), islands, reporter.of_islands, joining)


def meet_islands(
    config: RunConfig, topology: Topology, env: LaunchEnvironment, iteration: int, length: RunLength
) -> Met:
    """Meets the other islands, if any.

    Args:
        config: the resolved configuration.
        topology: the ranks of this island.
        env: environment of this process.
        iteration: iterations that this island has done.
        length: length of the run.

    Raises:
        UserError: on every rank of all islands, when they cannot go together.
        CommunicationError: when they do not come.
    """
    section = config.islands
    if not section.several or config.validation.skip_train:
        return Met()
    assert section.island is not None
    assert section.islands_address is not None
    seconds = _SHARE_OF_TIMEOUT * 60 * config.parallel.distributed_timeout_minutes
    place = MeetingPlace(*host_and_port(section.islands_address, "--islands-address"), seconds)
    islands = Islands(
        place,
        section.island,
        section.islands,
        section.quorum,
        section.islands_timeout_seconds,
        seconds,
        topology.control.pg,
    )
    in_step = iteration < config.compression.specs(length)[Point.OUTER].activation.warmup_iters
    begins = islands.begin(iteration, in_step, _identity(config, env))
    joint = islands.group_of(range(section.islands), "joint", seconds) if in_step and begins else None
    return Met(islands, joint, begins)


def _identity(config: RunConfig, env: LaunchEnvironment) -> Mapping[str, str]:
    """What must be the same on all islands."""
    sections: dict[str, Any] = {name: getattr(config, name) for name in run_sections()}
    everything = {"the number of processes": str(env.world_size), **identity_of(sections)}
    return {name: value for name, value in everything.items() if name not in _ITS_OWN}
