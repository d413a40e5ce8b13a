"""Checkpoints whose documents are well-formed, have right checksums and hold anything: one line, never a traceback."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable
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
    """Those of a tiny run, trained for some iterations, that saves to or loads from a folder."""
    changes = {**CHANGES, "checkpoint": {folder: str(root)}}
    engines = tiny_engines(changes)
    if iterations:
        tiny_train(engines, iterations)
    return tiny_checkpoints(engines, iterations)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    _checkpoints("save", root, 2).save()
    assert complete_iterations(root) == [2]
    return root


@pytest.fixture(scope="module")
def loader(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunCheckpoints, Path]:
    """A run that loads from a copy of ``saved``."""
    root = tmp_path_factory.mktemp("tampered") / "root"
    shutil.copytree(saved, root)
    return _checkpoints("load", root), root


def _read_all(stored: StoredTensors) -> None:
    for name in stored.manifest.tensors:
        stored.read(name)


def _load(checkpoints: RunCheckpoints) -> None:
    saved = find_saved(checkpoints.config, checkpoints.engines.topology, checkpoints.log)
    assert saved is not None
    checkpoints.load(saved)


def _use(checkpoints: RunCheckpoints, root: Path) -> str | None:
    """Loads in every way there is; the error, if it is one."""
    said = None
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
            said = str(error)
            assert "\n" not in said
            assert said
    progress = checkpoints.progress
    assert progress.iteration >= 0
    assert progress.consumed_samples >= 0
    return said


def _with(
    checkpoints: RunCheckpoints,
    saved: Path,
    root: Path,
    documents: dict[str, bytes],
    change: Callable[[Any], Any] = lambda content: content,
) -> str | None:
    shutil.rmtree(root)
    shutil.copytree(saved, root)
    reseal(root / FOLDER, documents, change)
    return _use(checkpoints, root)


def _common(saved: Path, **changes: Any) -> bytes:
    return json.dumps(json.loads((saved / FOLDER / "common.json").read_text()) | changes).encode()


def test_the_untouched_one_loads(loader: tuple[RunCheckpoints, Path], saved: Path) -> None:
    checkpoints, root = loader
    assert _with(checkpoints, saved, root, {}) is None
    assert checkpoints.progress.iteration == 2
    assert _with(checkpoints, saved, root, {"common.json": _common(saved)}) is None


NOT_COMMON: dict[str, bytes] = {
    "a list": b"[]",
    "a number": b"3",
    "deep": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "not JSON": b"{",
    "nothing": b"",
    "a tensor that is none": b'{"a": {"$tensor": ["float32", [99999999999999999999], ""]}}',
    "a long number": b'{"a": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("kind", NOT_COMMON)
def test_common_values_of_another_kind(loader: tuple[RunCheckpoints, Path], saved: Path, kind: str) -> None:
    said = _with(loader[0], saved, loader[1], {"common.json": NOT_COMMON[kind]})
    assert said is not None
    assert f"{loader[1] / FOLDER / 'common.json'} is not what a checkpoint holds: " in said
    assert "has no other complete checkpoint" in said


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"progress": {"iteration": -1, "consumed_samples": 8, "skipped": 0}},
            "iteration is -1; it must be at least",
        ),
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
def test_counters_that_no_run_has(
    loader: tuple[RunCheckpoints, Path], saved: Path, changes: dict[str, Any], says: str
) -> None:
    said = _with(loader[0], saved, loader[1], {"common.json": _common(saved, **changes)})
    assert said is not None
    assert says in said


def test_a_configuration_that_is_not_utf8(loader: tuple[RunCheckpoints, Path], saved: Path) -> None:
    checkpoints, root = loader
    _with(checkpoints, saved, root, {"config.yaml": b"\xff: 1"})
    with pytest.raises(UserError, match=r"config.yaml is no configuration: it is not UTF-8 text"):
        saved_config(root)


def test_a_seal_that_lacks_a_file(loader: tuple[RunCheckpoints, Path], saved: Path) -> None:
    checkpoints, root = loader
    for name in ("common.json", "config.yaml"):

        def without(content: dict[str, Any], name: str = name) -> dict[str, Any]:
            del content["documents"][name]
            return content

        _with(checkpoints, saved, root, {}, without)
        with pytest.raises(UserError, match=rf"metadata.json lists no {name}"):
            load_common(root, 2) if name == "common.json" else saved_config(root)


def test_chunks_that_lie_outside_or_over_each_other(loader: tuple[RunCheckpoints, Path], saved: Path) -> None:
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
        said = _with(loader[0], saved, loader[1], {}, change)
        assert said is not None
        assert "is not a checkpoint's table of contents" in said


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


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in _places(inner, (*path, key)))]


def _changed(data: st.DataObject, value: Any) -> Any:
    """The value with something at one or two of its places replaced or left out."""
    value = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(_places(value)))
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


PROPERTY = settings(max_examples=60, deadline=timedelta(seconds=10))


@PROPERTY
@given(data=st.data())
def test_any_common_values(loader: tuple[RunCheckpoints, Path], saved: Path, data: st.DataObject) -> None:
    checkpoints, root = loader
    changed = _changed(data, json.loads((saved / FOLDER / "common.json").read_text()))
    said = _with(checkpoints, saved, root, {"common.json": json.dumps(changed).encode()})
    assert said is None or len(said.splitlines()) == 1
    assert _with(checkpoints, saved, root, {}) is None, "what was refused has spoiled the run"
    assert checkpoints.progress.iteration == 2


@PROPERTY
@given(data=st.data())
def test_any_table_of_contents(loader: tuple[RunCheckpoints, Path], saved: Path, data: st.DataObject) -> None:
    checkpoints, root = loader
    said = _with(checkpoints, saved, root, {}, lambda content: _changed(data, content))
    assert said is None or len(said.splitlines()) == 1
    assert _with(checkpoints, saved, root, {}) is None, "what was refused has spoiled the run"
    assert checkpoints.progress.iteration == 2


@PROPERTY
@given(text=st.binary(max_size=40) | st.text(max_size=20).map(str.encode) | st.integers().map(lambda n: b"%d" % n))
def test_any_tracker(loader: tuple[RunCheckpoints, Path], saved: Path, text: bytes) -> None:
    checkpoints, root = loader
    shutil.rmtree(root)
    shutil.copytree(saved, root)
    (root / TRACKER).write_bytes(text)
    said = _use(checkpoints, root)
    named = text.decode(errors="replace").strip()
    assert (said is None) is bool(re.fullmatch("0{0,17}2", named)), "only the iteration that is there can be named"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [TRACKER, "metadata.json", "common.json", "config.yaml", "shard_00000.bin"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to itself"])
def test_what_is_no_plain_file_is_not_waited_for(
    loader: tuple[RunCheckpoints, Path], saved: Path, name: str, kind: str
) -> None:
    checkpoints, root = loader
    shutil.rmtree(root)
    shutil.copytree(saved, root)
    path = root / name if name == TRACKER else root / FOLDER / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    said = _use(checkpoints, root)
    assert said is not None
    assert str(path) in said
