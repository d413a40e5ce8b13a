"""Steps that look at one document at a time: every line is kept, changed or dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.base.errors import UserError
from megatron.data.processes import in_processes
from tools.openwebtext.streams import BAD_LINE, Report, document, in_chunks, numbered_lines, progress


@dataclass(frozen=True)
class Judged:
    """What became of a document.

    Args:
        kept: lines to be written.
        dropped: a line for the file of what was left out, where there is one.
        reasons: what is counted.
    """

    kept: tuple[bytes, ...] = ()
    dropped: bytes | None = None
    reasons: tuple[str, ...] = ()


Judge = Callable[[dict[str, Any], bytes, str], Judged]
"""Of a document, its line, and where it is (for errors)."""


@dataclass(frozen=True)
class _Part:
    judge: Judge
    path: str
    lines: Sequence[tuple[int, bytes]]
    skip_bad: bool


def _judge_part(part: _Part) -> list[Judged]:
    results = []
    for number, line in part.lines:
        where = f"{part.path}, line {number}"
        try:
            results.append(part.judge(document(line, where), line, where))
        except UserError:
            if not part.skip_bad:
                raise
            results.append(Judged(reasons=(BAD_LINE,)))
    return results


def judge_all(
    judge: Judge,
    path: str | Path,
    write: Callable[[bytes], None],
    drop: Callable[[bytes], None] | None = None,
    *,
    workers: int,
    skip_bad: bool,
    what: str,
    prepare: Callable[..., None] | None = None,
    arguments: Sequence[Any] = (),
) -> Report:
    """Judges every line of a file, in several processes, and writes the results in order.

    Args:
        judge: a function of a module.
        path: of JSON lines.
        write, drop: take the lines that are kept, and those of what is left out.
        workers: processes.
        skip_bad: count what is no document instead of ending there.
        what: for the progress bar.
        prepare, arguments: called once in every process.

    Raises:
        UserError: naming the file and the line that is no document.
    """
    report = Report()
    parts = (_Part(judge, str(path), chunk, skip_bad) for chunk in in_chunks(numbered_lines(path)))
    report.add("documents", 0)
    with progress((), what) as bar:
        for results in in_processes(_judge_part, parts, workers, prepare, arguments):
            for result in results:
                report.add("documents")
                for reason in result.reasons:
                    report.add(reason)
                for kept in result.kept:
                    report.add("written")
                    write(kept)
                if drop is not None and result.dropped is not None:
                    drop(result.dropped)
            bar.update(len(results))
    return report
