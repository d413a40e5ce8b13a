"""The case files: experiments, models and their layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.base.documents import read_yaml
from megatron.base.errors import UserError

CASES = Path(__file__).resolve().parent / "cases"


@dataclass(frozen=True)
class Experiment:
    """A case file of ``cases/experiments``.

    Args:
        name, title: name and title of the experiment.
        iterations, local_iterations: iterations of each run; the second on this machine.
        local_rounds: runs of each scheme on this machine, where the schemes take turns; None: one run.
        schemes: names in ``cases/schemes.yaml``.
        report: kind of the report.
        flags: further flags.
        layouts: layouts of models that this experiment splits in another way.
    """

    name: str
    title: str
    iterations: int
    schemes: tuple[str, ...]
    report: str
    local_iterations: int | None = None
    local_rounds: int | None = None
    flags: tuple[str, ...] = ()
    layouts: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelCase:
    """A case file of ``cases/models``.

    Args:
        name: name of the model.
        replicas: number of data-parallel replicas.
        ranks_per_node: number of processes per node.
        config: sections of a run's configuration.
    """

    name: str
    replicas: int
    ranks_per_node: int
    config: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return int(self.config["parallel"].get("pipeline_model_parallel_size", 1))

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.replicas * self.stages * int(self.config["parallel"].get("tensor_model_parallel_size", 1))

    @property
    def nodes(self) -> int:
        """Number of nodes that the processes need."""
        return -(-self.ranks // self.ranks_per_node)

    def flags(self) -> list[str]:
        """The settings as flags."""
        words: list[str] = []
        for section in self.config.values():
            for name, value in section.items():
                flag = f"--{name.replace('_', '-')}"
                words += [flag] if value is True else [] if value is False else [flag, str(value)]
        return words


def names_in(folder: str) -> list[str]:
    """Names of the case files."""
    return sorted(path.stem for path in (CASES / folder).glob("*.yaml"))


def read_experiment(name: str) -> Experiment:
    """Reads a case file.

    Raises:
        UserError: when there is none of the name.
    """
    if name not in names_in("experiments"):
        raise UserError(f"{name}: the experiments are {', '.join([*names_in('experiments'), 'fig14'])}")
    content = read_yaml(CASES / "experiments" / f"{name}.yaml")
    lists: dict[str, Any] = {key: tuple(content.pop(key, ())) for key in ("schemes", "flags")}
    return Experiment(name, **content, **lists)


def read_model(name: str, layout: Mapping[str, int] | None = None) -> ModelCase:
    """Reads a case file.

    Args:
        name: name of the model.
        layout: replicas and parallel sizes in place of its own.

    Raises:
        UserError: when there is none of the name.
    """
    if name not in names_in("models"):
        raise UserError(f"--model {name}: the models are {', '.join(names_in('models'))}")
    content = read_yaml(CASES / "models" / f"{name}.yaml")
    if "base" in content:
        base = read_yaml(CASES / f"{content['base']}.yaml")
        for section, values in content["config"].items():
            base["config"].setdefault(section, {}).update(values)
        content = base
    sizes = dict(layout or {})
    replicas = sizes.pop("replicas", content.pop("replicas"))
    content["config"]["parallel"].update(sizes)
    return ModelCase(name, replicas, **content)


def specs_of(scheme: Sequence[str], model: ModelCase) -> tuple[str, ...]:
    """Specs for a model's pipeline: the first three stages of two are all of them."""

    def within(match: re.Match[str]) -> str:
        return f"stages=first:{min(int(match[1]), model.stages)}"

    return tuple(re.sub(r"stages=first:(\d+)", within, spec) for spec in scheme)
