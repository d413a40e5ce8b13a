"""Compression of what crosses the network."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.option import option


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """One spec for each communication point."""

    compress: list[str] = option(  # noqa: RUF009
        [],
        "Compress a communication point. Only none (or identity) is available so far.",
        repeatable=True,
        metavar="POINT=SPEC",
    )
