"""Autoregressive generation and scoring of texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.base.seeds import keyed_seed
from megatron.inference.decode import Decoder
from megatron.inference.model import LoadedModel
from megatron.inference.sampling import Sampling, TokenCounts, widen
from megatron.models.context import ForwardContext
from megatron.tokenizer.api import start_token

_LOGITS_AT_ONCE = 1 << 25
"""Maximum number of logits computed at once for scoring."""


@dataclass(frozen=True)
class Token:
    """A generated or scored token.

    Args:
        id: token id.
        logprob: log-probability at temperature 1, over all entries of the model's vocabulary.
        top: likeliest tokens at this position with their log-probabilities, as many as requested.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Generated:
    """A prompt with its continuation.

    Args:
        tokens: ids of the prompt and of the continuation, without the token that ended it.
        prompt_length: number of tokens of the prompt.
        finished: whether the model ended the text, by the end of document or a stop token.
        details: details of the tokens after the prompt; on the sampling rank only.
        end: details of the token that ended the text; on the sampling rank only.
    """

    tokens: list[int]
    prompt_length: int
    finished: bool = False
    details: list[Token] = field(default_factory=list)
    end: Token | None = None


class _TokenChooser:
    """Samples the next token of each row, with a separate random generator for each row.

    Args:
        model: the model.
        rows: initial tokens of the rows.
        sampling: sampling options.
        seeds: random seed of each row.
    """

    def __init__(
        self, model: LoadedModel, rows: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]
    ) -> None:
        self._sampling = sampling
        # A model may have more entries than its tokenizer; the extra entries are never sampled.
        self._entries = model.tokenizer.vocab_size
        self._generators = [torch.Generator().manual_seed(keyed_seed(seed)) for seed in seeds]
        counted = sampling.adjusts and model.is_sampling_rank
        self._counts = TokenCounts(rows, self._entries, model.device) if counted else None

    def choose(self, active: Sequence[int], logits_bv: Tensor, position: int) -> Tensor:
        """Sample the next token of the active rows, (b,).

        Args:
            active: indices of the rows.
            logits_bv: logits of the rows, (b, vocabulary).
            position: number of tokens generated so far.
        """
        numbers = [torch.rand((), generator=self._generators[i], dtype=torch.float64) for i in active]
        logits_bv = logits_bv[:, : self._entries]
        if self._counts is not None:
            logits_bv = self._counts.adjust(self._sampling, logits_bv, active)
        tokens_b = self._sampling.after(position).choose(logits_bv, torch.stack(numbers))
        if self._counts is not None:
            self._counts.count_tokens(active, tokens_b)
        return tokens_b


OnToken = Callable[[int, Token], bool]
"""Callback for each token appended to a row, except end tokens; returning true ends the row."""


@torch.no_grad()
def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int] | None = None,
    *,
    top: int = 0,
    stop_tokens: Collection[int] = (),
    cached: bool = True,
    on_token: OnToken | None = None,
) -> list[Generated]:
    """Continue each prompt until the end of document, a stop token or ``max_new_tokens``.

    Every rank of the model calls this. Prompts may differ in length; rows are independent of each other. Beyond the
    model's maximum sequence length, the window slides.

    Args:
        model: a loaded model.
        prompts: token ids; an empty prompt starts from the tokenizer's ``start_token``.
        max_new_tokens: maximum number of new tokens for each prompt.
        sampling: sampling options.
        seeds: random seed of each row; default: new seeds at every call.
        top: number of alternatives to report with each token.
        stop_tokens: additional tokens that end a text.
        cached: whether to use a KV cache; if not, the whole text is recomputed for each token.
        on_token: called with each token, on the sampling rank only.
    """
    started_empty = [not prompt for prompt in prompts]
    rows = [list(prompt) or [start_token(model.tokenizer)] for prompt in prompts]
    results = [Generated(row, len(row)) for row in rows]
    chooser = _TokenChooser(model, rows, sampling, seeds or [random.getrandbits(62) for _ in rows])
    decoder = Decoder(model, max(map(len, rows), default=0) + max_new_tokens, cached)
    ends = {model.tokenizer.eod, *stop_tokens}
    active = list(range(len(rows)))
    for count in range(max_new_tokens):
        if not active:
            break
        # All ranks compute logits; only the sampling rank samples, and broadcasts the tokens.
        logits_bv = decoder.logits(active, [rows[i] for i in active])
        chosen = torch.zeros((2, len(active)), dtype=torch.int64)
        if logits_bv is not None and model.is_sampling_rank:
            chosen[0] = chooser.choose(active, logits_bv, count)
            tokens = _make_tokens(logits_bv, chosen[0], top, model.tokenizer.vocab_size)
            for column, (i, token) in enumerate(zip(active, tokens, strict=True)):
                if token.id in ends:
                    results[i].end = token
                else:
                    results[i].details.append(token)
                    chosen[1, column] = on_token is not None and on_token(i, token)
        model.broadcast(chosen, model.sampling_rank)
        continued_rows = []
        for i, token_id, stops in zip(active, *chosen.tolist(), strict=True):
            if token_id in ends:
                results[i].finished = True
                continue
            results[i].tokens.append(token_id)
            if not stops:
                continued_rows.append(i)
        active = continued_rows
    for empty, result in zip(started_empty, results, strict=True):
        if empty:
            del result.tokens[0]
            result.prompt_length = 0
    return results


def _make_tokens(logits_nv: Tensor, tokens_n: Tensor, top: int, vocab_size: int) -> list[Token]:
    """Tokens with log-probabilities over all entries of the model; alternatives are entries of the tokenizer."""
    logprobs_nv = widen(logits_nv).log_softmax(dim=-1)
    chosen_logprobs = logprobs_nv.gather(1, tokens_n.to(logprobs_nv.device).unsqueeze(1)).squeeze(1).tolist()
    likeliest: list[tuple[tuple[int, float], ...]] = [()] * len(chosen_logprobs)
    if top:
        top_logprobs = logprobs_nv[:, :vocab_size].topk(min(top, vocab_size), dim=-1)
        pairs = zip(top_logprobs.indices.tolist(), top_logprobs.values.tolist(), strict=True)
        likeliest = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    return [Token(*values) for values in zip(tokens_n.tolist(), chosen_logprobs, likeliest, strict=True)]


@torch.no_grad()
def score(model: LoadedModel, rows: Sequence[Sequence[int]], top: int = 1) -> list[list[Token]]:
    """Compute the log-probabilities of texts. Every rank of the model calls this.

    Args:
        model: a loaded model.
        rows: token ids, at most the model's window + 1 per row.
        top: number of alternatives to report with each token.

    Returns:
        The tokens of each row after the first; empty lists on all ranks but the sampling rank.

    Raises:
        UserError: when a row is too long.
    """
    if any(len(row) > model.window + 1 for row in rows):
        raise UserError(
            f"a text has {max(map(len, rows))} tokens, but the model's window is {model.window}; shorten it"
        )
    inputs = [list(row[:-1]) for row in rows]
    longest = max(map(len, inputs), default=0)
    scored: list[list[Token]] = [[] for _ in rows]
    if not longest:
        return scored
    eod, vocab_size = model.tokenizer.eod, model.tokenizer.vocab_size
    tokens_bs = torch.tensor([row + [eod] * (longest - len(row)) for row in inputs], device=model.device)
    x_sbh = model.hidden(tokens_bs, ForwardContext())
    if x_sbh is None:
        return scored
    step = max(_LOGITS_AT_ONCE // (len(rows) * model.stage.shard.vocab_size), 1)
    for first in range(0, longest, step):
        logits_sbv = model.stage.logits(x_sbh[first : first + step])
        if not model.is_sampling_rank:
            continue
        for b, row in enumerate(rows):
            target_ids = row[first + 1 : first + 1 + step]
            if target_ids:
                scored[b] += _make_tokens(logits_sbv[: len(target_ids), b], torch.tensor(target_ids), top, vocab_size)
    return scored
