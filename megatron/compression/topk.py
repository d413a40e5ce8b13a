"""Top-K all-reduces: some coordinates are sent, and error feedback keeps the others as residual.

In ``TopK``, every rank chooses coordinates in every step and all-gathers indices and values (Aji and Heafield 2017;
Lin et al. 2018). ``StableTopK`` is Radius (Zheng et al. 2025, section 4): all ranks use the same coordinates for many
steps and all-reduce only the values. A dense step chooses new coordinates by the optimizer's update.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Hashable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatron.compression.api import Aggregate, Op, Peers, Request, RoundCompressor, SumTraits
from megatron.compression.approximation import Sparse
from megatron.compression.error_feedback import RESIDUAL
from megatron.compression.options import CompressorFault, opt
from megatron.compression.points import Point
from megatron.compression.registry import Registration, Registry
from megatron.compression.state import CompressorState, combine_keys
from megatron.kernels.ops import abs_topk, dilate, gather_packed


class DisagreementError(CompressorFault):
    """Raised when ranks of a group use different coordinates."""


@dataclass(frozen=True)
class TopKConfig:
    """All-gather of each rank's largest gradients and their indices."""

    density: float = opt(0.01, "share of each parameter that is sent", above=0, maximum=1, scheduled=True)


class TopK(RoundCompressor):
    """Top-K all-gather: 8 bytes per coordinate to every other rank, less than an fp32 all-reduce sends at densities
    below 1 / n for n ranks."""

    config: TopKConfig

    def __init__(self, config: TopKConfig) -> None:
        super().__init__(config)
        self.traits = SumTraits(batched=True, gathers=True, density=config.density)

    def should_compress(self, shape: tuple[int, ...]) -> bool:
        return len(shape) > 1

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        flat_kn = x.view(x.shape[0], -1)
        k, n = flat_kn.shape
        starts_k1 = torch.arange(k, device=x.device).unsqueeze(1) * n
        indices_kc = abs_topk(flat_kn, _num_coordinates(self.config.density, n))
        flat_indices = (indices_kc + starts_k1).view(-1)
        values_kc = gather_packed(x.view(-1), flat_indices).view(indices_kc.shape)
        all_values = yield Request(values_kc, Op.GATHER)
        all_indices = yield Request(indices_kc.to(torch.int32), Op.GATHER)
        pieces = [((i + starts_k1).view(-1), v.view(-1)) for i, v in zip(all_indices, all_values, strict=True)]
        return Aggregate(Sparse(pieces), Sparse([(flat_indices, values_kc.view(-1))]))


@dataclass(frozen=True)
class StableTopKConfig:
    """All-reduce at the coordinates of the optimizer's largest updates, chosen once for many steps."""

    density: float = opt(0.1, "share of each parameter that is sent", above=0, maximum=1, scheduled=True)
    interval: int = opt(100, "steps between two dense steps, which choose the coordinates", minimum=1)
    range: int = opt(0, "neighbors on either side of a chosen coordinate that are also sent", minimum=0)
    flush: Literal["dump", "mean", "rotate"] = opt(
        "dump",
        "how the residual is sent: all of it in the dense step, its mean over the steps, or a slice in every step",
    )


class StableTopK(RoundCompressor):
    """All-reduce of the values at coordinates shared by all ranks.

    Every ``interval``-th all-reduce, the first included, is dense, and the following optimizer update selects the next
    coordinates (``observe``). With error feedback, the residual of the other coordinates is sent in the dense step, as
    published (``dump``); in the dense step, divided by ``interval``, with the rest discarded (``mean``); or in slices
    between dense steps (``rotate``).
    """

    traits = SumTraits(batched=True, observes=True, index_sets=("indices",), steady=("steps",))
    config: StableTopKConfig

    def __init__(self, config: StableTopKConfig) -> None:
        super().__init__(config)
        self.traits = replace(self.traits, scales_residual=config.flush == "mean")

    def should_compress(self, shape: tuple[int, ...]) -> bool:
        return len(shape) > 1

    def rounds(self, x: Tensor, state: CompressorState, peers: Peers) -> Generator[Request, Tensor, Aggregate]:
        steps_since_dense = state.count("steps") % self.config.interval
        state.stage("steps", state.count("steps") + 1)
        indices = state.get("indices")
        if indices is None or steps_since_dense == 0:
            state.stage("awaiting", 1)
            residual = state.get(RESIDUAL)
            if self.config.flush == "mean" and residual is not None:
                # x already contains the residual; the discarded part counts as sent.
                x.sub_(residual, alpha=1.0 - 1.0 / self.config.interval)
            return Aggregate((yield Request(x)), None)
        if state.count("unchecked"):
            digest = hashlib.blake2b(indices.cpu().numpy().tobytes(), digest_size=8).digest()
            local_digest = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(indices.device)
            all_digests = yield Request(local_digest, Op.GATHER)
            if not bool((all_digests == local_digest).all()):
                raise DisagreementError(
                    "stable-topk: ranks of a data-parallel group chose different coordinates, so their replicas "
                    "differ; resume from an earlier checkpoint with --check-replicas"
                )
            state.stage("unchecked", 0)
        flat = x.view(-1)
        if self.config.flush == "rotate":  # also send this step's slice of all coordinates
            width = -(-flat.numel() // max(self.config.interval - 1, 1))
            begin = min((steps_since_dense - 1) * width, flat.numel())
            end = min(steps_since_dense * width, flat.numel())
            edges = torch.tensor([begin, end], dtype=indices.dtype, device=indices.device)
            low, high = torch.searchsorted(indices, edges).tolist()
            rotating = torch.arange(begin, end, dtype=indices.dtype, device=indices.device)
            indices = torch.cat([indices[:low], rotating, indices[high:]])
        values = gather_packed(flat, indices)
        summed = yield Request(values.clone())
        return Aggregate(Sparse([(indices, summed)]), Sparse([(indices, values)]))

    def launch_signature(self, state: CompressorState) -> Hashable:
        # The length of the rotating slice depends on the step.
        steps = state.count("steps") % self.config.interval
        return combine_keys(state.layout(self.traits.steady), steps if self.config.flush == "rotate" else steps == 0)

    def observe(self, update: Tensor, state: CompressorState) -> None:
        """Choose the coordinates of the following steps by the update of a dense step."""
        if not state.count("awaiting"):
            return
        flat_kn = update.reshape(update.shape[0], -1)
        count = _num_coordinates(self.config.density, flat_kn.shape[1])
        indices_kc = abs_topk(flat_kn, count)
        starts_k1 = torch.arange(flat_kn.shape[0], device=update.device).unsqueeze(1) * flat_kn.shape[1]
        if self.config.range:
            mask = torch.zeros(flat_kn.shape, dtype=torch.bool, device=update.device).scatter_(1, indices_kc, True)
            indices = dilate(mask, self.config.range).view(-1).nonzero().view(-1)
        else:
            indices = (indices_kc + starts_k1).view(-1)
        state.stage("indices", indices)
        state.stage("awaiting", 0)
        state.stage("unchecked", 1)


def _num_coordinates(density: float, n: int) -> int:
    """Number of coordinates to send for a parameter of n elements, at least 1."""
    return min(n, max(int(density * n), 1))


def register(registry: Registry) -> None:
    """Register ``topk`` and ``stable-topk``."""
    points = frozenset({Point.DP_GRAD, Point.EMBED_GRAD})
    feedback = dict.fromkeys(points, "local")
    registry.register(
        "topk",
        Registration(
            TopKConfig,
            rounds=TopK,
            points=points,
            feedback=feedback,
            alternatives=("fixpoint",),
            source="Aji and Heafield 2017; deep gradient compression, Lin et al. 2018",
            example="dp-grad=topk,density=1~0.01@500",
        ),
    )
    registry.register(
        "stable-topk",
        Registration(
            StableTopKConfig,
            rounds=StableTopK,
            points=points,
            feedback=feedback,
            advice="coordinates are shared only by all-reduces of gradients",
            alternatives=("fixpoint",),
            source="Radius, Zheng et al. 2025, section 4",
            example="dp-grad=stable-topk,density=0.1,interval=20,flush=rotate",
        ),
    )
