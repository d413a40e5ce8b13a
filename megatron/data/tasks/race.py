"""Reader of RACE: passages with multiple-choice questions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megatron.base.errors import UserError
from megatron.base.text_file import parse_json, read_lines
from megatron.base.user_text import format_value
from megatron.data.tasks.examples import Example, ExampleFile, clean_text

CHOICES = 4
_LETTERS = "ABCD"


def read_race(path: str, flag: str) -> ExampleFile:
    """Read a folder of ``.txt`` files of JSON lines, each with a passage and its questions, such as RACE/train/middle.

    The answer replaces the blank (``_``) of a question, or follows the question if it has no blank.

    Raises:
        UserError: when a file cannot be read, or has another format; the message names flag, file and line.
    """
    try:
        files = sorted(entry for entry in Path(path).iterdir() if entry.suffix == ".txt")
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}; RACE consists of folders of .txt files") from error
    if not files:
        raise UserError(f"{flag} {path}: holds no .txt file; name RACE's innermost folders, such as train/middle")
    examples: list[Example] = []
    for file in files:
        for number, line in enumerate(read_lines(file, flag), 1):
            if line.strip():
                examples += _questions(line, f"{flag} {file}, line {number}")
    if not examples:
        raise UserError(f"{flag} {path}: holds no question")
    return ExampleFile(path, examples)


def _questions(line: str, location: str) -> Iterator[Example]:
    """Samples of a passage."""
    try:
        passage = parse_json(line)
        json.dumps(passage, ensure_ascii=False, default=str).encode()  # an escape may be a lone surrogate
    except (ValueError, RecursionError) as error:
        raise UserError(f"{location}: is not JSON of valid characters ({error})") from error
    if not isinstance(passage, dict):
        raise UserError(f"{location}: is not a JSON object with article, questions, options and answers")
    article = passage.get("article")
    if not isinstance(article, str) or not article.strip():
        raise UserError(f"{location}: article must be text")
    for name in ("questions", "options", "answers"):
        if not isinstance(passage.get(name), list):
            raise UserError(f"{location}: {name} must be a list")
    questions, options, answers = passage["questions"], passage["options"], passage["answers"]
    if not len(questions) == len(options) == len(answers):
        raise UserError(
            f"{location}: has {len(questions)} questions, {len(options)} options and {len(answers)} answers; "
            "the numbers must be equal"
        )
    text = clean_text(article)
    for number, (question, texts, answer) in enumerate(zip(questions, options, answers, strict=True), 1):
        question_location = f"{location}, question {number}"
        if not isinstance(question, str) or not isinstance(texts, list) or not all(isinstance(x, str) for x in texts):
            raise UserError(f"{question_location}: the question must be text, and its options a list of texts")
        if len(texts) != CHOICES:
            raise UserError(f"{question_location}: has {len(texts)} options instead of {CHOICES}")
        if not isinstance(answer, str) or len(answer) != 1 or answer not in _LETTERS:
            raise UserError(
                f"{question_location}: the answer {format_value(answer)} is not one of {', '.join(_LETTERS)}"
            )
        sequences = [question.replace("_", option) if "_" in question else f"{question} {option}" for option in texts]
        yield Example(tuple((clean_text(sequence), text) for sequence in sequences), _LETTERS.index(answer))
