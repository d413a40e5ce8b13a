"""Reader of the TSV files of GLUE tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.base.errors import UserError
from megatron.base.parse_numbers import read_number
from megatron.base.text_file import read_lines
from megatron.base.user_text import format_value
from megatron.data.tasks.examples import Example, ExampleFile, clean_text

_MAX_MALFORMED = 0.01
"""Maximum fraction of malformed lines in a file that is known to contain some."""
_MAX_SCORE = 5.0
"""Maximum of numeric labels; the minimum is 0."""


@dataclass(frozen=True)
class GlueFormat:
    """File format of a task.

    Args:
        texts: columns of one or two texts: names, or indices in files without a header.
        label: name or index of the label column.
        classes: class labels in index order; empty for numeric labels.
        columns: number of columns in files without a header.
        malformed: whether the published files contain malformed lines, which are skipped.
    """

    texts: tuple[str | int, ...]
    label: str | int
    classes: tuple[str, ...] = ("0", "1")
    columns: int | None = None
    malformed: bool = False


_SENTENCES = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")

FORMATS: Mapping[str, GlueFormat] = {
    "MNLI": GlueFormat(_SENTENCES, "gold_label", ("contradiction", "entailment", "neutral")),
    "QQP": GlueFormat(("question1", "question2"), "is_duplicate", malformed=True),
    "QNLI": GlueFormat(("question", "sentence"), "label", _ENTAILMENT),
    "SST-2": GlueFormat(("sentence",), "label"),
    "CoLA": GlueFormat((3,), 1, columns=4),
    "STS-B": GlueFormat(_SENTENCES, "score", ()),
    "MRPC": GlueFormat(("#1 String", "#2 String"), "Quality"),
    "RTE": GlueFormat(_SENTENCES, "label", _ENTAILMENT),
}


def read_glue(task: str, path: str, flag: str) -> ExampleFile:
    """Read the published TSV file of a task of ``FORMATS``.

    Raises:
        UserError: when the file cannot be read, or has another format; the message names flag, file and line.
    """
    form, location = FORMATS[task], f"{flag} {path}"
    lines = read_lines(path, flag)
    if not lines:
        raise UserError(f"{location}: is empty")
    line = lines[0]
    if form.columns is not None:
        text_columns = tuple(int(column) for column in form.texts)
        label_column, num_columns, first = int(form.label), form.columns, 0
    else:
        names = [name.strip() for name in line.split("\t")]
        for name in (*form.texts, form.label):
            if name not in names:
                test = "; GLUE's test files have no labels" if name == form.label else ""
                raise UserError(
                    f"{location}, line 1: {task} needs the column {name}, but the header has "
                    f"{', '.join(names)[:200]}{test}"
                )
            if names.count(str(name)) > 1:
                raise UserError(f"{location}, line 1: has the column {name} twice; leave one out")
        text_columns = tuple(names.index(str(name)) for name in form.texts)
        label_column, num_columns, first = names.index(str(form.label)), len(names), 1
    examples: list[Example] = []
    malformed: list[int] = []
    for number, line in enumerate(lines[first:], first + 1):
        row, line_location = line.split("\t"), f"{location}, line {number}"
        if len(row) == num_columns and all(row[column].strip() for column in text_columns):
            first_text, *second_text = (clean_text(row[column].strip()) for column in text_columns)
            word = row[label_column].strip()
            if form.classes:
                if word not in form.classes:
                    raise UserError(
                        f"{line_location}: the label {format_value(word)} is not one of {', '.join(form.classes)}"
                    )
                label = float(form.classes.index(word))
            else:
                try:
                    label = read_number(word)
                except ValueError:
                    label = math.nan
                if not 0 <= label <= _MAX_SCORE:
                    raise UserError(
                        f"{line_location}: the label {format_value(word)} is not a number from 0 to {_MAX_SCORE:g}"
                    )
            examples.append(Example(((first_text, second_text[0] if second_text else None),), label))
        elif form.malformed:
            malformed.append(number)
        elif len(row) != num_columns:
            raise UserError(f"{line_location}: has {len(row)} columns instead of {num_columns}, separated by tabs")
        else:
            empty_column = next(column for column in text_columns if not row[column].strip())
            raise UserError(f"{line_location}: column {empty_column + 1} holds no text")
    if malformed and len(malformed) > _MAX_MALFORMED * len(lines):
        raise UserError(
            f"{location}, line {malformed[0]}: does not have {num_columns} columns with texts, nor do "
            f"{len(malformed) - 1} others; give {task}'s own file"
        )
    if not examples:
        raise UserError(f"{location}: holds no sample after line {first}")
    note = (
        f"{location}: {len(malformed)} malformed lines are left out, the first at line {malformed[0]}"
        if malformed
        else ""
    )
    return ExampleFile(path, examples, note)
