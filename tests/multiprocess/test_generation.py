"""Generation with the model split over ranks: the tokens are those of a single process."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.distributed.layout import Layout
from megatron.distributed.topology import build_topology
from megatron.inference.generate import Generated, generate, score
from megatron.inference.model import load_model
from megatron.inference.sampling import Sampling
from megatron.models.context import ForwardContext
from tests.support.cli import run_cli
from tests.support.combinations import mark_repeats
from tests.support.device import own_device
from tests.support.spawn import run_ranks
from tests.unit.convert.support import LENGTH, MODELS, NOT_CLASSIC, WITH_EXPERTS, saved_model

pytestmark = pytest.mark.multiprocess

PROMPTS = [[3, 8, 13], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
SAMPLING = Sampling(top_p=0.9)


def _rank(root: Path, tp: int, pp: int) -> tuple[list[Generated], list[list[float]], bool]:
    topology = build_topology(Layout(tp=tp, pp=pp), own_device(dist.get_rank()))
    model = load_model(root, topology=topology)
    samples = generate(
        model, PROMPTS, 12, SAMPLING, [1, 2, 3], on_token=lambda row, token: row == 1 and token.id % 7 == 0
    )
    scored = score(model, [sample.tokens[:17] for sample in samples])
    return samples, [[token.logprob for token in row] for row in scored], model.is_sampling_rank


SPLIT = [
    *((name, 2, 2) for name in ("gpt2", "qwen2 with a window", "gemma2", "qwen3-moe")),
    ("qwen3-moe", 2, 1),
    ("gpt2", 1, 2),
]


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    mark_repeats(SPLIT, keep=[("qwen2 with a window", 2, 2), ("gemma2", 2, 2), ("qwen3-moe", 2, 1), ("gpt2", 1, 2)]),
)
def test_tokens_do_not_depend_on_the_layout(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    saved = saved_model(tmp_path, {**MODELS, **NOT_CLASSIC, **WITH_EXPERTS}[name], layers=4)
    model = load_model(saved)
    expected = generate(
        model, PROMPTS, 12, SAMPLING, [1, 2, 3], on_token=lambda row, token: row == 1 and token.id % 7 == 0
    )
    logprobs = score(model, [sample.tokens[:17] for sample in expected])
    results = run_ranks(tp * pp, _rank, saved, tp, pp)
    assert sum(speaks for _, _, speaks in results) == 1
    for samples, scored, speaks in results:
        assert [sample.tokens for sample in samples] == [sample.tokens for sample in expected]
        assert [sample.finished for sample in samples] == [sample.finished for sample in expected]
        if speaks:
            for row, row_scores in zip(logprobs, scored, strict=True):
                assert row_scores == pytest.approx([token.logprob for token in row], abs=1e-5)


def _greedy(root: Path, tp: int, pp: int, cached: bool) -> tuple[list[list[int]], list[list[float]]]:
    """Continuations, and log-probabilities of some texts."""
    model = load_model(root, topology=build_topology(Layout(tp=tp, pp=pp), own_device(dist.get_rank())))
    texts = generate(model, PROMPTS, 12, Sampling(greedy=True), cached=cached)
    return [text.tokens for text in texts], [[token.logprob for token in row] for row in score(model, PROMPTS)]


@pytest.mark.parametrize(
    ("name", "precision"),
    mark_repeats(
        product(["mixtral", "qwen2-moe"], ["fp32", "fp64"]), keep=[("mixtral", "fp32"), ("qwen2-moe", "fp64")]
    ),
)
def test_experts_continue_a_text_like_a_full_forward_pass(name: str, precision: str, tmp_path: Path) -> None:
    """Step by step with a cache or all anew, on one or two processes, the same tokens."""
    saved = saved_model(tmp_path, WITH_EXPERTS[name], {"fp64": precision == "fp64"}, layers=2)
    model = load_model(saved)
    expected, rows = [], []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(12):
            window = torch.tensor([tokens[-LENGTH:]])
            with torch.no_grad():
                logits = model.stage.logits(model.stage(window, ForwardContext()))[-1, 0]
            chosen = int(logits[: model.tokenizer.vocab_size].argmax())
            if chosen == model.tokenizer.eod:
                break
            tokens.append(chosen)
        expected.append(tokens)
        with torch.no_grad():
            logits = model.stage.logits(model.stage(torch.tensor([prompt]), ForwardContext()))[:, 0]
        scores = logits.double().log_softmax(-1)
        rows.append([float(scores[at, token]) for at, token in enumerate(prompt[1:])])
    assert [text.tokens for text in generate(model, PROMPTS, 12, Sampling(greedy=True))] == expected
    for cached in (True, False):
        for texts, scored in run_ranks(2, _greedy, saved, 2, 1, cached)[:1]:
            assert texts == expected
            for row_scores, row in zip(scored, rows, strict=True):
                assert row_scores == pytest.approx(row, abs=1e-5)


def test_the_command_writes_the_same_on_four_ranks_and_one(tmp_path: Path) -> None:
    saved = saved_model(tmp_path / "saved", MODELS["gpt2"], layers=4)
    flags = ["tools/generate_samples_gpt.py", "--load", str(saved), "--num-samples", "3", "--out-seq-length", "9"]
    run_cli(1, [*flags, "--genfile", str(tmp_path / "one")]).check()
    split = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--num-layers", "4"]
    done = run_cli(4, [*flags, *split, "--genfile", str(tmp_path / "four")]).check()
    assert "not needed" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "one").read_text().splitlines()]
    assert len(rows) == 3
    assert all(set(row) == {"text", "length", "finished"} for row in rows)
    assert (tmp_path / "four").read_text() == (tmp_path / "one").read_text()


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (["--tensor-model-parallel-size", "3"], 3, "--tensor-model-parallel-size 3"),
        (["--tensor-model-parallel-size", "2"], 4, "start 2 processes"),
        (["--ckpt-step", "77", "--pipeline-model-parallel-size", "2"], 2, "77"),
        (["--temperature", "0"], 1, "--temperature"),
        (["--top-k", "-3", "--top-p", "0.5"], 1, "--top-k is -3"),
        (["--min-p", "2"], 1, "--min-p is 2.0"),
        (["--num-samples", "3"], 1, "--genfile"),
        (["--sample-input-file", "nowhere.txt"], 1, "nowhere.txt"),
        (["--vocab-file", "nowhere.json", "--tokenizer-type", "GPT2BPETokenizer"], 1, "nowhere.json"),
        (["--temprature", "1"], 1, "--temperature"),
    ],
)
def test_bad_input_is_one_line_on_every_rank(flags: list[str], ranks: int, message: str, tmp_path: Path) -> None:
    saved = saved_model(tmp_path, MODELS["gpt2"], layers=4)
    done = run_cli(
        ranks,
        [
            "tools/generate_samples_gpt.py",
            "--load",
            str(saved),
            *(flags if "--sample-input-file" in flags else ["--prompt", "1 2", *flags]),
        ],
    )
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "Traceback" not in done.stderr.split("torch")[0]
