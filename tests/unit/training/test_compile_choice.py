"""``--compile``: the engines compile the layers that the configuration, and so the planner, takes to be compiled."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Literal

import pytest

from megatron.distributed.topology import single_process
from megatron.models.stage import Stage
from megatron.training.assembly import build_engines
from tests.support.device import own_device
from tests.support.tiny import VOCAB, tiny_config


@pytest.mark.parametrize(
    ("choice", "backend", "deterministic", "compiles"),
    [
        ("auto", "gloo", False, False),
        ("auto", "nccl", False, True),
        ("auto", "nccl", True, False),
        ("off", "nccl", False, False),
        ("on", "gloo", False, True),
    ],
)
def test_layers_are_compiled_where_the_configuration_says_so(
    choice: str,
    backend: Literal["gloo", "nccl"],
    deterministic: bool,
    compiles: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[Stage] = []
    monkeypatch.setattr(Stage, "compile_layers", lambda stage, **_: compiled.append(stage))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    config = tiny_config({"training": {"compile": choice, "deterministic_mode": deterministic}}, 1)
    config = replace(config, parallel=replace(config.parallel, distributed_backend=backend))
    engines = build_engines(config, single_process(own_device(0)), VOCAB)
    assert compiled == (engines.stages if compiles else [])
