"""Memory that a run needs at least, counted before any of it is taken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import UserError, parse_args
from megatron.config.memory import check_memory, in_words, least_needs, memory_of_this_machine
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
def test_the_least_is_near_what_a_model_takes(flags: str) -> None:
    """Of the parameters and gradients alone: between what is counted without norms and biases and 4/5 of that."""
    config = _config(flags)
    engines = build_engines(config, single_process(torch.device("cpu")), 100)
    held = sum(p.numel() * p.element_size() for stage in engines.stages for p in stage.parameters())
    count = sum(p.numel() for stage in engines.stages for p in stage.parameters())
    width = held // count
    each = {2: 2 + 4 + 12, 4: 16, 8: 32}[width]
    counted = sum(need.nbytes for need in least_needs(config, 1)[:3])
    assert 0.8 * count * each < counted <= count * each


def test_an_encoder_has_the_stages_before_the_split() -> None:
    pipeline = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-split-rank"
    early = least_needs(_config(f"{T5} {pipeline} 1", 4), 4)
    late = least_needs(_config(f"{T5.replace('num-layers 3', 'num-layers 2')} {pipeline} 2", 4), 4)
    assert early[0].nbytes == 2 * late[0].nbytes


def test_whole_experts_take_as_much_as_parts_of_more_of_them() -> None:
    common = "--num-experts 8 --make-vocab-size-divisible-by 32 --tensor-model-parallel-size 2"
    tensor = f"{common} --expert-model-parallel-size"
    parts, whole = (
        least_needs(_config(flags, 4), 4)[0].nbytes
        for flags in (f"{tensor} 2", f"{tensor} 4 --expert-tensor-parallel-size 1")
    )
    assert whole == parts


def test_muon_has_one_moment_of_matrices_and_two_of_the_rest() -> None:
    plain, muon = (least_needs(_config(flags, 1), 1) for flags in ("", "--optimizer muon"))
    assert plain[0].nbytes * 3 == muon[0].nbytes * 4  # weight, gradient, moments
    assert [need.nbytes for need in plain[1:]] == [need.nbytes for need in muon[1:]]


@pytest.mark.parametrize(
    ("options", "more", "more_of_a_share"),
    [
        ("every=1,warmup=0", 12, 4 + 2),  # anchor and momentum, of which a replica has its share, and the difference
        ("every=1,warmup=0,outer-optimizer=plain", 8, 4 + 1),
        ("every=2,fragments=2,warmup=0", 10, 2 + 2),
        ("every=1,warmup=0,offload=on", 12, 4 + 2),  # in the same memory, on CPUs
        ("every=1,warmup=1.0", 0, 0),
    ],
)
def test_rounds_of_islands_keep_more(options: str, more: int, more_of_a_share: int) -> None:
    rounds = f"--compress outer=identity,{options}"
    for sharded, there in (("", more), ("--use-distributed-optimizer", more_of_a_share)):
        without, with_rounds = (least_needs(_config(f"{sharded} {word}", 4), 4)[0].nbytes for word in ("", rounds))
        each = 4 + 4 + (2 if sharded else 8)
        assert with_rounds * each == without * (each + there)


def test_layouts_divide_it() -> None:
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --make-vocab-size-divisible-by 32"
    whole, part = (
        sum(need.nbytes for need in least_needs(_config(flags, world), world)[:2])
        for flags, world in (("--make-vocab-size-divisible-by 64", 1), (layout, 4))
    )
    assert whole / 4 < part < whole / 2
    plain, sharded = (least_needs(_config(flags, 4), 4)[0].nbytes for flags in ("", "--use-distributed-optimizer"))
    assert sharded == plain * (4 + 4 + 2) // 16
    flags = "--use-distributed-optimizer --compress param-gather=fixpoint,bits=4"
    assert least_needs(_config(flags, 4), 4)[0].nbytes == plain * (4 + 4 + 3) // 16


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
def test_what_cannot_fit_is_said_in_bytes(flags: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        check_memory(_config(flags), 1, 10**12, "on this machine")
    for word in ["each rank needs at least", "there are 1 TB on this machine", *words]:
        assert word in str(caught.value)
    check_memory(_config(), 1, 10**7, "on this machine")


def test_the_vocabulary_may_come_from_the_tokenizer() -> None:
    config = _config()
    check_memory(config, 1, 10**8, "there")
    with pytest.raises(UserError, match=r"the embedding .*--vocab-size 1000000"):
        check_memory(config, 1, 10**8, "there", 10**6)


def test_bytes_in_words() -> None:
    assert [in_words(n) for n in (0, 999, 1500, 25_300_000_000, 10**18, 10**30)] == [
        *("0 bytes", "999 bytes", "1.5 kB", "25.3 GB", "1 EB", "1.0e+12 EB")
    ]
    assert 10**8 < memory_of_this_machine() < 10**15


@given(st.integers(1, 2000), st.integers(1, 300), st.integers(1, 9))
def test_a_vocabulary_leaves_no_rank_empty(vocab_size: int, multiple: int, tensor: int) -> None:
    step = multiple * tensor
    rows = -(-vocab_size // step) * step // tensor
    held = [max(0, min(rows, vocab_size - rank * rows)) for rank in range(tensor)]
    assert sum(held) == vocab_size
    if all(held):
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
