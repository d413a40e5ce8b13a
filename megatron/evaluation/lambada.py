"""LAMBADA: accuracy of last-word prediction."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.base.errors import UserError
from megatron.base.text_file import parse_json, read_utf8
from megatron.evaluation.scoring import Window, count_matches, score_windows
from megatron.inference.model import LoadedModel
from megatron.tokenizer.api import Tokenizer


def read_texts(path: str) -> list[str]:
    """Read the ``text`` fields of a JSON-lines file.

    Raises:
        UserError: when a line is not a valid record; the message names the line.
    """
    texts = []
    for number, line in enumerate(read_utf8(path, "--valid-data").split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = parse_json(line)["text"]
            if isinstance(text, str):
                text.encode()
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(
                f"--valid-data {path}, line {number}: is not a JSON object with a valid field text"
            ) from error
        if not isinstance(text, str) or len(text.split()) < 2:
            raise UserError(f"--valid-data {path}, line {number}: text must hold at least two words")
        texts.append(text)
    if not texts:
        raise UserError(f"--valid-data {path}: contains no text")
    return texts


def last_word_window(text: str, tokenizer: Tokenizer, length: int, strict: bool) -> Window:
    """Window of a text for scoring its last word.

    Args:
        text: text with at least two words.
        tokenizer: tokenizer of the model.
        length: number of tokens that the model reads; longer texts lose their beginning.
        strict: score the whole last word; otherwise only its last token.
    """
    if strict:
        word = text.split()[-1]
        before = text[: text.rfind(word)].strip()
        # Tokenize the word in its context: tokenizers may split it differently at the beginning of a text.
        tokens, context = tokenizer.tokenize(f"{before} {word}"), tokenizer.tokenize(before)
        pairs = enumerate(zip(tokens, context, strict=False))
        first_target = next((i for i, (token, other) in pairs if token != other), min(len(tokens), len(context)))
        targets = len(tokens) - first_target
    else:
        tokens, targets = tokenizer.tokenize(text), 1
    return Window(tokens[-(length + 1) :], min(targets, length))


def evaluate(model: LoadedModel, texts: Sequence[str], path: str, strict: bool, batch: int) -> str:
    """Evaluate the texts; return the result line.

    Args:
        model: the model, on every rank.
        texts: texts from ``read_texts``.
        path: path of the texts, for messages.
        strict: see ``last_word_window``.
        batch: texts in a forward pass.

    Raises:
        UserError: when a text is too short.
    """
    length = model.config.model.seq_length
    windows = [last_word_window(text, model.tokenizer, length, strict) for text in texts]
    for number, window in enumerate(windows, 1):
        if len(window.tokens) < 2:
            raise UserError(f"--valid-data {path}: text {number} is a single token; nothing can be predicted")
    match_counts = score_windows(model, windows, batch, count_matches, "LAMBADA").tolist()
    correct = sum(matches == window.targets for matches, window in zip(match_counts, windows, strict=True))
    return (
        f" validation results on LAMBADA | number correct: {correct:.4E} | total examples: {len(windows):.4E} | "
        f"avg accuracy: {correct / len(windows):.4E}"
    )
