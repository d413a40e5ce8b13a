"""Sampling of the next token from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.base.errors import UserError


def widen(logits: Tensor) -> Tensor:
    """Convert logits to the dtype of probabilities: fp64 for fp64 models, else fp32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True)
class Sampling:
    """Sampling options.

    Args:
        temperature: divisor of the logits; below 1 sharpens, above 1 flattens the distribution.
        top_k: sample from the k likeliest tokens; 0: all.
        top_p: sample from the smallest set of likeliest tokens with this total probability; 0: all. Applied after
            top_k, to the renormalized probabilities.
        greedy: always choose the likeliest token.
        top_p_decay: factor of top_p after each token; 0: no decay.
        top_p_bound: lower bound of the decaying top_p.
        min_p: exclude tokens below this fraction of the likeliest remaining token's probability; 0: none.
        repetition_penalty: divides positive logits, and multiplies negative logits, of tokens in the text.
        presence_penalty: subtracted from the logits of tokens in the continuation.
        frequency_penalty: subtracted from the same logits once for each occurrence.
        logit_bias: token ids and the biases added to their logits.

    Raises:
        UserError: when a value is invalid.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    greedy: bool = False
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Sequence[tuple[int, float]] = ()

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise UserError(f"--temperature {self.temperature:g} must be positive; --greedy takes the likeliest token")
        if self.top_k < 0:
            raise UserError(f"--top_k {self.top_k} must not be negative; 0 chooses among all tokens")
        if not 0 <= self.top_p <= 1:
            raise UserError(f"--top_p {self.top_p:g} must lie between 0 and 1; 0 chooses among all tokens")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"--min_p {self.min_p:g} must lie between 0 and 1; 0 excludes no token")
        if self.greedy and (self.top_k or self.top_p or self.min_p):
            raise UserError("--greedy takes the likeliest token: leave out --top_k, --top_p and --min_p")
        if self.repetition_penalty <= 0:
            raise UserError(f"--repetition_penalty {self.repetition_penalty:g} must be positive; 1 changes nothing")
        if not 0 <= self.top_p_decay <= 1 or not 0 <= self.top_p_bound <= 1:
            raise UserError("top_p_decay and top_p_bound must lie between 0 and 1; 0 leaves top_p unchanged")
        if (self.top_p_decay or self.top_p_bound) and not self.top_p:
            raise UserError("top_p_decay and top_p_bound need --top_p, which they change")

    @property
    def adjusts(self) -> bool:
        """Whether penalties or biases change the logits."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(penalties or self.logit_bias)

    def adjust(self, logits_bv: Tensor, prompts_bv: Tensor, counts_bv: Tensor) -> Tensor:
        """Apply biases and penalties to logits, (b, vocabulary), in the dtype of ``widen``.

        Args:
            logits_bv: logits, (b, vocabulary).
            prompts_bv: bool, whether the prompt contains the token.
            counts_bv: fp32, occurrences of each token in the continuation.
        """
        logits = widen(logits_bv).clone()
        counts_bv = counts_bv.to(logits.dtype)
        for token, bias in self.logit_bias:
            logits[:, token] += bias
        present_bv = counts_bv > 0
        if self.repetition_penalty != 1:
            scaled = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
            logits = torch.where(prompts_bv | present_bv, scaled, logits)
        return logits - self.frequency_penalty * counts_bv - self.presence_penalty * present_bv.to(logits.dtype)

    def after(self, tokens: int) -> Sampling:
        """Options after ``tokens`` generated tokens, with decayed top_p."""
        if not self.top_p_decay or not tokens:
            return self
        return replace(self, top_p=max(self.top_p * self.top_p_decay**tokens, self.top_p_bound, 1e-9))

    def choose(self, logits_bv: Tensor, draws_b: Tensor) -> Tensor:
        """Sample the next token of each row, int64 (b,).

        Args:
            logits_bv: logits, (b, vocabulary).
            draws_b: a random number in [0, 1) for each row, fp64. A row's token depends only on its own number and
                logits.
        """
        if self.greedy:
            return logits_bv.argmax(dim=-1)
        sums_bv = self.probabilities(logits_bv).double().cumsum(dim=-1)
        thresholds_b1 = draws_b.to(sums_bv.device).unsqueeze(1) * sums_bv[:, -1:]
        return torch.searchsorted(sums_bv, thresholds_b1, right=True).squeeze(1).clamp(max=logits_bv.shape[-1] - 1)

    def probabilities(self, logits_bv: Tensor) -> Tensor:
        """Sampling distribution, (b, vocabulary), in the dtype of ``widen``."""
        # Subtracting the maximum avoids overflow at low temperatures.
        wide = widen(logits_bv)
        logits = (wide - wide.amax(dim=-1, keepdim=True)) / max(self.temperature, 1e-6)
        if self.top_k:
            top_logits = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)
            logits = torch.full_like(logits, -torch.inf).scatter_(-1, top_logits.indices, top_logits.values)
        if 0 < self.top_p < 1:
            ordered = logits.sort(dim=-1, descending=True)
            p = ordered.values.softmax(dim=-1)
            # Exclude a token if the likelier tokens reach top_p already; always keep the first.
            excluded = p.cumsum(dim=-1) - p >= self.top_p
            excluded[..., 0] = False  # even if top_p rounds to 0 in this dtype
            values = ordered.values.masked_fill(excluded, -torch.inf)
            logits = torch.full_like(logits, -torch.inf).scatter_(-1, ordered.indices, values)
        if self.min_p:
            p = logits.softmax(dim=-1)
            logits = logits.masked_fill(p < self.min_p * p.amax(dim=-1, keepdim=True), -torch.inf)
        return logits.softmax(dim=-1)


class TokenCounts:
    """Token counts of growing rows, for penalties.

    Args:
        prompts: prompts of the rows.
        entries: size of the vocabulary.
        device: device of the logits.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], entries: int, device: torch.device) -> None:
        self._prompts_rv = torch.zeros((len(prompts), entries), dtype=torch.bool, device=device)
        self._counts_rv = torch.zeros((len(prompts), entries), device=device)
        for row, prompt in enumerate(prompts):
            self._prompts_rv[row, torch.tensor(prompt, device=device)] = True

    def adjust(self, sampling: Sampling, logits_bv: Tensor, rows: Sequence[int]) -> Tensor:
        """Apply biases and penalties to the logits of some rows."""
        return sampling.adjust(logits_bv, self._prompts_rv[list(rows)], self._counts_rv[list(rows)])

    def count_tokens(self, rows: Sequence[int], tokens_b: Tensor) -> None:
        """Count the next token of some rows."""
        self._counts_rv[list(rows), tokens_b.to(self._counts_rv.device)] += 1
