"""Cases of the network benchmark: layouts on hosts, and the traffic on each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    """A case: a model's traffic, compressed or not.

    Args:
        name: name in the tables.
        specs: specs of ``--compress``.
        schedule: pipeline schedule.
        peer: a peer of ``peers.py`` in place of the trainer; with a rank.
        overlap: gradients are reduced while backward goes on.
        levels: bits of its two-level sums inside a host and between hosts, whose bytes are then compared with what
            their formula says.
        two_stage: rows of experts go once to a host of several ranks, and on inside it.
    """

    name: str
    specs: tuple[str, ...] = ()
    schedule: str = "1f1b"
    peer: str = ""
    rank: int = 0
    overlap: bool = True
    levels: tuple[int, int] | None = None
    two_stage: bool = True


FP32 = NetworkCase("fp32 traffic")
CAST = NetworkCase("bf16 traffic", ("pp-forward=cast", "pp-backward=cast", "dp-grad=cast"))
_AQSGD_4 = ("pp-forward=delta,bits=4", "pp-backward=fixpoint,bits=8")
_AQSGD_2 = ("pp-forward=delta,bits=2", "pp-backward=fixpoint,bits=4")
PIPELINE = (
    FP32,
    CAST,
    NetworkCase("fixpoint 4/8 bits", ("pp-forward=fixpoint,bits=4", "pp-backward=fixpoint,bits=8")),
    NetworkCase("delta 4, fixpoint 8 (AQ-SGD)", _AQSGD_4),
    NetworkCase("delta 2, fixpoint 4 (AQ-SGD)", _AQSGD_2),
    NetworkCase("CB: lowrank 16, epilogue", ("pp-backward=lowrank,rank=16,when=epilogue,error-feedback=lazy",)),
    NetworkCase("fp32 traffic, eager 1F1B", schedule="eager-1f1b"),
    NetworkCase("bf16 traffic, eager 1F1B", CAST.specs, "eager-1f1b"),
    NetworkCase("delta 4, fixpoint 8, eager 1F1B", _AQSGD_4, "eager-1f1b"),
    NetworkCase("delta 2, fixpoint 4, eager 1F1B", _AQSGD_2, "eager-1f1b"),
)
DATA = (
    FP32,
    CAST,
    NetworkCase("powersgd, rank 4", ("dp-grad=powersgd,rank=4",)),
    NetworkCase("powersgd, rank 32", ("dp-grad=powersgd,rank=32",)),
    NetworkCase("stable Top-K 10% (Radius)", ("dp-grad=stable-topk,density=0.1,interval=1000",)),
    NetworkCase("fixpoint 4 bits", ("dp-grad=fixpoint,bits=4,error-feedback=on",)),
    NetworkCase("torch DDP", peer="ddp"),
    NetworkCase("torch DDP, fp16 hook", peer="ddp-fp16"),
    NetworkCase("torch DDP, powerSGD_hook, rank 4", peer="ddp-powersgd", rank=4),
    NetworkCase("torch DDP, powerSGD_hook, rank 32", peer="ddp-powersgd", rank=32),
)
LEVELS = (
    FP32,
    CAST,
    NetworkCase("fixpoint 4 bits", ("dp-grad=fixpoint,bits=4,error-feedback=on",)),
    NetworkCase("fixpoint 8/4 bits in two levels", ("dp-grad=fixpoint,levels=8/4,error-feedback=on",), levels=(8, 4)),
    NetworkCase("torch DDP", peer="ddp"),
    NetworkCase("torch DDP, fp16 hook", peer="ddp-fp16"),
)
SERVERS = (
    FP32,
    NetworkCase("central parameter server", ("dp-grad=parameter-server,server=central",)),
    NetworkCase("sharded parameter servers", ("dp-grad=parameter-server,server=sharded",)),
    NetworkCase("sharded, compressed: quantized Adam, 8 bits", ("dp-grad=quantized-adam,bits=8,warmup=2",)),
)
_POWERSGD = "dp-grad=powersgd,rank=32"
FACTORS = (
    FP32,
    NetworkCase("torch DDP, powerSGD_hook, rank 32", peer="ddp-powersgd", rank=32),
    NetworkCase("powersgd, rank 32", (_POWERSGD,)),
    NetworkCase("powersgd, rank 32, bf16 factors", (f"{_POWERSGD},factors=bf16",)),
    NetworkCase("powersgd, rank 32, 8-bit factors", (f"{_POWERSGD},factors=fixpoint8",)),
    NetworkCase("powersgd, rank 32, 4-bit factors", (f"{_POWERSGD},factors=fixpoint4",)),
)


def _legs(name: str, legs: dict[str, str], rest: str = "cast", two_stage: bool = True) -> NetworkCase:
    """A case of expert parallelism: the codecs of some legs, and that of the others."""
    points = ("ep-dispatch-forward", "ep-combine-forward", "ep-combine-backward", "ep-dispatch-backward")
    specs = (*(f"{point}={legs.get(point, rest)}" for point in points), "dp-grad=cast")
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
MIXED = (
    FP32,
    CAST,
    NetworkCase(
        "CB + FE + SC (Optimus-CC)",
        (
            "pp-backward=lowrank,rank=16,when=epilogue,error-feedback=lazy",
            "embedding=fused",
            "dp-grad=powersgd,rank=32,stages=first:1",
        ),
    ),
    NetworkCase(
        "delta 4, fixpoint 8, powersgd 32, FE",
        ("pp-forward=delta,bits=4", "pp-backward=fixpoint,bits=8", "dp-grad=powersgd,rank=32", "embedding=fused"),
    ),
)


VOCAB = 2048


@dataclass(frozen=True)
class Bench:
    """A layout on hosts, with its cases.

    Args:
        hosts, ranks_per_host: number of hosts, and of ranks on each.
        tp, pp: tensor- and pipeline-parallel sizes; data parallelism is the rest.
        model: layers, hidden size, sequence length.
        micro_batches: micro-batches per replica and step.
        setups: published set-ups whose links are imitated.
        cases: cases that are measured on each link.
        paced_by: "message": the set-up's ratio is a micro-batch's; "gradients": an iteration's; "experts": a
            micro-batch's in layers with experts.
        tied: the output projection is the embedding, whose gradient the first and the last stage must all-reduce.
        device: cpu: fp32 over gloo, each host with a share of the processors; cuda: bf16 over NCCL, on one GPU.
        micro_batch: sequences per micro-batch.
        vocab: entries of the vocabulary.
        bucket: elements of a gradient bucket; None for the trainer's choice.
        experts, topk: experts of each layer, which all replicas share out, and of a token; 0 for dense layers.
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
        """Number of the model's parameters, without biases and norms."""
        layers, hidden, sequence = self.model
        return 12 * layers * hidden**2 + ((1 if self.tied else 2) * self.vocab + sequence) * hidden

    @property
    def sent_to_experts(self) -> float:
        """Bytes of fp32 rows that a rank sends to others for a micro-batch, forward and backward, if experts are chosen
        alike."""
        layers, hidden, sequence = self.model
        return 4 * layers * self.topk * self.micro_batch * sequence * hidden * 4 * (self.dp - 1) / self.dp

    def sent_in_two_levels(self, bits: int) -> float:
        """Bytes of gradients that a host sends to others in an iteration: each of its G ranks (M-1)/M n/G twice, each
        number in its bits and with its part of a scale of 32 bits for 64."""
        return 2 * (self.hosts - 1) / self.hosts * self.parameters * (bits / 8 + 4 / 64)


BENCHES = {
    "pp4": Bench(4, 1, 1, 4, (8, 512, 256), 8, tuple(aqsgd_pipeline()), PIPELINE),
    # AQ-SGD's own number of stages and of micro-batches (run_lm.sh: a batch of 32 in micro-batches of one).
    "pp8": Bench(8, 1, 1, 8, (8, 512, 256), 32, tuple(aqsgd_pipeline()[0::2]), PIPELINE),
    "dp4": Bench(4, 1, 1, 1, (4, 256, 256), 4, (*aqsgd_data(4), radius_data()), DATA, "gradients"),
    # Short iterations: the hook spends more than two thirds of its step on the wire.
    "dp4-short": Bench(4, 1, 1, 1, (4, 256, 256), 2, tuple(aqsgd_data(4, 2)[:1]), FACTORS, "gradients"),
    # AQ-SGD's choices of --dp-mode.
    "dp4-servers": Bench(4, 1, 1, 1, (4, 256, 256), 4, tuple(aqsgd_data(4)[:1]), SERVERS, "gradients"),
    "dp8": Bench(8, 1, 1, 1, (4, 256, 256), 4, (*aqsgd_data(8)[:1], radius_data()), DATA, "gradients"),
    # Links of their own rates. Short sequences, as it is the sums that are compared, in buckets that hide one another's
    # coding: a sum in two levels codes its numbers twice.
    "dp2x2": Bench(2, 2, 1, 1, (4, 512, 32), 1, tuple(as_named()[1:]), LEVELS, "gradients", bucket=4_000_000),
    "ep4": Bench(4, 1, 1, 1, (4, 256, 256), 4, tuple(mixtral_experts()), EXPERTS, "experts", micro_batch=2, experts=8),
    "ep2x2": Bench(
        2, 2, 1, 1, (4, 256, 256), 4, tuple(as_named()[1:]), STAGES, "experts", micro_batch=2, experts=16, topk=4
    ),
    "3d": Bench(4, 2, 2, 2, (8, 512, 256), 4, (optimus_pipeline(), aqsgd_pipeline()[1]), MIXED, tied=True),
}


def plan_of(bench: Bench) -> dict[str, Any]:
    """The plan that every rank reads at the start."""
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
                # Torch's DDP is measured as it is, and compiling every case would take longer than measuring it.
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
