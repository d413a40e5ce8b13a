"""Flags of islands: requirements, refusals, and folders of checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.base.errors import UserError
from megatron.config.flags import parse_args
from megatron.config.islands import IslandsConfig, fill_from_environment
from megatron.config.run import RunConfig
from megatron.distributed.topology import single_process
from megatron.training.islands import adapt_to_island, folders_of_others
from megatron.training.progress_state import Progress
from megatron.training.saved_run import SavedRun

_BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 0.001 --vocab-size 100 --train-iters 100 --data-path unused "
    "--distributed-backend gloo"
)
BASE = _BASE.split()
MET = ["--islands", "2", "--island", "0", "--islands-address", "127.0.0.1:29600"]
OUTER = ["--compress", "outer=identity,every=10,warmup=10"]


def _resolve(words: list[str], world_size: int = 1) -> RunConfig:
    return parse_args([*BASE, *words]).resolve(world_size, cuda_available="nccl" in words)


def test_islands_share_the_global_batch() -> None:
    config = parse_args([*BASE, *MET, *OUTER]).resolve(2)
    assert config.replicas(2) == 4
    with pytest.raises(UserError, match="not a multiple of --micro-batch-size 1 x 6"):
        parse_args([*BASE, "--islands", "3", *MET[2:], *OUTER]).resolve(2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--islands", "2", *OUTER], "--island is missing"),
        ([*MET[:4], *OUTER], "--islands-address is missing"),
        ([*MET], "their exchange is not configured"),
        (["--islands", "2", "--island", "2", *MET[4:], *OUTER], "are 0 to 1"),
        ([*MET[:5], "nowhere", *OUTER], "write HOST:PORT"),
        ([*MET, *OUTER, "--islands-quorum", "3"], "is above --islands 2"),
        (["--island", "1"], "there is one island"),
        (["--islands-quorum", "1"], "there is one island"),
        (["--compress", "outer=fixpoint,outer-preset=diloco,warmup=0"], "is for several islands"),
        ([*MET, "--compress", "outer=identity,every=91,warmup=10"], "is above the 90 steps"),
        ([*MET, *OUTER, "--DDP-impl", "torch"], "--DDP-impl torch reduces gradients itself"),
        ([*MET, *OUTER, "--no-allreduce"], "leaves the sums out"),
        ([*MET, *OUTER, "--compress", "dp-grad=quantized-adam,warmup=2"], "unlike islands in the synchronous warm-up"),
        ([*MET, *OUTER, "--islands-timeout-seconds", "541"], "541 is above 540, nine tenths of"),
        ([*MET, "--compress", "outer=fixpoint,every=9,fragments=3,warmup=10"], "there are 2; write at most that"),
        ([*MET, "--compress", "outer=fixpoint,levels=8/4,every=10,warmup=10"], "need nodes"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(words: list[str], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        _resolve(words, 2)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_islands_train_on_gpus() -> None:
    config = _resolve([*MET, *OUTER, "--distributed-backend", "nccl"], 2)
    assert config.islands.several
    assert config.parallel.distributed_backend == "nccl"


def test_the_launchers_variables_fill_missing_flags() -> None:
    filled = fill_from_environment(
        IslandsConfig(islands=2), {"MEGATRON_ISLAND": "1", "MEGATRON_ISLANDS_ADDRESS": "a:1"}
    )
    assert (filled.island, filled.islands_address) == (1, "a:1")
    explicit = IslandsConfig(islands=2, island=0, islands_address="b:2")
    assert fill_from_environment(explicit, {"MEGATRON_ISLAND": "1", "MEGATRON_ISLANDS_ADDRESS": "a:1"}) == explicit
    with pytest.raises(UserError, match="MEGATRON_ISLAND"):
        fill_from_environment(IslandsConfig(islands=2), {"MEGATRON_ISLAND": "one"})


def test_each_island_saves_and_logs_to_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*BASE, *MET[:3], "1", *MET[4:], "--save", "s", "--load", "l", "--log-json-file", "a/b.jsonl"]
    config = adapt_to_island(parse_args([*words, *OUTER]).config)
    assert (config.checkpoint.save, config.checkpoint.load) == ("s/island_1", "l/island_1")
    assert config.logging.log_json_file == "a/b.island_1.jsonl"
    root = tmp_path / "saved"
    loading = [*BASE, *MET[:3], "1", *MET[4:], *OUTER, "--save", str(root), "--load", str(root)]
    for folder, loads, islands in (
        ("island_0", "island_1", 0),  # just created by the other island
        ("iter_0000003", "island_1", 0),
        ("latest_checkpointed_iteration.txt", "", 0),
        ("island_0/iter_0000003", "island_1", 2),  # killed before its first checkpoint
        ("island_1", "island_0", 1),  # a new island
        ("island_1/iter_0000003", "island_1", 0),
    ):
        (root / folder).mkdir(parents=True)
        saved = replace(parse_args(loading).config, islands=IslandsConfig(islands=max(islands, 1)))
        monkeypatch.setattr("megatron.training.islands.saved_config", lambda *_, saved=saved: (saved, 3))
        assert adapt_to_island(parse_args(loading).config).checkpoint.load == str(root / loads)
    alone = parse_args([*BASE, "--save", "s"]).config
    assert adapt_to_island(alone) == alone


def test_a_late_island_needs_the_folders_of_others_only_in_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none with a checkpoint of its own, since other folders may be on another machine."""
    words = [*BASE, *MET[:3], "1", *MET[4:], *OUTER]
    saved_config = parse_args([*BASE, *MET[:3], "0", *MET[4:], *OUTER]).config
    monkeypatch.setattr("megatron.training.islands.saved_config", lambda *_: (saved_config, 3))
    common = {"outer": {"begun": True, "together": 2}}
    saved = SavedRun(3, common, Progress(iteration=3))
    config = parse_args([*words, "--load", str(tmp_path / "island_1")]).config
    assert folders_of_others(config, saved, single_process(torch.device("cpu"))) == []
    elsewhere = parse_args([*words, "--load", str(tmp_path / "island_0")]).config
    with pytest.raises(UserError, match="2 islands were under way to a round at iteration 3"):
        folders_of_others(elsewhere, saved, single_process(torch.device("cpu")))
