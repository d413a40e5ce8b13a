"""Scoring of token windows, with any model parallelism and any number of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from megatron.inference.model import LoadedModel
from megatron.models.context import ForwardContext


@dataclass(frozen=True)
class Window:
    """A window of tokens; the last ``targets`` tokens are predicted.

    Args:
        tokens: token ids; the model reads all but the last.
        targets: number of predicted tokens.
    """

    tokens: Sequence[int]
    targets: int


Measure = Callable[[LoadedModel, Tensor, Tensor, Tensor], Tensor]
"""Score of each window of a batch, (b,), as a function of the model, its last hidden states (s, b, h), the labels
(b, s) and the target mask (b, s)."""


@torch.no_grad()
def score_windows(model: LoadedModel, windows: Sequence[Window], batch: int, measure: Measure, name: str) -> Tensor:
    """Score all windows; return fp64 (windows,), the same on every rank.

    Args:
        model: the model, on every rank.
        windows: windows of any lengths; replicas share them.
        batch: windows in a forward pass.
        measure: ``window_losses`` or ``count_matches``.
        name: title of the progress bar.
    """
    topology = model.topology
    # Sort by length: batches need little padding, and the load of the replicas is balanced.
    ordered = sorted(range(len(windows)), key=lambda i: -len(windows[i].tokens))
    ordered = ordered[topology.coordinates.dp :: topology.layout.dp]
    scores_n = torch.zeros(len(windows), dtype=torch.float64)
    eod = model.tokenizer.eod
    with tqdm(total=len(ordered), unit="window", desc=name, disable=not model.is_sampling_rank) as bar:
        for first in range(0, len(ordered), batch):
            indices = ordered[first : first + batch]
            batch_windows = [windows[i] for i in indices]
            longest = len(batch_windows[0].tokens) - 1
            rows = [[*window.tokens, *[eod] * (longest + 1 - len(window.tokens))] for window in batch_windows]
            tokens = torch.tensor(rows, device=model.device)
            x_sbh = model.hidden(tokens[:, :-1].contiguous(), ForwardContext())
            if x_sbh is not None:
                mask_bs = torch.zeros((len(batch_windows), longest), dtype=torch.bool, device=model.device)
                for row, window in enumerate(batch_windows):
                    end = len(window.tokens) - 1
                    mask_bs[row, end - window.targets : end] = True
                scores_b = measure(model, x_sbh, tokens[:, 1:].contiguous(), mask_bs)
                # All tensor-parallel ranks of the last stage have the same results; one reports for its replica.
                if model.stage.stage_part.last and topology.tp.rank == 0:
                    scores_n[indices] = scores_b.double().cpu()
            bar.update(len(batch_windows))
    return model.all_reduce(scores_n)


def window_losses(model: LoadedModel, x_sbh: Tensor, labels_bs: Tensor, mask_bs: Tensor) -> Tensor:
    """Total loss of each window's targets, (b,), in nats."""
    _, losses_bs = model.stage.token_losses(x_sbh, labels_bs, mask_bs.to(torch.float32))
    return losses_bs.double().masked_fill(~mask_bs, 0.0).sum(dim=1)


def count_matches(model: LoadedModel, x_sbh: Tensor, labels_bs: Tensor, mask_bs: Tensor) -> Tensor:
    """Number of leading targets of each window, (b,), that greedy decoding predicts correctly."""
    logits_nv = model.stage.logits(x_sbh.transpose(0, 1)[mask_bs].unsqueeze(0))[0]
    right_bs = torch.ones_like(mask_bs)
    right_bs[mask_bs] = logits_nv.argmax(dim=-1) == labels_bs[mask_bs]
    return (right_bs.cumprod(dim=1) * mask_bs).sum(dim=1)
