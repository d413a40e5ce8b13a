"""Incremental decoding with a KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.inference.model import LoadedModel
from megatron.inference.steps import Workspace, rows_to_keep
from megatron.models.context import ForwardContext


class Decoder:
    """Computation of next-token logits for rows that grow by a token between calls, with a KV cache.

    The first call is the prefill of all rows; each later call computes a single position per row. Once a row exceeds
    the model's window, every call recomputes its last ``window`` tokens, since all their positions change.

    Args:
        model: a loaded model; all its ranks make the same calls.
        positions: maximum length of the rows; the cache is limited to the window.
        cached: whether to use the cache; if not, every call recomputes whole rows.
    """

    def __init__(self, model: LoadedModel, positions: int, cached: bool = True) -> None:
        self.model = model
        self.positions = min(positions, model.window)
        self.cached = cached
        self._workspace: Workspace | None = None
        self._row_numbers: list[int] = []

    def logits(self, numbers: Sequence[int], rows: Sequence[Sequence[int]]) -> Tensor | None:
        """Logits (b, vocabulary) after the last token of each row; None on all stages but the last.

        Args:
            numbers: indices of the rows: the rows of the previous call, or a subset.
            rows: tokens of the rows.
        """
        fits = max(map(len, rows)) <= self.model.window
        if self._workspace is None or not fits:
            rows = [row[-self.model.window :] for row in rows]
            lengths = [len(row) for row in rows]
            longest, padding = max(lengths), self.model.tokenizer.eod
            tokens_bs = torch.tensor(
                [[*row, *[padding] * (longest - len(row))] for row in rows], device=self.model.device
            )
            self._workspace = None
            cache = None
            if self.cached and fits:
                self._workspace, self._row_numbers = self.model.workspace(len(rows), self.positions), list(numbers)
                cache = self._workspace.cache
            x_sbh = self.model.hidden(tokens_bs, ForwardContext(cache=cache))
            if cache is not None:
                cache.set_lengths(lengths)
            if x_sbh is None:
                return None
            last_b = torch.tensor(lengths, device=x_sbh.device) - 1
            x_1bh = x_sbh[last_b, torch.arange(len(rows), device=x_sbh.device)].unsqueeze(0)
            return self.model.stage.logits(x_1bh)[0]
        # Ended rows are dropped, or stop growing as long as ``rows_to_keep`` keeps them.
        active_numbers = set(numbers)
        retained_indices = rows_to_keep(self._row_numbers, active_numbers, self.model.workspaces.record is not None)
        if retained_indices is not None:
            self._workspace.shrink(retained_indices)
            self._row_numbers = [self._row_numbers[index] for index in retained_indices]
        elif len(active_numbers) < len(self._row_numbers):
            self._workspace.cache.grow_only(
                [index for index, number in enumerate(self._row_numbers) if number in active_numbers]
            )
        if len(numbers) == len(self._row_numbers):
            return self._step(self._workspace, [row[-1] for row in rows])
        newest = {number: row[-1] for number, row in zip(numbers, rows, strict=True)}
        logits_bv = self._step(self._workspace, [newest.get(number, 0) for number in self._row_numbers])
        if logits_bv is None:
            return None
        indices = [index for index, number in enumerate(self._row_numbers) if number in newest]
        return logits_bv[torch.tensor(indices, device=logits_bv.device)]

    def _step(self, workspace: Workspace, tokens: Sequence[int]) -> Tensor | None:
        """Logits after the newest token of every row in the cache."""

        def compute() -> Tensor:
            workspace.cache.begin_step()
            context = ForwardContext(position_ids_bs=workspace.cache.positions_b1, cache=workspace.cache)
            x_1bh = self.model.hidden(workspace.tokens_b1, context)
            return workspace.tokens_b1 if x_1bh is None else self.model.stage.logits(x_1bh)[0]

        result = workspace.step(tokens, compute)
        return result if self.model.stage.stage_part.last else None
