"""Rules for logging settings without effect."""

from __future__ import annotations

from megatron.config.idle_rule import Idle, fields_of

_CURVES = fields_of(
    "logging",
    "tensorboard_log_interval log_timers_to_tensorboard log_batch_size_to_tensorboard "
    "log_learning_rate_to_tensorboard log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard "
    "log_world_size_to_tensorboard",
)

LOG_RULES = (
    Idle(
        _CURVES,
        lambda config, _: (
            config.logging.tensorboard_dir is None
            and config.logging.wandb_project is None
            and config.logging.mlflow_experiment is None
        ),
        "without --tensorboard-dir, --wandb-project or --mlflow-experiment",
    ),
    Idle(
        fields_of("logging", "tensorboard_queue_size"),
        lambda config, _: config.logging.tensorboard_dir is None,
        "without --tensorboard-dir",
    ),
    Idle(
        fields_of("logging", "wandb_exp_name wandb_save_dir"),
        lambda config, _: config.logging.wandb_project is None,
        "without --wandb-project",
    ),
    Idle(
        fields_of("logging", "timing_log_option"),
        lambda config, _: config.logging.timing_log_level == 0,
        "without --timing-log-level above 0",
    ),
    Idle(
        fields_of("logging", "log_gradients_interval log_gradients_density"),
        lambda config, _: not config.logging.log_gradients,
        "without --log-gradients",
    ),
    Idle(
        fields_of("logging", "profile_step_start profile_step_end"),
        lambda config, _: config.logging.profile_trace is None,
        "without --profile-trace",
    ),
)
