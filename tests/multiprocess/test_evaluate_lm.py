"""lm-evaluation-harness on local tasks, offline: the adapter and the harness's own model of the export agree."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.convert.command import main as convert
from megatron.data.preprocess.vocab_command import train
from megatron.evaluation.harness_command import main
from tests.support.spawn import run_ranks

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

WORDS = ("the", "a", "old", "young", "dog", "cat", "house", "river", "ran", "slept", "saw", "under", "near", "slowly")
CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
{more}
"""


@contextmanager
def offline_harness() -> Iterator[None]:
    """No download, and of the harness's own 14,000 task files only those of one task."""
    index = pytest.importorskip("lm_eval.tasks._index")
    build = index.TaskIndex.build

    def build_less(paths: Sequence[Path], **options: Any) -> Any:
        assert paths[0] == Path(index.__file__).parent
        return build([paths[0] / "hellaswag", *paths[1:]], **options)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.setattr(index.TaskIndex, "build", staticmethod(build_less))
        yield


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Iterator[None]:
    with offline_harness():
        yield


def _evaluate_on_ranks(argv: list[str]) -> None:
    with offline_harness():
        assert main(argv) == 0


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of a random GPT-2 and its vocabulary, and task files."""
    from transformers import GPT2Config, GPT2LMHeadModel  # each rank imports this file

    folder = tmp_path_factory.mktemp("prepared")
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
    for name, (kind, body) in kinds.items():
        filled = CHOICE.format(name=f"local_{name}", data=folder / "rows.json", kind=kind, more=body)
        (tasks / f"{name}.yaml").write_text(filled)
    return folder


def _flags(prepared: Path, *names: str) -> list[str]:
    tasks = [f"local_{name}" for name in names]
    return ["--load", str(prepared / "saved"), "--include-path", str(prepared / "tasks"), "--tasks", *tasks]


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
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = _flags(prepared, "choice", "rolling", "writing")
    assert main([*flags, "--output", str(tmp_path / "adapter")]) == 0
    assert "local_choice" in capsys.readouterr().out
    ours = _figures(tmp_path / "adapter")
    errors = {f"local_choice {name}_stderr,none" for name in ("acc", "acc_norm")} | {"local_writing chrf_stderr,none"}
    assert {name for name in ours if "stderr" in name} == errors  # the harness has none of perplexities by word or byte
    assert all(ours[name] > 0 for name in errors)
    assert len(ours) == 5 + len(errors)
    assert main([*flags, "--output", str(tmp_path / "hf"), "--via", "hf"]) == 0
    assert _figures(tmp_path / "hf") == pytest.approx(ours, rel=1e-4)
    flags = [*_flags(prepared, "choice", "writing"), "--output", str(tmp_path / "four")]
    split = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    run_ranks(4, _evaluate_on_ranks, [*flags, *split], timeout=250.0, init=False)
    four = _figures(tmp_path / "four")
    assert len(four) == 3 + len(errors)
    assert four == pytest.approx({name: ours[name] for name in four}, rel=1e-4)


@pytest.mark.timeout(600)
def test_a_model_with_experts_is_scored_as_its_export_is(prepared: Path, tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(4)
    shutil.copytree(prepared / "hf", tmp_path / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    size = json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"]
    config = Qwen3MoeConfig(
        max_position_embeddings=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24,
        norm_topk_prob=True, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        num_experts=4, num_experts_per_tok=2, vocab_size=size, initializer_range=0.3, bos_token_id=size - 1,
        eos_token_id=size - 1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "hf")
    assert convert(["--load", str(tmp_path / "hf"), "--save", str(tmp_path / "saved"), "--to", "megatron-cc"]) == 0
    flags = [*_flags(prepared, "choice", "rolling", "writing"), "--load", str(tmp_path / "saved")]
    assert main([*flags, "--output", str(tmp_path / "adapter")]) == 0
    ours = _figures(tmp_path / "adapter")
    assert main([*flags, "--output", str(tmp_path / "export"), "--via", "hf"]) == 0
    assert _figures(tmp_path / "export") == pytest.approx(ours, rel=1e-4)
    two = ["--tensor-model-parallel-size", "2", "--output", str(tmp_path / "two")]
    run_ranks(2, _evaluate_on_ranks, [*flags, *two], timeout=250.0, init=False)
    assert _figures(tmp_path / "two") == pytest.approx(ours, rel=1e-4)


@pytest.mark.parametrize("content", ["", "not json\n", None], ids=["empty", "malformed", "gone"])
def test_bad_data_of_a_task_is_one_line(
    content: str | None,
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "rows.json"
    if content is not None:
        data.write_text(content)
    body = 'doc_to_text: "{{text}}"\ndoc_to_target: "{{a}}"\nmetric_list: [{metric: perplexity}]'
    (tmp_path / "bad.yaml").write_text(CHOICE.format(name="local_bad", data=data, kind="loglikelihood", more=body))
    flags = ["--load", str(prepared / "saved"), "--include-path", str(tmp_path), "--tasks", "local_bad"]
    assert main(flags) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "--tasks local_bad: its data cannot be loaded" in errors[-1]


def test_unknown_tasks_are_named(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The harness's own tasks are known."""
    assert main(["--load", str(prepared / "saved"), "--tasks", "hellaswag", "no_such_task"]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: --tasks no_such_task: the harness has no such task")
