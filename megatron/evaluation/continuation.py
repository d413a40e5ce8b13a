"""CONTINUATION: prediction of the continuation of held-out text. Compression may harm this without harming the loss.

Two metrics over the same positions of the text: how often greedy decoding reproduces the true continuation, and how
often the true continuation is likelier than continuations of other positions (as in HellaSwag, where wrong endings come
from other texts, too).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.base.errors import UserError
from megatron.evaluation.scoring import Window, count_matches, score_windows, window_losses
from megatron.inference.model import LoadedModel


@dataclass(frozen=True)
class QuestionOptions:
    """Number and lengths of the questions.

    Args:
        samples: maximum number of positions; they are spread over the whole text.
        prompt: number of prompt tokens.
        continuation: number of tokens to predict.
        choices: number of continuations to rank, including the true continuation.
    """

    samples: int
    prompt: int
    continuation: int
    choices: int


def make_questions(documents: Sequence[Sequence[int]], options: QuestionOptions) -> list[list[tuple[int, ...]]]:
    """Make questions from tokenized documents; they neither overlap nor cross the end of a document.

    A question is a prompt with each of its candidate continuations, the true continuation first.

    Wrong continuations are the true continuations of distant positions. Short texts give fewer questions than
    ``options.samples``; a question is dropped if a wrong continuation equals the true continuation.
    """
    length = options.prompt + options.continuation
    cuts = [tuple(tokens[i : i + length]) for tokens in documents for i in range(0, len(tokens) - length + 1, length)]
    count = min(options.samples, len(cuts))
    cuts = [cuts[i * len(cuts) // count] for i in range(count)]
    ends = [cut[options.prompt :] for cut in cuts]
    questions = []
    for i, cut in enumerate(cuts):
        wrong_ends = [ends[(i + k * count // options.choices) % count] for k in range(1, options.choices)]
        if ends[i] not in wrong_ends:
            questions.append([cut, *(cut[: options.prompt] + end for end in wrong_ends)])
    return questions


def evaluate(model: LoadedModel, texts: Sequence[str], path: str, options: QuestionOptions, batch: int) -> str:
    """Evaluate the texts; return the result line.

    Args:
        model: the model, on every rank.
        texts: documents.
        path: path of the texts, for messages.
        options: number and lengths of the questions.
        batch: windows in a forward pass.

    Raises:
        UserError: when the model's window or the texts are too short.
    """
    length = options.prompt + options.continuation
    if length > model.window + 1:
        raise UserError(
            f"--prompt-tokens {options.prompt} and --continuation-tokens {options.continuation} are more than the "
            f"{model.window} tokens that the model reads, plus one; give fewer"
        )
    questions = make_questions([model.tokenizer.tokenize(text) for text in texts], options)
    if not questions:
        raise UserError(
            f"--valid-data {path}: has too few different passages of {length} tokens for --choices {options.choices}; "
            "give more text"
        )
    count = len(questions)
    true_windows = [Window(question[0], options.continuation) for question in questions]
    all_windows = [Window(tokens, options.continuation) for question in questions for tokens in question]
    counts_n = score_windows(model, true_windows, batch, count_matches, "greedy")
    losses_nc = score_windows(model, all_windows, batch, window_losses, "ranking").view(count, options.choices)
    exact = float((counts_n == options.continuation).double().mean())
    best = float((losses_nc[:, :1] < losses_nc[:, 1:]).all(dim=1).double().mean())
    return (
        f" validation results on CONTINUATION | exact match: {exact:.4E} +- {_error(exact, count):.1E} | "
        f"matched tokens: {float(counts_n.mean()):.4E} | ranking accuracy: {best:.4E} +- {_error(best, count):.1E} "
        f"(by chance {1 / options.choices:.2f}) | total examples: {count:.4E}"
    )


def _error(share: float, count: int) -> float:
    """Standard error of a proportion."""
    return math.sqrt(share * (1 - share) / count)
