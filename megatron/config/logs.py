"""Logging: log lines, timers and records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.base.errors import UserError
from megatron.base.option import derived, option
from megatron.config.conditions import needs
from megatron.config.parallel import ParallelConfig

_LAST_RANK_ONLY = "only the last rank writes it"


_CURVES = (needs("logging.tensorboard_dir", "logging.wandb_project", "logging.mlflow_experiment"),)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """The log line, timers, TensorBoard and files."""

    log_interval: int = option(
        100, "Iterations between log lines.", unit="iterations", minimum=1, common="evaluate and log"
    )
    log_params_norm: bool = option(False, "Log the norm of the parameters.")
    log_num_zeros_in_grad: bool = option(False, "Log the number of zeros in the gradients.")
    timing_log_level: int = option(
        0,
        "Timers: only the iteration (0), also coarse operations (1), or everything (2).",
        minimum=0,
        maximum=2,
    )
    timing_log_option: Literal["max", "minmax", "all"] = option(
        "minmax",
        "Report timers as the maximum over ranks, the minimum and maximum, or each rank's.",
        only_if=(needs("logging.timing_log_level"),),
    )
    tensorboard_dir: str | None = derived(
        "no TensorBoard",
        "Folder for TensorBoard events.",
        metavar="FOLDER",
        may_differ=_LAST_RANK_ONLY,
        common="evaluate and log",
    )
    tensorboard_log_interval: int = option(
        1, "Iterations between TensorBoard records.", unit="iterations", minimum=1, only_if=_CURVES
    )
    tensorboard_queue_size: int = option(
        1000,
        "Records that TensorBoard's writer buffers.",
        unit="records",
        minimum=1,
        maximum=10**6,
        only_if=(needs("logging.tensorboard_dir"),),
    )
    wandb_project: str | None = derived(
        "no Weights & Biases",
        "Write the curves of --tensorboard-dir to this Weights & Biases project; its package must be installed "
        "(WANDB_MODE=offline only writes files).",
        metavar="NAME",
        may_differ=_LAST_RANK_ONLY,
    )
    wandb_exp_name: str | None = derived(
        "Weights & Biases chooses",
        "Name of the run in --wandb-project.",
        metavar="NAME",
        may_differ=_LAST_RANK_ONLY,
        only_if=(needs("logging.wandb_project"),),
    )
    wandb_save_dir: str | None = derived(
        "wandb in the current folder",
        "Folder for the files of --wandb-project.",
        metavar="FOLDER",
        may_differ=_LAST_RANK_ONLY,
        only_if=(needs("logging.wandb_project"),),
    )
    mlflow_experiment: str | None = derived(
        "no MLflow",
        "Write the curves of --tensorboard-dir to this MLflow experiment; its package must be installed "
        "(mlflow-skinny suffices for a tracking server); MLFLOW_TRACKING_URI names the server.",
        metavar="NAME",
        may_differ=_LAST_RANK_ONLY,
    )
    log_timers_to_tensorboard: bool = option(False, "Write timers to TensorBoard.", only_if=_CURVES)
    log_batch_size_to_tensorboard: bool = option(False, "Write the batch size to TensorBoard.", only_if=_CURVES)
    log_learning_rate_to_tensorboard: bool = option(
        True,
        "Do not write the learning rate to TensorBoard.",
        flag="no-log-learning-rate-to-tensorboard",
        aliases=("no-log-learnig-rate-to-tensorboard",),
        off_switch=True,
        only_if=_CURVES,
    )
    log_loss_scale_to_tensorboard: bool = option(
        True,
        "Do not write the loss scale to TensorBoard.",
        flag="no-log-loss-scale-to-tensorboard",
        off_switch=True,
        only_if=_CURVES,
    )
    log_validation_ppl_to_tensorboard: bool = option(
        False, "Write the validation perplexity to TensorBoard.", only_if=_CURVES
    )
    log_world_size_to_tensorboard: bool = option(
        False, "Write the number of processes to TensorBoard.", only_if=_CURVES
    )
    log_txt_file: str | None = derived(
        "none", "Append the log lines to this text file.", metavar="FILE", may_differ=_LAST_RANK_ONLY
    )
    log_json_file: str | None = derived(
        "none",
        "Append one JSON object per event (log line, evaluation, ...) to this file.",
        metavar="FILE",
        may_differ=_LAST_RANK_ONLY,
        common="evaluate and log",
    )
    print_config: bool = option(
        False,
        "Print every setting at the start, not only those that differ from the defaults.",
        may_differ=_LAST_RANK_ONLY,
    )
    log_comm: bool = option(
        False,
        "After each log line, log the bytes, times and residuals of each communication point.",
        common="evaluate and log",
    )
    peak_tflops: float | None = derived(
        "the device's, where its name is known",
        "Peak rate of one device at the training precision, for the MFU (model FLOPs utilization) in the log.",
        unit="TFLOP/s",
        above=0,
        may_differ=_LAST_RANK_ONLY,
    )
    check_orth_error_acti: bool = option(
        False,
        "In each iteration, print the cosine between the errors of compressed activation gradients and the "
        "change of activations from one micro-batch to the next, and the means of both (of the last rank).",
    )
    log_gradients: bool = option(
        False,
        "Every --log-gradients-interval iterations, record where the largest gradients of each matrix are: the "
        "share of them that were there the last time, and their share of the norm (in --log-json-file; "
        "tools/plot_grad_distribution.py plots it).",
    )
    log_gradients_interval: int = option(
        100, "Iterations between records.", unit="iterations", minimum=1, only_if=(needs("logging.log_gradients"),)
    )
    log_gradients_density: float = option(
        0.01,
        "Share of each matrix that counts as its largest gradients.",
        above=0,
        maximum=1,
        only_if=(needs("logging.log_gradients"),),
    )
    log_gradients_bins: int = option(
        0,
        "Also record how many of the largest are in each of this many equal parts of a matrix, for the heat map "
        "of tools/plot_grad_distribution.py --places (Radius draws 5,000; 200 show as much); 0: do not.",
        minimum=0,
        maximum=5000,
    )
    profile_trace: str | None = derived(
        "none",
        "Write a Chrome trace of some iterations for each rank to this folder: forward, backward, encode, send, "
        "wait, decode, reduce, optimizer, with bytes; on CUDA with the device's times and kernels. "
        "tools/merge_traces.py merges them into one file.",
        metavar="FOLDER",
        may_differ="each rank writes a file of its own, on whatever disk is near",
    )
    profile_step_start: int = option(
        10, "First iteration of the trace, counted from 0.", minimum=0, only_if=(needs("logging.profile_trace"),)
    )
    profile_step_end: int = option(
        12, "First iteration after the trace.", minimum=1, only_if=(needs("logging.profile_trace"),)
    )
    progress_bar: Literal["auto", "on", "off"] = option(
        "auto",
        "Progress bar: only on a terminal (auto), always or never.",
        may_differ=_LAST_RANK_ONLY,
    )


def check_logs(logging: LoggingConfig, parallel: ParallelConfig) -> None:
    """Check the trace range and the gradient records; raise UserError for contradictions."""
    start, end = logging.profile_step_start, logging.profile_step_end
    if end <= start:
        raise UserError(
            f"--profile-step-end {end} must be greater than --profile-step-start {start}; use {start + 2} for a trace "
            "of two iterations"
        )
    if logging.log_gradients and logging.log_json_file is None:
        raise UserError("--log-gradients writes to --log-json-file FILE; add it or leave --log-gradients out")
    if logging.log_gradients_bins and not logging.log_gradients:
        raise UserError(
            f"--log-gradients-bins {logging.log_gradients_bins} is for the records of --log-gradients; add it"
        )
    if logging.log_gradients and parallel.delay:
        raise UserError(
            "--log-gradients reads gradients after a step, when --delay 1 still reduces them; leave one out"
        )
    if logging.check_orth_error_acti and parallel.overlaps_steps:
        raise UserError(
            "--check-orth-error-acti pairs the messages of a step, and with --no-pipeline-flush the next step begins "
            "before the last of them; leave one out"
        )
    if logging.log_gradients and parallel.use_distributed_optimizer:
        raise UserError(
            "--log-gradients needs whole gradients, of which --use-distributed-optimizer leaves each rank a share; "
            "leave one of them out"
        )
