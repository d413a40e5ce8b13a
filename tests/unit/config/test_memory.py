"""Lower bound of a run's memory, computed before allocation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.config.flags import parse_args
from megatron.config.memory import check_memory, format_bytes, memory_of_this_machine, min_memory_items
from megatron.config.run import RunConfig
from megatron.config.vocabulary import check_vocabulary
from megatron.distributed.topology import single_process
from megatron.training.assembly import build_engines
from tests.unit.config.conftest import MINIMAL


def _config(flags: str = "", world_size: int = 1) -> RunConfig:
    return parse_args([*MINIMAL.split(), "--train-iters", "3", *flags.split()]).resolve(world_size)


T5 = (
    "--model-type t5 --decoder-num-layers 3 --decoder-seq-length 8 --tokenizer-type BertWordPieceCase --vocab-file v "
    "--vocab-extra-ids 4"
)


@pytest.mark.parametrize(
    "flags", ["", "--swiglu --num-query-groups 2", "--bf16", "--fp64", "--position-embedding-type rope", T5]
)
def test_the_lower_bound_is_close_to_the_memory_of_a_model(flags: str) -> None:
    """For parameters, gradients and moments: at least 4/5, since norms and biases do not count."""
    config = _config(flags)
    engines = build_engines(config, single_process(torch.device("cpu")), 100)
    nbytes = sum(p.numel() * p.element_size() for stage in engines.stages for p in stage.parameters())
    count = sum(p.numel() for stage in engines.stages for p in stage.parameters())
    width = nbytes // count
    each = {2: 2 + 4 + 12, 4: 16, 8: 32}[width]
    counted = sum(need.nbytes for need in min_memory_items(config, 1)[:3])
    assert 0.8 * count * each < counted <= count * each


def test_encoder_layers_are_on_the_stages_before_the_split() -> None:
    pipeline = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-split-rank"
    early = min_memory_items(_config(f"{T5} {pipeline} 1", 4), 4)
    late = min_memory_items(_config(f"{T5.replace('num-layers 3', 'num-layers 2')} {pipeline} 2", 4), 4)
    assert early[0].nbytes == 2 * late[0].nbytes


def test_whole_experts_take_as_much_as_twice_as_many_halves() -> None:
    common = "--num-experts 8 --make-vocab-size-divisible-by 32 --tensor-model-parallel-size 2"
    tensor = f"{common} --expert-model-parallel-size"
    split, unsplit = (
        min_memory_items(_config(flags, 4), 4)[0].nbytes
        for flags in (f"{tensor} 2", f"{tensor} 4 --expert-tensor-parallel-size 1")
    )
    assert unsplit == split


def test_muon_has_a_single_moment_of_matrices() -> None:
    plain, muon = (min_memory_items(_config(flags, 1), 1) for flags in ("", "--optimizer muon"))
    assert plain[0].nbytes * 3 == muon[0].nbytes * 4  # weight, gradient, moments
    assert [need.nbytes for need in plain[1:]] == [need.nbytes for need in muon[1:]]


def test_delayed_gradients_and_the_parameters_of_two_steps_need_memory() -> None:
    stages = "--pipeline-model-parallel-size 2"
    flags = ["", "--delay 1", "--delay 1 --no-pipeline-flush", "--delay 1 --delay-correction extrapolate"]
    flags.append("--delay 1 --delay-correction lookahead")  # 4 bytes, and 4 more in fp32
    nbytes = [min_memory_items(_config(f"{stages} {words}", 2), 2)[0].nbytes for words in flags]
    assert [n * 16 / nbytes[0] for n in nbytes] == [16, 20, 28, 24, 28]


@pytest.mark.parametrize(
    ("options", "added_bytes", "added_bytes_sharded"),
    [
        ("every=1,warmup=0", 12, 4 + 2),  # anchor and momentum, divided among replicas, and the difference
        ("every=1,warmup=0,outer-optimizer=plain", 8, 4 + 1),
        ("every=2,fragments=2,warmup=0", 10, 2 + 2),
        ("every=1,warmup=0,offload=on", 12, 4 + 2),  # in the same memory, on CPUs
        ("every=1,warmup=1.0", 0, 0),
    ],
)
def test_rounds_of_islands_need_more_memory(options: str, added_bytes: int, added_bytes_sharded: int) -> None:
    rounds = f"--compress outer=identity,{options}"
    for sharded, added in (("", added_bytes), ("--use-distributed-optimizer", added_bytes_sharded)):
        without, with_rounds = (min_memory_items(_config(f"{sharded} {word}", 4), 4)[0].nbytes for word in ("", rounds))
        each = 4 + 4 + (2 if sharded else 8)
        assert with_rounds * each == without * (each + added)


def test_layouts_divide_the_memory() -> None:
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --make-vocab-size-divisible-by 32"
    single, divided = (
        sum(need.nbytes for need in min_memory_items(_config(flags, world), world)[:2])
        for flags, world in (("--make-vocab-size-divisible-by 64", 1), (layout, 4))
    )
    assert single / 4 < divided < single / 2
    plain, sharded = (min_memory_items(_config(flags, 4), 4)[0].nbytes for flags in ("", "--use-distributed-optimizer"))
    assert sharded == plain * (4 + 4 + 2) // 16
    flags = "--use-distributed-optimizer --compress param-gather=fixpoint,bits=4"
    assert min_memory_items(_config(flags, 4), 4)[0].nbytes == plain * (4 + 4 + 3) // 16


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--hidden-size 16777216", ["weights of its layers", "--hidden-size 16777216", "PB"]),
        ("--ffn-hidden-size 16777216 --num-layers 2048", ["weights of its layers", "--ffn-hidden-size 16777216"]),
        ("--kv-channels 16777216 --num-layers 2048", ["weights of its layers", "--kv-channels 16777216"]),
        ("--vocab-size 16777216 --hidden-size 65536", ["the embedding", "--vocab-size 16777216"]),
        ("--make-vocab-size-divisible-by 16777216 --hidden-size 65536", ["--make-vocab-size-divisible-by 16777216"]),
        ("--max-position-embeddings 16777216 --hidden-size 65536", ["positions", "--max-position-embeddings 16777216"]),
        ("--micro-batch-size 1048576 --seq-length 65536", ["one micro-batch", "--micro-batch-size 1048576"]),
    ],
)
def test_runs_that_cannot_fit_are_refused_with_sizes_in_bytes(flags: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        check_memory(_config(flags), 1, 10**12, "on this machine")
    for word in ["each rank needs at least", "1 TB are available on this machine", *words]:
        assert word in str(caught.value)
    check_memory(_config(), 1, 10**7, "on this machine")


def test_the_vocabulary_may_come_from_the_tokenizer() -> None:
    config = _config()
    check_memory(config, 1, 10**8, "there")
    with pytest.raises(UserError, match=r"the embedding .*--vocab-size 1000000"):
        check_memory(config, 1, 10**8, "there", 10**6)


def test_bytes_in_words() -> None:
    assert [format_bytes(n) for n in (0, 999, 1500, 25_300_000_000, 10**18, 10**30)] == [
        *("0 bytes", "999 bytes", "1.5 kB", "25.3 GB", "1 EB", "1.0e+12 EB")
    ]
    assert 10**8 < memory_of_this_machine() < 10**15


@given(st.integers(1, 2000), st.integers(1, 300), st.integers(1, 9))
def test_a_vocabulary_that_leaves_a_rank_empty_is_refused(vocab_size: int, multiple: int, tensor: int) -> None:
    step = multiple * tensor
    rows = -(-vocab_size // step) * step // tensor
    entries = [max(0, min(rows, vocab_size - rank * rows)) for rank in range(tensor)]
    assert sum(entries) == vocab_size
    if all(entries):
        check_vocabulary(vocab_size, multiple, tensor)
        return
    with pytest.raises(UserError) as caught:
        check_vocabulary(vocab_size, multiple, tensor)
    advice = str(caught.value).rpartition("--make-vocab-size-divisible-by ")[2]
    if advice.isdecimal():
        check_vocabulary(vocab_size, int(advice), tensor)


@pytest.mark.parametrize(("vocab_size", "tensor"), [(2, 2), (100, 2), (257, 4)])
def test_a_run_with_too_small_a_vocabulary_is_refused(vocab_size: int, tensor: int) -> None:
    with pytest.raises(UserError, match=f"a vocabulary of {vocab_size} entries.*--tensor-model-parallel-size {tensor}"):
        _config(f"--vocab-size {vocab_size} --tensor-model-parallel-size {tensor}", tensor)
