"""Texts of evaluation tasks, which training data should not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.base.errors import UserError
from megatron.data.lines import numbered_lines
from tools.openwebtext.filtering import document


@dataclass(frozen=True)
class Source:
    """Where a task's texts are on the Hugging Face hub.

    Args:
        dataset, config, split: names there.
        text: of a row.
    """

    dataset: str
    config: str | None
    split: str
    text: Callable[[dict[str, Any]], str]


SOURCES = {
    "squad": Source("rajpurkar/squad_v2", None, "validation", lambda row: row["question"]),
    "natural_questions": Source("google-research-datasets/nq_open", None, "validation", lambda row: row["question"]),
    "triviaqa": Source("mandarjoshi/trivia_qa", "unfiltered.nocontext", "test", lambda row: row["question"]),
    "webqa": Source("stanfordnlp/web_questions", None, "test", lambda row: row["question"]),
    "race": Source("ehovy/race", "all", "test", lambda row: row["question"]),
    "drop": Source("ucinlp/drop", None, "validation", lambda row: row["question"]),
    "coqa": Source("stanfordnlp/coqa", None, "validation", lambda row: row["story"]),
    "piqa": Source("ybisk/piqa", None, "test", lambda row: row["goal"]),
}

TASKS = ("lambada", *SOURCES)


def texts_of_file(path: str, key: str) -> Iterator[str]:
    """Texts of JSON lines.

    Raises:
        UserError: naming the line that has none.
    """
    for number, line in numbered_lines(path):
        yield document(line, f"{path}, line {number}", key, skippable=False)[key]


def texts_of_task(name: str) -> Iterator[str]:
    """Texts of a task on the hub.

    Raises:
        UserError: when they cannot be had.
    """
    from datasets import load_dataset
    from huggingface_hub import HfApi

    source = SOURCES[name]
    try:
        HfApi().dataset_info(source.dataset, timeout=30)  # asks once; load_dataset five times, and says so
        for row in load_dataset(source.dataset, source.config, split=source.split, streaming=True):
            yield source.text(row)
    except Exception as error:  # of the network, of files, of names: each library below has its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--tasks {name}: {source.dataset} cannot be had ({reason}); give its texts with --task-files FILE FIELD"
        ) from error
