"""A tiny DeBERTa-v3 as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sentencepiece
import torch
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification, DebertaV2Model

from tests.support.tasks import WORDS


def write_deberta(folder: Path, head: bool = False) -> Any:
    """Writes a random model, and a SentencePiece model of our words; returns the former."""
    folder.mkdir()
    (folder / "words.txt").write_text("\n".join(" ".join(WORDS[n:] + WORDS[:n]) for n in range(len(WORDS))))
    named = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]"}
    pieces = {f"{kind}_piece": piece for kind, piece in named.items()}
    options: dict[str, Any] = {
        "input": str(folder / "words.txt"), "model_prefix": str(folder / "spm"), "vocab_size": 60,
        "hard_vocab_limit": False, "minloglevel": 2, **pieces, **{f"{kind}_id": n for n, kind in enumerate(named)},
    }  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(**options)
    torch.manual_seed(3)
    form: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "max_position_embeddings": 32, "relative_attention": True, "position_buckets": 8, "pos_att_type": "p2c|c2p",
        "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1,
    }  # fmt: skip
    model: Any = (DebertaV2ForSequenceClassification if head else DebertaV2Model)(DebertaV2Config(**form))
    model.save_pretrained(folder)
    return model
