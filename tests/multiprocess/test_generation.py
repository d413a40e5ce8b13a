"""Generation with the model split over ranks: the tokens are those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.inference.generate import Generated, generate, score
from megatron.inference.model import load_model
from megatron.inference.sampling import Sampling
from megatron.topology.layout import Layout
from megatron.topology.topology import build_topology
from tests.support.cli import run_cli
from tests.support.device import own_device
from tests.support.spawn import run_ranks
from tests.unit.checkpoint.convert.support import MODELS, NOT_CLASSIC, saved_model

pytestmark = pytest.mark.multiprocess

PROMPTS = [[3, 8, 13], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
SAMPLING = Sampling(top_p=0.9)


def _rank(root: Path, tp: int, pp: int) -> tuple[list[Generated], list[list[float]], bool]:
    topology = build_topology(Layout(tp=tp, pp=pp), own_device(dist.get_rank()))
    model = load_model(root, topology=topology)
    found = generate(
        model, PROMPTS, 12, SAMPLING, [1, 2, 3], on_token=lambda row, token: row == 1 and token.id % 7 == 0
    )
    scored = score(model, [sample.tokens[:17] for sample in found])
    return found, [[token.logprob for token in row] for row in scored], model.is_sampling_rank


@pytest.mark.parametrize("name", ["gpt2", "qwen2 with a window"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)], ids=["tp2", "pp2", "tp2 pp2"])
def test_tokens_do_not_depend_on_the_layout(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    saved = saved_model(tmp_path, {**MODELS, **NOT_CLASSIC}[name], layers=4)
    model = load_model(saved)
    expected = generate(
        model, PROMPTS, 12, SAMPLING, [1, 2, 3], on_token=lambda row, token: row == 1 and token.id % 7 == 0
    )
    logprobs = score(model, [sample.tokens[:17] for sample in expected])
    results = run_ranks(tp * pp, _rank, saved, tp, pp)
    assert sum(speaks for _, _, speaks in results) == 1
    for found, scored, speaks in results:
        assert [sample.tokens for sample in found] == [sample.tokens for sample in expected]
        assert [sample.finished for sample in found] == [sample.finished for sample in expected]
        if speaks:
            for row, own in zip(logprobs, scored, strict=True):
                assert own == pytest.approx([token.logprob for token in row], abs=1e-5)


def test_the_command_on_four_ranks_writes_what_one_process_writes(tmp_path: Path) -> None:
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
    ("flags", "ranks", "said"),
    [
        (["--tensor-model-parallel-size", "3"], 3, "--tensor-model-parallel-size 3"),
        (["--tensor-model-parallel-size", "2"], 4, "start 2 processes"),
        (["--ckpt-step", "77", "--pipeline-model-parallel-size", "2"], 2, "77"),
        (["--temperature", "0"], 1, "--temperature"),
        (["--top-k", "3", "--top-p", "0.5"], 1, "--top_k and --top_p"),
        (["--num-samples", "3"], 1, "--genfile"),
        (["--sample-input-file", "nowhere.txt"], 1, "nowhere.txt"),
        (["--vocab-file", "nowhere.json", "--tokenizer-type", "GPT2BPETokenizer"], 1, "nowhere.json"),
        (["--temprature", "1"], 1, "--temperature"),
    ],
)
def test_bad_input_is_one_line_on_every_rank(flags: list[str], ranks: int, said: str, tmp_path: Path) -> None:
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
    assert said in line
    assert "Traceback" not in done.stderr.split("torch")[0]
