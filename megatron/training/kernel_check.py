"""Check that the compiled kernels run, on all ranks or on none."""

from __future__ import annotations

from megatron.base.errors import UserError
from megatron.distributed.agreement import gather_texts
from megatron.distributed.topology import Topology
from megatron.kernels import native
from megatron.kernels.products import own_products


def check_kernels(topology: Topology) -> str | None:
    """Check the kernels; return a note if the run goes without them. Every rank calls this.

    Replicas must compute alike: the orthonormal bases of the compiled kernel and of its pure-torch version span the
    same space but differ in their last digits.

    Raises:
        UserError: on every rank, when only some ranks have the kernels, or a variable requests missing kernels.
    """
    try:
        why = native.problem_on(topology.device.type) or ""
        own_products()
    except RuntimeError as error:
        why = f"!{error}"
    group = topology.control.pg
    reasons = gather_texts(group, why)
    refused = next((reason[1:] for reason in reasons if reason.startswith("!")), None)
    if refused is not None:
        raise UserError(refused)
    without = [rank for rank, reason in enumerate(reasons) if reason]
    if 0 < len(without) < len(reasons):
        raise UserError(
            f"rank {without[0]} has no compiled kernels while others do ({reasons[without[0]]}): "
            f"make all ranks alike, or set {native.CHOICE}=reference on all"
        )
    return f"compiled kernels are not in use, pure torch is slower: {why}" if why else None
