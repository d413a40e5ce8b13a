"""megatron-core's sample orders and files, recorded: guards equality where megatron-core is not installed.

`golden/data/megatron_core.json` was written by `python -m tests.unit.data.test_golden`, with
MEGATRON_CORE_ORACLE set, from megatron-core's own answers.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed import IndexedDataset, IndexedWriter
from tests.unit.data.cases import order_cases, served

GOLDEN = Path(__file__).parents[2] / "golden" / "data" / "megatron_core.json"
DOCUMENTS: list[tuple[list[int], list[int]]] = [([3, 1, 2], [2, 1]), ([], []), ([65000, 9], [2]), ([7], [1])]


def digest(samples: list[list[int]] | None) -> str:
    """SHA-256 of all samples of a split, in order; a split without samples is the empty string."""
    return hashlib.sha256(json.dumps(samples).encode()).hexdigest() if samples else ""


def test_sample_orders_equal_the_golden_ones(tmp_path: Path) -> None:
    recorded = json.loads(GOLDEN.read_text())["orders"]
    cases = order_cases(tmp_path)
    assert len(cases) == len(recorded)
    for (data, case), answer in zip(cases, recorded, strict=True):
        assert [digest(split) for split in served(data, case)] == answer, case


def test_files_equal_the_golden_ones(tmp_path: Path) -> None:
    for dtype, files in json.loads(GOLDEN.read_text())["files"].items():
        with IndexedWriter(tmp_path / "ours", dtype=np.dtype(dtype)) as writer:
            for tokens, lengths in DOCUMENTS:
                writer.add_document(tokens, lengths)
        for ending, content in files.items():
            assert (tmp_path / f"ours{ending}").read_bytes().hex() == content
        dataset = IndexedDataset(tmp_path / "ours")
        assert [dataset[i].tolist() for i in range(4)] == [[3, 1], [2], [65000, 9], [7]]
        assert dataset.doc_idx.tolist() == [0, 2, 2, 3, 4]


def record() -> None:
    """Write the golden file from megatron-core's answers."""
    from tests.unit.data.test_oracle import ask

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases: list[dict[str, Any]] = [{"what": "gpt_samples", **case} for _, case in order_cases(folder)]
        for dtype in ("uint16", "int32"):
            prefix = str(folder / dtype)
            cases.append({"what": "write_file", "prefix": prefix, "dtype": dtype, "documents": DOCUMENTS})
        answers = ask(folder, cases)
        orders = [[digest(split) for split in answer["splits"]] for answer in answers if "splits" in answer]
        files = {
            dtype: {ending: (folder / f"{dtype}{ending}").read_bytes().hex() for ending in (".bin", ".idx")}
            for dtype in ("uint16", "int32")
        }
    GOLDEN.write_text(json.dumps({"megatron_core": "0.16.1", "orders": orders, "files": files}, indent=1) + "\n")


if __name__ == "__main__":
    record()
