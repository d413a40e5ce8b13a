"""Texts of evaluation tasks, for the decontamination of training data."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.base.errors import UserError, first_line
from megatron.data.lines import numbered_lines
from tools.openwebtext.cleaning.filtering import document

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
"""Location of each task's texts on the Hugging Face hub: dataset, configuration, split, and field."""

TASKS = ("lambada", *SOURCES)


def texts_of_file(path: str, key: str) -> Iterator[str]:
    """Read the texts of a JSON-lines file.

    Raises:
        UserError: naming the first line without a text.
    """
    for number, line in numbered_lines(path):
        yield document(line, f"{path}, line {number}", key, skippable=False)[key]


def texts_of_task(name: str) -> Iterator[str]:
    """Read the texts of a task from the hub.

    Raises:
        UserError: when the texts cannot be downloaded.
    """
    from datasets import load_dataset
    from huggingface_hub import HfApi

    dataset, config, split, field = SOURCES[name]
    try:
        HfApi().dataset_info(dataset, timeout=30)  # a single request; load_dataset retries five times and logs it
        for row in load_dataset(dataset, config, split=split, streaming=True):
            yield row[field]
    except Exception as error:  # network, file or name errors: each library raises other types
        reason = first_line(error)
        raise UserError(
            f"--tasks {name}: {dataset} cannot be downloaded ({reason}); give its texts with --task-files FILE FIELD"
        ) from error
