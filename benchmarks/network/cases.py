"""Cases of the network benchmark: layouts on hosts, and the traffic of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.models import VOCAB as GPT2_VOCAB
from benchmarks.network.setups import (
    Setup,
    aqsgd_data,
    aqsgd_pipeline,
    as_named,
    mixtral_experts,
    optimus_pipeline,
    radius_data,
)


@dataclass(frozen=True)
class NetworkCase:
    """A case: the traffic of a model, compressed or not.

    Args:
        name: name in the tables.
        specs: specs of ``--compress``.
        schedule: pipeline schedule.
        peer, rank: a peer of ``peers.py`` instead of the trainer, and the rank of its hook.
        overlap: whether gradients are reduced during the backward pass.
        two_stage: whether rows of experts cross a link once for each host.
        delay: steps by which gradients are applied late.
        flush: whether a pipeline drains at the end of each step.
        in_flight: maximum number of micro-batches in flight; None for the schedule's.
    """

    name: str
    specs: tuple[str, ...] = ()
    schedule: str = "1f1b"
    peer: str = ""
    rank: int = 0
    overlap: bool = True
    two_stage: bool = True
    delay: int = 0
    flush: bool = True
    in_flight: int | None = None


FP32 = NetworkCase("fp32 traffic")
CAST = NetworkCase("bf16 traffic", ("pp-forward=cast", "pp-backward=cast", "dp-grad=cast"))
BF16_SUMS = NetworkCase("bf16 traffic", ("dp-grad=cast",))
FIXPOINT = NetworkCase("fixpoint 4/8 bits", ("pp-forward=fixpoint,bits=4", "pp-backward=fixpoint,bits=8"))
DELTA = NetworkCase("delta 4, fixpoint 8 (AQ-SGD)", ("pp-forward=delta,bits=4", "pp-backward=fixpoint,bits=8"))
DELTA_EAGER = NetworkCase("delta 4, fixpoint 8, eager 1F1B", DELTA.specs, "eager-1f1b")
DELTA_2 = NetworkCase("delta 2, fixpoint 4 (AQ-SGD)", ("pp-forward=delta,bits=2", "pp-backward=fixpoint,bits=4"))
FIXPOINT_SUMS = NetworkCase("fixpoint 4 bits", ("dp-grad=fixpoint,bits=4,error-feedback=on",))
RADIUS = NetworkCase("stable Top-K 10% (Radius)", ("dp-grad=stable-topk,density=0.1,interval=1000",))
POWERSGD_4 = NetworkCase("powersgd, rank 4", ("dp-grad=powersgd,rank=4",))
POWERSGD_32 = NetworkCase("powersgd, rank 32", ("dp-grad=powersgd,rank=32",))
DDP = NetworkCase("torch DDP", peer="ddp")
DDP_FP16 = NetworkCase("torch DDP, fp16 hook", peer="ddp-fp16")
DDP_POWERSGD_4 = NetworkCase("torch DDP, powerSGD_hook, rank 4", peer="ddp-powersgd", rank=4)
DDP_POWERSGD_32 = NetworkCase("torch DDP, powerSGD_hook, rank 32", peer="ddp-powersgd", rank=32)
OPTIMUS = NetworkCase(
    "CB + FE + SC (Optimus-CC)",
    (
        "pp-backward=lowrank,rank=16,when=epilogue,error-feedback=lazy",
        "embedding=fused",
        "dp-grad=powersgd,rank=32,stages=first:1",
    ),
)
ALL_POINTS = NetworkCase("delta 4, fixpoint 8, powersgd 32, FE", (*DELTA.specs, *POWERSGD_32.specs, "embedding=fused"))
PIPELINE = (
    FP32,
    CAST,
    FIXPOINT,
    DELTA,
    DELTA_2,
    NetworkCase("CB: lowrank 16, epilogue", ("pp-backward=lowrank,rank=16,when=epilogue,error-feedback=lazy",)),
    NetworkCase("fp32 traffic, eager 1F1B", schedule="eager-1f1b"),
    NetworkCase("bf16 traffic, eager 1F1B", CAST.specs, "eager-1f1b"),
    DELTA_EAGER,
    NetworkCase("delta 2, fixpoint 4, eager 1F1B", DELTA_2.specs, "eager-1f1b"),
    NetworkCase("fp32 traffic, zero bubble", schedule="zb-h1"),
    NetworkCase("bf16 traffic, zero bubble", CAST.specs, "zb-h1"),
    NetworkCase("delta 4, fixpoint 8, zero bubble", DELTA.specs, "zb-h1"),
    NetworkCase("fp32 traffic, zero bubble, V form", schedule="zb-v"),
    NetworkCase("delta 4, fixpoint 8, zero bubble, V form", DELTA.specs, "zb-v"),
    NetworkCase("fp32 traffic, auto schedule", schedule="auto"),
    NetworkCase("delta 4, fixpoint 8, auto schedule", DELTA.specs, "auto"),
)
DATA = (
    FP32,
    CAST,
    POWERSGD_4,
    POWERSGD_32,
    RADIUS,
    FIXPOINT_SUMS,
    DDP,
    DDP_FP16,
    DDP_POWERSGD_4,
    DDP_POWERSGD_32,
)
LEVELS = (
    FP32,
    CAST,
    FIXPOINT_SUMS,
    NetworkCase("fixpoint 8/4 bits in two levels", ("dp-grad=fixpoint,levels=8/4,error-feedback=on",)),
    DDP,
    DDP_FP16,
)
FACTORS = (
    FP32,
    DDP_POWERSGD_32,
    POWERSGD_32,
    NetworkCase("powersgd, rank 32, bf16 factors", ("dp-grad=powersgd,rank=32,factors=bf16",)),
    NetworkCase("powersgd, rank 32, 8-bit factors", ("dp-grad=powersgd,rank=32,factors=fixpoint8",)),
    NetworkCase("powersgd, rank 32, 4-bit factors", ("dp-grad=powersgd,rank=32,factors=fixpoint4",)),
)
MIXED = (FP32, CAST, OPTIMUS, ALL_POINTS)
DELAYED = tuple(
    case
    for prompt in (FP32, BF16_SUMS, FIXPOINT_SUMS, POWERSGD_32)
    for case in (prompt, replace(prompt, name=f"{prompt.name}, a step late", delay=1))
)


def _without_flush(micro_batches: int) -> tuple[NetworkCase, ...]:
    """Cases of steps with ``micro_batches`` micro-batches, with and without a flush."""
    prompt_cases = FP32, NetworkCase("fp32 traffic, eager 1F1B", schedule="eager-1f1b"), DELTA, DELTA_EAGER
    pairs = [
        (case, replace(case, name=f"{case.name}, a step late, no flush", delay=1, flush=False)) for case in prompt_cases
    ]
    most = micro_batches + 1
    return (
        *(case for pair in pairs for case in pair),
        replace(pairs[-1][1], name=f"{pairs[-1][1].name}, {most} in flight", in_flight=most),
        NetworkCase("delta 4, fixpoint 8, zero bubble", DELTA.specs, "zb-h1"),
        NetworkCase("delta 4, fixpoint 8, auto schedule", DELTA.specs, "auto"),
    )


def _legs(name: str, legs: dict[str, str], default: str = "cast", two_stage: bool = True) -> NetworkCase:
    """Return a case of expert parallelism: the codecs of some legs, and the codec of all others."""
    points = ("ep-dispatch-forward", "ep-combine-forward", "ep-combine-backward", "ep-dispatch-backward")
    specs = (*(f"{point}={legs.get(point, default)}" for point in points), "dp-grad=cast")
    return NetworkCase(name, specs, two_stage=two_stage)


_ROWS_8, _ROWS_4 = "fixpoint,bits=8,group=64", "fixpoint,bits=4,group=64,rotation=64"
EXPERTS = (
    FP32,
    _legs("bf16 traffic", {}),
    _legs("8 bits to the experts, both ways", dict.fromkeys(("ep-dispatch-forward", "ep-combine-backward"), _ROWS_8)),
    _legs("8 bits, all legs", {}, _ROWS_8),
    _legs("4 bits to the experts, else 8", {"ep-dispatch-forward": _ROWS_4, "ep-combine-backward": _ROWS_4}, _ROWS_8),
    _legs("4 bits, all legs", {}, _ROWS_4),
)
STAGES = (
    FP32,
    _legs("bf16 traffic, one stage", {}, two_stage=False),
    _legs("bf16 traffic, two stages", {}),
    _legs("8 bits, all legs, one stage", {}, _ROWS_8, two_stage=False),
    _legs("8 bits, all legs, two stages", {}, _ROWS_8),
)


VOCAB = 2048


@dataclass(frozen=True)
class Bench:
    """A layout on hosts, with its cases.

    Args:
        hosts, ranks_per_host: number of hosts, and of ranks on each.
        tp, pp: tensor- and pipeline-parallel sizes; the other ranks are replicas.
        model: layers, hidden size, sequence length.
        micro_batches: micro-batches per replica and step.
        setups: published set-ups whose links are imitated.
        cases: cases that are measured on each link.
        paced_by: work of a set-up's ratio: "message" for a micro-batch, "gradients" for an iteration, "experts" for a
            micro-batch of layers with experts.
        tied: whether the embedding is also the output projection, so that two stages all-reduce its gradient.
        device: cpu: fp32 over gloo, each host with a share of the processors; cuda: bf16 over NCCL, on a shared GPU.
        micro_batch: sequences per micro-batch.
        vocab: entries of the vocabulary.
        bucket: elements of a gradient bucket; None for the trainer's choice.
        experts, topk: experts of each layer, spread over all replicas, and experts of a token; 0 for dense layers.
    """

    hosts: int
    ranks_per_host: int
    tp: int
    pp: int
    model: tuple[int, int, int]
    micro_batches: int
    setups: tuple[Setup, ...]
    cases: tuple[NetworkCase, ...]
    paced_by: str = "message"
    tied: bool = False
    device: str = "cpu"
    micro_batch: int = 1
    vocab: int = VOCAB
    bucket: int | None = None
    experts: int = 0
    topk: int = 2

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return self.hosts * self.ranks_per_host // (self.tp * self.pp)

    @property
    def parameters(self) -> int:
        """Number of parameters, without biases and norms."""
        layers, hidden, sequence = self.model
        return 12 * layers * hidden**2 + ((1 if self.tied else 2) * self.vocab + sequence) * hidden

    @property
    def sent_to_experts(self) -> float:
        """Bytes of fp32 rows that a rank sends for a micro-batch, forward and backward, with balanced experts."""
        layers, hidden, sequence = self.model
        return 4 * layers * self.topk * self.micro_batch * sequence * hidden * 4 * (self.dp - 1) / self.dp


BENCHES = {
    "pp4": Bench(4, 1, 1, 4, (8, 512, 256), 8, tuple(aqsgd_pipeline()), PIPELINE),
    "pp4-flush": Bench(4, 1, 1, 4, (8, 512, 256), 8, tuple(aqsgd_pipeline()), _without_flush(8)),
    "pp8-flush": Bench(8, 1, 1, 8, (8, 512, 256), 16, tuple(aqsgd_pipeline()), _without_flush(16)),
    "dp4": Bench(4, 1, 1, 1, (4, 256, 256), 4, (*aqsgd_data(4), radius_data()), DATA, "gradients"),
    # Short iterations, in which communication dominates.
    "dp4-short": Bench(4, 1, 1, 1, (4, 256, 256), 2, tuple(aqsgd_data(4, 2)[:1]), FACTORS, "gradients"),
    "dp4-delay": Bench(4, 1, 1, 1, (4, 256, 256), 4, tuple(aqsgd_data(4)), DELAYED, "gradients"),
    # Links of the given rates. Sums are compared, so sequences are short; several buckets hide the coding, which sums
    # in two levels do twice.
    "dp2x2": Bench(2, 2, 1, 1, (4, 512, 32), 1, tuple(as_named()[1:]), LEVELS, "gradients", bucket=4_000_000),
    "ep4": Bench(4, 1, 1, 1, (4, 256, 256), 4, tuple(mixtral_experts()), EXPERTS, "experts", micro_batch=2, experts=8),
    "ep2x2": Bench(
        2, 2, 1, 1, (4, 256, 256), 4, tuple(as_named()[1:]), STAGES, "experts", micro_batch=2, experts=16, topk=4
    ),
    "3d": Bench(4, 2, 2, 2, (8, 512, 256), 4, (optimus_pipeline(), aqsgd_pipeline()[1]), MIXED, tied=True),
}


# Ranks that share a GPU: larger models, links of the given rates. Parameters and messages between stages are in bf16;
# gradients add up in fp32, which is the sum in "fp32 traffic".
_CUDA_PIPELINE = (
    NetworkCase("bf16 traffic"),
    FIXPOINT,
    NetworkCase("fixpoint 4/8 bits, eager 1F1B", FIXPOINT.specs, "eager-1f1b"),
    NetworkCase("bf16 traffic, eager 1F1B", schedule="eager-1f1b"),
    DELTA,
    DELTA_EAGER,
)
_WITH_PEERS = (
    FP32,
    DDP,
    BF16_SUMS,
    NetworkCase("torch DDP, bf16 hook", peer="ddp-bf16"),
    POWERSGD_4,
    DDP_POWERSGD_4,
    POWERSGD_32,
    DDP_POWERSGD_32,
)
PEER_PAIRS = len(_WITH_PEERS)
"""Number of leading cases of data parallelism that are pairs of ours and torch's."""
_CUDA_DATA = (
    *_WITH_PEERS,
    NetworkCase("powersgd, rank 4, no overlap", POWERSGD_4.specs, overlap=False),
    FIXPOINT_SUMS,
    RADIUS,
    NetworkCase("bf16 traffic, no overlap", BF16_SUMS.specs, overlap=False),
    NetworkCase("fp32 traffic, no overlap", overlap=False),
)
_CUDA_MIXED = (FP32, BF16_SUMS, OPTIMUS, ALL_POINTS)
_LINKS = tuple(as_named())
CUDA_BENCHES = {
    "pp4": Bench(
        4, 1, 1, 4, (12, 1024, 1024), 8, _LINKS, _CUDA_PIPELINE, device="cuda", micro_batch=2, vocab=GPT2_VOCAB
    ),
    "dp4": Bench(
        4, 1, 1, 1, (12, 768, 1024), 1, _LINKS, _CUDA_DATA, "gradients", True, "cuda", micro_batch=4, vocab=GPT2_VOCAB
    ),
    "3d": Bench(
        4, 2, 2, 2, (12, 1024, 1024), 4, _LINKS, _CUDA_MIXED, tied=True, device="cuda", micro_batch=2, vocab=GPT2_VOCAB
    ),
}


def plan_of(bench: Bench) -> dict[str, Any]:
    """Plan that every rank reads when it starts."""
    layers, hidden, sequence = bench.model
    return {
        "vocab": bench.vocab,
        "device": bench.device,
        "micro_batches": bench.micro_batches,
        "config": {
            "model": {
                "num_layers": layers,
                "hidden_size": hidden,
                "num_attention_heads": hidden // 64,
                "seq_length": sequence,
                "max_position_embeddings": sequence,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "untie_embeddings_and_output_weights": not bench.tied,
                "num_experts": [bench.experts] if bench.experts else [],
                "moe_router_topk": bench.topk,
            },
            "training": {
                "micro_batch_size": bench.micro_batch,
                "global_batch_size": bench.micro_batch * bench.micro_batches * bench.dp,
                "train_iters": 1_000_000,
                # Compiling every case would take longer than measuring it, and torch's DDP is not compiled either.
                "compile": "off",
            },
            "optimizer": {"lr": 1e-3},
            "data": {"sample_order": "fixed"},
            "tokenizer": {"vocab_size": bench.vocab},
            "precision": {"bf16": bench.device == "cuda"},
            "parallel": {
                "tensor_model_parallel_size": bench.tp,
                "pipeline_model_parallel_size": bench.pp,
                "expert_model_parallel_size": bench.dp if bench.experts else 1,
                "distributed_backend": "nccl" if bench.device == "cuda" else "gloo",
                **({} if bench.bucket is None else {"ddp_bucket_size": bench.bucket}),
            },
        },
    }
