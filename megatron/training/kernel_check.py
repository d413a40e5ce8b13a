"""Checks that the compiled kernels run, and on all ranks alike."""

from __future__ import annotations

import json

from megatron.base.errors import UserError
from megatron.kernels import native, products
from megatron.topology.agree import gather_texts
from megatron.topology.topology import Topology


def check_kernels(topology: Topology) -> str | None:
    """Checks the kernels; returns a note when the run goes without them. Every rank calls this.

    Replicas must compute alike: an orthonormal basis of the compiled kernel and one of its pure-torch twin span the
    same space but differ in their last digits, and so do products of different kinds on CPUs.

    Raises:
        UserError: on every rank, when only some ranks have the kernels, ranks multiply in different ways, or a variable
            asks for what there is not.
    """
    refusal = why = multiplied = ""
    try:
        why, multiplied = native.problem_on(topology.device.type) or "", products.kind()
    except RuntimeError as error:
        refusal = str(error)
    group = topology.control.pg if topology.layout.world_size > 1 else None
    found = [json.loads(text) for text in gather_texts(group, json.dumps([refusal, why, multiplied]))]
    refusals, reasons, kinds = zip(*found, strict=True)
    if any(refusals):
        raise UserError(next(filter(None, refusals)))
    without = [rank for rank, reason in enumerate(reasons) if reason]
    if 0 < len(without) < len(reasons):
        raise UserError(
            f"rank {without[0]} has no compiled kernels while others do ({reasons[without[0]]}): "
            f"make all ranks alike, or set {native.CHOICE}=reference on all"
        )
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), 0)
    if other and topology.device.type == "cpu":
        raise UserError(
            f"rank {other} multiplies by {kinds[other]} products and rank 0 by {kinds[0]}, whose last digits differ: "
            f"set {products.CHOICE}=torch on all ranks"
        )
    return f"compiled kernels are not in use, pure torch is slower: {why}" if why else None
