"""Compression of network traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron.base.option import Condition, option
from megatron.config.conditions import needs

if TYPE_CHECKING:  # the compressors import torch; parsing flags must not
    from megatron.compression.points import Point
    from megatron.compression.schedule import RunLength
    from megatron.compression.spec import Spec


def _compresses_forward(run: Any, _: int) -> bool:
    if run.compression.is_auto:
        return True
    points = [spec.partition("=")[0].strip().lower() for spec in run.compression.compress]
    forward = ("pp-forward", "tp-forward", "ep-dispatch", "ep-combine", "experts")
    return any(point.startswith(forward) and not point.endswith("-backward") for point in points)


_FORWARD_COMPRESSOR = Condition(_compresses_forward, "without a compressor of forward messages")

AUTO = "auto"
"""Value of ``--compress`` that chooses the compressors of the points without a spec."""
_AUTO_CHOICE = Condition(lambda run, _: run.compression.is_auto, f"without --compress {AUTO}")


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """The compressors: one spec for each communication point."""

    compress: list[str] = option(  # noqa: RUF009
        [],
        "Compress a communication point, such as dp-grad=powersgd,rank=32 or pp-forward=fixpoint,bits=4, or the "
        "tokens to experts and back: experts=default. --list-compressors prints all points and compressors. auto "
        "measures this machine and its links at the start, and chooses the fastest compressors within "
        "--max-loss-increase for all points without a spec, and whether to use --overlap-grad-reduce and "
        "--pipeline-schedule auto.",
        repeatable=True,
        metavar="POINT=SPEC|auto",
        common="compress",
    )
    max_loss_increase: float = option(
        0.5,
        "Largest increase in validation loss that --compress auto accepts, based on measurements of each "
        "compressor with a small GPT (docs/results/loss.md).",
        unit="percent",
        above=0.0,
        maximum=100.0,
        only_if=(_AUTO_CHOICE,),
    )
    loss_check_interval: int = option(
        100,
        "Iterations between checks of the loss cost of the compressors chosen by --compress auto. Above "
        "--max-loss-increase, one of them switches to a gentler setting; if the cost stays far below, it "
        "switches back. Without this flag, a multiple of it if choice and checks would take more than 2% of the "
        "run. 0: no checks during the run.",
        minimum=0,
        only_if=(_AUTO_CHOICE,),
    )
    compress_adapt: bool = option(
        False,
        "Choose the compressors of --compress auto again when links become much slower or faster: the run saves "
        "a checkpoint, chooses, and continues. It chooses at once if it resumes from a run without this flag.",
        only_if=(_AUTO_CHOICE,),
    )
    compress_module: list[str] = option(  # noqa: RUF009
        [],
        "Python file whose register(registry) adds compressors.",
        repeatable=True,
        contents="file",
        metavar="FILE",
        only_if=(needs("compression.compress"),),
    )
    eval_compressed: bool = option(
        False,
        "Compress pp-forward, tp-forward, ep-dispatch-forward and ep-combine-forward in evaluation, too, as "
        "eval=on does for each; by default evaluation is uncompressed.",
        only_if=(_FORWARD_COMPRESSOR,),
    )

    @property
    def is_auto(self) -> bool:
        """Whether points without a spec get one from ``--compress auto``."""
        return any(text.strip().lower() == AUTO for text in self.compress)

    @property
    def spec_texts(self) -> list[str]:
        """Values of ``--compress`` that are specs, of the user or chosen."""
        return [text for text in self.compress if text.strip().lower() != AUTO]

    @property
    def chosen_specs(self) -> list[str]:
        """The chosen specs of a configuration from ``with_choice``."""
        return self.compress[self.compress.index(AUTO) + 1 :] if AUTO in self.compress else []

    def with_choice(self, user_specs: Sequence[str], chosen_specs: Sequence[str]) -> CompressionConfig:
        """A copy with chosen specs; those of the user come before ``auto``, and the chosen ones after it."""
        return replace(self, compress=[*user_specs, AUTO, *chosen_specs])

    def without_choice(self) -> CompressionConfig:
        """A copy of a configuration from ``with_choice`` without the chosen specs."""
        return replace(self, compress=self.compress[: self.compress.index(AUTO) + 1]) if self.chosen_specs else self

    def specs(self, length: RunLength) -> dict[Point, Spec]:
        """Compressor spec of each communication point that has one.

        Raises:
            UserError: for an unreadable or unusable spec.
        """
        from megatron.compression.plugins import build_registry
        from megatron.compression.spec import read_specs

        specs = read_specs(self.spec_texts, build_registry(self.compress_module), length)
        if self.eval_compressed:
            return {point: spec.with_evaluation() for point, spec in specs.items()}
        return specs
