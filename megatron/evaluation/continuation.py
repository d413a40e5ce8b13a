"""CONTINUATION: does a model go on as held-out text does? Compression may leave the loss alone and harm this.

Two figures over the same places of the text: how often greedy decoding finds the true continuation, and how often the
true continuation is likelier than those of other places (as in HellaSwag, whose wrong endings come from elsewhere too).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.base.errors import UserError
from megatron.evaluation.scoring import Window, losses, matched, scores
from megatron.inference.model import LoadedModel


@dataclass(frozen=True)
class QuestionOptions:
    """The places of a text that are asked about.

    Args:
        samples: most places; they are spread over the whole text.
        prompt: tokens that the model is given.
        continuation: tokens that it is to find.
        choices: continuations that it ranks, the true one among them.
    """

    samples: int
    prompt: int
    continuation: int
    choices: int


@dataclass(frozen=True)
class Question:
    """A place of the text: what precedes it, and the continuations, of which the first is the true one."""

    prompt: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]


def questions_of(documents: Sequence[Sequence[int]], options: QuestionOptions) -> list[Question]:
    """Questions about documents, given as tokens: places that do not overlap, none across the end of a document.

    The wrong continuations are the true ones of other places, as far away as can be. There are fewer questions than
    asked for when the text is short; one is left out where a wrong continuation would equal the true one.
    """
    length = options.prompt + options.continuation
    cuts = [tuple(tokens[i : i + length]) for tokens in documents for i in range(0, len(tokens) - length + 1, length)]
    taken = min(options.samples, len(cuts))
    cuts = [cuts[i * len(cuts) // taken] for i in range(taken)]
    ends = [cut[options.prompt :] for cut in cuts]
    questions = []
    for i, cut in enumerate(cuts):
        others = [ends[(i + k * taken // options.choices) % taken] for k in range(1, options.choices)]
        if ends[i] not in others:
            questions.append(Question(cut[: options.prompt], (ends[i], *others)))
    return questions


def evaluate(model: LoadedModel, texts: Sequence[str], path: str, options: QuestionOptions, batch: int) -> str:
    """Evaluates the texts; returns the result line.

    Args:
        model: the model, on every rank.
        texts: documents.
        path: path of the texts, for messages.
        options: the places that are asked about.
        batch: windows in a forward pass.

    Raises:
        UserError: when the model reads too few tokens, or the texts are too short.
    """
    length = options.prompt + options.continuation
    if length > model.window + 1:
        raise UserError(
            f"--prompt-tokens {options.prompt} and --continuation-tokens {options.continuation} are more than the "
            f"{model.window} tokens that the model reads, and the one after them; give fewer"
        )
    questions = questions_of([model.tokenizer.tokenize(text) for text in texts], options)
    if not questions:
        raise UserError(f"--valid-data {path}: no text has {length} tokens in two places that differ; give more text")
    rows = [[(*one.prompt, *end) for end in one.continuations] for one in questions]
    first = [Window(row[0], options.continuation) for row in rows]
    every = [Window(tokens, options.continuation) for row in rows for tokens in row]
    found_n = scores(model, first, batch, matched, "greedy")
    losses_nc = scores(model, every, batch, losses, "ranking").view(len(rows), options.choices)
    exact = float((found_n == options.continuation).double().mean())
    best = float((losses_nc[:, :1] < losses_nc[:, 1:]).all(dim=1).double().mean())
    return (
        f" validation results on CONTINUATION | exact match: {exact:.4E} +- {_error(exact, len(rows)):.1E} | "
        f"matched tokens: {float(found_n.mean()):.4E} | ranking accuracy: {best:.4E} +- {_error(best, len(rows)):.1E} "
        f"(by chance {1 / options.choices:.2f}) | total examples: {len(rows):.4E}"
    )


def _error(share: float, count: int) -> float:
    """Standard error of a share."""
    return math.sqrt(share * (1 - share) / count)
