"""Batch sizes, the length of the run, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.base.option import derived, option, required

MOST_ITERATIONS = 10**9
MOST_BATCH = 1 << 20
"""Samples of a batch, global or micro."""
MOST_SAMPLES = 10**12
MOST_TOKENS = 10**16


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The run's length is counted in iterations or in samples, never in both."""

    micro_batch_size: int = required(
        "Samples in one forward pass of one data-parallel replica.", unit="samples", minimum=1, maximum=MOST_BATCH
    )
    global_batch_size: int = derived(
        "micro batch size * data-parallel size",
        "Samples in one optimizer step.",
        unit="samples",
        minimum=1,
        maximum=MOST_BATCH,
    )
    rampup_batch_size: list[int] | None = derived(  # noqa: RUF009
        "no ramp-up",
        "Grow the global batch: START, INCREMENT, and the number of SAMPLES over which it grows. Needs "
        "--train-samples.",
        count=3,
        metavar="START INCREMENT SAMPLES",
        minimum=0,
        maximum=MOST_SAMPLES,
    )
    train_iters: int | None = derived(
        "--train-samples decides", "Length of the run.", unit="iterations", minimum=1, maximum=MOST_ITERATIONS
    )
    train_samples: int | None = derived(
        "--train-iters decides", "Length of the run.", unit="samples", minimum=1, maximum=MOST_SAMPLES
    )
    train_tokens: int | None = derived(
        "no limit",
        "Length of the run; counted as whole sequences of --seq-length. With --train-samples the shorter one "
        "ends the run.",
        unit="tokens",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    exit_interval: int | None = derived(
        "never", "Save and exit at every iteration that this number divides.", unit="iterations", minimum=1
    )
    exit_duration_in_mins: float | None = derived("never", "Save and exit after this long.", unit="minutes", above=0)
    exit_signal_handler: bool = option(False, "Save and exit on SIGTERM or SIGUSR1.")
    kill_switch_file: str | None = derived(
        "none",
        "Save and exit as soon as this file exists; refused when it does at the start.",
        metavar="FILE",
        may_differ="any machine's switch ends the run",
    )
    seed: int = option(1234, "Seed of initialization, dropout and data order.", minimum=0, maximum=2**32 - 1)
    deterministic_mode: bool = option(
        False,
        "Compute the same bits each time, on GPUs too (CPUs do so anyway): only operations that add in a fixed order. "
        "Slower; see docs/gpu.md.",
    )
    check_replicas: int | None = derived(
        "never",
        "Compare, bit by bit, what ranks must hold alike (replicas' parameters, both ends' memories of pipeline "
        "codecs) every N iterations, and stop when they differ.",
        metavar="N",
        unit="iterations",
        minimum=1,
    )
    use_flash_attn: bool = option(
        False,
        "Flash attention.",
        aliases=(
            "use-flash-attn-v1",
            "use-flash-attn-v2",
            "use-flash-attn-triton",
            "use-flash-attn-builder",
        ),
        no_effect=("attention always goes through scaled_dot_product_attention, which uses flash kernels where it can"),
    )
    compile: Literal["auto", "on", "off"] = option(
        "auto",
        "Compile each transformer layer by torch.compile. auto does where CUDA and Triton are, with one "
        "tensor-parallel rank, without attention dropout and --deterministic-mode.",
    )
    empty_unused_memory_level: int = option(
        0,
        "Return cached GPU memory to the device each iteration: not (0), once (1), or twice (2).",
        minimum=0,
        maximum=2,
        no_effect="cached memory is kept",
    )

    @property
    def planned_iters(self) -> int | None:
        """Iterations of the run; of one counted in samples those of the full batch size, of which a ramp-up takes
        more. None where neither is known yet."""
        if self.train_iters is not None or self.train_samples is None or not self.global_batch_size:
            return self.train_iters
        return max(self.train_samples // self.global_batch_size, 1)
