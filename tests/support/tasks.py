"""Tiny files of fine-tuning tasks in their own formats, and a pretrained BERT to begin with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.support.corpus import tiny_flags

WORDS = [f"w{number}" for number in range(40)]
_COLUMNS = {
    "MNLI": "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
    "sentence1 sentence2 label1 gold_label",
    "QQP": "id qid1 qid2 question1 question2 is_duplicate",
    "QNLI": "index question sentence label",
    "SST-2": "sentence label",
    "STS-B": "index genre filename year old_index source1 source2 sentence1 sentence2 score",
    "MRPC": "Quality|#1 ID|#2 ID|#1 String|#2 String",
    "RTE": "index sentence1 sentence2 label",
}
_LABELS = {
    "MNLI": ["contradiction", "entailment", "neutral"],
    "QNLI": ["entailment", "not_entailment"],
    "RTE": ["entailment", "not_entailment"],
}
_TEXTS = {"sentence1", "sentence2", "sentence", "question", "question1", "question2", "#1 String", "#2 String"}
_LABEL = {"gold_label", "label", "is_duplicate", "score", "Quality"}


def write_vocabulary(folder: Path) -> Path:
    """Writes a WordPiece vocabulary; returns its path."""
    path = folder / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, ".", "?"]) + "\n")
    return path


def columns_of(task: str) -> list[str]:
    """Names of the columns of a task's published files; none for CoLA."""
    text = _COLUMNS.get(task, "")
    return text.split("|") if "|" in text else text.split()


def write_tsv(path: Path, task: str, samples: int, seed: int = 0) -> Path:
    """Writes a file in GLUE's format with labels that can be learned: they follow from the first word."""
    random = np.random.default_rng(seed)
    columns = columns_of(task)
    lines = ["\t".join(columns)] if columns else []
    for number in range(samples):
        texts = [" ".join(random.choice(WORDS, int(random.integers(3, 9)))) for _ in range(2)]
        kind = int(texts[0].split()[0][1:])
        labels = _LABELS.get(task, ["0", "1"])
        label = f"{kind % 11 / 2:.3f}" if task == "STS-B" else labels[kind % len(labels)]
        if task == "CoLA":
            lines.append("\t".join(["gj04", label, "*", texts[0]]))
            continue
        text_iterator = iter(texts)
        fields = {
            name: next(text_iterator) if name in _TEXTS else label if name in _LABEL else str(number)
            for name in columns
        }
        lines.append("\t".join(fields.values()))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_race(folder: Path, passages: int, questions: int = 2, seed: int = 0) -> Path:
    """Writes a folder of RACE: the right answer to each question is a word that the passage begins with."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for number in range(passages):
        article = list(random.choice(WORDS, 12, replace=False))
        distractors = [word for word in WORDS if word not in article]
        options, answers = [], []
        for _ in range(questions):
            right = int(random.integers(4))
            options.append([article[0] if option == right else str(random.choice(distractors)) for option in range(4)])
            answers.append("ABCD"[right])
        question_texts = ["w1 _ w2 ?" if question % 2 else "w3 w4 ?" for question in range(questions)]
        passage = {
            "article": " ".join(article) + " . ",
            "questions": question_texts,
            "options": options,
            "answers": answers,
        }
        (folder / f"{number}.txt").write_text(json.dumps({**passage, "id": f"{number}.txt"}))
    return folder


def task_flags(
    vocabulary: Path, task: str, train: Sequence[Path], valid: Sequence[Path], **changes: object
) -> list[str]:
    """Flags of a tiny run of ``tasks/main.py``; a change is as in ``tiny_flags``."""
    pretraining = ("train_iters", "data_path", "split", "eval_iters", "eval_interval", "vocab_size")
    values: dict[str, object] = {
        **dict.fromkeys(pretraining),
        "tokenizer_type": "BertWordPieceLowerCase",
        "vocab_file": vocabulary,
        "seq_length": 24,
        "max_position_embeddings": 24,
        "task": task,
        "epochs": 2,
        "train_data": " ".join(map(str, train)) or None,
        "valid_data": " ".join(map(str, valid)),
    }
    return tiny_flags(vocabulary, **{**values, **changes})
