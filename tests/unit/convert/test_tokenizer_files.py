"""The tokenizer of a converted checkpoint: the search for its files, and files that are never copied."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.base.errors import UserError
from megatron.checkpoint.load import saved_config
from megatron.config.tokenizer import TokenizerConfig
from megatron.convert.classic_write import write_classic
from megatron.convert.command import main
from megatron.convert.hugging_face import write_hf
from megatron.convert.ours import read_ours
from megatron.convert.tokenizer_files import find_tokenizer
from tests.support.tiny import VOCAB
from tests.unit.convert.support import convert, saved_model

FILE = "model_optim_rng.pt"


@pytest.fixture(scope="module")
def classic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the classic layout."""
    root = tmp_path_factory.mktemp("models")
    convert(saved_model(root / "ours", {}, layers=1), root / "classic", "classic")
    return root / "classic"


def _gpt2_files(folder: Path, entries: int) -> dict[str, Any]:
    """Files of a tokenizer with this many entries, the last of which ends a document."""
    folder.mkdir(exist_ok=True)
    words = [chr(97 + i % 26) * (1 + i // 26) for i in range(entries - 1)]
    (folder / "v.json").write_text(json.dumps({word: i for i, word in enumerate([*words, "<|endoftext|>"])}))
    (folder / "m.txt").write_text("#version: 0.2\n")
    return {"vocab_file": str(folder / "v.json"), "merge_file": str(folder / "m.txt")}


def test_the_tokenizer_is_copied(tmp_path: Path) -> None:
    saved = saved_model(tmp_path / "ours", {})
    files = _gpt2_files(tmp_path / "files", VOCAB - 10)
    weights = replace(read_ours(saved), tokenizer=TokenizerConfig(tokenizer_type="GPT2BPETokenizer", **files))
    for name, write in (("hf", write_hf), ("classic", lambda w, f, d: write_classic(w, f, 1, 1, d))):
        (tmp_path / name).mkdir()
        write(weights, tmp_path / name, lambda nbytes: None)
        assert (tmp_path / name / "vocab.json").read_text() == Path(files["vocab_file"]).read_text()
        assert (tmp_path / name / "merges.txt").is_file()
        convert(tmp_path / name, tmp_path / f"back from {name}", "megatron-cc")
        config, _ = saved_config(tmp_path / f"back from {name}")
        assert config.tokenizer.tokenizer_type == "GPT2BPETokenizer"
        assert config.tokenizer.vocab_file == str(tmp_path / name / "vocab.json")
        # The model remains larger than the tokenizer.
        assert config.tokenizer.vocab_size == VOCAB
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["bos_token_id"]) == (VOCAB, VOCAB - 11, VOCAB - 11)


def test_a_file_that_is_not_a_tokenizer_is_not_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A foreign checkpoint may name any file of this machine, or contain a link to it."""
    (tmp_path / "secret").write_text("root:x:0:0\n")
    weights = read_ours(saved_model(tmp_path / "ours", {}))
    files = _gpt2_files(tmp_path / "files", VOCAB)
    named = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", **files | {"vocab_file": str(tmp_path / "secret")})
    (tmp_path / "hf").mkdir()
    with pytest.raises(UserError, match="or convert without the tokenizer"):
        write_hf(replace(weights, tokenizer=named), tmp_path / "hf", lambda nbytes: None)
    assert not list((tmp_path / "hf").iterdir())
    larger = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", **_gpt2_files(tmp_path / "larger", VOCAB + 1))
    with pytest.raises(UserError, match="the tokenizer has 98 entries, the model 97"):
        write_hf(replace(weights, tokenizer=larger), tmp_path / "hf", lambda nbytes: None)
    assert not list((tmp_path / "hf").iterdir())
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b"}))
    (folder / "special_tokens_map.json").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"special_tokens_map\.json: is not JSON"):
        write_hf(
            replace(weights, tokenizer=TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder))),
            tmp_path / "hf",
            lambda nbytes: None,
        )
    assert not (tmp_path / "hf" / "special_tokens_map.json").exists()


def _tokenizer_json() -> str:
    from tokenizers import Tokenizer, models

    return str(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str())


def _names_a_vocabulary(path: Path, vocabulary: Path) -> None:
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, weights_only=True)
    content["args"].tokenizer_type = "GPT2BPETokenizer"
    content["args"].vocab_file = content["args"].merge_file = str(vocabulary)
    torch.save(content, path)


def test_a_path_inside_a_classic_checkpoint_is_not_followed(classic: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0\n")
    shutil.copytree(classic, tmp_path / "classic")
    for path in (tmp_path / "classic").rglob(FILE):
        _names_a_vocabulary(path, secret)
    for to in ("hf", "classic", "megatron-cc"):
        convert(tmp_path / "classic", tmp_path / f"to {to}", to)
        for path in (tmp_path / f"to {to}").rglob("*"):
            assert not path.is_file() or b"root:x" not in path.read_bytes(), path
            assert path.name not in ("vocab.json", "merges.txt")
    tokenizer = saved_config(tmp_path / "to megatron-cc")[0].tokenizer
    assert (tokenizer.tokenizer_type, tokenizer.vocab_file) == (None, None)


def _three_words(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "<|endoftext|>": 2}))
    (folder / "merges.txt").write_text("#version: 0.2\n")


@pytest.mark.parametrize(
    ("named", "model_type", "fast", "type_"),
    [
        ("GPT2Tokenizer", "qwen2", True, "GPT2BPETokenizer"),
        ("GPT2TokenizerFast", "gpt2", False, "GPT2BPETokenizer"),
        ("Qwen2Tokenizer", "qwen2", True, "HFTokenizer"),
        ("Qwen2Tokenizer", "qwen2", False, "HFTokenizer"),
        (None, "gpt2", True, "GPT2BPETokenizer"),
        (None, "qwen2", True, "HFTokenizer"),
        (None, "gpt_neox", False, "GPT2BPETokenizer"),
    ],
)
def test_the_owner_of_vocab_json_is_recognized(
    named: str | None, model_type: str, fast: bool, type_: str, tmp_path: Path
) -> None:
    """Qwen2's folders have both files, too, and its words differ from GPT-2's."""
    _three_words(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named} if named else {}))
    if fast:
        (tmp_path / "tokenizer.json").write_text("{}")
    assert find_tokenizer(tmp_path).tokenizer_type == type_


def test_flags_and_files_beside_the_checkpoint_name_the_tokenizer(
    classic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], error_line: Callable[[], str]
) -> None:
    shutil.copytree(classic, tmp_path / "classic")
    files = tmp_path / "files"
    _three_words(files)
    flags = ["--vocab-file", str(files / "vocab.json"), "--merge-file", str(files / "merges.txt")]
    convert(tmp_path / "classic", tmp_path / "flags", "hf", *flags)
    assert (tmp_path / "flags" / "vocab.json").is_file()
    for number, folder in enumerate((tmp_path / "classic", tmp_path / "classic" / "iter_0000007")):
        _three_words(folder)
        convert(tmp_path / "classic", tmp_path / f"beside{number}", "hf")
        assert (tmp_path / f"beside{number}" / "merges.txt").is_file()
        (folder / "vocab.json").unlink()
        convert(tmp_path / "classic", tmp_path / f"half{number}", "hf")
        assert not (tmp_path / f"half{number}" / "merges.txt").exists()
    save = ["--load", str(tmp_path / "classic"), "--save", str(tmp_path / "x"), "--to", "hf"]
    for extra, message in (
        ([*flags, "--no-tokenizer"], "--no-tokenizer contradicts --vocab-file"),
        (["--vocab-file", "gone", *flags[2:]], "--vocab-file gone: no such file"),
        (flags[:2], "--tokenizer-type GPT2BPETokenizer needs --merge-file"),
        (["--tokenizer-type", "GPT3"], "--tokenizer-type GPT3 is not known"),
        (["--tokenizer-model", str(files)], "cannot be"),
    ):
        capsys.readouterr()
        if message == "cannot be":
            (files / "tokenizer.json").write_text("{")
        assert main([*save, *extra]) == 2
        assert message in error_line()
        assert not (tmp_path / "x").exists()
