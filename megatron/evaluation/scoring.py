"""Losses and hits of windows, on a model split over any ranks and on any number of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from megatron.inference.model import LoadedModel
from megatron.model.context import ForwardContext


@dataclass(frozen=True)
class Window:
    """A window of tokens, of which the last ``targets`` are predicted from those before them.

    Args:
        tokens: token ids, one more than the model reads.
        targets: number of tokens that count.
    """

    tokens: Sequence[int]
    targets: int


@torch.no_grad()
def total(model: LoadedModel, windows: Sequence[Window], batch: int, measure: Callable[..., float], name: str) -> float:
    """Sums a measure over all windows; the same on every rank.

    Args:
        model: the model, on every rank.
        windows: windows of any lengths; each replica takes its share.
        batch: windows in a forward pass.
        measure: ``loss_sum`` or ``hits``.
        name: title of the progress bar.
    """
    topology = model.topology
    # Windows of like lengths together need little padding; every replica gets as much to do.
    ordered = sorted(windows, key=lambda window: -len(window.tokens))[topology.coordinates.dp :: topology.layout.dp]
    found = 0.0
    eod = model.tokenizer.eod
    with tqdm(total=len(ordered), unit="window", desc=name, disable=not model.is_sampling_rank) as bar:
        for first in range(0, len(ordered), batch):
            taken = ordered[first : first + batch]
            longest = len(taken[0].tokens) - 1
            rows = [[*window.tokens, *[eod] * (longest + 1 - len(window.tokens))] for window in taken]
            tokens = torch.tensor(rows, device=model.device)
            x_sbh = model.hidden(tokens[:, :-1].contiguous(), ForwardContext())
            if x_sbh is not None:
                found += measure(model, x_sbh, tokens[:, 1:].contiguous(), _mask(taken, longest, model.device))
            bar.update(len(taken))
    result = torch.tensor([found if _counts(model) else 0.0], dtype=torch.float64)
    return float(model.all_reduce(result))


def _counts(model: LoadedModel) -> bool:
    """Whether this rank counts for its replica: all tensor-parallel ranks of the last stage have the same results."""
    return model.stage.part.last and model.topology.tp.rank == 0


def _mask(windows: Sequence[Window], longest: int, device: torch.device) -> Tensor:
    """Mask of the windows' targets, (b, s)."""
    mask_bs = torch.zeros((len(windows), longest), dtype=torch.bool, device=device)
    for row, window in enumerate(windows):
        end = len(window.tokens) - 1
        mask_bs[row, end - window.targets : end] = True
    return mask_bs


def loss_sum(model: LoadedModel, x_sbh: Tensor, labels_bs: Tensor, mask_bs: Tensor) -> float:
    """Loss of all targets together, in nats."""
    _, losses_bs = model.stage.loss(x_sbh, labels_bs, mask_bs.to(torch.float32))
    return float(losses_bs.double()[mask_bs].sum())


def hits(model: LoadedModel, x_sbh: Tensor, labels_bs: Tensor, mask_bs: Tensor) -> float:
    """Number of windows whose targets are all the likeliest tokens at their positions."""
    rows_n = mask_bs.nonzero()[:, 0]
    logits_nv = model.stage.logits(x_sbh.transpose(0, 1)[mask_bs].unsqueeze(0))[0]
    wrong_n = logits_nv.argmax(dim=-1) != labels_bs[mask_bs]
    missed = set(rows_n[wrong_n].tolist())
    return float(len(mask_bs) - len(missed))
