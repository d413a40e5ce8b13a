"""A random GPT-2 in Hugging Face's form with a tokenizer that has a chat template and tokens that mark turns."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, END = "<|im_start|>", "<|im_end|>"


def write_chat_model(folder: Path, window: int = 128) -> Path:
    """Writes the model and its tokenizer, which has a token for each byte; returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([START, END])
    encoder.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(6)
    size = encoder.get_vocab_size()
    config = GPT2Config(
        n_positions=window, n_embd=32, n_layer=2, n_head=2, vocab_size=size, initializer_range=0.3,
        bos_token_id=size - 1, eos_token_id=size - 1,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder
