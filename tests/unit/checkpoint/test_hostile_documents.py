"""Checkpoints with valid checksums and arbitrary content give a single line, never a traceback."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.checkpoint.files import TRACKER
from megatron.checkpoint.find import complete_iterations, read_tracker
from megatron.checkpoint.load import load_common, saved_config
from megatron.checkpoint.stored import StoredTensors
from megatron.training.persistence import RunCheckpoints
from megatron.training.saved_run import find_saved
from tests.support.reseal import reseal
from tests.support.tiny import tiny_checkpoints, tiny_engines, tiny_train

FOLDER = "iter_0000002"
CHANGES: dict[str, dict[str, Any]] = {"model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}}


def _checkpoints(folder: str, root: Path, iterations: int = 0) -> RunCheckpoints:
    """Checkpoints of a tiny run that has trained for some iterations; ``folder`` is save or load."""
    changes = {**CHANGES, "checkpoint": {folder: str(root)}}
    engines = tiny_engines(changes)
    if iterations:
        tiny_train(engines, iterations)
    return tiny_checkpoints(engines, iterations)


def _read_all(stored: StoredTensors) -> None:
    for name in stored.manifest.tensors:
        stored.read(name)


def _load(checkpoints: RunCheckpoints) -> None:
    saved = find_saved(checkpoints.config, checkpoints.engines.topology, checkpoints.log)
    assert saved is not None
    checkpoints.load(saved)


def _use(checkpoints: RunCheckpoints, root: Path) -> str | None:
    """Loads in every way; returns the last error."""
    message = None
    ways: list[Callable[[], Any]] = [
        lambda: read_tracker(root),
        lambda: complete_iterations(root),
        lambda: saved_config(root),
        lambda: load_common(root, 2),
        lambda: _read_all(StoredTensors(root, 2)),
        lambda: _load(checkpoints),
    ]
    for way in ways:
        try:
            way()
        except UserError as error:
            message = str(error)
            assert "\n" not in message
            assert message
    progress = checkpoints.progress
    assert progress.iteration >= 0
    assert progress.consumed_samples >= 0
    return message


@dataclass
class Loader:
    """A run that loads from a copy of ``saved``."""

    checkpoints: RunCheckpoints
    saved: Path
    root: Path

    def restore(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.saved, self.root)

    def load_with(
        self, documents: dict[str, bytes], change: Callable[[Any], Any] = lambda content: content
    ) -> str | None:
        """Loads a copy with other documents and a changed table of contents; returns the error."""
        self.restore()
        reseal(self.root / FOLDER, documents, change)
        return _use(self.checkpoints, self.root)

    def common(self, **changes: Any) -> bytes:
        return json.dumps(json.loads((self.saved / FOLDER / "common.json").read_text()) | changes).encode()

    def assert_intact(self) -> None:
        """An unchanged checkpoint can be loaded."""
        assert self.load_with({}) is None
        assert self.checkpoints.progress.iteration == 2


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    saved, root = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("tampered") / "root"
    _checkpoints("save", saved, 2).save()
    assert complete_iterations(saved) == [2]
    shutil.copytree(saved, root)
    return Loader(_checkpoints("load", root), saved, root)


def test_an_unchanged_checkpoint_loads(loader: Loader) -> None:
    loader.assert_intact()
    assert loader.load_with({"common.json": loader.common()}) is None


NOT_COMMON: dict[str, bytes] = {
    "a list": b"[]",
    "a number": b"3",
    "deep": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "not JSON": b"{",
    "nothing": b"",
    "an impossible tensor": b'{"a": {"$tensor": ["float32", [99999999999999999999], ""]}}',
    "a long number": b'{"a": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("kind", NOT_COMMON)
def test_common_values_of_another_kind(loader: Loader, kind: str) -> None:
    message = loader.load_with({"common.json": NOT_COMMON[kind]})
    assert message is not None
    assert f"{loader.root / FOLDER / 'common.json'} is not a valid file of a checkpoint: " in message
    assert "has no other complete checkpoint" in message


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"progress": {"iteration": -1, "consumed_samples": 8, "skipped": 0}}, "iteration is -1; it must be at least"),
        ({"progress": {"iteration": 2, "consumed_samples": -8, "skipped": 0}}, "samples is -8; it must be at least 0"),
        ({"progress": {"iteration": 2, "skipped": 0}}, "consumed_samples is missing"),
        ({"progress": {"iteration": True, "consumed_samples": 8, "skipped": 0}}, "iteration: true is not an integer"),
        ({"progress": [2, 8, 0]}, "progress: expected names and values, not a list"),
        ({"optimizer_steps": -5}, "optimizer_steps is -5"),
        ({"optimizer_steps": 1e400}, "optimizer_steps: inf is not an integer"),
        ({"separate_main": "no"}, "separate_main: 'no' is neither true nor false"),
        ({"schedule": []}, "schedule: expected names and values, not a list"),
        ({"schedule": {}}, "learning-rate schedule cannot be read"),
        ({"loss_scale": 7}, "loss_scale: expected names and values, not 7"),
    ],
)
def test_invalid_counters(loader: Loader, changes: dict[str, Any], fragment: str) -> None:
    message = loader.load_with({"common.json": loader.common(**changes)})
    assert message is not None
    assert fragment in message


def test_a_configuration_that_is_not_utf8(loader: Loader) -> None:
    loader.load_with({"config.yaml": b"\xff: 1"})
    with pytest.raises(UserError, match=r"config.yaml is not a configuration: it is not UTF-8 text"):
        saved_config(loader.root)


def test_a_table_of_contents_without_a_document(loader: Loader) -> None:
    for name in ("common.json", "config.yaml"):

        def without(content: dict[str, Any], name: str = name) -> dict[str, Any]:
            del content["documents"][name]
            return content

        loader.load_with({}, without)
        with pytest.raises(UserError, match=rf"metadata.json lists no {name}"):
            load_common(loader.root, 2) if name == "common.json" else saved_config(loader.root)


def test_chunks_outside_their_tensor_or_that_overlap(loader: Loader) -> None:
    def tamper(offset: int, twice: bool) -> Callable[[Any], Any]:
        def change(content: dict[str, Any]) -> dict[str, Any]:
            name, tensor = next((n, t) for n, t in content["tensors"].items() if len(t["shape"]) == 1)
            (_offsets, sizes, file, at, length, crc32), size = tensor["chunks"][0], tensor["shape"][0]
            assert sizes == [size], name
            half = [[0], [size // 2], file, at, length // 2, crc32]
            tensor["chunks"] = [half, half] if twice else [[[offset], sizes, file, at, length, crc32]]
            return content

        return change

    for change in (tamper(-1, False), tamper(0, True)):
        message = loader.load_with({}, change)
        assert message is not None
        assert "is not a checkpoint's table of contents" in message


# Any JSON value, with the numbers and shapes that break readers.
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([-(2**63), 2**31, 2**62, 2**63, 10**400, 1e308, float("inf"), float("nan"), -0.5]),
    st.sampled_from(["", "release", "float32", "quint8", "../x", "\0", "shard_00000.bin", "$tensor"]),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "$tuple", "$tensor", "$bytes", "$dict", "iteration"]), inner, max_size=2),
    ),
    max_leaves=6,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Keys of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner_path for key, inner in items for inner_path in _paths(inner, (*path, key)))]


def _changed(data: st.DataObject, value: Any) -> Any:
    """A copy with a value or two replaced or removed."""
    value = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(_paths(value)))
        if not path:
            return data.draw(_VALUES)
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        if data.draw(st.booleans()):
            holder[path[-1]] = data.draw(_VALUES)
        else:
            del holder[path[-1]]
    return value


PROPERTY = settings(max_examples=20, deadline=timedelta(seconds=10))


@pytest.mark.slow
@PROPERTY
@given(data=st.data())
def test_any_common_values(loader: Loader, data: st.DataObject) -> None:
    loader.load_with({"common.json": json.dumps(_changed(data, json.loads(loader.common()))).encode()})
    loader.assert_intact()


@PROPERTY
@given(data=st.data())
def test_any_table_of_contents(loader: Loader, data: st.DataObject) -> None:
    loader.load_with({}, lambda content: _changed(data, content))
    loader.assert_intact()


@PROPERTY
@given(text=st.binary(max_size=40) | st.text(max_size=20).map(str.encode) | st.integers().map(lambda n: b"%d" % n))
def test_any_tracker(loader: Loader, text: bytes) -> None:
    loader.restore()
    (loader.root / TRACKER).write_bytes(text)
    message = _use(loader.checkpoints, loader.root)
    iteration = text.decode(errors="replace").strip()
    assert (message is None) is bool(re.fullmatch("0{0,17}2", iteration)), "there is no other iteration"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [TRACKER, "metadata.json", "common.json", "config.yaml", "shard_00000.bin"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to itself"])
def test_reading_a_special_file_does_not_block(loader: Loader, name: str, kind: str) -> None:
    loader.restore()
    path = loader.root / name if name == TRACKER else loader.root / FOLDER / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    message = _use(loader.checkpoints, loader.root)
    assert message is not None
    assert str(path) in message
