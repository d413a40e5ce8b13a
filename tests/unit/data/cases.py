"""Small datasets, and the cases of the comparison of sample orders with megatron-core's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron.config.data import DataConfig
from megatron.data.build import Dataset, build_datasets
from megatron.data.indexed import IndexedWriter
from megatron.data.loader import MicroBatches
from megatron.data.source import SampleSource


def flags(**overrides: Any) -> DataConfig:
    return DataConfig(**{"split": "969,30,1", "sample_order": "megatron", **overrides})


def write(prefix: Path, lengths: list[int], first_token: int) -> str:
    """Write documents whose tokens are all different, so that a sample shows its origin."""
    with IndexedWriter(prefix) as writer:
        for length in lengths:
            writer.add_documents(np.arange(first_token, first_token + length), [length], [1])
            first_token += length
    return str(prefix)


T = TypeVar("T")


def present(value: T | None) -> T:
    assert value is not None
    return value


def build(data: DataConfig, sizes: list[int | None], **options: Any) -> list[Dataset | None]:
    arguments: dict[str, Any] = {"seq_length": 8, "seed": 5, "eod_token": -1, "vocab_size": None, **options}
    return list(build_datasets(data, train_valid_test_num_samples=sizes, **arguments))


def build_train(data: DataConfig, samples: int | None, **options: Any) -> Dataset:
    """The training set."""
    return present(build(data, [samples, 0, 0], **options)[0])


def rows(dataset: Dataset) -> list[list[int]]:
    return [dataset[index].tolist() for index in range(len(dataset))]


def load(
    dataset: SampleSource, micro: int, consumed: int = 0, rank: int = 0, ranks: int = 1, **options: Any
) -> MicroBatches:
    return MicroBatches(
        dataset, consumed_samples=consumed, micro_batch_size=micro, dp_rank=rank, dp_size=ranks, **options
    )


def served(data: DataConfig, case: dict[str, Any]) -> list[list[list[int]] | None]:
    splits = build(data, case["sizes"], seq_length=case["seq_length"], seed=case["seed"], eod_token=0)
    return [None if split is None else rows(split) for split in splits]


def order_cases(tmp_path: Path) -> list[tuple[DataConfig, dict[str, Any]]]:
    rng = np.random.RandomState(5)
    many = write(tmp_path / "many", rng.randint(1, 60, 200).tolist(), 0)
    holes = write(tmp_path / "holes", [0, 7, 0, 0, 31, 1, 90, 0, 12, 45, 0], 10_000)
    small = write(tmp_path / "small", [40, 25, 33, 18, 70, 22], 20_000)
    cases = []

    def single(path: str, seq_length: int, sizes: list[int | None], split: str, seed: int) -> None:
        case = {"blend": [[path], None], "split": split, "sizes": sizes, "seq_length": seq_length, "seed": seed}
        cases.append((flags(data_path=[path], split=split), case))

    # Part of an epoch, a full epoch, several epochs whose last is barely or mostly used.
    for count in (1, 50, 190, 195, 200, 320, 400, 1000):
        single(many, 20, [count, 11, 3], "8,1,1", 1234)
    single(many, 20, [None, None, None], "969,30,1", 7)
    single(many, 1, [300, 5, 5], "7,3,1", 99)
    for count in (3, 9, 25, 77):
        single(holes, 16, [count, 0, 0], "1,0,0", 42)
    # Samples longer than an epoch.
    single(small, 500, [4, 0, 0], "100,0,0", 3)

    blends: list[tuple[list[str], list[float], int]] = [
        ([many, small], [0.3, 0.7], 100),
        ([many, holes, small], [2.0, 1.0, 5.0], 333),
        ([small, small], [1.0, 1.0], 41),
        ([many], [1.0], 60),
    ]
    for paths, weights, count in blends:
        case = {"blend": [paths, weights], "split": "1,0,0", "sizes": [count, 0, 0], "seq_length": 20, "seed": 11}
        values = [word for pair in zip(map(str, weights), paths, strict=True) for word in pair]
        cases.append((flags(data_path=values, split="1,0,0"), case))
    case = {"blend": [[many, small, holes], None], "split": "1,0,0", "sizes": [150, 0, 0], "seq_length": 20}
    cases.append((flags(data_path=[many, small, holes], split="1,0,0"), {**case, "seed": 11}))
    per_split = {
        "blend_per_split": [[[many, small], [0.5, 0.5]], [[holes], None], None],
        "sizes": [90, 12, 0],
        "seq_length": 20,
        "seed": 4,
    }
    separate = flags(train_data_path=["0.5", many, "0.5", small], valid_data_path=[holes])
    cases.append((separate, per_split))
    return cases
