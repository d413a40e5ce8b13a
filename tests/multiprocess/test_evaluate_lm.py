"""lm-evaluation-harness on local tasks, offline: the adapter and the harness's own model of the export agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron.convert.command import main as convert
from megatron.data.preprocess.vocab_command import train
from megatron.evaluation.harness_command import main
from tests.support.cli import run_cli

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

WORDS = ("the", "a", "old", "young", "dog", "cat", "house", "river", "ran", "slept", "saw", "under", "near", "slowly")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
{more}
"""


@pytest.fixture(scope="module", autouse=True)
def _own_tasks_are_read_once() -> Iterator[None]:
    """The harness reads its own 14,000 files, which takes seconds, whenever it is called."""
    index = pytest.importorskip("lm_eval.tasks._index")
    own, build = Path(index.__file__).parent, index.TaskIndex.build
    kept: dict[str, Any] = {}

    def built(paths: list[Path], **how: Any) -> dict[str, Any]:
        assert paths[0] == own
        if not kept:
            kept.update(build(paths[:1], **how))
        return {**kept, **build(paths[1:], **how)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index.TaskIndex, "build", staticmethod(built))
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of a random GPT-2 and its vocabulary, and task files."""
    folder = tmp_path_factory.mktemp("place")
    random = np.random.default_rng(0)

    def text(count: int) -> str:
        return " ".join(random.choice(WORDS, count))

    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text(30)}) + "\n" for _ in range(200)))
    train([folder / "corpus.jsonl"], folder / "hf", 300)
    torch.manual_seed(3)
    size = len(json.loads((folder / "hf" / "vocab.json").read_text()))
    config = GPT2Config(
        n_positions=64, n_embd=32, n_layer=2, n_head=2, vocab_size=size, initializer_range=0.3,
        bos_token_id=size - 1, eos_token_id=size - 1,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder / "hf")
    assert convert(["--load", str(folder / "hf"), "--save", str(folder / "saved"), "--to", "megatron-cc"]) == 0
    rows = [
        {"text": text(9), "long": text(90), "a": " " + text(1), "choices": [" " + text(1), " " + text(3)],
         "label": int(random.integers(2))}
        for _ in range(12)
    ]  # fmt: skip
    (folder / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    tasks = folder / "tasks"
    tasks.mkdir()
    kinds = {
        "choice": (
            "multiple_choice",
            'doc_to_text: "{{text}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: label\n'
            "metric_list: [{metric: acc}, {metric: acc_norm}]",
        ),
        "rolling": (
            "loglikelihood_rolling",
            'doc_to_text: ""\ndoc_to_target: "{{long}}"\nmetric_list: [{metric: word_perplexity}, '
            "{metric: bits_per_byte}]",
        ),
        "writing": (
            "generate_until",
            'doc_to_text: "{{text}}"\ndoc_to_target: "{{a}}"\ngeneration_kwargs: {until: [" the"], max_gen_toks: 8}\n'
            "metric_list: [{metric: chrf}]",
        ),
    }
    for name, (kind, more) in kinds.items():
        filled = CHOICE.format(name=f"local_{name}", data=folder / "rows.json", kind=kind, more=more)
        (tasks / f"{name}.yaml").write_text(filled)
    return folder


def _flags(place: Path, *names: str) -> list[str]:
    tasks = [f"local_{name}" for name in names]
    return ["--load", str(place / "saved"), "--include-path", str(place / "tasks"), "--tasks", *tasks]


def _figures(output: Path) -> dict[str, float]:
    results: dict[str, Any] = json.loads(output.read_text())["results"]
    return {
        f"{task} {name}": value
        for task, values in results.items()
        for name, value in values.items()
        if isinstance(value, float)
    }


@pytest.mark.timeout(600)
def test_the_adapter_the_export_and_other_layouts_agree(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    flags = _flags(place, "choice", "rolling", "writing")
    assert main([*flags, "--output", str(tmp_path / "adapter")]) == 0
    assert "local_choice" in capsys.readouterr().out
    ours = _figures(tmp_path / "adapter")
    errors = {f"local_choice {name}_stderr,none" for name in ("acc", "acc_norm")} | {"local_writing chrf_stderr,none"}
    assert {name for name in ours if "stderr" in name} == errors  # the harness has none of perplexities by word or byte
    assert all(ours[name] > 0 for name in errors)
    assert len(ours) == 5 + len(errors)
    assert main([*flags, "--output", str(tmp_path / "hf"), "--via", "hf"]) == 0
    assert _figures(tmp_path / "hf") == pytest.approx(ours, rel=1e-4)
    split = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    command = ["tools/evaluate_lm.py", *_flags(place, "choice", "writing"), *split, "--output", str(tmp_path / "four")]
    run_cli(4, command, env=OFFLINE, timeout=250).check()
    four = _figures(tmp_path / "four")
    assert len(four) == 3 + len(errors)
    assert four == pytest.approx({name: ours[name] for name in four}, rel=1e-4)


@pytest.mark.timeout(600)
def test_a_model_with_experts_is_scored_as_its_export_is(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    torch.manual_seed(4)
    shutil.copytree(place / "hf", tmp_path / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    size = json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"]
    config = Qwen3MoeConfig(
        max_position_embeddings=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24,
        norm_topk_prob=True, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        num_experts=4, num_experts_per_tok=2, vocab_size=size, initializer_range=0.3, bos_token_id=size - 1,
        eos_token_id=size - 1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "hf")
    assert convert(["--load", str(tmp_path / "hf"), "--save", str(tmp_path / "saved"), "--to", "megatron-cc"]) == 0
    flags = [*_flags(place, "choice", "rolling", "writing"), "--load", str(tmp_path / "saved")]
    assert main([*flags, "--output", str(tmp_path / "adapter")]) == 0
    ours = _figures(tmp_path / "adapter")
    assert main([*flags, "--output", str(tmp_path / "export"), "--via", "hf"]) == 0
    assert _figures(tmp_path / "export") == pytest.approx(ours, rel=1e-4)
    command = ["tools/evaluate_lm.py", *flags, "--tensor-model-parallel-size", "2", "--output", str(tmp_path / "two")]
    run_cli(2, command, env=OFFLINE, timeout=250).check()
    assert _figures(tmp_path / "two") == pytest.approx(ours, rel=1e-4)


@pytest.mark.parametrize("content", ["", "not json\n", None], ids=["empty", "malformed", "gone"])
def test_bad_data_of_a_task_is_one_line(
    content: str | None,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "rows.json"
    if content is not None:
        data.write_text(content)
    more = 'doc_to_text: "{{text}}"\ndoc_to_target: "{{a}}"\nmetric_list: [{metric: perplexity}]'
    (tmp_path / "bad.yaml").write_text(CHOICE.format(name="local_bad", data=data, kind="loglikelihood", more=more))
    flags = ["--load", str(place / "saved"), "--include-path", str(tmp_path), "--tasks", "local_bad"]
    assert main(flags) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "--tasks local_bad: its data cannot be had" in said[-1]


def test_unknown_tasks_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--load", str(place / "saved"), "--tasks", "no_such_task"]) == 2
    assert "no_such_task" in capsys.readouterr().err
