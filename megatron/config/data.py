"""Datasets and sample order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.base.errors import UserError
from megatron.base.option import Condition, derived, option
from megatron.config.conditions import WORDS, needs, unless

_BLEND = "PATH ..., or WEIGHT PATH WEIGHT PATH ..."
MIN_WEIGHT, MAX_WEIGHT = 1e-12, 1e12
"""Bounds of dataset weights in a blend and of shares in --split; sums and quotients stay accurate within them."""


@dataclass(frozen=True)
class DatasetBlend:
    """Dataset prefixes with blending weights.

    Args:
        paths: dataset prefixes.
        weights: a weight for each path, not normalized; None if not given.
    """

    paths: tuple[str, ...]
    weights: tuple[float, ...] | None = None


_MASKED_WORDS = Condition(lambda run, _: not run.model.causal, "only BERT and T5 mask words")
_DOCUMENTS_IN_A_ROW = Condition(
    lambda run, _: run.model.causal, "a sample of BERT or T5 does not cross the end of a document"
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Datasets and how they are read. A path is the prefix of a .bin/.idx pair."""

    data_path: list[str] = option(  # noqa: RUF009
        [],
        "Dataset prefix, or a blend of several; split by --split.",
        metavar=_BLEND,
        contents="blend",
        common="data",
    )
    train_data_path: list[str] = option(  # noqa: RUF009
        [], "Datasets for training only.", metavar=_BLEND, contents="blend"
    )
    valid_data_path: list[str] = option(  # noqa: RUF009
        [], "Datasets for validation only.", metavar=_BLEND, contents="blend"
    )
    test_data_path: list[str] = option(  # noqa: RUF009
        [], "Datasets for the final test only.", metavar=_BLEND, contents="blend"
    )
    mock_data: bool = option(
        False,
        "Train on random tokens drawn from --seed instead of files, split by --split; for a first test of a cluster.",
    )
    multiple_validation_sets: bool = option(
        False,
        "Report losses separately for each dataset of --valid-data-path (or --data-path); these take no weights.",
        only_if=(unless("validation.eval_iters", 0),),
    )
    split: str = option(
        "969,30,1",
        "Shares of the documents of --data-path for training, validation and test.",
        only_if=(needs("data.data_path", "data.mock_data"),),
        common="data",
    )
    data_cache_path: str | None = derived(
        "nothing is cached",
        "Folder for cached sample indices.",
        metavar="FOLDER",
        may_differ="each machine may have scratch space of its own",
    )
    data_impl: Literal["infer", "mmap", "lazy", "cached"] = option(
        "infer",
        "Format of the dataset files.",
    )
    num_workers: int = option(
        2,
        "Threads per rank that read samples ahead; 0 reads samples when they are needed.",
        unit="threads",
        minimum=0,
        maximum=256,
        may_differ="machines have different numbers of cores; samples and their order are the same",
    )
    dataloader_type: Literal["single", "cyclic"] | None = derived(
        "single",
        "single: epochs as --sample-order defines them; cyclic: the same samples in each epoch, reshuffled.",
    )
    reset_position_ids: bool = option(
        False, "Restart positions after each end of document.", only_if=(_DOCUMENTS_IN_A_ROW,)
    )
    reset_attention_mask: bool = option(False, "Attend only within a document.", only_if=(_DOCUMENTS_IN_A_ROW,))
    eod_mask_loss: bool = option(
        False, "Compute no loss where the input is an end-of-document token.", only_if=(_DOCUMENTS_IN_A_ROW,)
    )
    mask_prob: float = option(
        0.15,
        "BERT and T5: share of the tokens to predict.",
        above=0,
        below=1,
        only_if=(_MASKED_WORDS, WORDS),
    )
    short_seq_prob: float = option(
        0.1,
        "BERT and T5: share of the samples that are shorter than possible.",
        minimum=0,
        maximum=1,
        only_if=(_MASKED_WORDS, WORDS),
    )
    sample_order: Literal["lazy", "fixed", "megatron"] = option(
        "lazy",
        "Order of samples: lazy cuts each epoch into new samples; fixed draws the same samples in every epoch, "
        "as codecs that remember samples need; megatron is Megatron's eager order, to reproduce its runs.",
    )

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of training, validation and test for --data-path, unnormalized. Raises UserError as `parse_split`."""
        return parse_split(self.split)

    @property
    def blend(self) -> DatasetBlend | None:
        """Datasets of --data-path or --mock-data, if given. Raises UserError as `parse_blend`."""
        if self.mock_data:
            return DatasetBlend(("mock data",))
        return parse_blend(self.data_path, "--data-path")

    @property
    def separate_blends(self) -> tuple[DatasetBlend | None, DatasetBlend | None, DatasetBlend | None]:
        """Datasets of --train-data-path, --valid-data-path and --test-data-path. Raises UserError as `parse_blend`."""
        return (
            parse_blend(self.train_data_path, "--train-data-path"),
            parse_blend(self.valid_data_path, "--valid-data-path"),
            parse_blend(self.test_data_path, "--test-data-path"),
        )


def parse_split(split: str) -> tuple[float, float, float]:
    """Parse the shares of training, validation and test, such as "969,30,1".

    Missing numbers are 0. Raises UserError for anything else.
    """
    try:
        shares = [_ascii_number(word) for word in re.split(r"[,/]", split.strip())]
    except ValueError:
        shares = []
    in_bounds = all(share == 0 or MIN_WEIGHT <= share <= MAX_WEIGHT for share in shares)
    if not 1 <= len(shares) <= 3 or not in_bounds:
        raise UserError(f"--split {split}: expected up to three shares such as 969,30,1, none of them negative")
    if not any(shares):
        raise UserError(f"--split {split}: the shares sum to 0; give at least one that is positive")
    train, valid, test = (*shares, 0.0, 0.0)[:3]
    return train, valid, test


def _ascii_number(word: str) -> float:
    if not word.isascii():
        raise ValueError(word)
    return float(word)


def parse_blend(words: Sequence[str], flag: str) -> DatasetBlend | None:
    """Parse "PATH", "PATH PATH ..." or "WEIGHT PATH WEIGHT PATH ..."; None if there are no words.

    Raises UserError naming the flag for other forms and invalid weights.
    """
    if len(words) < 2 or not any(_is_number(word) for word in words[::2]):
        return DatasetBlend(tuple(words)) if words else None
    advice = "give one path, several, or a weight before each (0.3 A 0.7 B)"
    if len(words) % 2 != 0:
        raise UserError(f"{flag}: {len(words)} words are not pairs of a weight and a path; {advice}")
    invalid_weights = [word for word in words[::2] if not _is_number(word)]
    if invalid_weights:
        raise UserError(f"{flag}: {invalid_weights[0]!r} is not a weight; {advice}")
    for word, path in zip(words[::2], words[1::2], strict=True):
        if not MIN_WEIGHT <= float(word) <= MAX_WEIGHT:
            raise UserError(
                f"{flag}: the weight {word} of {path} must be a positive number from {MIN_WEIGHT:g} to "
                f"{MAX_WEIGHT:g}; leave a path out to drop it"
            )
    return DatasetBlend(tuple(words[1::2]), tuple(map(float, words[::2])))


def _is_number(word: str) -> bool:
    try:
        _ascii_number(word)
    except ValueError:
        return False
    return True


def check_data(data: DataConfig, *, skip_train: bool) -> None:
    """Check the split, the blends and the dataset flags; raise UserError for contradictions."""
    _ = data.shares, data.blend, data.separate_blends  # raises for unreadable values
    separate_paths = (
        (data.train_data_path, "--train-data-path"),
        (data.valid_data_path, "--valid-data-path"),
        (data.test_data_path, "--test-data-path"),
    )
    separate_flags = [flag for words, flag in separate_paths if words]
    path_flags = ["--data-path"] if data.data_path else separate_flags
    if data.mock_data and path_flags:
        raise UserError(f"--mock-data and {path_flags[0]} exclude each other; leave one of them out")
    for blend, flag in ((data.blend, "--data-path"), (data.separate_blends[1], "--valid-data-path")):
        if data.multiple_validation_sets and blend is not None and blend.weights is not None:
            raise UserError(
                f"--multiple-validation-sets reads each dataset of {flag} separately, so weights have no effect; give "
                f"{'--train-data-path and --valid-data-path, the latter' if flag == '--data-path' else 'them'} without "
                "weights"
            )
    if separate_flags and data.data_path:
        raise UserError(f"--data-path and {separate_flags[0]} exclude each other; leave one of them out")
    if separate_flags and not data.train_data_path and not skip_train:
        raise UserError(
            f"{separate_flags[0]} without --train-data-path leaves nothing to train on; add --train-data-path"
        )


def check_data_given(data: DataConfig) -> None:
    """Check that a dataset is given; raise UserError otherwise. Not part of `resolve`: some programs read no data."""
    if not (data.mock_data or data.data_path or data.train_data_path or data.valid_data_path or data.test_data_path):
        raise UserError(
            "no dataset: give its prefix (without .bin or .idx) with --data-path, or with --train-data-path, "
            "--valid-data-path and --test-data-path; --mock-data needs none"
        )
