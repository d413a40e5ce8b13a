"""Damaged and crafted files: one line and status 2, or exactly the stored weights; never a traceback."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron.base.errors import UserError
from megatron.convert import command
from megatron.convert.command import main
from megatron.convert.ours import read_ours
from megatron.convert.torch_file import TorchFile
from tests.unit.convert.support import LLAMA, assert_same_weights, change_json, convert, refusal, saved_model

FILE = "model_optim_rng.pt"
ARCHIVE = pytest.mark.parametrize("archive", [True, False], ids=["archive", "before torch 1.6"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model in every format that can be read."""
    root = tmp_path_factory.mktemp("models")
    saved = saved_model(root / "ours", LLAMA, layers=1)
    convert(saved, root / "classic", "classic", "--target-tensor-model-parallel-size", "2")
    convert(saved, root / "hf", "hf")
    shutil.copytree(root / "hf", root / "bin")
    (root / "bin" / "model.safetensors").unlink()
    torch.save(load_file(root / "hf" / "model.safetensors"), root / "bin" / "pytorch_model.bin")
    return {name: root / name for name in ("ours", "classic", "hf", "bin")}


@pytest.fixture
def capture(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> pytest.CaptureFixture[str]:
    """The output without the progress bar, which writes to standard error."""
    monkeypatch.setattr(command, "tqdm", lambda **_: _NoBar())
    return capfd


class _NoBar(io.StringIO):
    """Progress bar without output."""

    def update(self, count: int) -> None:
        """Accept tqdm's arguments."""


# Crafted files


class _Tensor:
    """Pickled as a tensor view over a storage, in bounds or not."""

    def __init__(self, storage: torch.Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.parts = (
            torch.storage.TypedStorage(wrap_storage=storage.untyped_storage(), dtype=storage.dtype, _internal=True),
            offset, size, stride, False, OrderedDict[str, Any](),
        )  # fmt: skip

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, self.parts


CRAFTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "an offset beyond its storage": lambda x: _Tensor(x, 1, tuple(x.shape), x.stride()),
    "an offset far beyond": lambda x: _Tensor(x, 10**6, tuple(x.shape), x.stride()),
    "a negative offset": lambda x: _Tensor(x, -1, tuple(x.shape), x.stride()),
    "strides beyond its storage": lambda x: _Tensor(x, 0, tuple(x.shape), (x.stride(0) + 1, *x.stride()[1:])),
    "negative strides": lambda x: _Tensor(x, x.numel() - 1, tuple(x.shape), tuple(-n for n in x.stride())),
    "a negative size": lambda x: _Tensor(x, 0, (-1, *x.shape[1:]), x.stride()),
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.to_sparse_csr() if x.dim() == 2 else x.to_sparse(),
    "without contents": lambda x: torch.empty(x.shape, device="meta"),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.as_nested_tensor([x]),
}


def _load(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


@ARCHIVE
@pytest.mark.parametrize("how", CRAFTED)
@pytest.mark.parametrize("kind", ["classic", "bin"])
@pytest.mark.filterwarnings("ignore")
def test_a_file_with_an_invalid_tensor_is_refused(
    kind: str, how: str, archive: bool, models: dict[str, Path], tmp_path: Path, capture: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(models[kind], tmp_path / "in")
    (path,) = [*tmp_path.rglob(f"mp_rank_01/{FILE}"), *tmp_path.rglob("*.bin")]
    content = _load(path)
    tensors = content if kind == "bin" else content["model"]["language_model"]["encoder"]
    name = "model.layers.0.mlp.down_proj.weight" if kind == "bin" else "layers.0.mlp.dense_4h_to_h.weight"
    tensors[name] = CRAFTED[how](tensors[name])
    torch.save(content, path, _use_new_zipfile_serialization=archive)
    assert str(path) in refusal(capture, tmp_path / "in", tmp_path / "out", "megatron-cc")


def test_tensor_views_are_read_as_in_torch(tmp_path: Path) -> None:
    """Transposed, overlapping, part of a larger storage, and lazily negated."""
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "transposed": base.t(), "part": base[1:3, 2:5], "repeated": base[0].expand(3, 6),
        "negated": torch.complex(base, base).conj().imag, "empty": base[:0], "number": base[2, 3],
    }  # fmt: skip
    assert tensors["negated"].is_neg()
    for archive in (True, False):
        torch.save(tensors, tmp_path / "views.pt", _use_new_zipfile_serialization=archive)
        file = TorchFile(tmp_path / "views.pt")
        for name, tensor in tensors.items():
            assert torch.equal(file.stored(name, file.content[name]).read(), tensor), (archive, name)


def test_files_without_checksums_and_big_endian_files(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.ones(3)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    file = TorchFile(path)
    assert torch.equal(file.stored("x", file.content["x"]).read(), torch.ones(3))
    other = {"little": "big", "big": "little"}[sys.byteorder]
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for info in old.infolist():
            info.CRC, data = 0, old.open(_unchecked(info)).read()
            new.writestr(info.filename, other if info.filename.endswith("byteorder") else data)
    with pytest.raises(UserError, match=f"its numbers are {other}-endian"):
        TorchFile(tmp_path / "y.pt")


def _unchecked(info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    info.CRC = None  # type: ignore[assignment]
    return info


# Files that arrive damaged


CHANGES = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 1), st.integers(1, 255)),
    st.tuples(st.just("flip near the end"), st.floats(0, 1), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(0)),
    st.tuples(st.just("zeros"), st.floats(0, 1), st.integers(1, 300)),
    st.tuples(st.just("leave out"), st.floats(0, 1), st.integers(1, 300)),
)


def _damaged(data: bytes, change: tuple[str, float, int], beginning: int) -> bytes:
    """``beginning`` is how many bytes at the front are worth a flip "near the end" of an archive, which has none."""
    how, share, number = change
    at = min(int(share * len(data)), len(data) - 1)
    if how == "flip near the end":
        at = int(share * (beginning - 1)) if beginning else max(len(data) - 1 - int(share * 3000), 0)
    if how == "cut":
        return data[:at]
    if how == "zeros":
        return data[:at] + bytes(min(number, len(data) - at)) + data[at + number :]
    if how == "leave out":
        return data[:at] + data[at + number :]
    return data[:at] + bytes([data[at] ^ number]) + data[at + 1 :]


EXAMPLES = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _convert(folder: Path, to: str, capture: pytest.CaptureFixture[str]) -> Path | None:
    """The converted folder, or None if ``folder``/in is refused in one line and nothing is written."""
    capture.readouterr()
    status = main(["--load", str(folder / "in"), "--save", str(folder / "out"), "--to", to])
    error = capture.readouterr().err
    assert (error.count("\n"), "Traceback" in error) == (1 if status else 0, False), error
    if status == 0:
        return folder / "out"
    assert status == 2
    assert not (folder / "out").exists()
    return None


@pytest.mark.parametrize("kind", ["classic", "bin"])
@EXAMPLES
@given(change=CHANGES)
def test_a_damaged_pickle_is_refused_or_harmless(
    kind: str, models: dict[str, Path], capture: pytest.CaptureFixture[str], change: tuple[str, float, int]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(models[kind], folder / "in")
        (path, *_) = sorted([*folder.rglob(FILE), *folder.rglob("*.bin")])
        path.write_bytes(_damaged(path.read_bytes(), change, 0))
        if (out := _convert(folder, "megatron-cc", capture)) is not None:
            first, second = read_ours(models["ours"]), read_ours(out)
            assert_same_weights(first, second)
            assert first.model.norm_epsilon == second.model.norm_epsilon


@EXAMPLES
@given(change=CHANGES)
def test_a_damaged_safetensors_file_is_refused_or_read_by_its_header(
    models: dict[str, Path], capture: pytest.CaptureFixture[str], change: tuple[str, float, int]
) -> None:
    """The format has no checksums: the tensors must match the header."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(models["hf"], folder / "in")
        path = folder / "in" / "model.safetensors"
        length = int.from_bytes(path.read_bytes()[:8], "little")
        path.write_bytes(_damaged(path.read_bytes(), change, 8 + length))
        if (out := _convert(folder, "hf", capture)) is not None:
            before, after = load_file(path), load_file(out / "model.safetensors")
            for name, x in after.items():
                assert torch.equal(before[name].view(torch.int32), x.view(torch.int32))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@EXAMPLES
@given(data=st.data())
def test_a_config_of_any_values_is_refused_or_fits(
    models: dict[str, Path], capture: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(models["hf"], Path(folder, "in"))
        path = Path(folder, "in", "config.json")
        names = [*sorted(json.loads(path.read_text())), "rope_parameters", "sliding_window", "use_parallel_residual"]
        change_json(path, {data.draw(st.sampled_from(names)): data.draw(JSON)})
        _convert(Path(folder), "megatron-cc", capture)


@EXAMPLES
@given(data=st.data())
def test_arguments_of_any_values_are_refused_or_fit(
    models: dict[str, Path], capture: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(models["classic"], Path(folder, "in"))
        path = Path(folder, "in", "iter_0000007", "mp_rank_00", FILE)
        content = _load(path)
        setattr(content["args"], data.draw(st.sampled_from(sorted(vars(content["args"])))), data.draw(JSON))
        torch.save(content, path)
        _convert(Path(folder), "megatron-cc", capture)
