"""A tiny GPT-2 as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from megatron.data.preprocess.vocab_command import train
from tests.support.tasks import WORDS


def write_gpt2(folder: Path, head: bool = False) -> Any:
    """Writes a random model, and a BPE vocabulary of our words; returns the former."""
    texts = folder.with_suffix(".jsonl")
    texts.write_text(json.dumps({"text": " ".join(WORDS * 20)}) + "\n")
    train([texts], folder, 330)
    size = len(json.loads((folder / "vocab.json").read_text()))
    torch.manual_seed(3)
    shape: dict[str, Any] = {"vocab_size": size, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    shape |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    model: Any = (GPT2ForSequenceClassification if head else GPT2LMHeadModel)(GPT2Config(**shape))
    model.save_pretrained(folder)
    return model
