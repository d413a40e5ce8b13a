"""Loading of checkpoints of any layout for inference, on a single process or several."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron.base.errors import UserError
from megatron.checkpoint.files import Iteration
from megatron.checkpoint.load import load_tensors, saved_config
from megatron.checkpoint.model_state import MODEL, model_tensors
from megatron.checkpoint.vocabulary import saved_vocab_size
from megatron.compression.points import Point
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig, minimal_run_config
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.agreement import run_together
from megatron.distributed.layout import Layout
from megatron.distributed.ledger import Ledger
from megatron.distributed.policy import CompressionPlan, Position
from megatron.distributed.topology import Topology, single_process
from megatron.inference.steps import Workspace, Workspaces, record_on_cuda
from megatron.models.context import ForwardContext
from megatron.models.gpt import GPTStage
from megatron.models.kv_cache import KVCache
from megatron.models.rank_context import RankContext
from megatron.models.stage import Stage
from megatron.models.stages import build_stages
from megatron.parallel.pipeline.channel import Message, PipelineChannel
from megatron.parallel.tensor.collectives import TensorComm
from megatron.tokenizer.api import Tokenizer
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.vocabulary import fit_vocab_size


@dataclass(frozen=True)
class LoadedModel:
    """This rank's shard of a model, and the run that trained it.

    Args:
        stage: the whole model, or the shard of a tensor- and pipeline-parallel rank.
        tokenizer: tokenizer of the run, or its replacement.
        config: configuration of the run that saved the checkpoint.
        iteration: iteration of the checkpoint.
        topology: ranks that hold the shards.
        ledger: bytes sent between the ranks.
        channel: pipeline channel of activations; None without pipeline parallelism.
        workspaces: memory of generation, and recorder of its steps.
        tokenizer_flags: configuration of the tokenizer.
    """

    stage: GPTStage
    tokenizer: Tokenizer
    config: RunConfig
    iteration: Iteration
    topology: Topology = field(default_factory=single_process)
    ledger: Ledger = field(default_factory=Ledger)
    channel: PipelineChannel | None = None
    workspaces: Workspaces = field(default_factory=Workspaces)
    tokenizer_flags: TokenizerConfig = field(default_factory=TokenizerConfig)

    @property
    def window(self) -> int:
        """Number of positions that the model can attend to."""
        return self.config.model.max_position_embeddings

    @property
    def device(self) -> torch.device:
        """Device of the tokens and hidden states."""
        return next(self.stage.parameters()).device

    @property
    def sampling_rank(self) -> int:
        """Rank that samples tokens: tensor-parallel rank 0 of the last stage."""
        return self.topology.layout.rank_of(tp=0, dp=0, pp=self.topology.layout.pp - 1)

    @property
    def is_sampling_rank(self) -> bool:
        return self.topology.rank == self.sampling_rank

    @torch.no_grad()
    def hidden(self, tokens_bs: Tensor, context: ForwardContext) -> Tensor | None:
        """Run the model on tokens (b, s), equal on all ranks: hidden states (s, b, h) on the last stage, else None."""
        stage_part, pp_rank = self.stage.stage_part, self.topology.coordinates.pp
        x = tokens_bs
        if self.channel is not None:
            b, s = tokens_bs.shape
            self.channel.shapes = [torch.Size((s, b, self.config.model.hidden_size))] * (self.topology.layout.pp - 1)
        if self.channel is not None and not stage_part.first:
            message = Message(self.channel.forward, Position(-1, pp_rank - 1, 0), None)
            # Shapes vary between calls, so any kernel launch may load a new kernel: launch none during a receive.
            self.channel.post([message])
            self.channel.wait_for_posted()
            x = self.channel.recv(message)
        x_sbh: Tensor = self.stage(x, context)
        if self.channel is not None and not stage_part.last:
            self.channel.send(Message(self.channel.forward, Position(-1, pp_rank, 0), None), x_sbh)
            # This may be the rank's last call; the message must be sent before the process exits.
            self.channel.flush()
            return None
        return x_sbh

    def workspace(self, rows: int, positions: int) -> Workspace:
        """Workspace with an empty KV cache for ``rows`` rows of at most ``positions`` positions."""

        def cache(capacity: int) -> KVCache:
            windows = {layer: self.config.model.window_of(layer) for layer in self.stage.stage_part.layers}
            return KVCache(windows, rows, capacity, self.device, self.workspaces.block)

        return self.workspaces.workspace(rows, positions, cache)

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Broadcast a CPU tensor from rank ``src``, in place."""
        self.ledger.complete(Point.CONTROL, self.topology.control.broadcast(x, src))
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        """All-reduce a CPU tensor over all ranks, in place."""
        self.ledger.complete(Point.CONTROL, self.topology.control.all_reduce(x))
        return x

    def broadcast_json(self, value: Any, src: int) -> Any:
        """Broadcast a JSON value from rank ``src``; values of other ranks are ignored."""
        if self.topology.layout.world_size == 1:
            return value
        text = json.dumps(value).encode() if self.topology.rank == src else b""
        length = int(self.broadcast(torch.tensor([len(text)]), src))
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.zeros(length, dtype=torch.uint8)
        return json.loads(bytes(self.broadcast(data, src).numpy()))


def inference_layout(config: RunConfig, tp: int, pp: int, world_size: int, backend: Literal["nccl", "gloo"]) -> Layout:
    """Layout for a saved model; the remaining ranks are data-parallel replicas.

    Raises:
        UserError: when the model does not support these sizes.
    """
    replicas = max(world_size // max(tp * pp, 1), 1)
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, distributed_backend=backend
    )
    training = TrainingConfig(micro_batch_size=1, global_batch_size=replicas, train_iters=1)
    run_config = minimal_run_config(config.model, parallel=parallel, training=training)
    run_config.resolve(world_size, cuda_available=torch.cuda.is_available())
    return Layout(tp=tp, pp=pp, dp=replicas)


def check_generates(config: RunConfig, root: str | Path) -> None:
    """Check that a saved model can generate text (else UserError)."""
    if config.model.type_and_task != "gpt":
        raise UserError(
            f"--load {root} holds a model of type {config.model.type_and_task}, and only gpt generates text"
        )


def load_model(
    root: str | Path,
    *,
    iteration: Iteration | None = None,
    tokenizer: TokenizerConfig | None = None,
    device: torch.device | None = None,
    topology: Topology | None = None,
) -> LoadedModel:
    """Load a checkpoint, regardless of its tensor- and pipeline-parallel sizes. Every rank calls this.

    Args:
        root: the folder that ``--save`` wrote to.
        iteration: iteration of the checkpoint; None for the newest.
        tokenizer: fields that override the run's tokenizer configuration.
        device: device of the model if ``topology`` is None; default: CUDA if available, else the CPU.
        topology: ranks that the model is split over; default: this process alone.

    Raises:
        UserError: on every rank, when there is no usable checkpoint.
    """
    if topology is None:
        topology = single_process(device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    group = topology.control.pg
    config, chosen = run_together(group, lambda: saved_config(root, iteration))
    check_generates(config, root)
    entries = run_together(group, lambda: saved_vocab_size(root, chosen))
    vocabulary, flags = run_together(group, lambda: _build_run_tokenizer(config, tokenizer, entries))
    ledger, plan, dtype = Ledger(), CompressionPlan({}), config.precision.params_dtype
    rank = RankContext(config.model, TensorComm(topology.tp, ledger, plan), topology.device, dtype)
    (stage,) = build_stages(rank, topology.layout, topology.coordinates.pp, entries, None)
    assert isinstance(stage, GPTStage)
    load_weights(stage, root, chosen, topology)
    channel = None
    if topology.layout.pp > 1:
        links = (topology.forward_link, topology.backward_link)
        channel = PipelineChannel(
            topology.layout, *links, plan, ledger, (), config.model.residual_dtype(dtype), topology.device
        )
    # Communication and varying shapes (experts) cannot be recorded as CUDA graphs.
    can_record = topology.device.type == "cuda" and topology.layout.world_size == 1 and not config.model.has_experts
    workspaces = Workspaces(record_on_cuda if can_record else None)
    return LoadedModel(stage.eval(), vocabulary, config, chosen, topology, ledger, channel, workspaces, flags)


def load_weights(stage: Stage, root: str | Path, iteration: Iteration, topology: Topology) -> None:
    """Load a shard of a model from a checkpoint, ignoring its other tensors. Every rank calls this.

    Raises:
        UserError: on every rank, when the checkpoint is damaged or does not match the model.
    """
    load_tensors(
        root,
        iteration,
        model_tensors([stage]),
        topology.control.pg,
        allow_unexpected=lambda name: not name.startswith(MODEL),
    )


def _build_run_tokenizer(
    config: RunConfig, overrides: TokenizerConfig | None, entries: int
) -> tuple[Tokenizer, TokenizerConfig]:
    """Build the run's tokenizer with ``overrides``; return it with its configuration.

    The model may have more entries than the tokenizer.

    Raises:
        UserError: when the tokenizer cannot be built, or does not match the model.
    """
    changes = {} if overrides is None else {name: value for name, value in vars(overrides.with_type()).items() if value}
    tokenizer_config = dataclasses.replace(config.tokenizer, **changes)
    size = changes.get("vocab_size")
    if size is None:
        tokenizer_config = fit_vocab_size(tokenizer_config, entries)
    elif size != entries and tokenizer_config.tokenizer_type != "NullTokenizer":
        raise UserError(f"--vocab-size {size}: the checkpoint's model has {entries} entries; leave it out")
    tokenizer = build_tokenizer(tokenizer_config)
    if tokenizer.vocab_size > entries:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} entries, but the checkpoint's model has {entries}; give the "
            "tokenizer that the model was trained with"
        )
    return tokenizer, tokenizer_config
