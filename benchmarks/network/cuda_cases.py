"""The same layouts with ranks on one GPU: models that it computes in a fraction of a second, links of their own rates.

Parameters and messages between stages are in bf16, gradients add up in fp32; "fp32 traffic" is the sum of those.
"""

from __future__ import annotations

from benchmarks.network.cases import FP32, Bench, NetworkCase
from benchmarks.network.setups import as_named

GPT2_VOCAB = 50257
_POWERSGD = "dp-grad=powersgd,rank={}"
BF16 = NetworkCase("bf16 traffic")
_FIXPOINT = ("pp-forward=fixpoint,bits=4", "pp-backward=fixpoint,bits=8")
_DELTA = ("pp-forward=delta,bits=4", "pp-backward=fixpoint,bits=8")
PIPELINE = (
    BF16,
    NetworkCase("fixpoint 4/8 bits", _FIXPOINT),
    NetworkCase("fixpoint 4/8 bits, eager 1F1B", _FIXPOINT, "eager-1f1b"),
    NetworkCase("bf16 traffic, eager 1F1B", schedule="eager-1f1b"),
    NetworkCase("delta 4, fixpoint 8 (AQ-SGD)", _DELTA),
    NetworkCase("delta 4, fixpoint 8, eager 1F1B", _DELTA, "eager-1f1b"),
)
_BESIDE_DDP = (
    FP32,
    NetworkCase("torch DDP", peer="ddp"),
    NetworkCase("bf16 traffic", ("dp-grad=cast",)),
    NetworkCase("torch DDP, bf16 hook", peer="ddp-bf16"),
    NetworkCase("powersgd, rank 4", (_POWERSGD.format(4),)),
    NetworkCase("torch DDP, powerSGD_hook, rank 4", peer="ddp-powersgd", rank=4),
    NetworkCase("powersgd, rank 32", (_POWERSGD.format(32),)),
    NetworkCase("torch DDP, powerSGD_hook, rank 32", peer="ddp-powersgd", rank=32),
)
PAIRS = len(_BESIDE_DDP)
"""Number of the first cases of data parallelism, each of which has one of torch's beside it."""
DATA = (
    *_BESIDE_DDP,
    NetworkCase("powersgd, rank 4, no overlap", (_POWERSGD.format(4),), overlap=False),
    NetworkCase("fixpoint 4 bits", ("dp-grad=fixpoint,bits=4,error-feedback=on",)),
    NetworkCase("stable Top-K 10% (Radius)", ("dp-grad=stable-topk,density=0.1,interval=1000",)),
    NetworkCase("bf16 traffic, no overlap", ("dp-grad=cast",), overlap=False),
    NetworkCase("fp32 traffic, no overlap", overlap=False),
)
MIXED = (
    FP32,
    NetworkCase("bf16 traffic", ("dp-grad=cast",)),
    NetworkCase(
        "CB + FE + SC (Optimus-CC)",
        (
            "pp-backward=lowrank,rank=16,when=epilogue,error-feedback=lazy",
            "embedding=fused",
            "dp-grad=powersgd,rank=32,stages=first:1",
        ),
    ),
    NetworkCase("delta 4, fixpoint 8, powersgd 32, FE", (*_DELTA, _POWERSGD.format(32), "embedding=fused")),
)
_LINKS = tuple(as_named())
CUDA_BENCHES = {
    "pp4": Bench(4, 1, 1, 4, (12, 1024, 1024), 8, _LINKS, PIPELINE, device="cuda", micro_batch=2, vocab=GPT2_VOCAB),
    "dp4": Bench(
        4, 1, 1, 1, (12, 768, 1024), 1, _LINKS, DATA, "gradients", True, "cuda", micro_batch=4, vocab=GPT2_VOCAB
    ),
    "3d": Bench(
        4, 2, 2, 2, (12, 1024, 1024), 4, _LINKS, MIXED, tied=True, device="cuda", micro_batch=2, vocab=GPT2_VOCAB
    ),
}
