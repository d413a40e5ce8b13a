"""Steps of the training benchmarks' sides: the trainer's own, on one process or on two, and its peers'."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.train_sides import Shape, peer_step
from benchmarks.turns import Step
from megatron.base.memory import keep_freed_memory
from megatron.config.model_types import PROGRAMS, ModelType
from megatron.config.run import RunConfig
from megatron.data.batch import Batch
from megatron.distributed.process_group import LaunchEnvironment, init_process_group
from megatron.distributed.topology import Topology, build_topology, single_process
from megatron.training.assembly import build_engines, make_layout
from megatron.training.step import train_step


def run_config(
    shape: Shape,
    precision: str,
    parallel: Mapping[str, Any],
    micro: int,
    world: int,
    divisor: int = 1,
    compress: Sequence[str] = (),
    kind: ModelType = "gpt",
) -> RunConfig:
    """The resolved configuration of a training with as many samples per step as the shape has.

    Args:
        shape: shape of the model.
        precision: fp32 or bf16.
        parallel: values of the ``parallel`` section.
        micro: samples per micro-batch.
        world: number of ranks.
        divisor: number that the padded vocabulary is divisible by.
        compress: specs of compressors.
        kind: of the model. T5's layers are half an encoder's, half a decoder's, whose text has a quarter of the length.
    """
    form: dict[str, Any] = {"model_type": kind}
    tokenizer: dict[str, Any] = {"vocab_size": shape.vocab}
    if kind == "t5":
        halves = {"num_layers": shape.layers - shape.layers // 2, "decoder_num_layers": shape.layers // 2}
        form |= {**halves, "decoder_seq_length": shape.seq // 4}
        tokenizer |= {"tokenizer_type": "BertWordPieceCase", "vocab_file": "unused", "vocab_extra_ids": 100}
    if shape.llama:
        form |= _llama(shape)
    cuda = parallel.get("distributed_backend") == "nccl"
    return RunConfig.from_dict(
        {
            "model": {
                "num_layers": shape.layers,
                "hidden_size": shape.hidden,
                "num_attention_heads": shape.heads,
                "seq_length": shape.seq,
                "max_position_embeddings": shape.seq,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "make_vocab_size_divisible_by": divisor,
                **form,
            },
            "training": {"micro_batch_size": micro, "global_batch_size": shape.samples, "train_iters": 1},
            "optimizer": {"lr": 1e-4, "clip_grad": 1.0},
            "tokenizer": tokenizer,
            "parallel": {"distributed_backend": "gloo", **parallel},
            "compression": {"compress": list(compress)},
            "precision": {} if precision == "fp32" else {precision: True},
        }
    ).resolve(world, cuda_available=cuda)


def _llama(shape: Shape) -> dict[str, Any]:
    """Fields of the model's section that make it a Llama, or with experts a Mixtral."""
    return {
        "ffn_hidden_size": shape.ffn,
        "num_query_groups": shape.groups,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "num_experts": [shape.experts] if shape.experts else [],
    }


def random_batch(ids_b: torch.Tensor, seq: int, vocab: int, generator: torch.Generator | None = None) -> Batch:
    """A micro-batch of random tokens, every one of which counts in the loss."""
    tokens = torch.randint(0, vocab, (len(ids_b), seq + 1), generator=generator)
    return Batch(
        sample_ids_b=ids_b,
        draw_ids_b=ids_b,
        tokens_bs=tokens[:, :-1].contiguous(),
        labels_bs=tokens[:, 1:].contiguous(),
        loss_mask_bs=torch.ones(len(ids_b), seq),
    )


def masked_batch(ids_b: torch.Tensor, config: RunConfig, vocab: int) -> Batch:
    """A micro-batch of random tokens of BERT or T5 without padding, of which stages are told all the same."""
    model = config.model
    shape, labels = ((len(ids_b), length) for length in (model.seq_length, model.labels_of(model.seq_length)))
    whole = dict.fromkeys(("tokens_bs", "labels_bs"), torch.randint(0, vocab, shape))
    told = {"segment_ids_bs": torch.zeros(shape, dtype=torch.int32)}
    if model.model_type == "bert":
        mask_bs = (torch.rand(shape) < config.data.mask_prob).float()
        half = (torch.arange(model.seq_length) >= model.seq_length // 2).long().expand(shape).contiguous()
        more = {"loss_mask_bs": mask_bs, "types_bs": half, "order_b": torch.zeros(len(ids_b), dtype=torch.int64)}
    else:
        decoder = dict.fromkeys(("labels_bs", "decoder_tokens_bs"), torch.randint(0, vocab, labels))
        told |= {"decoder_segment_ids_bs": torch.zeros(labels, dtype=torch.int32)}
        more = {**decoder, "loss_mask_bs": torch.ones(labels)}
    return Batch(sample_ids_b=ids_b, draw_ids_b=ids_b, **{**whole, **told, **more})


def our_step(config: RunConfig, topology: Topology, vocab: int, length: int | None = None) -> Step:
    """A step of the trainer, the whole global batch over the ranks of the topology.

    Args:
        config: resolved configuration.
        topology: this rank's place.
        vocab: entries of the vocabulary.
        length: tokens of each sample, as a curriculum cuts them; None for all.
    """
    keep_freed_memory()  # as the program does
    engines = build_engines(config, topology, vocab)
    micro = config.training.micro_batch_size
    length = length or config.model.seq_length
    if config.model.causal:
        batch = random_batch(torch.arange(micro), config.model.seq_length, vocab).truncated(length)
    else:
        batch = masked_batch(torch.arange(micro), config, vocab)
    batch = batch.to(topology.device)
    assert config.training.global_batch_size is not None
    batches = [batch] * (config.training.global_batch_size // (micro * topology.layout.dp))
    return lambda: train_step(engines, batches, 0, 1e-4, 0.01, seq_length=length)


def process_step(
    kind: str, shape: Shape, precision: str, threads: int, device: str = "cpu", compiled: bool = False, divisor: int = 1
) -> Step:
    """A step on one process, of the trainer or of a peer.

    Args:
        kind: ours, half-length (ours in the middle of a curriculum), bert or t5 (ours of that kind), nanogpt or
            hugging-face.
        shape: shape of the model.
        precision: fp32 or bf16.
        threads: number of threads on a CPU.
        device: torch's name of the device.
        compiled: whether torch.compile compiles a peer's model.
        divisor: number that our padded vocabulary is divisible by.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if kind not in ("ours", "half-length", *PROGRAMS):
        return peer_step(kind, shape, precision, device, compiled)
    model_type: ModelType = next((name for name in PROGRAMS if name == kind), "gpt")
    backend = {"distributed_backend": "nccl" if device == "cuda" else "gloo"}
    config = run_config(shape, precision, backend, shape.batch, 1, divisor, kind=model_type)
    length = shape.seq // 2 if kind == "half-length" else None
    return our_step(config, single_process(device), shape.vocab, length)


def rank_step(rank: int, port: int, shape: Shape, parallel: Mapping[str, Any]) -> Step:
    """A step of the trainer on one of two ranks with a thread each, over gloo.

    Args:
        rank: the rank.
        port: port of the rendezvous.
        shape: shape of the model.
        parallel: values of the ``parallel`` section.
    """
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    init_process_group(LaunchEnvironment(rank, 2, rank), "gloo", 5)
    pipeline = "pipeline_model_parallel_size" in parallel
    replicas = 1 if pipeline or "tensor_model_parallel_size" in parallel else 2
    config = run_config(shape, "fp32", parallel, max(1, shape.batch // (replicas * (2 if pipeline else 1))), 2)
    return our_step(config, build_topology(make_layout(config, 2), torch.device("cpu")), shape.vocab)
