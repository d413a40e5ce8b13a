"""Where samples come from and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.base.option import derived, option

_BLEND = "PATH, or WEIGHT PATH WEIGHT PATH ..."


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A path is the prefix of a .bin/.idx pair."""

    data_path: list[str] = option(  # noqa: RUF009
        [], "Dataset prefix, or a blend of several; divided by --split.", metavar=_BLEND, contents="blend"
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
    split: str = option("969,30,1", "Shares of documents for training, validation and test under --data-path.")
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
        "Threads of each rank that read samples ahead; 0 reads them when they are needed.",
        unit="threads",
        minimum=0,
        maximum=256,
        may_differ="machines have different numbers of cores; samples and their order are the same",
    )
    dataloader_type: Literal["single", "cyclic"] | None = derived(
        "single",
        "Samples in order (single) or reshuffled each epoch (cyclic).",
    )
    reset_position_ids: bool = option(False, "Restart positions after each end of document.")
    reset_attention_mask: bool = option(False, "Attend only inside the own document.")
    eod_mask_loss: bool = option(False, "No loss where the input is an end of document.")
    sample_order: Literal["lazy", "fixed", "megatron"] = option(
        "lazy",
        "Order of samples: lazy cuts each epoch anew; fixed draws the same samples in every epoch, as codecs that "
        "remember samples need; megatron is Megatron's eager order for reproducing its runs.",
    )
