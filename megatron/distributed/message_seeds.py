"""Seeds of stateless stochastic compressors."""

from __future__ import annotations

from megatron.base.seeds import keyed_seed
from megatron.compression.state import CompressorState


class MessageSeeds:
    """Position in a run that seeds random draws, so that recomputation draws the same numbers again.

    Attributes:
        iteration: 0-based; 0 in evaluations.
        micro_batch: number in the step of the micro-batch whose forward or backward runs.
    """

    def __init__(self) -> None:
        self.iteration = 0
        self.micro_batch = 0

    def begin_step(self, iteration: int) -> None:
        """Begin a step; -1 stands for an evaluation."""
        self.iteration, self.micro_batch = max(iteration, 0), 0

    def state(self, *message: int | str) -> CompressorState:
        """Compressor state for a single message, equal on sender and receiver.

        Args:
            message: identifiers of the message besides the position: its point, its place in the model, its sender.
        """
        number = keyed_seed(self.iteration, self.micro_batch, *message)
        return CompressorState(counters=dict.fromkeys(("draws", "messages"), number))
