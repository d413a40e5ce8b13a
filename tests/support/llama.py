"""A random Llama in Hugging Face's form with a SentencePiece tokenizer: begin and end tokens that differ, a dummy
prefix, characters of several tokens, and words of several tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import sentencepiece
import torch
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = ("the", "a", "old", "young", "dog", "cat", "house", "river", "ran", "slept", "saw", "under", "near", "slowly",
         "class", "clear")  # fmt: skip
BOS, EOS = 1, 2


def write_sentence_piece(path: Path) -> None:
    """Writes a SentencePiece model, made as Llama's is, to ``path`` (its name ends in .model)."""
    words = random.Random(0)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(words.choices(WORDS, k=12)) for _ in range(300)]),
        model_prefix=str(path.with_suffix("")), vocab_size=320, hard_vocab_limit=False, model_type="bpe",
        byte_fallback=True, character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=True, unk_id=0, bos_id=BOS, eos_id=EOS, pad_id=-1, minloglevel=2, num_threads=1,
    )  # fmt: skip


def write_llama(folder: Path, window: int = 64) -> Path:
    """Writes the model and its tokenizer; returns ``folder``.

    Args:
        folder: folder to write to.
        window: number of positions of the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_sentence_piece(folder / "tokenizer.model")
    size = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).get_piece_size()
    torch.manual_seed(5)
    config = LlamaConfig(
        max_position_embeddings=window, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=size, initializer_range=0.3,
        bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **names}))
    return folder
