"""Load balance of experts: token counts of a step over all ranks, and the bias updates that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.compression.points import Point
from megatron.config.model import ModelConfig
from megatron.distributed.ledger import Ledger
from megatron.distributed.topology import Topology
from megatron.models.experts import Experts
from megatron.models.stage import Stage
from megatron.parallel.data.sync_warmup import SyncWarmup
from megatron.parallel.expert.router import ExpertContext
from megatron.training.metrics import ExpertLoads

MOE_LOSS = "moe loss"
"""Name of the auxiliary losses' contribution to the objective."""


class ExpertTally:
    """Token counts of the experts in a step; ``statistics`` holds the layers' counts (``ExpertContext``).

    Args:
        config: the model.
        stages: this rank's chunks.
        topology, ledger: the ranks, and the traffic account of a small all-reduce per step.
        sync_warmup: synchronous steps of all islands.
    """

    def __init__(
        self,
        config: ModelConfig,
        stages: Sequence[Stage],
        topology: Topology,
        ledger: Ledger,
        sync_warmup: SyncWarmup,
    ) -> None:
        self._config, self._topology, self._ledger, self._sync_warmup = config, topology, ledger, sync_warmup
        self._layers = list(config.expert_layers)
        self._max_experts = max(config.expert_layers.values(), default=0)
        self._experts = {
            module.layer: module for stage in stages for module in stage.modules() if isinstance(module, Experts)
        }
        self.statistics: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._last_loads: ExpertLoads = {}
        self._shares: dict[int, Tensor] = {}

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return bool(self._layers)

    def begin_step(self) -> None:
        """Begin a step."""
        self.statistics.clear()

    def context(self, micro_batch: int, loss_grad: Tensor) -> ExpertContext:
        """Inputs of the layers for a micro-batch; see ``ExpertContext``."""
        return ExpertContext(micro_batch, loss_grad, self._shares, self.statistics)

    def finish_step(self, micro_batches: int, step_taken: bool) -> tuple[dict[str, float], ExpertLoads]:
        """End a step; every rank calls it.

        Args:
            micro_batches: micro-batches of the step on each replica.
            step_taken: whether the update was taken; otherwise biases do not change, and its counts are not kept.

        Returns:
            The auxiliary loss by name, and the loads of the experts; equal on all ranks. Empty without experts.
        """
        if not self.has_experts:
            return {}, {}
        weights = torch.tensor(list(self._config.expert_losses.values()), dtype=torch.float64)
        totals = torch.zeros(len(self._layers), self._max_experts + len(weights), dtype=torch.float64)
        if self._topology.tp.rank == 0 and self.statistics:
            tallies = [tally.double() for pair in self.statistics.values() for tally in pair]
            chunks = iter(torch.cat(tallies).cpu().split([len(tally) for tally in tallies]))  # a single device sync
            for layer, _ in self.statistics:
                row, counts = totals[self._layers.index(layer)], next(chunks)
                row[: len(counts)] += counts
                row[self._max_experts :] += next(chunks)
        totals = totals.to(self._topology.device)
        self._ledger.complete(Point.CONTROL, self._topology.world.all_reduce(totals))
        self._sync_warmup.all_reduce([totals])
        counts_le, losses_ln = totals[:, : self._max_experts].cpu(), totals[:, self._max_experts :].cpu()
        numbers = self._config.expert_layers
        loads = {
            layer: tuple(row[: numbers[layer]].tolist()) for layer, row in zip(self._layers, counts_le, strict=True)
        }
        if step_taken:
            self._set_last_loads(loads)
            if self._config.moe_router_enable_expert_bias:
                # Raise the biases of underloaded experts, and lower those of overloaded experts (Wang et al. 2024,
                # auxiliary-loss-free load balancing, algorithm 1).
                for layer, module in self._experts.items():
                    counts = counts_le[self._layers.index(layer), : module.count]
                    bias = module.router.expert_bias
                    assert bias is not None
                    step = (counts.mean() - counts).sign() * self._config.moe_router_bias_update_rate
                    bias.add_(step.to(bias.dtype).to(bias.device))
        replicas = self._topology.layout.dp * self._sync_warmup.islands_in_step
        loss = float((losses_ln.sum(0) * weights).sum()) / (micro_batches * replicas)
        return {MOE_LOSS: loss}, loads

    def state_dict(self) -> dict[str, list[float]]:
        """Tokens that chose each expert in the last step, by layer; the next step's losses use them."""
        return {str(layer): list(counts) for layer, counts in self._last_loads.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue after a checkpoint's last step. The empty state of an older version means no last step."""
        self._set_last_loads({int(layer): tuple(map(float, counts)) for layer, counts in state.items()})

    def _set_last_loads(self, loads: ExpertLoads) -> None:
        self._last_loads = loads
        counts_by_layer = {layer: torch.tensor(counts, dtype=torch.float64) for layer, counts in loads.items()}
        self._shares = {layer: (x / x.sum()).to(self._topology.device) for layer, x in counts_by_layer.items()}
