"""Training steps in a single process: the trainer's and those of its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.models import Shape, peer_training
from benchmarks.turns import Step
from megatron.base.memory import keep_freed_memory
from megatron.config.run import RunConfig
from megatron.data.batch import Batch
from megatron.distributed.topology import single_process
from megatron.training.assembly import build_engines
from megatron.training.step import train_step

COMPILED = " compiled"
"""Suffix of the name of a peer compiled by torch.compile."""


def run_config(
    shape: Shape,
    precision: str,
    parallel: Mapping[str, Any],
    micro_batch: int,
    world_size: int,
    divisor: int = 1,
    compress: Sequence[str] = (),
) -> RunConfig:
    """Return the resolved configuration of a training in fp32 or bf16 with the samples per step of a shape.

    ``parallel`` are values of the ``parallel`` section, and ``divisor`` divides the padded vocabulary.
    """
    architecture: dict[str, Any] = {}
    if shape.llama:
        architecture = {
            "ffn_hidden_size": shape.ffn,
            "num_query_groups": shape.groups,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
            "num_experts": [shape.experts] if shape.experts else [],
        }
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
                **architecture,
            },
            "training": {"micro_batch_size": micro_batch, "global_batch_size": shape.samples, "train_iters": 1},
            "optimizer": {"lr": 1e-4, "clip_grad": 1.0},
            "tokenizer": {"vocab_size": shape.vocab},
            "parallel": {"distributed_backend": "gloo", **parallel},
            "compression": {"compress": list(compress)},
            "precision": {} if precision == "fp32" else {precision: True},
        }
    ).resolve(world_size, cuda_available=parallel.get("distributed_backend") == "nccl")


def random_batch(ids_b: torch.Tensor, seq: int, vocab: int, generator: torch.Generator | None = None) -> Batch:
    """Return a micro-batch of random tokens, all of which count in the loss."""
    tokens = torch.randint(0, vocab, (len(ids_b), seq + 1), generator=generator)
    return Batch(
        sample_ids_b=ids_b,
        draw_ids_b=ids_b,
        tokens_bs=tokens[:, :-1].contiguous(),
        labels_bs=tokens[:, 1:].contiguous(),
        loss_mask_bs=torch.ones(len(ids_b), seq),
    )


def process_step(name: str, shape: Shape, precision: str, threads: int, device: str = "cpu", divisor: int = 1) -> Step:
    """Return a step in a single process, of the trainer or of a peer.

    Args:
        name: ours, or a peer: nanogpt or hugging-face, optionally followed by `` compiled``.
        shape: shape of the model.
        precision: fp32 or bf16.
        threads: number of threads on a CPU.
        device: torch's name of the device.
        divisor: number that divides our padded vocabulary.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if name == "ours":
        backend = {"distributed_backend": "nccl" if device == "cuda" else "gloo"}
        config = run_config(shape, precision, backend, shape.batch, 1, divisor)
        keep_freed_memory()  # as the program does
        engines = build_engines(config, single_process(device), shape.vocab)
        batch = random_batch(torch.arange(shape.batch), shape.seq, shape.vocab).to(engines.topology.device)
        return lambda: train_step(engines, [batch] * shape.micro_batches, 0, 1e-4, 0.01)
    train = peer_training(name.removesuffix(COMPILED), shape, precision, device, name.endswith(COMPILED))
    with torch.device(device):
        tokens_bs, labels_bs = (torch.randint(0, shape.vocab, (shape.batch, shape.seq)) for _ in range(2))
    return lambda: train(tokens_bs, labels_bs)
