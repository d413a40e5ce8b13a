"""Vocabulary padding for the tensor-parallel ranks."""

from __future__ import annotations

from megatron.base.errors import UserError


def check_vocabulary(vocab_size: int, multiple: int, tensor: int) -> None:
    """Check that every tensor-parallel rank has entries after padding to a multiple of ``multiple``; else UserError."""
    if _fills_all_ranks(vocab_size, multiple, tensor):
        return
    powers = [1 << power for power in range(multiple.bit_length())]
    fitting = [power for power in powers if power < multiple and _fills_all_ranks(vocab_size, power, tensor)]
    remedy = f"--make-vocab-size-divisible-by {fitting[-1]}" if fitting else "--tensor-model-parallel-size"
    raise UserError(
        f"a vocabulary of {vocab_size} entries, padded to a multiple of --make-vocab-size-divisible-by {multiple} x "
        f"--tensor-model-parallel-size {tensor}, leaves tensor-parallel rank {tensor - 1} none of them; "
        f"{'use' if fitting else 'lower'} {remedy}"
    )


def _fills_all_ranks(vocab_size: int, multiple: int, tensor: int) -> bool:
    rows = -(-vocab_size // (multiple * tensor)) * multiple
    return rows * (tensor - 1) < vocab_size
