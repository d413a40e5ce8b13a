"""Canaries: five tasks with one right answer, which a toy model can learn to solve exactly.

Documents have the same length, a sample's, so that every task is seen from its first token and at the same places:

    Cbdacfe=bdacfe.    copy
    Rbdacfe=efcadb.    reverse
    Ka3c7?c7a3.....    key-value recall; training also asks for the other value
    S25+66=190.....    sum of two numbers of two digits, the units first
    B([{}((=))])...    brackets: close what is open

The loss averages over text in which the next token is mostly a guess; here damage is counted in wrong answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LETTERS = "abcdefgh"
LENGTH = 6
"""Letters to copy or reverse; brackets of a prompt."""
KEYS, PAIRS = "abcd", 2
"""Keys, and how many of them a prompt has, with their values."""
DIGITS = "0123456"
"""Digits of the numbers to add: sums with carries, learned sooner than with all ten."""
DOCUMENT_LENGTH = 15
"""Characters of a document, to which the end of document is added."""
FILL = "."
CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Canary:
    """A prompt and its only right answer.

    Args:
        prompt: the prompt.
        answer: the answer, which ends with a fill.
        extra: further questions and answers of the document, before the fill.
    """

    prompt: str
    answer: str
    extra: str = ""

    @property
    def document(self) -> str:
        """Training text of the canary."""
        return f"{self.prompt}{self.answer}{self.extra}".ljust(DOCUMENT_LENGTH, FILL)

    @property
    def ended_answer(self) -> str:
        """The continuation that greedy decoding must give, with the fill that ends it if nothing else follows."""
        return self.answer if self.extra else f"{self.answer}{FILL}"


def copy(generator: random.Random) -> Canary:
    """Letters, to be repeated."""
    letters = "".join(generator.choices(LETTERS, k=LENGTH))
    return Canary(f"C{letters}=", letters)


def reverse(generator: random.Random) -> Canary:
    """Letters, to be repeated from the last to the first."""
    letters = "".join(generator.choices(LETTERS, k=LENGTH))
    return Canary(f"R{letters}=", letters[::-1])


def recall(generator: random.Random) -> Canary:
    """Keys with values, then a key; the answer is its value."""
    keys = generator.sample(KEYS, PAIRS)
    values = generator.choices("0123456789", k=PAIRS)
    pairs = [key + value for key, value in zip(keys, values, strict=True)]
    question, *extra = generator.sample(pairs, PAIRS)
    return Canary(f"K{''.join(pairs)}?{question[0]}", question[1], "".join(extra))


def add(generator: random.Random) -> Canary:
    """Two numbers of two digits up to 6, and the three digits of their sum, the units first."""
    first, second = (int("".join(generator.choices(DIGITS, k=2))) for _ in range(2))
    return Canary(f"S{first:02}+{second:02}=", f"{first + second:03}"[::-1])


def close(generator: random.Random) -> Canary:
    """Return the beginning of a text of brackets, and the brackets that close what is open."""
    text, is_open = "", ""
    while len(text) < LENGTH:
        if is_open and generator.random() < 0.3:
            text, is_open = text + CLOSING[is_open[-1]], is_open[:-1]
        else:
            opening = generator.choice(list(CLOSING))
            text, is_open = text + opening, is_open + opening
    return Canary(f"B{text}=", "".join(CLOSING[opening] for opening in reversed(is_open)))


TASKS: dict[str, Callable[[random.Random], Canary]] = {
    "copy": copy,
    "reverse": reverse,
    "recall": recall,
    "sums": add,
    "brackets": close,
}
SHARES = (1, 1, 4, 3, 1)
"""Relative numbers of training documents by task: more for tasks that are learned later."""


def heldout_canaries(count: int) -> dict[str, list[Canary]]:
    """Distinct canaries of every task that occur in no training text."""
    generator = random.Random("held-out canaries")
    by_task: dict[str, list[Canary]] = {}
    for task, draw in TASKS.items():
        canaries: dict[str, Canary] = {}
        while len(canaries) < count:
            canary = draw(generator)
            canaries[canary.prompt] = canary
        by_task[task] = list(canaries.values())
    return by_task


def training_documents(count: int, heldout: dict[str, list[Canary]]) -> list[str]:
    """Documents of all tasks in turn, none with a held-out prompt."""
    generator = random.Random("training canaries")
    excluded = {canary.prompt for canaries in heldout.values() for canary in canaries}
    documents: list[str] = []
    while len(documents) < count:
        canary = TASKS[generator.choices(list(TASKS), SHARES)[0]](generator)
        if canary.prompt not in excluded:
            documents.append(canary.document)
    return documents


def write_documents(documents: list[str], path: Path) -> None:
    """Write documents as the preprocessing reads them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
