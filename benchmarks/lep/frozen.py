"""Measures errors of compressed backpropagation in the gradients of a model with frozen weights.

One process plays all pipeline stages of 1F1B: the forward pass and the exact backward pass once, and the backward pass
behind every compressed message once for each kind of residual, so that all see the same activations, dropout included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from megatron.compression.api import Codec
from megatron.compression.error_feedback import RESIDUAL, ErrorFeedbackCodec, MessageResidual
from megatron.compression.lowrank_codec import LowRankCodec, LowRankConfig
from megatron.compression.state import CompressorState
from megatron.data.batch import Batch
from megatron.models.block import TransformerLayer
from megatron.models.context import ForwardContext
from megatron.models.gpt import GPTStage
from megatron.parallel.pipeline.schedule import find_epilogue, one_f_one_b
from megatron.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.random import DropoutKeys

KINDS = ("none", "lazy", "lazy-reset", "lazy-mean")
"""Kinds of residuals: values of ``error-feedback`` of ``pp-backward``."""

Sums = dict[str, Tensor]
"""Gradients, or their errors, by the name of the parameter."""


@dataclass
class ResidualMethod:
    """A kind of residual at every boundary, and the error of the gradients that it leads to."""

    kind: str
    codecs: list[Codec]
    states: list[CompressorState]
    error: Sums = field(default_factory=dict)
    total: Sums = field(default_factory=dict)
    ratios: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, kind: str, rank: int, boundaries: int) -> ResidualMethod:
        def codec() -> Codec:
            inner = LowRankCodec(LowRankConfig(rank=rank))
            return inner if kind == "none" else ErrorFeedbackCodec(inner, cast(MessageResidual, kind))

        return cls(kind, [codec() for _ in range(boundaries)], [CompressorState() for _ in range(boundaries)])

    def begin(self) -> None:
        """Begins an iteration."""
        self.error = {}
        for codec, state in zip(self.codecs, self.states, strict=True):
            codec.begin_step(state)

    def end(self) -> None:
        """Ends an iteration."""
        for state in self.states:
            state.commit()
        for name, error in self.error.items():
            self.total[name] = self.total[name] + error if name in self.total else error.clone()

    def send(self, boundary: int, grad_sbh: Tensor, key: int) -> Tensor:
        """Sends a gradient over a boundary; returns what arrives."""
        codec, state = self.codecs[boundary], self.states[boundary]
        residual = state.get(RESIDUAL)
        if residual is not None:
            # lazy-mean adds one vector to every token.
            spread = math.sqrt(grad_sbh.numel() / residual.numel())
            self.ratios.append(float(residual.norm() * spread / grad_sbh.norm()))
        payload = codec.encode(grad_sbh, state, key)
        return codec.decode(payload, grad_sbh.shape, grad_sbh.dtype, CompressorState(), key)


@dataclass
class Kappas:
    """|E x|^2 / E |x|^2 of every linear layer's input x over the tokens: 1 where all tokens have the same input."""

    found: dict[str, list[float]] = field(default_factory=dict)

    def watch(self, stage: nn.Module) -> None:
        for name, module in stage.named_modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.register_forward_pre_hook(self._hook(name.split(".")[-1]))

    def _hook(self, kind: str):  # type: ignore[no-untyped-def]  # torch's hooks are untyped
        def measure(module: nn.Module, inputs: tuple[Tensor]) -> None:
            x = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
            self.found.setdefault(kind, []).append(float(x.mean(dim=0).square().sum() / x.square().sum(dim=1).mean()))

        return measure

    def means(self) -> dict[str, float]:
        return {kind: sum(values) / len(values) for kind, values in self.found.items()}


class FrozenPipeline:
    """A whole model cut into stages whose backward messages go through low-rank codecs.

    Args:
        stage: the whole model.
        stages: number of pipeline stages.
        rank: rank of the codecs' factors.
        micro_batches: micro-batches per iteration.
        seed: seed of dropout; None for no dropout.
        late_only: whether to compress the messages of the epilogue alone.
    """

    def __init__(
        self, stage: GPTStage, stages: int, rank: int, micro_batches: int, seed: int | None, late_only: bool = True
    ) -> None:
        self.stage, self.stages, self.micro_batches, self.seed = stage, stages, micro_batches, seed
        layers = list(stage.layers.items())
        per_stage = len(layers) // stages
        self.parts = [layers[s * per_stage : (s + 1) * per_stage] for s in range(stages)]
        self.params = [
            {f"{name}.{n}": p for name, layer in part for n, p in layer.named_parameters()} for part in self.parts
        ]
        self.methods = [ResidualMethod.of(kind, rank, stages - 1) for kind in KINDS]
        everything = frozenset(range(micro_batches))
        self.compressed = [
            frozenset(op.micro_batch for op in find_epilogue(one_f_one_b(stages, s, micro_batches)))
            if late_only
            else everything
            for s in range(stages)
        ]
        """Micro-batches whose backward message is compressed, by sending stage."""
        self.kappas = Kappas()
        self.kappas.watch(stage)
        self.exact: Sums = {}
        self.exact_total: Sums = {}

    def iteration(self, batches: Sequence[Batch]) -> dict[str, dict[str, float]]:
        """Runs the micro-batches of one iteration; returns each kind's relative error of the gradient, by group."""
        self.exact = {}
        for method in self.methods:
            method.begin()
        for number, batch in enumerate(batches):
            self._micro_batch(number, batch)
        for method in self.methods:
            method.end()
        for name, grad in self.exact.items():
            self.exact_total[name] = self.exact_total[name] + grad if name in self.exact_total else grad.clone()
        return {method.kind: relative(method.error, self.exact) for method in self.methods}

    def means(self) -> dict[str, dict[str, float]]:
        """Relative errors of the mean gradient over all iterations so far."""
        return {method.kind: relative(method.total, self.exact_total) for method in self.methods}

    def _forward(self, batch: Batch) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Runs the forward pass; returns inputs and outputs of the stages (the first has no input), and the loss."""
        assert batch.tokens_bs is not None
        assert batch.labels_bs is not None
        assert batch.loss_mask_bs is not None
        keys = None if self.seed is None else DropoutKeys(self.seed, tuple(batch.draw_ids_b.tolist()))
        context = ForwardContext(dropout=keys)
        with torch.no_grad():
            x_sbh = self.stage.embedding(batch.tokens_bs, context)
        inputs, outputs = [], []
        for part in self.parts:
            x_sbh = x_sbh.detach().requires_grad_()
            inputs.append(x_sbh)
            for _, module in part:
                layer = cast(TransformerLayer, module)
                positions = self.stage._rotary_tables(x_sbh, context).get(layer.layer)
                x_sbh = layer(x_sbh, context, positions, layer.dropout_keys(context))
            outputs.append(x_sbh)
        total, _ = self.stage.token_losses(
            outputs[-1], batch.labels_bs, batch.loss_mask_bs / batch.loss_mask_bs.numel()
        )
        return inputs, outputs, total / self.micro_batches

    def _micro_batch(self, number: int, batch: Batch) -> None:
        inputs, outputs, loss = self._forward(batch)
        last = self.stages - 1
        incoming = self._backward(last, loss, inputs[last], None, self.exact)
        exact = incoming
        arrived: dict[str, Tensor] = {}  # of the kinds whose gradient is no longer the exact one
        for s in range(last - 1, -1, -1):
            if number in self.compressed[s + 1]:
                arrived = {m.kind: m.send(s, arrived.get(m.kind, exact), number) for m in self.methods}
            mine: Sums = {}
            below = self._backward(s, outputs[s], inputs[s], exact, mine)
            add(self.exact, mine)
            for method in self.methods:
                if method.kind in arrived:
                    theirs: Sums = {}
                    arrived[method.kind] = self._backward(s, outputs[s], inputs[s], arrived[method.kind], theirs)
                    add(method.error, {name: grad - mine[name] for name, grad in theirs.items()})
            exact = below

    def _backward(self, s: int, output: Tensor, x_sbh: Tensor, grad: Tensor | None, into: Sums) -> Tensor:
        """Computes the gradient of a stage's input; adds those of its parameters to ``into``."""
        params = self.params[s]
        found = torch.autograd.grad(output, [x_sbh, *params.values()], grad, retain_graph=True)
        add(into, dict(zip(params, found[1:], strict=True)))
        return found[0]


def add(sums: Sums, more: Sums) -> None:
    """Adds to accumulated gradients, in place."""
    for name, grad in more.items():
        sums[name] = sums[name] + grad if name in sums else grad


def groups(names: Sequence[str], sums: Sums) -> Iterator[tuple[str, list[str]]]:
    yield "matrices", [name for name in names if sums[name].dim() > 1]
    yield "vectors", [name for name in names if sums[name].dim() == 1]


def relative(error: Sums, exact: Sums) -> dict[str, float]:
    """|error| / |exact| over the parameters behind a compressed message, matrices and others apart."""
    found = {}
    for group, names in groups(list(error), error):
        wrong = sum(float(error[name].double().square().sum()) for name in names)
        right = sum(float(exact[name].double().square().sum()) for name in names)
        found[group] = math.sqrt(wrong / right) if right else math.nan
    return found
