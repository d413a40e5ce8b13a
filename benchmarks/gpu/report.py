"""The benchmark's report: a table for each section, and the claims beside the measured values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.setting import Claim, Section
from benchmarks.rows import Book
from benchmarks.tables import Table
from megatron.base.markdown import markdown_table

Header = Mapping[str, Any]


def heading(header: Header) -> str:
    """The heading: hardware, versions, date."""
    gib = float(header["memory_bytes"]) / 2**30
    memory = f", {gib:.0f} GiB" if gib else ""
    return "\n".join(
        [
            "# GPU benchmark",
            "",
            f"- {header['device']}{memory}, driver {header['driver']}; {header['cpus']} processor cores",
            f"- {header['date']}; torch {header['torch']}, CUDA {header['cuda']}, NCCL {header['nccl']}",
            f"- git commit {header['commit']}; sources {header['sources']}",
            f"- a large copy moves {header['copy_bytes_per_s'] / 1e9:,.0f} GB/s, read and written; a large bf16"
            f" product computes {header['product_flops'] / 1e12:,.1f} TFLOP/s, the peak is"
            f" {header['peak_flops'] / 1e12:,.1f}",
        ]
    )


def table(section: Section, book: Book, order: Sequence[str]) -> str:
    """A table of the finished rows, and the reasons why others are missing."""
    rows = [book.rows[key] for key in order if key in book.rows]
    lines = [f"## {section.TITLE}", "", section.NOTE, ""]
    if rows:
        lines += [Table(*section.COLUMNS).filled(rows).text(rows), ""]
    # One line for all that have the same reason.
    missing: dict[str, list[str]] = {}
    for key in order:
        if key not in book.rows:
            missing.setdefault(book.failures.get(key, "not asked for"), []).append(key)
    for why, keys in missing.items():
        named = "; ".join(keys) if len(keys) <= 3 else f"{len(keys)} rows, the first one {keys[0]}"
        lines.append(f"Not measured ({named}): {why}.")
    return "\n".join(lines).rstrip()


def wanted(claims: Sequence[Claim]) -> str:
    """A table of all claims, and how many rows meet them."""
    rows = []
    for claim in claims:
        low, high = min(claim.values), max(claim.values)
        measured = f"{low:.2f}" if len(claim.values) == 1 else f"{low:.2f} to {high:.2f}"
        rows.append((claim.what, f">= {claim.least:g}", measured, f"{claim.met} of {len(claim.values)}"))
    return "## Wanted\n\n" + markdown_table(("what", "wanted", "measured", "rows that have it"), rows)


def merged(claims: Sequence[Claim]) -> list[Claim]:
    """Merges claims of the same words."""
    found: dict[str, Claim] = {}
    for claim in claims:
        known = found.get(claim.what)
        values = (*known.values, *claim.values) if known else claim.values
        found[claim.what] = Claim(claim.what, claim.least, values)
    return list(found.values())
