"""The optimizer and its schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.base.option import derived, option, required


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Decay and warm-up are counted as the run is: in iterations or in samples."""

    optimizer: Literal["adam", "sgd"] = option(
        "adam",
        "adam is AdamW (decoupled weight decay).",
    )
    lr: float = required("Highest learning rate.", minimum=0, maximum=1e4)
    min_lr: float = option(0.0, "Lowest learning rate of the decay.", minimum=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = option(
        "linear",
        "Shape of the decay after the warm-up.",
    )
    lr_decay_iters: int | None = derived(
        "--train-iters", "Length of warm-up and decay together.", unit="iterations", minimum=1
    )
    lr_decay_samples: int | None = derived(
        "--train-samples", "Length of warm-up and decay together.", unit="samples", minimum=1
    )
    lr_decay_tokens: int | None = derived(
        "unused",
        "Length of warm-up and decay together; counted as whole sequences. Needs --train-samples or --train-tokens.",
        unit="tokens",
        minimum=1,
    )
    lr_warmup_fraction: float | None = derived(
        "unused", "Warm-up as a share of the decay's length.", minimum=0, below=1
    )
    lr_warmup_iters: int = option(0, "Length of the linear warm-up.", unit="iterations", minimum=0)
    lr_warmup_samples: int = option(0, "Length of the linear warm-up.", unit="samples", minimum=0)
    lr_warmup_tokens: int | None = derived(
        "unused",
        "Length of the linear warm-up; counted as whole sequences. Needs --train-samples or --train-tokens.",
        unit="tokens",
        minimum=0,
    )
    weight_decay: float = option(0.01, "Weight decay; biases and norms have none.", minimum=0)
    start_weight_decay: float = derived("--weight-decay", "First weight decay of a growing one.", minimum=0)
    end_weight_decay: float = derived("--weight-decay", "Last weight decay of a growing one.", minimum=0)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        "constant",
        "How weight decay grows over the run.",
    )
    clip_grad: float = option(1.0, "Gradients are clipped to this global norm; 0 turns clipping off.", minimum=0)
    adam_beta1: float = option(0.9, "Decay of Adam's first moment.", minimum=0, below=1)
    adam_beta2: float = option(0.999, "Decay of Adam's second moment.", minimum=0, below=1)
    adam_eps: float = option(1e-8, "Added to the root of Adam's second moment.", above=0)
    sgd_momentum: float = option(0.9, "Momentum of --optimizer sgd.", minimum=0, below=1)
    use_apex: bool = option(False, "Use apex's FusedAdam and FusedLayerNorm where apex is installed.")
    override_opt_param_scheduler: bool = option(
        False,
        "On resuming, take the schedules from the flags instead of from the checkpoint.",
        aliases=("override-lr-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "On resuming, take the schedules from the checkpoint whatever the flags say.",
        aliases=("use-checkpoint-lr-scheduler",),
    )
    use_new_lr: bool = option(False, "On resuming, take --lr from the flags whatever the checkpoint says.")
    use_new_min_lr: bool = option(False, "On resuming, take --min-lr from the flags whatever the checkpoint says.")
