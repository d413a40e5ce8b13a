"""Fine-tuning of GPT-2 against a plain loop over Hugging Face's classifier, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.convert.command import main as convert
from megatron.data.tasks.epochs import Epochs
from megatron.evaluation.command import main
from tests.support.events import read_events
from tests.support.gpt2 import write_gpt2
from tests.support.tasks import task_flags, write_tsv

SAMPLES, BATCH, EPOCHS, LR = 128, 8, 6, 3e-3


def _read(path: Path) -> list[tuple[str, int]]:
    """Texts and labels of a CoLA file."""
    return [(fields[3], int(fields[1])) for fields in (line.split("\t") for line in path.read_text().splitlines())]


def _tokens(folder: Path, texts: list[str]) -> Tensor:
    """Tokens of each text and the end of a text, padded with a token that the classifier ignores."""
    from transformers import GPT2Tokenizer

    tokenizer: Any = GPT2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    rows = [torch.tensor([*tokenizer.encode(text), tokenizer.eos_token_id]) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)


def _plain(theirs: Any, folder: Path, train: list[tuple[str, int]]) -> list[float]:
    """Losses of each step."""
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, weight_decay=0.0)
    order, losses = Epochs(len(train), BATCH, keep_last=False, seed=1234), list[float]()
    for step in range(EPOCHS * len(train) // BATCH):
        batch = [train[order.sample_at(draw).sample] for draw in range(step * BATCH, (step + 1) * BATCH)]
        labels_b = torch.tensor([label for _, label in batch])
        loss = F.cross_entropy(theirs(_tokens(folder, [text for text, _ in batch])).logits, labels_b)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _accuracy(theirs: Any, folder: Path, samples: list[tuple[str, int]]) -> float:
    with torch.no_grad():
        found_b = theirs.eval()(_tokens(folder, [text for text, _ in samples])).logits.argmax(dim=1)
    return float((found_b == torch.tensor([label for _, label in samples])).double().mean())


@pytest.mark.slow
def test_losses_and_weights_of_each_step_equal_hugging_face(tmp_path: Path) -> None:
    theirs = write_gpt2(tmp_path / "hf", head=True)
    files = write_tsv(tmp_path / "train.tsv", "CoLA", SAMPLES), write_tsv(tmp_path / "dev.tsv", "CoLA", 60, 1)
    assert convert(["--load", str(tmp_path / "hf"), "--save", str(tmp_path / "ours"), "--to", "megatron-cc"]) == 0
    shape = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_file")
    changes: dict[str, Any] = {
        **dict.fromkeys((*shape, "tokenizer_type", "make_vocab_size_divisible_by")), "model_type": "gpt",
        "load": tmp_path / "ours", "finetune": True, "seq_length": 32, "weight_decay": 0.0, "epochs": EPOCHS, "lr": LR,
        "micro_batch_size": 4, "global_batch_size": BATCH,
    }  # fmt: skip
    log = tmp_path / "log.jsonl"
    changes |= {"log_json_file": log, "save": tmp_path / "tuned"}
    assert main(task_flags(tmp_path, "CoLA", [files[0]], [files[1]], **changes)) == 0
    losses = [event["classification_loss"] for event in read_events(log)]
    (*_, scores) = (event["scores"]["dev.tsv"] for event in read_events(log, "validation"))
    expected, valid = _plain(theirs, tmp_path / "hf", _read(files[0])), _read(files[1])
    assert len(losses) == len(expected)
    assert losses[:32] == pytest.approx(expected[:32], rel=1e-4)
    assert scores["accuracy"] == pytest.approx(_accuracy(theirs, tmp_path / "hf", valid), abs=0.05)
    assert scores["accuracy"] > 0.9
    assert convert(["--load", str(tmp_path / "tuned"), "--save", str(tmp_path / "back"), "--to", "hf"]) == 0
    back = type(theirs).from_pretrained(tmp_path / "back")
    assert _accuracy(back, tmp_path / "back", valid) == pytest.approx(scores["accuracy"], rel=1e-6)
