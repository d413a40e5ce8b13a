"""Added and special tokens of Hugging Face folders: ids as in transformers, and a lossless way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.base.errors import UserError
from megatron.config.tokenizer import TokenizerConfig
from megatron.convert.tokenizer_files import find_tokenizer
from megatron.tokenizer.build import build_tokenizer
from tests.support.shared import shared_path
from tests.unit.convert.support import convert, refusal

transformers = pytest.importorskip("transformers")

WORDS = "the cat sat on the mat, and they'll say: user system <|im_start >  \n\n"
CHAT = "<|im_start|>user\nthe cat<|im_end|>\n<|endoftext|> sat<|tool|> <|pad|>on"
TEMPLATE = "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
FILES = [
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"),
    *("chat_template.jinja", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"),
]


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _byte_level_files(folder: Path) -> int:
    """vocab.json, merges.txt and tokenizer.json with <|endoftext|> as the only added token."""
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([WORDS] * 9, vocab_size=290, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(folder))
    bpe.save(str(folder / "tokenizer.json"))
    return int(bpe.get_vocab_size())


def _added(base: int) -> dict[str, dict[str, Any]]:
    flags = {"lstrip": False, "rstrip": False, "single_word": False}
    tokens = {str(base): {"content": "<|im_start|>", "special": True, "normalized": False, **flags}}
    tokens[str(base + 1)] = {"content": "<|im_end|>", "special": True, "normalized": False, **flags}
    tokens[str(base + 2)] = {"content": "<|tool|>", "special": False, "normalized": True, **flags | {"lstrip": True}}
    return tokens


def _model(folder: Path, entries: int, bos: int, eos: Any) -> None:
    shape = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 64, "vocab_size": entries}
    config = transformers.GPT2Config(**shape, bos_token_id=bos, eos_token_id=eos)
    transformers.set_seed(3)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def _in_config(folder: Path, base: int) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, "added_tokens_decoder": _added(base)}
    _write(folder / "tokenizer_config.json", config)


def _gpt2_class(folder: Path, base: int) -> None:
    _in_config(folder, base)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "chat_template": TEMPLATE}
    _write(folder / "tokenizer_config.json", config)
    (folder / "tokenizer.json").unlink()


def _older_files(folder: Path, base: int) -> None:
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "x"}')
    _write(folder / "special_tokens_map.json", {**SPECIAL, "additional_special_tokens": ["<|im_start|>"]})
    _write(folder / "added_tokens.json", {"<|im_start|>": base, "<|im_end|>": base + 1, "<|tool|>": base + 2})
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _named_only(folder: Path, base: int) -> None:
    """Special tokens that have a name and no id, and come after the vocabulary."""
    extra = {"pad_token": "<|pad|>", "extra_special_tokens": ["<|im_start|>"]}
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, **extra})


KINDS = {form.__name__: form for form in (_in_config, _gpt2_class, _older_files, _named_only)}


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_come_back(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    base = _byte_level_files(folder)
    _model(folder, base + 5, 0, [base + 1, 0])
    KINDS[kind](folder, base)
    _check_both_ways(folder, tmp_path, [CHAT, "<|tool|>the  <|im_start|>", ""])


def _check_both_ways(folder: Path, tmp_path: Path, texts: list[str]) -> None:
    """Compare the ids of training, and those after a conversion there and back, with transformers' ids."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer = find_tokenizer(folder)
    assert tokenizer.tokenizer_type == "HFTokenizer"
    ours = build_tokenizer(tokenizer)
    ids = [theirs.encode(text, add_special_tokens=False) for text in texts]
    assert ours.tokenize_batch(texts) == ids
    assert (ours.bos, ours.eod) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    convert(folder, tmp_path / "ours", "megatron-cc")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    for name in FILES:
        assert (folder / name).exists() == (tmp_path / "back" / name).exists(), name
        assert not (folder / name).exists() or (folder / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert [again.encode(text) for text in texts] == [theirs.encode(text) for text in texts]
    assert again.chat_template == theirs.chat_template
    before, after = (json.loads((root / "config.json").read_text()) for root in (folder, tmp_path / "back"))
    names = ("bos_token_id", "eos_token_id")
    assert [after[name] for name in names] == [before[name] for name in names]
    convert(folder, tmp_path / "classic", "classic")
    convert(tmp_path / "classic", tmp_path / "from classic", "hf")
    classic = transformers.AutoTokenizer.from_pretrained(tmp_path / "from classic")
    assert [classic.encode(text) for text in texts] == [theirs.encode(text) for text in texts]


def _chat(folder: Path) -> list[int]:
    """Greedy continuation of a chat prompt."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer(CHAT, return_tensors="pt")
    return list(model.generate(**prompt, max_new_tokens=12, do_sample=False)[0].tolist())


@pytest.mark.parametrize("name", ["gpt2_added/hf", "tok_dirs/added_in_config", "llama_spm/hf"])
def test_reported_folders_come_back(name: str, tmp_path: Path) -> None:
    source = shared_path(f"data/reports/{name}")
    if source is None:
        pytest.skip("needs the folders of test data")
    texts = [CHAT, "<|im_start|>user", "<s> the  cat</s>s <unk>", " a b"]
    _check_both_ways(source, tmp_path, texts)
    assert _chat(source) == _chat(tmp_path / "back")


def test_plain_gpt2_files_come_back(tmp_path: Path) -> None:
    """Plain GPT-2 files keep Megatron's tokenizer, and are all there after the way back."""
    folder = tmp_path / "hf"
    folder.mkdir()
    _model(folder, _byte_level_files(folder), 0, 0)
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 64})
    assert find_tokenizer(folder).tokenizer_type == "GPT2BPETokenizer"
    convert(folder, tmp_path / "ours", "megatron-cc")
    convert(tmp_path / "ours", tmp_path / "back", "hf")
    for name in FILES:
        assert not (folder / name).exists() or (folder / name).read_bytes() == (tmp_path / "back" / name).read_bytes()


def test_files_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    base = _byte_level_files(tmp_path)
    _in_config(tmp_path, base + 1)
    flags = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(tmp_path))
    with pytest.raises(UserError, match=rf"<\|im_start\|> the id {base + 1}, but its tokenizer.json gives it {base}"):
        build_tokenizer(flags)
    _write(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": {"one": {"content": "<|im_start|>"}}})
    with pytest.raises(UserError, match="its added token 'one' needs an id and a text"):
        build_tokenizer(flags)
    for number, text in (("9" * 5000, "<|im_start|>"), (str(base), "\ud800")):
        _write(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": {number: {"content": text}}})
        with pytest.raises(UserError, match="needs an id and a text"):
            build_tokenizer(flags)


def test_a_tokenizer_without_a_splitter_cannot_add_a_space(tmp_path: Path) -> None:
    _byte_level_files(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    _write(tmp_path / "tokenizer.json", {**content, "pre_tokenizer": None})
    _write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True})
    with pytest.raises(UserError, match="add_prefix_space is given, but the pre_tokenizer"):
        build_tokenizer(TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(tmp_path)))


def test_a_malformed_template_is_not_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    base = _byte_level_files(folder)
    _model(folder, base + 3, 0, 0)
    _in_config(folder, base)
    (tmp_path / "secret").write_text("root:x:0:0\n")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    convert(folder, tmp_path / "ours", "megatron-cc")
    assert "chat_template.jinja: is not a template" in refusal(capsys, tmp_path / "ours", tmp_path / "back", "hf")
    assert not (tmp_path / "back").exists()
