"""Search for the island whose contribution spoils a mean."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.distributed.errors import CommunicationError


class OutlierSearch:
    """Islands of a round that may have spoiled its mean; the same on all of them.

    A sender's claims about its contribution prove nothing, and a sum does not show where it comes from. So the round is
    tried again with all islands, in case the error was transient, and then without each of them in turn: the mean is
    sound without the island that spoils it.

    ``suspect`` is the island that the next attempt leaves out; None for none.
    """

    def __init__(self) -> None:
        self.suspect: int | None = None
        self._members: tuple[int, ...] = ()
        self._turns: list[int | None] | None = None

    def next_suspect(self, members: Sequence[int]) -> None:
        """Choose the next suspect, after an attempt whose mean was not sound.

        Args:
            members: islands that took part.

        Raises:
            CommunicationError: when leaving out any single island does not make the mean sound.
        """
        if self._turns is None:
            self._members = tuple(members)
            self._turns = [None, *(members if len(members) > 1 else ())]
        if not self._turns:
            raise CommunicationError(
                f"the mean of the differences of islands {', '.join(map(str, self._members))} is not finite, or far "
                "larger than each of them, whichever island is left out; lower --lr or outer-lr"
            )
        self.suspect = self._turns.pop(0)

    def describe(self, iteration: int) -> str:
        """A line for the user on the round after an iteration."""
        again = "with all islands" if self.suspect is None else f"without island {self.suspect}"
        return (
            f"the mean that was received in the round at iteration {iteration} is not finite, or far larger than "
            f"differences are; it is tried again {again}"
        )
