"""``--check-replicas``: checks bit by bit that ranks which must hold the same numbers do."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.distributed.agreement import gather_texts
from megatron.parallel.tensor.shards import collect_specs
from megatron.training.assembly import Engines


def check_replicas(engines: Engines, iteration: int) -> None:
    """Compare digests of parameters, buffers and pipeline codec state. Every rank calls this between steps.

    These must be equal: the same slice of a parameter on every rank that holds it (data-parallel replicas,
    tensor-parallel ranks that hold it whole, all stages of a tied embedding), buffers, the memory at both ends of a
    pipeline boundary, and the routing of the last step's tokens to experts on tensor-parallel ranks.

    Raises:
        UserError: on every rank, naming the first differences and the ranks that hold them.
    """
    problems = disagreements(engines)
    if problems:
        more_text = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"--check-replicas: replicas differ after iteration {iteration}: {'; '.join(problems[:3])}{more_text}. "
            "Go on from a checkpoint before it; if it happens again, look for a faulty machine or compressor"
        )


def disagreements(engines: Engines) -> list[str]:
    """Differences between ranks that should agree, the same list on every rank."""
    topology = engines.topology
    group = topology.control.pg
    # The same name on several ranks (or ends, after an @) must have the same digest.
    digest_by_name = {}
    for stage in engines.stages:
        specs = collect_specs(stage)
        for local, param in stage.named_parameters():
            logical, spec = specs[local]
            digest_by_name[f"{logical} from {list(spec.offsets())}@{local}"] = _digest(param)
        for name, buffer in stage.named_buffers():
            digest_by_name[f"{name}@"] = _digest(buffer)
    channel, at = engines.channel, topology.coordinates
    for (layer, micro_batch), (counts, losses) in engines.experts.statistics.items():
        location = f"layer {layer + 1}, micro-batch {micro_batch + 1} of replica {at.dp}"
        digest_by_name[f"the routing of {location}@"] = _digest(torch.cat([counts.double(), losses.double()]))
    for way in () if channel is None else (channel.forward, channel.backward):
        shared = engines.plan.codec(way.point).traits.shared
        for end, states in (("sender", way.sent), ("receiver", way.received)):
            for boundary, state in states.items():
                tensors = state.export_tensors()
                location = f"{way.point.value} boundary {boundary} of replica {at.dp}, tensor-parallel rank {at.tp}"
                for name in shared:
                    tensor = tensors.get(name, torch.empty(0))
                    digest_by_name[f"{name} of {location}@{end}"] = _digest(tensor)
    rows = [json.loads(text) for text in gather_texts(group, json.dumps(digest_by_name))]
    holders: dict[str, dict[str, list[int]]] = {}
    for rank, row in enumerate(rows):
        for name, digest in row.items():
            holders.setdefault(name.partition("@")[0], {}).setdefault(digest, []).append(rank)
    differences = []
    for name, digests in sorted(holders.items()):
        if len(digests) > 1:
            groups = " and ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for r in digests.values())
            differences.append(f"{name} on {groups}")
    return differences


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu()
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()
