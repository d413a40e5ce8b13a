"""Files, sample order, blends and masks against megatron-core, where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.batch import CollateOptions, collate
from megatron.data.indexed import IndexedDataset, IndexedWriter
from tests.unit.data.cases import order_cases, present, served

ORACLE = os.environ.get("MEGATRON_CORE_ORACLE")
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.slow,
    pytest.mark.skipif(not ORACLE, reason="MEGATRON_CORE_ORACLE names no folder with megatron-core"),
]


def ask(tmp_path: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers of megatron-core, from a single process for all cases."""
    cases_path, answers_path = tmp_path / "cases.json", tmp_path / "answers.json"
    cases_path.write_text(json.dumps(cases))
    script = Path(__file__).with_name("megatron_core_oracle.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(ORACLE), str(cases_path), str(answers_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(answers_path.read_text()))


def file_cases(tmp_path: Path) -> list[dict[str, Any]]:
    documents: list[tuple[list[int], list[int]]] = [([3, 1, 2], [2, 1]), ([], []), ([65000, 9], [2]), ([7], [1])]
    cases = []
    for dtype in ("uint16", "int32"):
        prefix = str(tmp_path / f"theirs-{dtype}")
        cases.append({"what": "write_file", "prefix": prefix, "dtype": dtype, "documents": documents})
        with IndexedWriter(tmp_path / f"ours-{dtype}", dtype=np.dtype(dtype)) as writer:
            for tokens, lengths in documents:
                writer.add_document(tokens, lengths)
        cases.append({"what": "read_file", "prefix": str(tmp_path / f"ours-{dtype}")})
    return cases


def mask_rows() -> list[list[int]]:
    rng = np.random.RandomState(0)
    return [[int(x) for x in rng.randint(0, 4, size=25)] for _ in range(20)] + [[0] * 5, [1] * 5]


class Answers:
    """Every case and its answer, from a single query."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.orders = order_cases(tmp_path)
        samples = [{"what": "gpt_samples", **case} for _, case in self.orders]
        files = file_cases(tmp_path)
        masks = [{"what": "masks", "tokens": row[:-1], "eod": 0} for row in mask_rows()]
        answers = ask(tmp_path, samples + files + masks)
        self.samples = answers[: len(samples)]
        self.files = answers[len(samples) : len(samples) + len(files)]
        self.masks = answers[len(samples) + len(files) :]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return Answers(tmp_path_factory.mktemp("oracle"))


def test_every_sample_equals_megatron_core(answers: Answers) -> None:
    for (data, case), answer in zip(answers.orders, answers.samples, strict=True):
        for mine, theirs in zip(served(data, case), answer["splits"], strict=True):
            # A split without documents is None here and an empty dataset there.
            assert (mine or []) == (theirs or []), case


def test_files_equal_megatron_core(answers: Answers) -> None:
    for number, dtype in enumerate(("uint16", "int32")):
        for ending in (".bin", ".idx"):
            ours, theirs = (answers.tmp_path / f"{source}-{dtype}{ending}" for source in ("ours", "theirs"))
            assert ours.read_bytes() == theirs.read_bytes()
        dataset = IndexedDataset(answers.tmp_path / f"theirs-{dtype}")
        read = answers.files[2 * number + 1]
        assert read["sequences"] == [dataset[i].tolist() for i in range(len(dataset))]
        assert read["documents"] == dataset.doc_idx.tolist()
        assert read["dtype"] == dtype == dataset.dtype.name


def test_masks_and_positions_equal_megatron_core(answers: Answers) -> None:
    for row, answer in zip(mask_rows(), answers.masks, strict=True):
        ids = np.zeros(1, dtype=np.int64)
        batch = collate(np.array([row]), ids, ids, CollateOptions(0, True, True, True))
        assert present(batch.loss_mask_bs)[0].tolist() == answer["loss"]
        assert present(batch.position_ids_bs)[0].tolist() == answer["positions"]
        segments_s = present(batch.segment_ids_bs)[0]
        causal = np.tril(np.ones((len(row) - 1,) * 2, dtype=bool))
        allowed = causal & (segments_s[:, None] == segments_s[None, :]).numpy()
        assert (~allowed).tolist() == answer["masked"]
