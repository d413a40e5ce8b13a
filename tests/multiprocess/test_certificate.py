"""``--certificate``: runs are certified, and a run that says something false is not."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron.training.certificate as certificate_module
from megatron.base.regular import fingerprint
from megatron.checkpoint.certificate import (
    CERTIFICATE,
    MAX_INCREASE,
    AutoDecision,
    LossCheck,
    Statements,
    read_certificate,
)
from megatron.checkpoint.verify_command import BYTES_TOLERANCE, RESIDUAL_TOLERANCE, main
from megatron.compression.error_feedback import RESIDUAL, ErrorFeedback
from megatron.compression.points import Point
from megatron.distributed.interfaces import SentCounts
from megatron.distributed.ledger import Ledger
from megatron.planner.candidates import CandidateSpec
from megatron.training.certificate import RunCertificate, is_sampled
from megatron.training.pretrain import main as pretrain
from tests.support.cli import REPO, run_cli
from tests.support.combinations import mark_repeats
from tests.support.corpus import tiny_flags
from tests.support.events import read_losses
from tests.support.machines import require_laboratory
from tests.support.spawn import run_ranks
from tests.support.tiny import tiny_engines, tiny_train
from tests.support.train import train
from tests.support.warm import INTERPRETER

pytestmark = pytest.mark.multiprocess

TWO_STAGES: dict[str, Any] = {"pipeline_model_parallel_size": 2}
WIDE: dict[str, Any] = {"hidden_size": 64}

CASES: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "dp-grad with a residual": ({"compress": ["dp-grad=powersgd,rank=2"]}, {"dp-grad": True}),
    "residuals of the aggregate": (
        {"compress": ["dp-grad=powersgd,rank=2,error-feedback=aggregate"]},
        {"dp-grad": True},
    ),
    "dp-grad without a residual": ({"compress": ["dp-grad=fixpoint,bits=4"]}, {"dp-grad": False}),
    "gathered parameters": (
        {"compress": ["param-gather=fixpoint,bits=4,group=64"], "use_distributed_optimizer": True},
        {"param-gather": False},
    ),
    "pipeline": (
        {
            **TWO_STAGES,
            "async_save": True,
            "compress": [
                "pp-forward=fixpoint,bits=8",
                "pp-backward=lowrank,rank=2,error-feedback=lazy",
                "embedding=powersgd,rank=2",
            ],
        },
        {"pp-forward": False, "pp-backward": True, "embedding": True},
    ),
    "means of residuals, remembered samples": (
        {
            **TWO_STAGES,
            "sample_order": "fixed",
            "compress": ["pp-forward=delta,bits=4", "pp-backward=lowrank,rank=2,error-feedback=lazy-mean"],
        },
        {"pp-backward": True},
    ),
    "pipeline without a flush": (
        {
            **TWO_STAGES,
            "num_layers": 4,
            "delay": 1,
            "no_pipeline_flush": True,
            "pipeline_schedule": "eager-1f1b",
            "compress": ["pp-forward=fixpoint,bits=8", "pp-backward=lowrank,rank=2,error-feedback=lazy"],
        },
        {"pp-forward": False, "pp-backward": True},
    ),
    "tensor parallelism": (
        {"tensor_model_parallel_size": 2, "compress": ["tp-forward=fixpoint,bits=8"]},
        {"tp-forward": False},
    ),
    "experts": (
        {
            "num_experts": 2,
            "expert_model_parallel_size": 2,
            "compress": ["ep-dispatch=fixpoint,bits=8,group=64", "ep-combine=cast"],
        },
        {f"ep-{leg}-{way}": False for leg in ("dispatch", "combine") for way in ("forward", "backward")},
    ),
}


def _newest(saved: Path) -> Statements:
    return read_certificate(sorted(saved.glob("iter_*"))[-1]).statements


# The others cover them: a resumed run has the residual of dp-grad, gathered parameters have none.
REPEATS = {"dp-grad with a residual", "dp-grad without a residual"}


@pytest.mark.parametrize("name", mark_repeats(CASES, keep=CASES.keys() - REPEATS))
def test_runs_are_certified_and_go_on_as_without(
    name: str, prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, points = CASES[name]
    saved, logs = tmp_path / "saved", [tmp_path / "plain.jsonl", tmp_path / "certified.jsonl"]
    plain = {**WIDE, **flags, "async_save": None}
    certified = {**WIDE, **flags, "log_json_file": logs[1], "save": saved, "save_interval": 3, "certificate": True}
    train(2, tiny_flags(prefix, **plain, log_json_file=logs[0]), tiny_flags(prefix, **certified))
    assert read_losses(logs[0]) == read_losses(logs[1])
    for folder in sorted(saved.glob("iter_*")):
        assert main([str(folder), "--strict"]) == 0, capsys.readouterr().err
    statements = _newest(saved)
    assert {entry.point: entry.residual for entry in statements.samples} == points
    for entry in statements.samples:
        assert entry.samples >= 3  # iterations 1, 2 and 4, on one rank or both
        assert entry.worst_error < (RESIDUAL_TOLERANCE if entry.residual else 0.5)
        assert (entry.worst_error > 0) or not entry.residual
    assert set(statements.not_sampled) == ({"pp-forward"} if "delta" in str(flags) else set())
    (span,) = statements.traffic
    assert (span.after, span.until, span.ranks, span.reason) == (0, 6, 2, "")
    assert set(points) <= set(span.ledger)
    assert span.uncompressed.keys() == span.ledger.keys()
    assert all(span.uncompressed[point] > span.ledger[point] for point in points)
    assert span.uncompressed["control"] == span.ledger["control"]
    (half,) = read_certificate(saved / "iter_0000003").statements.traffic
    assert sum(span.ledger.values()) > 1.5 * sum(half.ledger.values())
    assert "lo" in span.names
    assert [Path(file.path) for file in statements.inputs] == [prefix.with_suffix(end) for end in (".bin", ".idx")]
    assert [file.contents for file in statements.inputs] == [fingerprint(file.path) for file in statements.inputs]


def test_the_same_run_has_the_same_digests_of_samples(prefix: Path, tmp_path: Path) -> None:
    digests = []
    evaluations = {"eval_interval": 1, "eval_compressed": True}  # are not sampled
    for name, changes in (("a", {"seed": 1}), ("b", {"seed": 1, **evaluations}), ("c", {"seed": 2})):
        flags = tiny_flags(prefix, save=tmp_path / name, certificate=True, **changes, **CASES["pipeline"][0])
        train(2, flags)
        digests.append([entry.sha256 for entry in _newest(tmp_path / name).samples])
    assert digests[0] == digests[1]
    assert not set(digests[0]) & set(digests[2])


def test_a_resumed_run_goes_on_with_the_statements_and_shows_gaps(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved"
    common: dict[str, Any] = {**CASES["dp-grad with a residual"][0], "save": saved, "load": saved, "train_iters": 16}
    for until, certificate in ((4, True), (8, True), (10, None), (16, True)):
        train(2, tiny_flags(prefix, **common, exit_interval=until, certificate=certificate))
        assert (saved / f"iter_{until:07d}" / CERTIFICATE).exists() == bool(certificate)
    statements = _newest(saved)
    assert [(span.after, span.until) for span in statements.traffic] == [(0, 4), (4, 8), (10, 16)]
    assert [entry.samples for entry in statements.samples] == [2 * 5]  # iterations 1, 2, 4, 8 and 16
    first = read_certificate(saved / "iter_0000004").statements
    assert statements.traffic[0] == first.traffic[0]
    assert statements.samples[0].worst_error >= first.samples[0].worst_error
    assert main([str(saved), "--strict"]) == 0
    assert "iterations 11 to 16 of 2 ranks" in capsys.readouterr().out


def _undercount() -> None:
    """Counts 5% less of the gradients."""
    count = Ledger.count_message

    def less(ledger: Ledger, point: Point, wire_bytes: int, *others: Any) -> None:
        count(ledger, point, wire_bytes * 95 // 100 if point is Point.DP_GRAD else wire_bytes, *others)

    Ledger.count_message = less  # type: ignore[method-assign,assignment]


def _lose_residuals() -> None:
    finalize = ErrorFeedback.finalize

    def lose(self: ErrorFeedback, x: Any, aggregate: Any, state: Any, peers: Any) -> None:
        finalize(self, x, aggregate, state, peers)
        state.tensors[RESIDUAL].mul_(0.99)

    ErrorFeedback.finalize = lose  # type: ignore[method-assign]


def _spoil_a_replica() -> None:
    collect = RunCertificate.collect

    def spoil(self: RunCertificate, iteration: int) -> Statements:
        with torch.no_grad():
            next(self.engines.stages[0].parameters()).view(-1)[0] += self.topology.rank
        return collect(self, iteration)

    RunCertificate.collect = spoil  # type: ignore[method-assign]


def _hide_counters() -> None:
    def fail() -> SentCounts:
        raise PermissionError(13, "Permission denied")

    certificate_module.read_sent = fail


def _count_interfaces_only() -> None:
    read = certificate_module.read_sent

    def without_connections() -> SentCounts:
        counts = read()
        return SentCounts(counts.namespace, counts.interfaces, {})

    certificate_module.read_sent = without_connections


def _replace_an_interface() -> None:
    """An interface carries everything, and another one takes its name at the end."""
    counts = iter([10**9])
    certificate_module.read_sent = lambda: SentCounts("net", {"veth0": next(counts, 5)}, {})


def _train_changed(change: Callable[[], None], flags: list[str]) -> None:
    change()
    assert pretrain(flags) == 0


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (_undercount, "bytes differ: iterations 1 to 6"),
        (_lose_residuals, "residuals do not add up at dp-grad"),
        (_spoil_a_replica, "replicas differ: "),
    ],
)
def test_a_run_that_does_wrong_is_not_certified(
    change: Callable[[], None], line: str, prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"hidden_size": 256, **CASES["dp-grad with a residual"][0], "save": tmp_path, "certificate": True}
    run_ranks(2, _train_changed, change, tiny_flags(prefix, **flags), timeout=120, init=False)
    assert main([str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert line in output.err
    assert len(output.err.splitlines()) == 1
    assert output.out == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hide_counters, "the counters of interfaces cannot be read here"),
        (_replace_an_interface, "the counters of veth0 were removed or reset meanwhile"),
    ],
)
def test_counters_that_cannot_be_compared_are_said_to_be_so(
    change: Callable[[], None], reason: str, prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, _train_changed, change, tiny_flags(prefix, save=tmp_path, certificate=True), timeout=120, init=False)
    assert main([str(tmp_path)]) == 0
    assert f"not compared with the interfaces: {reason}" in capsys.readouterr().out


def test_interfaces_are_counted_where_connections_are_not(prefix: Path, tmp_path: Path) -> None:
    flags = tiny_flags(prefix, save=tmp_path, certificate=True)
    run_ranks(2, _train_changed, _count_interfaces_only, flags, timeout=120, init=False)
    (span,) = _newest(tmp_path).traffic
    assert span.connections is None
    assert span.interfaces is not None
    assert span.interfaces > 0.99 * sum(span.ledger.values())


def test_a_single_rank_and_other_transports_are_not_compared(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(1, tiny_flags(prefix, save=tmp_path, certificate=True))
    assert main([str(tmp_path)]) == 0
    assert "not compared with the interfaces: a single rank sends nothing" in capsys.readouterr().out

    def reason(backend: str, islands: bool) -> str:
        config = SimpleNamespace(
            parallel=SimpleNamespace(distributed_backend=backend), islands=SimpleNamespace(several=islands)
        )
        topology = SimpleNamespace(layout=SimpleNamespace(world_size=2))
        run: Any = SimpleNamespace(engines=SimpleNamespace(config=config), topology=topology)
        return RunCertificate._why_not_compared(run)

    assert reason("gloo", False) == ""
    assert reason("nccl", False) == "NCCL also sends by other ways than network interfaces"
    assert reason("gloo", True) == "other islands may use the same interfaces"


def test_one_step_of_64_is_sampled_and_the_sampler_leaves() -> None:
    assert [n for n in range(1, 400) if is_sampled(n)] == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384]
    observers: list[Any] = []
    sampler = certificate_module.MessageSampler(observers)
    sampler.join()
    assert observers == [sampler]
    sampler.leave()
    assert observers == []


def test_no_receive_is_posted_early_in_a_sampled_step() -> None:
    """The signatures of such a step say that its kernels are unknown."""
    engines, unknown = tiny_engines({}), []
    run = engines.pipeline.run

    def record(*arguments: Any, **options: Any) -> None:
        unknown.append(None in arguments[4])
        run(*arguments, **options)

    engines.pipeline.run = record  # type: ignore[method-assign]
    sampler = certificate_module.MessageSampler(engines.ledger.observers)
    tiny_train(engines, 1)
    sampler.join()
    tiny_train(engines, 1, first=1)
    sampler.leave()
    tiny_train(engines, 1, first=2)
    assert unknown == [False, True, False]


def test_a_message_that_overflows_is_no_sample(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second step is skipped; the statements can be read again."""
    flags = {"lr": 1e4, "train_iters": 2, "save": tmp_path, "certificate": True}
    train(2, tiny_flags(prefix, **TWO_STAGES, **WIDE, **flags, compress=["pp-forward=cast,dtype=fp16"]))
    assert main([str(tmp_path)]) == 0, capsys.readouterr().err
    (sample,) = _newest(tmp_path).samples
    assert sample.samples == 1
    assert 0.0 < sample.worst_error < 1.0


def test_auto_is_certified_with_its_prediction_and_the_measured_time(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --certificate; a resumed run keeps both."""
    saved = tmp_path / "saved"
    flags: dict[str, Any] = {"compress": ["auto"], "save": saved, "load": saved, "train_iters": 12}
    train(2, tiny_flags(prefix, **flags, exit_interval=9))
    auto = _newest(saved).auto
    assert auto is not None
    assert auto.predicted_s > 0
    assert auto.uncompressed_s > 0
    assert auto.measured_s is not None
    assert auto.report[0].startswith(("--compress auto: predicted", "--compress auto: measured"))
    assert main([str(saved)]) == 0
    assert f"; measured {auto.measured_s:.3g} s" in capsys.readouterr().out
    train(2, tiny_flags(prefix, **flags))
    assert _newest(saved).auto == auto
    train(2, tiny_flags(prefix, **{**flags, "train_iters": 13}, certificate="false"))
    assert not (saved / "iter_0000013" / CERTIFICATE).exists()


def _state_a_choice() -> Any:
    """Statements about a choice whose prediction and reasons differ by rank, like those of different libraries."""
    engines = tiny_engines({"compression": {"compress": ["auto", "dp-grad=fixpoint,bits=8"]}})
    rank = engines.topology.rank
    candidates = {Point.DP_GRAD: CandidateSpec("dp-grad=fixpoint,bits=8", 0.1 + rank)}
    seconds = SimpleNamespace(seconds=1.0 + rank)
    settings = {"overlap_grad_reduce": True}
    choice: Any = SimpleNamespace(prediction=seconds, trial_s=2.0, candidates=candidates, settings=settings)
    plain: Any = SimpleNamespace(prediction=seconds, trial_s=3.0)
    guard: Any = SimpleNamespace(checks=[LossCheck(4, 0.2), LossCheck(8, MAX_INCREASE, "dp-grad")])
    certificate_module.report = lambda *_: f"reasons of rank {rank}"
    certificate = RunCertificate(engines, {}, SimpleNamespace(chosen=choice, plain=plain), None, guard)  # type: ignore[arg-type]
    certificate.begin(3, None)
    return certificate.collect(1).auto


def test_all_ranks_state_the_choice_as_rank_0_explains_it() -> None:
    first, second = run_ranks(2, _state_a_choice)
    assert first == second
    assert (first.predicted_s, first.trial_s, first.report) == (1.0, 2.0, ["reasons of rank 0"])
    assert first.increases == {"dp-grad=fixpoint,bits=8": 0.1}
    assert first.checks == [LossCheck(4, 0.2), LossCheck(8, MAX_INCREASE, "dp-grad")]
    assert (first.uncompressed_trial_s, first.settings, first.after) == (3.0, ["--overlap-grad-reduce"], 3)


def _resume_with_evidence(specs: list[str]) -> bool:
    """Whether a run that keeps a choice of 8 bits states the evidence of its checkpoint, which is for some specs."""
    engines = tiny_engines({"compression": {"compress": ["auto", "dp-grad=fixpoint,bits=8"]}})
    certificate = RunCertificate(engines)
    certificate.begin(3, None)
    statements = certificate.collect(3)
    certificate.begin(3, replace(statements, auto=AutoDecision(specs, 0.1, 0.4, None, None, [])))
    return certificate.collect(4).auto is not None


def test_evidence_of_another_choice_is_not_kept() -> None:
    """As after a run without --certificate that has chosen again."""
    assert _resume_with_evidence(["dp-grad=fixpoint,bits=8"])
    assert not _resume_with_evidence(["dp-grad=fixpoint,bits=4"])


def test_it_needs_a_folder(prefix: Path) -> None:
    result = run_cli(1, ["pretrain_gpt.py", *tiny_flags(prefix, certificate=True)])
    assert result.returncode == 2
    assert "--certificate needs --save FOLDER; add it or leave --certificate out" in result.stderr


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("hosts", "ranks", "name"), mark_repeats([(2, 1, "eth0"), (1, 2, "lo")], keep=[(2, 1, "eth0")])
)
def test_bytes_of_hosts_are_those_of_their_interfaces(
    hosts: int, ranks: int, name: str, prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 1% by both counters, of hosts on which nothing else runs."""
    require_laboratory()
    flags = tiny_flags(prefix, save=tmp_path, certificate=True, hidden_size=256, train_iters=4)
    lab = [str(REPO / "tools" / "netlab.py"), "--hosts", str(hosts), "--ranks-per-host", str(ranks), "--timeout", "100"]
    words = [INTERPRETER, *lab, "--", "pretrain_gpt.py", *flags]
    result = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert main([str(tmp_path), "--strict"]) == 0, capsys.readouterr().err
    (span,) = _newest(tmp_path).traffic
    counted = sum(span.ledger.values())
    assert name in span.names
    assert span.interfaces == pytest.approx(counted, rel=BYTES_TOLERANCE)
    assert span.connections == pytest.approx(counted, rel=BYTES_TOLERANCE)


def test_the_command_explains_itself_and_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert not ended.value.code
    text = capsys.readouterr().out
    for check in ("files", "statements", "bytes", "residuals", "replicas", "auto", "machine"):
        assert f"\n  {check} " in text
    for name in ("missing", "long" * 100):
        assert main([str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.splitlines() == [
            f"verify: error: {tmp_path / name} is not a folder; name the one that --save wrote to"
        ]
