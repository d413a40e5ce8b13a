"""Perplexity of continuous text, such as the WikiText-103 test set."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.base.errors import UserError
from megatron.base.text_file import read_utf8
from megatron.evaluation.detokenize import wikitext
from megatron.evaluation.scoring import Window, score_windows, window_losses
from megatron.inference.model import LoadedModel
from megatron.training.metrics import perplexity


def read_text(path: str) -> tuple[str, int]:
    """Read a text and count its original words; detokenize it if the path contains "wiki".

    Raises:
        UserError: when the file cannot be read, or has fewer than two words.
    """
    text = read_utf8(path, "--valid-data")
    words = len(text.strip().split(" "))
    if words < 2:
        raise UserError(f"--valid-data {path}: must hold at least two words, separated by a space")
    return wikitext(text) if "wiki" in path else text, words


def split_windows(tokens: Sequence[int], length: int, stride: int) -> list[Window]:
    """Windows that predict every token after the first exactly once, each with the maximum context.

    Args:
        tokens: tokens of the text.
        length: number of tokens that the model reads.
        stride: number of tokens that each window after the first predicts.
    """
    windows = [Window(tokens[: length + 1], min(length, len(tokens) - 1))]
    predicted = windows[0].targets
    while predicted < len(tokens) - 1:
        new = min(stride, len(tokens) - 1 - predicted)
        end = predicted + new + 1
        # The last window may have fewer targets than the stride; its start is the same as with a full stride.
        start = predicted - (length - stride)
        windows.append(Window(tokens[start:end], new))
        predicted += new
    return windows


def evaluate(model: LoadedModel, text: str, words: int, path: str, stride: int, batch: int) -> str:
    """Evaluate the text; return the result line.

    Args:
        model: the model, on every rank.
        text, words: text and number of words, from ``read_text``.
        path: path of the text, for messages.
        stride: see ``split_windows``; 0: the window's length, so that every token is read once.
        batch: windows in a forward pass.

    Raises:
        UserError: when the text is too short, or the stride exceeds the window.
    """
    tokens = model.tokenizer.tokenize(text)
    if len(tokens) < 2:
        raise UserError(f"--valid-data {path}: is too short")
    length = model.config.model.seq_length
    if stride > length:
        raise UserError(f"--overlapping-eval {stride} is more than the {length} tokens that the model reads")
    windows = split_windows(tokens, length, stride or length)
    loss = float(score_windows(model, windows, batch, window_losses, "WIKITEXT103").sum()) / (len(tokens) - 1)
    ratio = (len(tokens) - 1) / (words - 1)
    ppl, adjusted = perplexity(loss), perplexity(loss * ratio)
    return (
        f" validation results on WIKITEXT103 | avg loss: {loss:.4E} | ppl: {ppl:.4E} | adjusted ppl: {adjusted:.4E} | "
        f"token ratio: {ratio} |"
    )
