"""lm-evaluation-harness on a model in Llama's form: the checkpoint, its export and the server give the same figures.

The tokenizer has begin and end tokens that differ, puts a space before a text, and joins contexts and continuations.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lm_eval.models.openai_completions import LocalCompletionsAPI

from megatron.base.errors import UserError
from megatron.convert.command import main as convert
from megatron.evaluation.harness_command import EvaluationFlags, run, via_hf
from megatron.evaluation.lm_eval_adapter import CheckpointLM
from megatron.evaluation.lm_eval_rules import ContinuationRules
from megatron.inference.jobs import Leader
from megatron.inference.model import load_model
from tests.multiprocess.test_evaluate_lm import offline_harness
from tests.support.llama import WORDS, write_llama
from tests.support.server import serving

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

WINDOW = 64
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
{more}
"""
CHOICE = (
    'output_type: multiple_choice\ndoc_to_text: "{{%s}}"\ndoc_to_choice: "{{%s}}"\ndoc_to_target: 0\n'
    'target_delimiter: ""\nmetric_list: [{metric: acc}, {metric: acc_norm}, {metric: brier_score}]'
)
ROLLING = (
    'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{%s}}"\n'
    "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]"
)
TASKS = {
    "words": CHOICE % ("text", "words"),
    "joined": CHOICE % ("begun", "ends"),
    "unprompted": CHOICE % ("nothing", "begins"),
    "page": ROLLING % "text",
    "book": ROLLING % "long",
    "writing": (
        'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{a}}"\n'
        'generation_kwargs: {until: ["zz"], max_gen_toks: 8}\nmetric_list: [{metric: bleu}, {metric: exact_match}]'
    ),
    "too_long": CHOICE % ("text", "too_long"),
    "long_context": CHOICE % ("long", "words"),
    "long_writing": (
        'output_type: generate_until\ndoc_to_text: "{{long}}"\ndoc_to_target: "{{a}}"\n'
        'generation_kwargs: {until: ["zz"], max_new_tokens: 5}\nmetric_list: [{metric: bleu}, {metric: exact_match}]'
    ),
    "endless": (
        'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{a}}"\n'
        'generation_kwargs: {until: ["zz"], max_gen_toks: 64}\nmetric_list: [{metric: exact_match}]'
    ),
}


class ServedLM(ContinuationRules, LocalCompletionsAPI):
    """The harness's client of a server, with the checkpoint's rules for joining tokens."""

    @property
    def longest_continuation(self) -> int:
        return WINDOW


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Iterator[None]:
    with offline_harness():
        yield


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, its Hugging Face form, and tasks."""
    folder = tmp_path_factory.mktemp("llama")
    hf = write_llama(folder / "hf", WINDOW)
    assert convert(["--load", str(hf), "--save", str(folder / "saved"), "--to", "megatron-cc"]) == 0
    words = random.Random(3)

    def text(count: int) -> str:
        return " ".join(words.choices(WORDS, k=count))

    rows = []
    for _ in range(8):
        page, long, ends = text(7), text(90), [words.choice(["ass", "ear"]), f"ea {text(1)}"]
        choices = {"words": [f" {text(1)}", f" {text(2)}"], "begins": [text(1), text(2)], "too_long": [" a", long],
                   "ends": ends}  # fmt: skip
        rows.append(
            {"text": page, "long": long, "nothing": "", "begun": f"{text(4)} cl", "a": f" {text(1)}", **choices}
        )
    (folder / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    (folder / "tasks").mkdir()
    for name, body in TASKS.items():
        (folder / "tasks" / f"{name}.yaml").write_text(TASK.format(name=name, data=folder / "rows.json", more=body))
    return folder


def _figures(results: dict[str, Any]) -> dict[str, float]:
    return {
        f"{task} {name}": value
        for task, values in results["results"].items()
        for name, value in values.items()
        if isinstance(value, float) and "stderr" not in name
    }


def _flags(prepared: Path, *tasks: str) -> EvaluationFlags:
    return EvaluationFlags(
        tasks=list(tasks), include_path=str(prepared / "tasks"), bootstrap_iters=0, micro_batch_size=3
    )


def _results(prepared: Path, *tasks: str) -> dict[str, Any]:
    with Leader(load_model(prepared / "saved"), 60.0) as leader:
        return run(CheckpointLM(leader, 3), _flags(prepared, *tasks))


def _by_checkpoint(prepared: Path, *tasks: str) -> dict[str, float]:
    return _figures(_results(prepared, *tasks))


def test_the_checkpoint_its_export_and_the_server_give_the_same_figures(prepared: Path) -> None:
    tasks = ("words", "joined", "unprompted", "page", "book", "writing")
    ours = _by_checkpoint(prepared, *tasks)
    assert len(ours) == 3 * 3 + 2 * 2 + 2
    assert _figures(via_hf(str(prepared / "saved"), None, _flags(prepared, *tasks))) == pytest.approx(ours, rel=1e-4)
    with serving(prepared / "saved") as server:
        options = {
            "base_url": f"http://{server.host}:{server.port}/v1/completions", "model": "any",
            "tokenizer": str(prepared / "hf"), "tokenizer_backend": "huggingface", "max_length": WINDOW,
            "batch_size": 3,
        }  # fmt: skip
        served = [name for name in tasks if name not in ("joined", "book")]  # windows are the client's
        figures = _figures(run(LocalCompletionsAPI(**options), _flags(prepared, *served)))
        figures |= _figures(run(ServedLM(**options), _flags(prepared, "joined")))
    assert figures == pytest.approx({name: ours[name] for name in figures}, rel=1e-4)
    assert len(figures) == len(ours) - 2


def test_a_continuation_that_is_longer_than_the_window_is_refused(prepared: Path) -> None:
    of_export = partial(via_hf, str(prepared / "saved"), None, _flags(prepared, "too_long"))
    for evaluate in (partial(_by_checkpoint, prepared, "too_long"), of_export):
        with pytest.raises(UserError, match="cannot be scored") as refusal:
            evaluate()
        assert "\n" not in str(refusal.value)


def test_contexts_that_lose_their_beginning_are_counted(prepared: Path) -> None:
    """By the checkpoint and by its export; their figures agree."""
    tasks = _flags(prepared, "long_context", "long_writing", "words")
    with Leader(load_model(prepared / "saved"), 60.0) as leader:
        tokens = leader.model.tokenizer.tokenize
        ours = run(CheckpointLM(leader, 3), tasks)
    rows = [json.loads(line) for line in (prepared / "rows.json").read_text().splitlines()]
    lost = [len(tokens(row["long"] + word)) - WINDOW - 1 for row in rows for word in row["words"]]
    lost += [len(tokens(row["long"])) - (WINDOW - 5) for row in rows]
    assert all(count > 0 for count in lost)
    expected = {"requests": len(lost) + 16, "cut": len(lost), "tokens_cut": sum(lost), "most_tokens_cut": max(lost)}
    assert ours["contexts"] == {**expected, "window": WINDOW}
    exported = via_hf(str(prepared / "saved"), None, tasks)
    assert exported["contexts"] == ours["contexts"]
    assert _figures(exported) == pytest.approx(_figures(ours), rel=1e-4)
    assert _results(prepared, "words")["contexts"]["cut"] == 0


def test_only_the_export_refuses_an_answer_as_long_as_the_window(prepared: Path) -> None:
    _by_checkpoint(prepared, "endless")
    with pytest.raises(UserError, match=r"^--tasks endless: asks for answers of 64 tokens, but --via hf reads 64 with"):
        via_hf(str(prepared / "saved"), None, _flags(prepared, "endless"))


def test_a_continuation_that_joins_its_context_is_tokenized_alone(prepared: Path) -> None:
    with Leader(load_model(prepared / "saved"), 60.0) as leader:
        model = CheckpointLM(leader, 3)
        tokens = leader.model.tokenizer.tokenize
        assert model._encode_pair("the cl", "ass") == (tokens("the cl"), tokens("ass"))
        assert model._encode_pair("the ", "class") == (tokens("the"), tokens("the class")[len(tokens("the")) :])
        for context in ("the dog", ""):
            with pytest.raises(UserError, match="--tasks mine: a continuation is empty"):
                model.loglikelihood([SimpleNamespace(args=(context, ""), task_name="mine")])
