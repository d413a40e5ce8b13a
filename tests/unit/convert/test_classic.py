"""The classic Megatron layout, both ways."""

from __future__ import annotations

import argparse
import enum
import os
import runpy
import sys
import types
import zipfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.convert.command import main
from megatron.convert.ours import read_ours
from megatron.inference.model import load_model
from megatron.models.context import ForwardContext
from tests.support.combinations import mark_repeats
from tests.support.tiny import VOCAB
from tests.unit.convert.support import (
    HEADS,
    HIDDEN,
    LENGTH,
    MODELS,
    NOT_CLASSIC,
    assert_close,
    assert_same_weights,
    convert,
    refusal,
    saved_model,
)

DROPOUTS: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
FILE = "model_optim_rng.pt"


def _classic(saved: Path, folder: Path, tp: int, pp: int) -> Path:
    sizes = ["--target-tensor-model-parallel-size", str(tp), "--target-pipeline-model-parallel-size", str(pp)]
    convert(saved, folder, "classic", *sizes)
    return folder


def _load(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


CLASSIC = {**MODELS, "norms of weights beside 1": {"apply_layernorm_1p": True}}


# Each model in one of the layouts: fused and gated projections, groups, biases and an untied head are split in two.
LAYOUTS = {
    "gpt2": (2, 3),
    "gpt2 untied, exact gelu": (4, 1),
    "llama, 1 group": (4, 1),  # is refused
    "llama, 2 groups, untied": (2, 3),
    "llama, wide heads": (4, 1),
    "llama with biases": (2, 3),
    "llama, all wavelengths scaled": (1, 1),
    "llama 3": (1, 1),
    "qwen2, 2 groups, untied": (2, 3),
    "neox": (4, 1),
    "neox, half rotated, exact gelu, untied": (2, 3),
    "norms of weights beside 1": (2, 3),
}


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    mark_repeats(
        [(name, tp, pp) for (tp, pp), name in product([(1, 1), (2, 3), (4, 1)], CLASSIC)],
        keep=[(name, tp, pp) for name, (tp, pp) in LAYOUTS.items()],
    ),
)
def test_there_and_back(name: str, tp: int, pp: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = saved_model(tmp_path / "ours", CLASSIC[name])
    if CLASSIC[name].get("num_query_groups", HEADS) % tp:
        refusal(capsys, saved, tmp_path / "classic", "classic", "--target-tensor-model-parallel-size", str(tp))
        return
    classic = _classic(saved, tmp_path / "classic", tp, pp)
    convert(classic, tmp_path / "back", "megatron-cc")
    assert_same_weights(read_ours(saved), read_ours(tmp_path / "back"))
    first, second = read_ours(saved).model, read_ours(tmp_path / "back").model
    assert first == replace(second, init_method_std=first.init_method_std, **DROPOUTS)
    assert read_ours(tmp_path / "back").iteration == 7


@pytest.mark.parametrize("name", NOT_CLASSIC)
def test_models_outside_the_layout_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = saved_model(tmp_path / "ours", NOT_CLASSIC[name])
    assert "--to classic: that layout has no --" in refusal(capsys, saved, tmp_path / "classic", "classic")


def test_a_model_without_an_iteration_is_a_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron-LM takes an iteration above 0 or the word "release"."""
    saved = saved_model(tmp_path / "ours", {})
    convert(saved, tmp_path / "hf", "hf")
    classic = _classic(tmp_path / "hf", tmp_path / "classic", 2, 1)
    assert (classic / "latest_checkpointed_iteration.txt").read_text() == "release\n"
    assert [path.name for path in classic.iterdir() if path.is_dir()] == ["release"]
    convert(classic, tmp_path / "back", "megatron-cc")
    assert_same_weights(read_ours(saved), read_ours(tmp_path / "back"))
    again = _classic(classic, tmp_path / "again", 1, 3)
    ranks = [f"mp_rank_00_{stage:03d}" for stage in range(3)]
    assert sorted(path.name for path in (again / "release").iterdir()) == ranks
    assert "has no such checkpoint; it has release" in refusal(
        capsys, classic, tmp_path / "x", "hf", "--iteration", "3"
    )


def test_names_and_shapes_follow_the_layout(tmp_path: Path) -> None:
    classic = _classic(saved_model(tmp_path / "ours", {}, layers=4), tmp_path / "classic", 2, 2)
    assert (classic / "latest_checkpointed_iteration.txt").read_text().strip() == "7"
    folder = classic / "iter_0000007"
    assert sorted(path.name for path in folder.iterdir()) == [
        "mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001",
    ]  # fmt: skip
    first, last = _load(folder / "mp_rank_00_000" / FILE), _load(folder / "mp_rank_01_001" / FILE)
    assert first["checkpoint_version"] == 3.0
    assert first["args"].padded_vocab_size == 128
    language = first["model"]["language_model"]
    assert language["embedding"]["word_embeddings"]["weight"].shape == (64, HIDDEN)
    assert next(iter(language["encoder"])) == "layers.0.input_layernorm.weight"
    assert language["encoder"]["layers.1.self_attention.query_key_value.weight"].shape == (3 * HIDDEN // 2, HIDDEN)
    assert language["encoder"]["layers.1.mlp.dense_4h_to_h.weight"].shape == (HIDDEN, 2 * HIDDEN)
    assert not any(name.startswith("final") for name in language["encoder"])
    ends = last["model"]
    assert list(ends["language_model"]["encoder"])[-2:] == ["final_layernorm.weight", "final_layernorm.bias"]
    assert ends["word_embeddings_for_head"]["weight"].shape == (64, HIDDEN)
    with zipfile.ZipFile(folder / "mp_rank_00_000" / FILE) as archive:
        assert archive.testzip() is None


def _rewrite(path: Path, change: Any) -> None:
    content = _load(path)
    change(content)
    torch.save(content, path)


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
def test_older_orders_of_the_fused_projection(version: float, tmp_path: Path) -> None:
    """Version 0 had no number and put all queries first; version 1 had the three innermost."""
    saved = saved_model(tmp_path / "ours", {})
    classic = _classic(saved, tmp_path / "classic", 2, 1)
    heads, width = HEADS // 2, HIDDEN // HEADS

    def older(content: dict[str, Any]) -> None:
        encoder = content["model"]["language_model"].pop("encoder")
        for name, x in encoder.items():
            if "query_key_value" in name and version < 2:
                by_head = x.view(heads, 3, width, *x.shape[1:])
                order = by_head.transpose(0, 1) if version == 0 else by_head.transpose(1, 2)
                encoder[name] = order.reshape(x.shape).clone()
        content["model"]["language_model"]["transformer"] = encoder
        if version == 0:
            del content["checkpoint_version"]
        else:
            content["checkpoint_version"] = version

    for path in classic.rglob(FILE):
        _rewrite(path, older)
    convert(classic, tmp_path / "back", "megatron-cc")
    assert_same_weights(read_ours(saved), read_ours(tmp_path / "back"))


def test_interleaved_chunks_are_ordered(tmp_path: Path) -> None:
    """Two stages of two chunks: chunk c of stage s holds virtual stage 2 c + s."""
    saved = saved_model(tmp_path / "ours", {}, layers=4)
    classic = _classic(saved, tmp_path / "classic", 1, 4)
    stages = [_load(classic / "iter_0000007" / f"mp_rank_00_{p:03d}" / FILE) for p in range(4)]
    folder = tmp_path / "interleaved" / "iter_0000007"
    for stage in range(2):
        content = {k: v for k, v in stages[stage].items() if k != "model"}
        content |= {"model0": stages[stage]["model"], "model1": stages[2 + stage]["model"]}
        path = folder / f"mp_rank_00_{stage:03d}"
        path.mkdir(parents=True)
        torch.save(content, path / FILE)
    convert(folder, tmp_path / "back", "megatron-cc")
    assert_same_weights(read_ours(saved), read_ours(tmp_path / "back"))


class _Attribute:
    """An attribute of a class, as Python 3.11.2 pickles the member of an enum."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


def test_other_contents_of_a_file_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random states as numpy arrays, and enums of a package that is missing here."""
    saved = saved_model(tmp_path / "ours", {})
    classic = _classic(saved, tmp_path / "classic", 1, 1)
    path = classic / "iter_0000007" / "mp_rank_00" / FILE
    content = _load(path)
    module = types.ModuleType("megatron.model.enums_of_old")
    ModelType = enum.Enum("ModelType", ["encoder_or_decoder"], module=module.__name__)
    module.ModelType = ModelType  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, module.__name__, module)
        content["args"].model_type = ModelType["encoder_or_decoder"]
        content["args"].attention_backend = _Attribute(ModelType, "encoder_or_decoder")
        content["np_rng_state"] = np.random.RandomState(3).get_state()
        torch.save(content, path)
    convert(classic, tmp_path / "back", "megatron-cc")
    assert_same_weights(read_ours(saved), read_ours(tmp_path / "back"))


class _Evil:
    def __reduce__(self) -> Any:
        return sys.exit, ("this must not run",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: torch.save(_load(path) | {"args": _Evil()}, path), "cannot be read safely"),
        (lambda path: path.write_bytes(path.read_bytes()[:-500]), "cannot be read safely"),
        (lambda path: path.unlink(), "mp_rank_00_000 is missing"),
        (lambda path: _rewrite(path, lambda content: content.pop("args")), "does not hold its training arguments"),
        (
            lambda path: _rewrite(path, lambda content: setattr(content["args"], "num_layers", 5)),
            "the files hold 3 layers, but their arguments specify 5",
        ),
    ],
    ids=["code", "truncated", "gone", "no arguments", "fewer layers"],
)
def test_errors_are_named(change: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classic = _classic(saved_model(tmp_path / "ours", {}), tmp_path / "classic", 2, 1)
    change(classic / "iter_0000007" / "mp_rank_00" / FILE)
    assert message in refusal(capsys, classic, tmp_path / "back", "megatron-cc")


def test_the_vocabulary_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classic = _classic(saved_model(tmp_path / "ours", {}), tmp_path / "classic", 1, 1)
    path = classic / "iter_0000007" / "mp_rank_00" / FILE
    _rewrite(path, lambda content: delattr(content["args"], "orig_vocab_size"))
    convert(classic, tmp_path / "padded", "megatron-cc")
    assert read_ours(tmp_path / "padded").vocab_size == 128
    convert(classic, tmp_path / "back", "megatron-cc", "--vocab-size", str(VOCAB))
    assert read_ours(tmp_path / "back").vocab_size == VOCAB
    assert "--vocab-size 999: the checkpoint's embedding has 128 rows" in refusal(
        capsys, classic, tmp_path / "x", "hf", "--vocab-size", "999"
    )


def test_command_lines_of_the_forks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = saved_model(tmp_path / "ours", {})
    shards = _classic(saved, tmp_path / "parts", 2, 3)
    words = ["-i", str(shards / "iter_0000007"), "-i_g", "1", "-p", "64", "--target-pipeline-model-parallel-size", "1"]
    run = ["--model-type", "GPT", "--num-layers", "3", "--hidden-size", "32", "--fp16"]
    assert main([*words, "-o", str(tmp_path / "merged"), *run]) == 0
    assert "ignored, since the model is in the checkpoint: --num-layers 3" in capsys.readouterr().err
    assert (tmp_path / "merged" / "iter_0000007" / "mp_rank_00" / FILE).is_file()
    convert(tmp_path / "merged", tmp_path / "back", "megatron-cc")
    assert_same_weights(read_ours(saved), read_ours(tmp_path / "back"))
    for flags, message in (
        (["--model-type", "BERT"], "--model-type BERT: only GPT has a classic layout"),
        (["--num-layer", "3", "--model-type", "GPT"], "--num-layer"),
        ([], "--to is missing"),
        (["--to", "classic", "--target-tensor-parallel-size", "0"], "give at least 1"),
        (["--to", "classic", "--target-tensor-parallel-size", "3"], "does not divide the 4 heads"),
    ):
        assert main(["--load", str(saved), "--save", str(tmp_path / "x"), *flags]) == 2
        error = capsys.readouterr().err.strip()
        assert message in error
        assert not (tmp_path / "x").exists()


ORACLE = os.environ.get("TRANSFORMERS_ORACLE")


@pytest.mark.oracle
@pytest.mark.skipif(not ORACLE, reason="TRANSFORMERS_ORACLE names no folder with transformers 4.17")
@pytest.mark.parametrize("fused_gelu", [True, False])
def test_transformers_own_converter_reads_our_export(fused_gelu: bool, tmp_path: Path) -> None:
    """The script of transformers 4.17 with the installed transformers below it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    script_path = Path(str(ORACLE)) / "transformers/models/megatron_gpt2/convert_megatron_gpt2_checkpoint.py"
    script = runpy.run_path(str(script_path))
    saved = saved_model(tmp_path / "ours", {"bias_gelu_fusion": fused_gelu}, layers=4)
    classic = _classic(saved, tmp_path / "classic", 1, 1)
    state = _load(classic / "iter_0000007" / "mp_rank_00" / FILE)
    # As its main function chooses; the sizes come from the arguments.
    gelu = "gelu_fast" if state["args"].bias_gelu_fusion else "gelu"
    config = GPT2Config(activation_function=gelu)
    weights = script["convert_megatron_checkpoint"](None, state, config)
    theirs: Any = GPT2LMHeadModel(config).eval()
    report = theirs.load_state_dict(weights, strict=False)
    assert not report.missing_keys
    assert all(name.endswith(("attn.bias", "attn.masked_bias")) for name in report.unexpected_keys)
    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    model = load_model(saved, device=torch.device("cpu"))
    with torch.no_grad():
        expected = model.stage.logits(model.stage(tokens, ForwardContext())).transpose(0, 1)
        logits = theirs(input_ids=tokens).logits[..., :VOCAB]
    assert_close(logits, expected)
