"""Position of a run: the counters in a checkpoint other than tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError
from megatron.base.values import Values
from megatron.distributed.policy import SkippedSteps

_MAX = 1 << 62


@dataclass
class Progress(SkippedSteps):
    """Counters of a run.

    Args:
        iteration: optimizer steps attempted, those without an update included.
        consumed_samples: training samples used.
        skipped: iterations without an update, counted by ``train_step``.
        consumed_tokens: tokens of these samples that were trained on; None in checkpoints that did not count them.
        consecutive_skips: steps skipped since the last update, except steps that search for a loss scale or in which
            no token counts.
        last_update: iteration of the last update; zero before the first.

    ``tracked_runs`` names the run at the services that keep its curves, by service. Checkpoints store it separately.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int | None = 0
    consecutive_skips: int = 0
    last_update: int = 0
    tracked_runs: dict[str, str] = field(default_factory=dict)

    def state_dict(self) -> dict[str, int]:
        """The counters as plain numbers."""
        return {name: count for name, count in asdict(self).items() if isinstance(count, int)}

    def tokens(self, seq_length: int) -> int:
        """The tokens that were trained on; samples whose tokens were not counted had ``seq_length`` of them."""
        return self.consumed_samples * seq_length if self.consumed_tokens is None else self.consumed_tokens

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters.

        Raises:
            UserError: when a value is not a whole number; nothing has changed then.
        """
        values = Values(state)
        counts: dict[str, int | None] = {
            name: values.integer(name, minimum=0, maximum=_MAX) for name in ("iteration", "consumed_samples", "skipped")
        }
        # Older checkpoints lack these values.
        defaults = {"consumed_tokens": None, "consecutive_skips": 0, "last_update": counts["iteration"]}
        for name, default in defaults.items():
            counts[name] = values.integer(name, minimum=0, maximum=_MAX) if values.has(name) else default
        for name, count in counts.items():
            setattr(self, name, count)


def check_saved_values(common: Mapping[str, Any], location: Path, *, optimizer: bool, counters: bool) -> None:
    """Check values of a checkpoint other than tensors before anything is changed.

    Args:
        common: the values.
        location: name of their source, for the message.
        optimizer: whether to check the optimizer's values.
        counters: whether to check the run's position.

    Raises:
        UserError: when a value is missing or of another kind; the message names the file and the value.
    """
    try:
        values = Values(common)
        values.flag("separate_main")
        if counters:
            Progress().load_state_dict(values.table("progress"))
            values.table("schedule")
        if optimizer:
            for name in ("loss_scale", "controllers"):
                values.table(name)
            for name in ("optimizer_steps", "variance_frozen_at"):
                values.integer(name, minimum=0, maximum=_MAX)
    except UserError as error:
        remedy = "load another checkpoint, or its weights alone with --finetune"
        raise UserError(f"{location} is not what a run writes: {error}; {remedy}") from error
