"""Files of fine-tuning tasks: their contents, refusals, and the order of draws."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.base.errors import UserError
from megatron.config.model import ModelConfig
from megatron.data.tasks.dataset import Separators, TaskDataset, join_texts
from megatron.data.tasks.epochs import Epochs
from megatron.data.tasks.examples import Example, clean_text
from megatron.data.tasks.glue import FORMATS, read_glue
from megatron.data.tasks.race import read_race
from megatron.tokenizer.wordpiece import BertWordPieceTokenizer
from tests.support.tasks import columns_of, write_race, write_tsv, write_vocabulary
from tests.unit.data.cases import present


@pytest.mark.parametrize("task", FORMATS)
def test_every_task_reads_the_columns_of_its_published_files(task: str, tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "train.tsv", task, 12)
    lines = path.read_text().splitlines()[bool(columns_of(task)) :]
    examples = read_glue(task, str(path), "--train-data").examples
    assert len(examples) == 12
    for line, example in zip(lines, examples, strict=True):
        ((first, second),) = example.sequences
        assert first in line.split("\t")
        assert (second is None) is (task in ("SST-2", "CoLA"))
        assert second is None or line.split("\t").index(second) > line.split("\t").index(first)
        kind = int(first.split()[0][1:])
        classes = FORMATS[task].classes
        assert example.label == (kind % len(classes) if classes else kind % 11 / 2)


def test_byte_order_marks_line_ends_and_spaces_are_stripped(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_bytes('\ufeffsentence\tlabel\r\nA  text . It\u00a0 ends .\t1\r\n\u2028 "odd\x85\t0\r\n'.encode())
    texts = [example.sequences[0][0] for example in read_glue("SST-2", str(path), "--train-data").examples]
    assert texts == ["A text. It ends .", '"odd']
    assert clean_text("a . b . . c\n.") == "a. b.. c ."


GOOD = "sentence\tlabel\nw1 w2\t1\n"
BAD = {
    "empty": ("SST-2", b"", ": is empty"),
    "a header alone": ("SST-2", b"sentence\tlabel\n", ": holds no sample after line 1"),
    "a missing text": ("SST-2", b"text\tlabel\nw1\t1\n", ", line 1: SST-2 needs the column sentence, but"),
    "no labels": ("SST-2", b"index\tsentence\n0\tw1\n", "column label, .*; GLUE's test files have no labels"),
    "a missing column": ("SST-2", GOOD.encode() + b"w1\n", ", line 3: has 1 columns instead of 2, separated by tabs"),
    "no text": ("SST-2", GOOD.encode() + b" \t1\n", ", line 3: column 1 holds no text"),
    "a label out of range": ("SST-2", GOOD.encode() + b"w1\t2\n", ", line 3: the label '2' is not one of 0, 1"),
    "no number": ("STS-B", b"sentence1\tsentence2\tscore\nw1\tw2\tnan\n", ", line 2: the label 'nan' is not a number"),
    "too large": ("STS-B", b"sentence1\tsentence2\tscore\nw1\tw2\t5.1\n", ", line 2: the label '5.1' is not a number"),
    "no digits of ASCII": ("STS-B", "sentence1\tsentence2\tscore\nw1\tw2\t\uff13\n".encode(), ", line 2: the label '"),
    "a long label": ("SST-2", GOOD.encode() + b"w1\t" + b"2" * 9999 + b"\n", f", line 3: the label '{'2' * 60}...' is"),
    "a column twice": ("SST-2", b"sentence\tsentence\tlabel\nw1\tw2\t1\n", ", line 1: has the column sentence twice"),
    "another task": ("CoLA", GOOD.encode(), ", line 1: has 2 columns instead of 4"),
    "no UTF-8": ("SST-2", GOOD.encode() + b"\xff\t1\n", ", line 3: is not UTF-8 text"),
    "torn throughout": ("QQP", b"question1\tquestion2\tis_duplicate\na\tb\t1\na\nb\n", ", line 3: does not have"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_file_is_refused_by_line(name: str, tmp_path: Path) -> None:
    task, content, message = BAD[name]
    path = tmp_path / "bad.tsv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^--train-data {path}.*{message}") as caught:
        read_glue(task, str(path), "--train-data")
    assert "\n" not in str(caught.value)


def test_a_torn_line_of_qqp_is_left_out_with_a_note(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "train.tsv", "QQP", 300)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], "torn line", *lines[5:]]) + "\n")
    data = read_glue("QQP", str(path), "--train-data")
    assert len(data.examples) == 300
    assert data.note == f"--train-data {path}: 1 malformed lines are left out, the first at line 6"


def test_race_puts_each_answer_into_its_question(tmp_path: Path) -> None:
    folder = write_race(tmp_path / "middle", 3, questions=2)
    examples = read_race(str(folder), "--train-data").examples
    assert len(examples) == 6
    passage = json.loads((folder / "0.txt").read_text())
    for number, example in enumerate(examples[:2]):
        options = passage["options"][number]
        assert example.label == "ABCD".index(passage["answers"][number])
        questions = [f"w1 {option} w2 ?" if number else f"w3 w4 ? {option}" for option in options]
        assert [first for first, _ in example.sequences] == questions
        assert {second for _, second in example.sequences} == {clean_text(passage["article"])}


PASSAGE = {"article": "w1", "questions": ["w2"], "options": [["w1", "w2", "w3", "w4"]], "answers": ["A"]}
BAD_RACE = {
    "json": ("{", "is not JSON"),
    "half of a character": (json.dumps({**PASSAGE, "article": "w1 \ud800"}), "is not JSON of valid characters"),
    "a number without end": ('{"id": ' + "1" * 5000 + "}", "article must be text"),
    "list": ("[]", "is not a JSON object with article"),
    "article": (json.dumps({**PASSAGE, "article": 3}), "article must be text"),
    "answers": (json.dumps({**PASSAGE, "answers": []}), "has 1 questions, 1 options and 0 answers"),
    "no questions": (json.dumps({**PASSAGE, "questions": None}), "questions must be a list"),
    "options": (json.dumps({**PASSAGE, "options": [["w1"]]}), "question 1: has 1 options instead of 4"),
    "letter": (json.dumps({**PASSAGE, "answers": ["E"]}), "question 1: the answer 'E' is not one of A, B, C, D"),
    "text": (json.dumps({**PASSAGE, "questions": [7]}), "question 1: the question must be text"),
}


@pytest.mark.parametrize("name", BAD_RACE)
def test_a_malformed_passage_is_refused_by_line(name: str, tmp_path: Path) -> None:
    line, message = BAD_RACE[name]
    (tmp_path / "1.txt").write_text(f"{json.dumps(PASSAGE)}\n{line}\n")
    with pytest.raises(UserError, match=rf"^--valid-data {tmp_path / '1.txt'}, line 2.*{message}"):
        read_race(str(tmp_path), "--valid-data")


def test_a_folder_without_passages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no .txt file; name RACE's innermost folders"):
        read_race(str(tmp_path), "--train-data")
    with pytest.raises(UserError, match=r"No such file or directory; RACE consists of folders of .txt files"):
        read_race(str(tmp_path / "none"), "--train-data")


AROUND = Separators(1, 2, 0)


@pytest.mark.parametrize(
    ("first", "second", "tokens", "of_first"),
    [
        ([5, 6], None, [1, 5, 6, 2], 4),
        ([5, 6], [7], [1, 5, 6, 2, 7, 2], 4),
        ([5, 6, 7, 8, 9, 10], None, [1, 5, 6, 7, 8, 9, 10, 2], 8),
        ([5, 6, 7, 8, 9, 10, 11], None, [1, 5, 6, 7, 8, 9, 10, 2], 8),
        ([5, 6], [7, 8, 9, 10], [1, 5, 6, 2, 7, 8, 9, 2], 4),
        ([5, 6, 7, 8, 9, 10, 11], [12], [1, 5, 6, 7, 8, 9, 10, 2], 7),
    ],
)
def test_long_pairs_are_truncated_as_in_megatron(
    first: list[int], second: list[int] | None, tokens: list[int], of_first: int
) -> None:
    assert join_texts(first, second, 8, AROUND) == (tokens, of_first)


@pytest.mark.parametrize("keep_last", [True, False])
@pytest.mark.parametrize("recurring", [True, False])
def test_an_epoch_draws_every_sample_once_and_fills_its_last_batch(keep_last: bool, recurring: bool) -> None:
    epochs = Epochs(35, 4, keep_last=keep_last, recurring=recurring, seed=3)
    most = 34 if recurring else 35  # two lanes of 17
    assert epochs.draws == (36 if keep_last else most // 4 * 4)
    orders = []
    for epoch in range(3):
        places = [epochs.sample_at(epoch * epochs.draws + draw) for draw in range(epochs.draws)]
        counted = [position.sample for position in places if position.counts]
        assert len(counted) == len(set(counted)) == (most if keep_last else epochs.draws)
        assert all(position.counts for position in places[: len(counted)])
        if recurring:
            assert all(position.sample % 2 == draw % 2 for draw, position in enumerate(places))
        orders.append(counted)
    assert orders[0] != orders[1] != orders[2]
    if not keep_last:
        assert len(Counter(sample for order in orders for sample in order)) > len(orders[0])
    still = Epochs(5, 4, keep_last=True, shuffle=False)
    assert [still.sample_at(draw).sample for draw in range(5)] == [0, 1, 2, 3, 4]


def _dataset(folder: Path, examples: list[Example], **model: object) -> TaskDataset:
    tokenizer = BertWordPieceTokenizer(write_vocabulary(folder), lower_case=True)
    shape = ModelConfig(model_type="bert", seq_length=10, num_tokentypes=2, **model)  # type: ignore[arg-type]
    epochs = Epochs(len(examples), 2, keep_last=True, shuffle=False)
    return TaskDataset(examples, epochs, 2, tokenizer, shape, max_first_tokens=2)


def test_a_batch_holds_tokens_types_labels_and_lengths(tmp_path: Path) -> None:
    examples = [Example((("w1 w2 w3", "w4"),), 1.25), Example((("w5", None),), 4.0), Example((("w6", "w7"),), 0.5)]
    dataset = _dataset(tmp_path, examples, task_head="regression")
    assert (len(dataset), dataset.epoch_samples) == (8, 4)
    rows = np.stack([dataset[draw] for draw in range(4)])
    batch = dataset.collate(rows, np.arange(4), np.arange(4))
    w = [0, *range(5, 45)]
    assert present(batch.tokens_bs).tolist() == [
        [2, w[2], w[3], 3, w[5], 3, 0, 0, 0, 0],
        [2, w[6], 3, 0, 0, 0, 0, 0, 0, 0],
        [2, w[7], 3, w[8], 3, 0, 0, 0, 0, 0],
        [2, w[2], w[3], 3, w[5], 3, 0, 0, 0, 0],
    ]
    assert present(batch.types_bs).tolist()[:2] == [[0, 0, 0, 0, 1, 1, 0, 0, 0, 0], [0] * 10]
    labels_bs = present(batch.labels_bs)
    assert labels_bs.dtype == torch.float64
    assert labels_bs.tolist() == [[1.25], [4.0], [0.5], [1.25]]
    assert present(batch.loss_mask_bs).tolist() == [[1.0], [1.0], [1.0], [0.0]]
    assert present(batch.lengths_b).tolist() == [6, 3, 5, 6]
    assert (present(batch.segment_ids_bs) == 0).sum(dim=1).tolist() == [6, 3, 5, 6]
    assert [dataset.sample_id(draw) for draw in range(5)] == [0, 1, 2, 0, 0]


def test_the_sequences_of_a_choice_are_draws_in_a_row(tmp_path: Path) -> None:
    examples = [Example(tuple((f"w{4 * n + k}", "w9") for k in range(4)), n) for n in range(3)]
    dataset = _dataset(tmp_path, examples, task_head="choice", task_classes=4)
    assert dataset.epoch_samples == 16
    rows = np.stack([dataset[draw] for draw in range(16)])
    assert (rows[:, 1] - 5).tolist() == [*range(12), *range(4)]
    assert [dataset.sample_id(draw) for draw in range(16)] == [*range(12), *range(4)]
    assert rows[:, -1].tolist() == [1, 0, 0, 0] * 3 + [0] * 4
    assert rows[:, -2].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4
