"""How the JUPITER benchmark reads a log: its patterns and columns, in JUBE's words."""

from __future__ import annotations

import re

PATTERNS = {
    "iter_pat": r"iteration\s+$jube_pat_int/\s*$jube_pat_nint",
    "tflops_pat": r"TFLOPs:\s+$jube_pat_fp",
    "elp_pat": r"elapsed time per iteration \(s\):\s+$jube_pat_fp",
    "jobid": r"Submitted batch job $jube_pat_int",
}
"""Patterns for job.out."""

DERIVED = {
    "iterations": "$iter_pat_max",
    "tokens_per_second": "(1.0/$elp_pat_avg)*$global_batch_size*$sequence_length",
    "throughput_in_time": "(20000000/$tokens_per_second)",
}
"""Values computed from the matches, in Python."""

COLUMNS = ("jobid", "iterations", "tflops_pat_avg", "tokens_per_second", "throughput_in_time")

_WORDS = {
    "$jube_pat_int": r"([+-]?\d+)",
    "$jube_pat_nint": r"(?:[+-]?\d+)",
    "$jube_pat_fp": r"([+-]?(?:\d*\.?\d+(?:[eE][-+]?\d+)?|\d+\.))",
}


def matches(name: str, log: str) -> list[float]:
    """The numbers that a pattern finds, as JUBE finds them."""
    pattern = PATTERNS[name]
    for word, meaning in _WORDS.items():
        pattern = pattern.replace(word, meaning)
    return [float(number) for number in re.findall(pattern, log, re.MULTILINE)]


def workflow(log: str, batch: int, sequence: int) -> str:
    """A workflow in YAML that only reads a log as the benchmark does, and prints its figures."""
    types = {"tflops_pat": "float", "elp_pat": "float"}
    patterns = [f"{{name: {name}, type: {types.get(name, 'int')}, _: '{text}'}}" for name, text in PATTERNS.items()]
    patterns += [f"{{name: {name}, type: float, mode: python, _: '{text}'}}" for name, text in DERIVED.items()]
    return f"""
name: benchmark
outpath: runs
parameterset:
  name: sizes
  parameter:
    - {{name: global_batch_size, type: int, _: {batch}}}
    - {{name: sequence_length, type: int, _: {sequence}}}
step:
  name: benchmark
  use: sizes
  do: cp {log} job.out
patternset:
  name: perf_patterns
  pattern: [{", ".join(patterns)}]
analyser:
  name: analyse
  use: perf_patterns
  analyse: {{step: benchmark, file: job.out}}
result:
  use: analyse
  table: {{name: result, style: csv, column: [{", ".join(COLUMNS)}]}}
"""
