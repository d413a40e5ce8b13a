"""What the random numbers of messages depend on whose compressors keep no state."""

from __future__ import annotations

from megatron.compression.message import message_seed
from megatron.compression.state import CompressorState


class StepDraws:
    """The part of a run that is being computed: each draws numbers of its own, and its recomputation the same again.

    Attributes:
        iteration: 0-based; 0 in evaluations.
        micro_batch: number of the micro-batch in the step, whose forward or backward this is.
    """

    def __init__(self) -> None:
        self.iteration = 0
        self.micro_batch = 0

    def begin(self, iteration: int) -> None:
        """Begins a step; -1 stands for an evaluation."""
        self.iteration, self.micro_batch = max(iteration, 0), 0

    def state(self, *message: int | str) -> CompressorState:
        """A state that lasts for one message, equal at both of its ends.

        Args:
            message: what else the message is known by: its point, its place in the model, its sender.
        """
        number = message_seed(self.iteration, self.micro_batch, *message)
        return CompressorState(counters=dict.fromkeys(("draws", "messages"), number))
