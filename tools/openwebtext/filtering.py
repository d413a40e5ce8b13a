"""Steps that look at one document at a time: every line is kept, changed or dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.errors import UserError
from tools.openwebtext.processes import in_processes
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
    paths: Iterable[str | Path],
    take: Callable[[Judged], None],
    *,
    workers: int,
    skip_bad: bool,
    what: str,
    prepare: Callable[..., None] | None = None,
    arguments: Sequence[Any] = (),
) -> Report:
    """Judges every line of some files, in several processes, and hands the results on in order.

    Args:
        judge: a function of a module.
        paths: of JSON lines.
        take: gets every result.
        workers: processes.
        skip_bad: count what is no document instead of ending there.
        what: for the progress bar.
        prepare, arguments: called once in every process.

    Raises:
        UserError: naming the file and the line that is no document.
    """
    report = Report()

    def parts() -> Iterable[_Part]:
        for path in paths:
            for chunk in in_chunks(numbered_lines(path)):
                yield _Part(judge, str(path), chunk, skip_bad)

    report.add("documents", 0)
    with progress((), what) as bar:
        for results in in_processes(_judge_part, parts(), workers, prepare, arguments):
            for result in results:
                report.add("documents")
                for reason in result.reasons:
                    report.add(reason)
                if result.kept:
                    report.add("written", len(result.kept))
                take(result)
            bar.update(len(results))
    return report
