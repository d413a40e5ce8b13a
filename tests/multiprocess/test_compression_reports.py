"""Reports of compression: the log, shares of compressed numbers, and the documented compressor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.training.coverage import coverage_notes
from tests.multiprocess.test_compression import Changes, _run
from tests.support.cli import run_cli
from tests.support.corpus import tiny_flags
from tests.support.documented import python_blocks
from tests.support.events import read_events
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_engines, tiny_run
from tests.support.train import train


def test_the_documented_compressor_trains(prefix: Path, tmp_path: Path) -> None:
    """The example of docs/extend/compressor.md, from its own text, through the command line."""
    code = python_blocks("extend/compressor.md")[0]
    for example in ("class Float8Config", "class RandomRowsConfig"):
        assert example in code
    codec = code[code.index("@dataclass") : code.index("@dataclass", code.index("@dataclass") + 1)]
    assert len(codec.splitlines()) < 40
    (tmp_path / "mine.py").write_text(code)
    log = tmp_path / "log.jsonl"
    flags = tiny_flags(
        prefix,
        pipeline_model_parallel_size=2,
        train_iters=20,
        compress_module=tmp_path / "mine.py",
        compress=["pp-forward=tensor-float8", "dp-grad=random-rows,share=0.5,error-feedback=on"],
        log_json_file=log,
    )
    train(4, flags)
    losses = [event["lm_loss"] for event in read_events(log)]
    assert losses[-1] < losses[0] - 0.1


def test_the_log_reports_each_point(prefix: Path, tmp_path: Path) -> None:
    """--log-comm, the JSON lines, --check-orth-error-acti on tensor-parallel ranks, and evaluation through codecs."""
    log = tmp_path / "log.jsonl"
    flags = tiny_flags(
        prefix,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        train_iters=4,
        global_batch_size=6,
        log_comm=True,
        check_orth_error_acti=True,
        check_replicas=2,
        eval_compressed=True,
        compress=[
            "pp-backward=lowrank,rank=2,error-feedback=lazy",
            "pp-forward=fixpoint,bits=8",
            "embedding=powersgd,rank=2",
        ],
        log_json_file=log,
    )
    result = run_cli(4, ["pretrain_gpt.py", *flags]).check()
    lines = [line for line in result.stdout.splitlines() if line.startswith(" communication at iteration")]
    assert len(lines) == 4
    assert "| embedding: " in lines[-1]
    assert re.search(r"pp-backward: [\d.]+ kB of [\d.]+ kB \([\d.]+x\), coded .*residual [\d.]+ of the grad", lines[-1])
    assert read_events(log, "config")[0]["config"]["compression"]["eval_compressed"] is True
    comm = read_events(log)[-1]["comm"]
    # 6 micro-batches of (16, 1, 16), on both tensor-parallel ranks; rank 2: 2 (16 + 16) numbers; a byte and 4/64.
    assert comm["pp-backward"]["raw_bytes"] == 2 * 6 * 16 * 16 * 4
    assert comm["pp-backward"]["wire_bytes"] == 2 * 6 * 2 * (16 + 16) * 4
    assert comm["pp-forward"]["wire_bytes"] == 2 * 6 * (256 + 4 * 4)
    assert 0.1 < comm["pp-backward"]["residual"] < 10
    assert 0.0 < comm["pp-backward"]["staleness"] < 10
    probes = read_events(log, "orthogonality")
    assert [event["micro_batches"] for event in probes] == [[0, 1, 2, 3, 4]] * 4
    assert all(0 < abs(cosine) < 0.6 for event in probes for cosine in event["cosine_sim"])
    assert "Total Length: 5 | Cosine Sim: [" in result.stdout


COVERED: dict[str, tuple[int, Changes, list[str]]] = {
    "every point": (
        4,
        _run(
            "pp-forward=fixpoint,bits=4",
            "pp-backward=lowrank,rank=2,when=epilogue,error-feedback=lazy",
            "dp-grad=powersgd,rank=2,stages=first:1",
            "embedding=powersgd,rank=2",
            pp=2,
        ),
        [
            "--compress pp-forward=fixpoint compresses 100.0% of the numbers that pp-forward sends",
            # Two micro-batches, both sent back after the second stage's second-last forward.
            "--compress pp-backward=lowrank compresses 50.0% of the numbers that pp-backward sends",
            "--compress dp-grad=powersgd compresses {first_stage_matrices:.1%} of the numbers that dp-grad sends",
            "--compress embedding=powersgd compresses 100.0% of the numbers that embedding sends",
        ],
    ),
    "ranks that do not pay": (
        4,
        _run(
            "pp-backward=lowrank,rank=32,error-feedback=lazy",
            "dp-grad=powersgd,rank=26",
            "embedding=powersgd,rank=25",
            pp=2,
        ),
        [
            f"warning: --compress {spec} compresses 0% of what {spec.split('=')[0]} sends: there only ranks up to "
            f"{highest} send fewer bytes than the matrices; lower rank={rank}"
            for spec, highest, rank in (
                ("pp-backward=lowrank", 10, 32),
                ("dp-grad=powersgd", 25, 26),
                ("embedding=powersgd", 24, 25),
            )
        ],
    ),
    "messages of bf16": (
        2,
        # Factors are in fp32: of a (16, 1, 32) in bf16, those of rank 6 have more bytes than it has.
        _run("pp-backward=lowrank,rank=6,error-feedback=lazy", "pp-forward=cast", pp=2, precision="bf16"),
        [
            "warning: --compress pp-backward=lowrank compresses 0% of what pp-backward sends: there only ranks up to 5 "
            "send fewer bytes than the matrices; lower rank=6",
            "--compress pp-forward=cast: the numbers have 16 bits as they are",
        ],
    ),
    "small factors": (
        4,
        # A (16, 1, 32) in bf16 has 1,024 bytes, factors of rank 10 in bf16 960. An eighth of a (128, 32) is 2,048
        # bytes, factors of rank 12 have a byte a number and a scale for 128 of a column: 1,952.
        _run(
            "pp-backward=lowrank,rank=11,factors=bf16",
            "dp-grad=powersgd,rank=14,factors=fixpoint8,min-ratio=8",
            "embedding=powersgd,rank=14,factors=fixpoint8,min-ratio=1e9",
            pp=2,
            precision="bf16",
        ),
        [
            "warning: --compress pp-backward=lowrank compresses 0% of what pp-backward sends: there only ranks up to "
            "10 send fewer bytes than the matrices; lower rank=11",
            "warning: --compress dp-grad=powersgd compresses 0% of what dp-grad sends: there only ranks up to 12 "
            "send fewer bytes than the matrices; lower rank=14",
            "warning: --compress embedding=powersgd compresses 0% of what embedding sends: there no rank sends fewer "
            "bytes than the matrices; leave it out",
        ],
    ),
    "tensor-parallel, sharded": (
        4,
        _run("tp-forward=powersgd,rank=2", "param-gather=cast", tp=2, use_distributed_optimizer=True),
        [
            "--compress tp-forward=powersgd compresses 100.0% of the numbers that tp-forward sends",
            "--compress param-gather=cast compresses 100.0% of the numbers that param-gather sends",
        ],
    ),
    "nothing to send": (2, _run("dp-grad=powersgd", "tp-forward=cast", pp=2), []),
}


def _sent_back(changes: Changes) -> tuple[float, float]:
    trace = tiny_run(changes, 2)
    return trace.bytes_by_point.get("pp-backward", 0.0), trace.raw_by_point.get("pp-backward", 0.0)


@pytest.mark.parametrize("spec", ["lowrank,rank=6", "lowrank,rank=32,error-feedback=off", "lowrank,rank=32", "cast"])
def test_messages_that_would_grow_are_sent_uncompressed(spec: str) -> None:
    """In any precision: a codec's input is wider than the message without a codec."""
    sent, raw = run_ranks(2, _sent_back, _run(f"pp-backward={spec}", pp=2, precision="bf16"))[1]
    assert sent == raw > 0


def _coverage(changes: Changes) -> list[str]:
    return coverage_notes(tiny_engines(changes))


@pytest.mark.parametrize("name", COVERED)
def test_a_run_reports_the_share_that_it_compresses(name: str) -> None:
    ranks, changes, lines = COVERED[name]
    # Each of two stages has two layers of 4 matrices; beside them the first has the embeddings, the last a norm.
    layer, vectors = 32 * (3 * 32 + 32 + 4 * 32 + 4 * 32), 32 * (3 + 1 + 4 + 1 + 4)
    first, last = 2 * (layer + vectors) + (97 + 16) * 32, 2 * (layer + vectors) + 97 * 32 + 2 * 32
    matrices = (2 * layer + (97 + 16) * 32) / (first + last)
    for notes in run_ranks(ranks, _coverage, changes):
        assert notes == [line.format(first_stage_matrices=matrices) for line in lines]
