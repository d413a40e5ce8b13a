"""Common behavior of the lm-evaluation-harness models of a checkpoint and of its export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM

from megatron.base.errors import UserError

EncodedPair = tuple[Any, list[int], list[int]]
"""Texts (None for windows of a rolling text), context tokens, and continuation tokens."""

MAX_NEW_TOKENS = 256
"""The harness's default for tasks that specify no maximum."""
_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclass
class ContextCounts:
    """Number of contexts, and of contexts truncated at the beginning to fit the model's window.

    Args:
        window: number of tokens that the model reads.
        requests: number of contexts.
        cut: number of truncated contexts.
        tokens_cut: total number of removed tokens.
        most_tokens_cut: maximum number of tokens removed from a context.
    """

    window: int
    requests: int = 0
    cut: int = 0
    tokens_cut: int = 0
    most_tokens_cut: int = 0

    def count_context(self, length: int, room: int) -> None:
        """Count a context of ``length`` tokens that is truncated to ``room`` tokens."""
        excess = max(length - room, 0)
        self.requests += 1
        self.cut += excess > 0
        self.tokens_cut += excess
        self.most_tokens_cut = max(self.most_tokens_cut, excess)


def answer_length(options: Mapping[str, Any]) -> int:
    """Maximum number of new tokens of a task, under any option name that the harness accepts."""
    return next((int(options[name]) for name in _NEW_TOKENS if options.get(name) is not None), MAX_NEW_TOKENS)


class ContinuationRules(TemplateLM):
    """Harness model that rejects empty and overlong continuations, and counts truncated contexts.

    The harness tokenizes a context and its continuation together, and splits after the context's number of tokens.
    If the continuation is left without tokens, because its text merged with the context's last token, it is tokenized
    separately.
    """

    @property
    def longest_continuation(self) -> int:
        """Number of tokens that the model can score in a single pass."""
        raise NotImplementedError

    @cached_property
    def contexts(self) -> ContextCounts:
        """Counts of the requests' contexts so far."""
        return ContextCounts(self.longest_continuation)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        for request in requests:
            if not request.args[1]:
                raise UserError(f"--tasks {request.task_name}: a continuation is empty; nothing can be scored")
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return scores

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        if not continuation_ids:
            spaces = context[len(context.rstrip()) :]
            continuation_ids = self.tok_encode(spaces + continuation, add_special_tokens=False)
        return context_ids, continuation_ids

    def check_pairs(self, pairs: Sequence[EncodedPair]) -> None:
        """Check that continuations can be scored, and count their contexts.

        Raises:
            UserError: when a continuation has no tokens, or more than ``longest_continuation``.
        """
        most = self.longest_continuation
        for texts, context_ids, continuation_ids in pairs:
            if not 0 < len(continuation_ids) <= most:
                begin = "" if texts is None else repr(texts[1][:40])
                raise UserError(
                    f"--tasks: a continuation of {len(continuation_ids)} tokens ({begin}) cannot be scored, since the "
                    f"model reads {most}; leave out its task"
                )
            if texts is not None:
                # The last token is predicted and not read.
                self.contexts.count_context(len(context_ids), most + 1 - len(continuation_ids))


class ExportedLM(ContinuationRules, HFLM):
    """The harness's Hugging Face model, scored in the same way as a checkpoint.

    No BOS token is added except as the context of the first token, and answers are decoded in the context of their
    prompts, which preserves a leading space.

    Args:
        folder: the folder.
        batch: texts in a forward pass.
    """

    def __init__(self, folder: str, batch: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(pretrained=folder, dtype="auto", add_bos_token=False, batch_size=batch, device=device)

    @property
    def longest_continuation(self) -> int:
        return int(self.max_length)

    def _loglikelihood_tokens(self, requests: list[EncodedPair], **options: Any) -> list[tuple[float, bool]]:
        self.check_pairs(requests)
        scores: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, **options)
        return scores

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        for request in requests:
            text, options = request.args
            new = answer_length(options)
            if new >= self.longest_continuation:
                raise UserError(
                    f"--tasks {request.task_name}: asks for answers of {new} tokens, but --via hf reads "
                    f"{self.longest_continuation} with their context; leave out --via or the task"
                )
            self.contexts.count_context(len(self.tok_encode(text)), self.longest_continuation - new)
        answers: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
        return answers

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        if not isinstance(tokens, list):
            return str(super().tok_decode(tokens, skip_special_tokens=skip_special_tokens))
        before = self.tok_encode("a", add_special_tokens=False)
        texts = [super(ExportedLM, self).tok_decode(ids, skip_special_tokens) for ids in (before, before + tokens)]
        return str(texts[1][len(texts[0]) :])
