"""Texts of evaluation tasks, which training data should not hold."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.base.errors import UserError, first_line
from megatron.data.cleaning.filtering import document
from megatron.data.lines import numbered_lines

SOURCES = {
    "squad": ("rajpurkar/squad_v2", None, "validation", "question"),
    "natural_questions": ("google-research-datasets/nq_open", None, "validation", "question"),
    "triviaqa": ("mandarjoshi/trivia_qa", "unfiltered.nocontext", "test", "question"),
    "webqa": ("stanfordnlp/web_questions", None, "test", "question"),
    "race": ("ehovy/race", "all", "test", "question"),
    "drop": ("ucinlp/drop", None, "validation", "question"),
    "coqa": ("stanfordnlp/coqa", None, "validation", "story"),
    "piqa": ("ybisk/piqa", None, "test", "goal"),
}
"""Where a task's texts are on the Hugging Face hub: data set, configuration, split, and the field of a row."""

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

    dataset, config, split, field = SOURCES[name]
    try:
        HfApi().dataset_info(dataset, timeout=30)  # asks once; load_dataset five times, and says so
        for row in load_dataset(dataset, config, split=split, streaming=True):
            yield row[field]
    except Exception as error:  # of the network, of files, of names: each library below has its own
        reason = first_line(error)
        raise UserError(
            f"--tasks {name}: {dataset} cannot be had ({reason}); give its texts with --task-files FILE FIELD"
        ) from error
