"""Costs of the pieces of the model on a rank: forward, backward, memory, and the reduction of gradients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.compression.api import Codec, SampleKey
from megatron.compression.points import Point
from megatron.compression.state import CompressorState
from megatron.config.recompute import RecomputeConfig
from megatron.config.run import RunConfig
from megatron.distributed.policy import CompressionPlan
from megatron.models.context import ExpertContext, ForwardContext
from megatron.models.losses import Targets
from megatron.models.rank_context import RankContext
from megatron.models.stage import Stage, StagePart
from megatron.models.stages import make_stage, padded_vocab_size
from megatron.parallel.data.buffer import BucketKind, FlatBuffer, named_params
from megatron.parallel.data.grad_reducer import GradReducer
from megatron.parallel.data.gradient_sync import main_grad_dtype, make_grad_bucket
from megatron.parallel.data.tied_embedding import EmbeddingSync
from megatron.parallel.tensor.collectives import TensorComm
from megatron.parallel.tensor.embedding import VocabShard
from megatron.parallel.tensor.main_grad import WeightGrads
from megatron.parallel.tensor.shards import collect_specs
from megatron.planner.dry_run import CostTally, DryBackend, ExpertLoad, SavedTensors
from megatron.planner.piece_costs import EMBEDDING, HEAD, MessageCost, PieceCost, ReductionCost, piece_of


@dataclass
class _BuiltPiece:
    """A built piece with its recorder."""

    stage: Stage
    buffer: FlatBuffer
    weight_grads: WeightGrads
    recorder: Any


class Pieces:
    """Runner of the pieces of a configuration.

    Args:
        config: resolved configuration.
        vocab_size: entries of the vocabulary.
        backend: backend on which the pieces run.
        plan: the compressors of a pipeline stage.
        iteration: the iteration to run, past all warm-ups.
        expert_load: distribution of tokens over experts in a dry run.
    """

    def __init__(
        self,
        config: RunConfig,
        vocab_size: int,
        backend: DryBackend,
        plan: CompressionPlan,
        iteration: int,
        expert_load: ExpertLoad | None = None,
    ) -> None:
        # Fused dropout costs little, and the meta device would trace the CPU implementation.
        without_dropout = dataclasses.replace(config.model, attention_dropout=0.0, hidden_dropout=0.0)
        self.config = dataclasses.replace(config, model=without_dropout)
        self.vocab_size = vocab_size
        self.backend = backend
        self.plan = plan
        self.iteration = iteration
        self.expert_load = expert_load or ExpertLoad()

    def _build(
        self,
        name: str,
        recompute: RecomputeConfig,
        shares: int = 1,
        experts_only: bool | None = None,
        exact: bool = False,
    ) -> _BuiltPiece | None:
        """Build a piece with a gradient buffer; None without matching parameters.

        The buffer holds all parameters, or with ``experts_only`` the expert parameters that not all replicas hold
        (True) or the others (False). With ``exact``, gradients are at least fp32.
        """
        config, recorder = self.config, self.backend.recorder()
        tp = config.parallel.tensor_model_parallel_size
        ep = config.parallel.expert_model_parallel_size
        comm = TensorComm(
            self.backend.group(tp, recorder),
            recorder.ledger,
            self.plan,
            sequence_parallel=config.parallel.sequence_parallel,
            asynchronous=config.parallel.async_tensor_model_parallel_allreduce,
        )
        expert_comm = self.backend.experts(ep, recorder, self.plan, self.expert_load, config.parallel.folds_experts)
        comm.begin_step(self.iteration)
        expert_comm.begin_step(self.iteration)
        padded = padded_vocab_size(self.vocab_size, config.model.make_vocab_size_divisible_by, tp)
        shard = VocabShard(self.vocab_size, padded, comm)
        dtype = config.precision.params_dtype
        # The first layer of each kind represents all layers of that kind.
        number = next((n for n in range(config.model.num_layers) if piece_of(config.model, n) == name), None)
        layers = range(0) if number is None else range(number, number + 1)
        stage_part = StagePart(layers, first=name == EMBEDDING, last=name == HEAD)
        rank = RankContext(config.model, comm, self.backend.torch_device, dtype, recompute, expert_comm)
        stage = make_stage(rank, stage_part, shard)
        params = named_params(collect_specs(stage), stage)
        if experts_only is not None:
            params = [param for param in params if (ep > 1 and param.spec.of_expert) is experts_only]
        if not params and experts_only is not None:
            return None
        weight_grads = WeightGrads()
        buffer = FlatBuffer(
            params,
            main_grad_dtype(dtype, exact or config.parallel.accumulate_allreduce_grads_in_fp32),
            self.backend.group(shares, recorder),
            None,
            sharded=shares > 1,
            tensor_parallel=tp > 1,
            weight_grads=weight_grads,
        )
        self.backend.fill(buffer.params_flat)
        return _BuiltPiece(stage, buffer, weight_grads, recorder)

    def piece(self, name: str) -> PieceCost:
        """Run forward and backward of a piece."""
        built = self._build(name, self.config.recompute)
        assert built is not None
        config, stage, recorder, device = self.config, built.stage, built.recorder, self.backend.torch_device
        batch, length = config.training.micro_batch_size, config.model.seq_length
        tokens_bs = torch.zeros((batch, length), dtype=torch.int64, device=device)
        weights_bs = torch.zeros((batch, length), dtype=torch.float32, device=device)
        targets = Targets(tokens_bs, weights_bs, tokens_bs[:, 0])
        expert_context = None
        if config.model.has_experts:
            expert_context = ExpertContext(0, torch.ones((), device=device), {}, {})
        context = ForwardContext(
            segment_ids_bs=None if config.model.causal else tokens_bs,
            types_bs=tokens_bs,
            attention=self.backend.attention,
            experts=expert_context,
        )
        rows = length // (stage.comm.size if stage.comm.sequence_parallel else 1)
        dtype = config.model.residual_dtype(stage.dtype)
        activation = torch.empty((rows, batch, config.model.hidden_size), dtype=dtype, device=device)
        x: Tensor = tokens_bs if stage.stage_part.first else self.backend.fill(activation).requires_grad_()
        forwards: list[CostTally] = []
        backwards: list[CostTally] = []
        saved = SavedTensors()

        def run_forward() -> Tensor:
            nonlocal saved
            saved = SavedTensors(built.buffer.params_flat, tokens_bs, weights_bs)
            with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
                out = stage.loss(x, targets).objective if stage.stage_part.last else stage(x, context)
            if stage.stage_part.layers:
                saved.add(x)
            return out

        for _ in range(self.backend.repeats):
            with recorder:
                out = run_forward()
                forwards.append(recorder.take())
                torch.autograd.backward(out, torch.ones_like(out))
                backwards.append(recorder.take())
        built.weight_grads.begin_step(separate=True)
        recorded = SavedTensors(built.buffer.params_flat)
        with recorder:
            out = run_forward()
            with built.weight_grads.recording(None):
                torch.autograd.backward(out, torch.ones_like(out))
            recorder.take()
            for tensor in built.weight_grads.tensors(None):
                recorded.add(tensor)
            built.weight_grads.compute(None)
            weight = recorder.take()
        working = 0.0
        if name == HEAD:
            itemsize = config.precision.params_dtype.itemsize
            working = min(batch * length * stage.shard.valid_rows, 1 << 28) * (itemsize + 4.0)
        params = named_params(collect_specs(stage), stage)
        ep = config.parallel.expert_model_parallel_size
        tied = [s for b in built.buffer.buckets if b.kind is BucketKind.TIED for s in b.slots]
        return PieceCost(
            CostTally.median(forwards),
            CostTally.median(backwards),
            weight,
            float(recorded.nbytes),
            float(saved.nbytes),
            working,
            sum(parameter.numel() for parameter in stage.parameters()),
            sum(param.numel() for _, _, spec, param in params if ep > 1 and spec.of_expert),
            sum(b.stop - b.start for b in built.buffer.buckets if b.kind is BucketKind.PARTIAL),
            tuple(tied[0].param.shape) if tied else (),
            params,
        )

    def reduction(
        self,
        name: str,
        *,
        sharded: bool = False,
        fused: bool = False,
        replicas: int = 2,
        nodes: int = 0,
        experts_only: bool | None = None,
        point: Point = Point.DP_GRAD,
    ) -> ReductionCost:
        """Run the reduction of a piece's gradients over replicas, in an ordinary step past all warm-ups.

        Args:
            name: name of the piece.
            sharded: whether each replica needs only its share.
            fused: whether the tied embedding is reduced elsewhere.
            replicas: replicas in the reduction.
            nodes: number of nodes of the replicas, for two-level sums.
            experts_only: reduce only expert parameters that not all replicas hold (True), or the others (False);
                None for all.
            point: point of the reduction: gradients, or pseudo-gradients over islands (``OUTER``).
        """
        built = self._build(
            name, RecomputeConfig(), replicas if sharded else 1, experts_only, exact=point is Point.OUTER
        )
        if built is None:
            return ReductionCost()
        recorder = built.recorder
        group = self.backend.group(replicas, recorder, nodes)
        buckets = [make_grad_bucket(built.buffer, bucket, fused) for bucket in built.buffer.buckets]
        reducer = GradReducer(buckets, group, self.plan, recorder.ledger, sharded, point)
        first_tallies: list[CostTally] = []
        later_tallies: list[CostTally] = []
        for step in range(1 + self.backend.repeats):
            self.backend.fill(built.buffer.grads_flat)
            with recorder:
                reducer.begin_step(self.iteration + step, 1.0, reducer.compressor.finalizes)
                reducer.launch_all()
                first_tallies.append(recorder.take())
                reducer.finish_reduction(True)
                later_tallies.append(recorder.take())
            if reducer.needs_update:
                reducer.observe()
            for units in reducer.units:
                for unit in units:
                    unit.state.commit()
                    # Skip the check that all ranks chose alike: it reads the choice, which a dry run does not make.
                    unit.state.counters.pop("unchecked", None)
        first, later = CostTally.median(first_tallies), CostTally.median(later_tallies)
        states = [unit.state for units in reducer.units for unit in units]
        return ReductionCost(
            tuple(collectives for collectives in (tuple(first.collectives), tuple(later.collectives)) if collectives),
            sum(tally.coding_s + tally.seconds for tally in (first, later)),
            first.coding_s + first.seconds,
            sum(state_bytes(state) for state in states),
        )

    def embedding_reduction(
        self, shape: tuple[int, ...], elements: int, replicas: int = 2, nodes: int = 0
    ) -> ReductionCost:
        """Run the all-reduce of the tied embedding's gradient over its holders.

        Args:
            shape: shape of the embedding's part on a rank.
            elements: number of reduced elements: all, or a replica's share.
            replicas: number of holders in the all-reduce.
            nodes: number of nodes of the holders, for two-level sums.
        """
        recorder = self.backend.recorder()
        sync = EmbeddingSync(self.backend.group(replicas, recorder, nodes), self.plan, recorder.ledger)
        dtype = main_grad_dtype(
            self.config.precision.params_dtype, self.config.parallel.accumulate_allreduce_grads_in_fp32
        )
        grad = torch.empty(elements, dtype=dtype, device=self.backend.torch_device)
        tallies: list[CostTally] = []
        for step in range(1 + self.backend.repeats):
            self.backend.fill(grad)
            sync.begin_step(self.iteration + step)
            with recorder:
                sync.all_reduce(grad, shape, 1.0)
                tallies.append(recorder.take())
            if sync.needs_update:
                sync.observe(grad, shape)
            sync.state.commit()
            sync.state.counters.pop("unchecked", None)
        tally = CostTally.median(tallies)
        coding = tally.coding_s + tally.seconds
        return ReductionCost((tuple(tally.collectives),), coding, state_bytes=state_bytes(sync.state))


def run_message(
    codec: Codec, shape: torch.Size, dtype: torch.dtype, backend: DryBackend, keys: int = 1, vocab_size: int = 1
) -> MessageCost:
    """Run a message through a codec, in the steady state in which its samples have been sent before.

    Args:
        codec: codec of the message.
        shape, dtype: shape and dtype of the tensor.
        backend: backend that encodes and decodes.
        keys: number of samples in the message.
        vocab_size: entries of the vocabulary of the samples' tokens.
    """
    recorder, device = backend.recorder(), backend.torch_device
    sender, receiver = CompressorState(), CompressorState()
    key = SampleKey(range(keys))
    if codec.traits.tokens:
        key.tokens_sb = torch.arange(shape[:-1].numel(), device=device).view(shape[:-1]) % vocab_size
        key.vocab_size = vocab_size
    wide = dtype if codec.traits.exact or dtype == torch.float64 else torch.float32
    nbytes = 0.0
    encodes: list[CostTally] = []
    decodes: list[CostTally] = []
    for _ in range(1 + backend.repeats):
        x = backend.fill(torch.empty(shape, dtype=dtype, device=device))
        received = codec.empty_payload(shape, wide, device, receiver, key)
        with recorder:
            payload = codec.encode(x.to(wide), sender, key)
            encodes.append(recorder.take())
            received.wire.copy_(payload.wire)
            recorder.take()
            codec.decode(received, shape, wide, receiver, key).to(dtype)
            decodes.append(recorder.take())
        nbytes = float(payload.nbytes)
        sender.commit()
        receiver.commit()
    kept_bytes = state_bytes(sender) + state_bytes(receiver)
    remembered = sum(tensor.nbytes for tensor in receiver.export_tensors().values()) - state_bytes(receiver)
    return MessageCost(
        nbytes, CostTally.median(encodes).seconds, CostTally.median(decodes).seconds, kept_bytes, remembered / keys
    )


def state_bytes(state: CompressorState) -> float:
    """Bytes of a compressor's state tensors, without sample caches."""
    return float(sum(tensor.nbytes for tensor in state.tensors.values()))
