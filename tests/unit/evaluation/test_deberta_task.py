"""A DeBERTa fine-tuned elsewhere evaluates as it does there: texts, tokens, padding, head and scores."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sentencepiece
import torch
import torch.nn.functional as F

from megatron.convert.command import main as convert
from megatron.evaluation.command import main
from tests.support.deberta import write_deberta
from tests.support.tasks import task_flags, write_tsv


def test_a_fine_tuned_folder_has_the_losses_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = write_deberta(tmp_path / "hf", head=True).eval()
    file = write_tsv(tmp_path / "dev.tsv", "RTE", 11)
    assert convert(["--load", str(tmp_path / "hf"), "--save", str(tmp_path / "ours"), "--to", "megatron-cc"]) == 0
    shape = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_file")
    unset = dict.fromkeys((*shape, "tokenizer_type", "make_vocab_size_divisible_by"))
    options = {"model_type": "deberta", "epochs": 0, "load": tmp_path / "ours", "seq_length": 40, "finetune": True}
    assert main(task_flags(tmp_path, "RTE", [], [file], **options, **unset)) == 0
    match = re.search(r"classification loss value: (\S+) ", capsys.readouterr().out)
    assert match is not None
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "hf" / "spm.model"))
    losses = []
    for line in file.read_text().splitlines()[1:]:
        _, *texts, label = line.split("\t")
        ids = [1, *(number for text in texts for number in (*pieces.encode(text), 2))]
        assert 1 not in ids[1:]
        with torch.no_grad():
            logits = theirs(torch.tensor([ids])).logits
        losses.append(F.cross_entropy(logits, torch.tensor([["entailment", "not_entailment"].index(label)])))
    assert float(match[1]) == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
