"""Data parallelism by torch's DistributedDataParallel, with all-reduces counted at our communication point."""

# No postponed annotations: ``register_comm_hook`` compares the hook's annotations with types, not with strings.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron.compression.points import Point
from megatron.distributed.group import Group
from megatron.distributed.ledger import Ledger
from megatron.parallel.tensor.main_grad import detach_main_grad


class TorchReplicas:
    """A replica wrapped by DistributedDataParallel, for models that are not split over a pipeline.

    Gradients arrive already divided by the number of replicas, so torch is told to sum.

    Args:
        model: the replica of this rank.
        group: the data-parallel ranks.
        ledger: ledger that counts the bytes.
    """

    def __init__(self, model: nn.Module, group: Group, ledger: Ledger) -> None:
        self.group = group
        self.ledger = ledger
        device = next(model.parameters()).device
        for param in model.parameters():
            detach_main_grad(param)  # torch reduces the gradients that autograd stores
        self.wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=group.pg,
            init_sync=False,
        )
        self.wrapped.register_comm_hook(None, self._all_reduce)

    def _all_reduce(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        grads = bucket.buffer()
        self.ledger.count_message(Point.DP_GRAD, 2 * (self.group.size - 1) * grads.nbytes // self.group.size)
        work = dist.all_reduce(grads, group=self.group.pg, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])
