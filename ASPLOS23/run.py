#!/usr/bin/env python3
"""Runs the experiments of Optimus-CC: on this machine, through Slurm or LSF, or prints the commands.

    python ASPLOS23/run.py fig10 --model 335M --scheme CB-FE-SC --print
    python ASPLOS23/run.py fig10 --model 335M --slurm --data-path web_text_document --vocab-file vocab.json \\
        --merge-file merges.txt
    python ASPLOS23/run.py fig10 --model 335M --report
    python ASPLOS23/run.py tbl2 --local                       a toy model, all schemes, then the report
    python ASPLOS23/run.py fig14 --local                      the kernels of this machine, without a model

Each scheme of an experiment is a run of its own, whose log is OUT/EXPERIMENT/MODEL/SCHEME/log.jsonl; the report reads
what is there. What follows -- goes to pretrain_gpt.py, for fig14 to benchmarks/kernels.py.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    from _clone import start_program

    start_program("ASPLOS23.run")

import numpy as np

from ASPLOS23.experiments import (
    CASES,
    Experiment,
    ModelCase,
    names_in,
    read_experiment,
    read_model,
    specs_of,
)
from ASPLOS23.progress import run_shown
from ASPLOS23.report import round_logs, write_report
from megatron.base.documents import read_yaml
from megatron.base.errors import UserError
from megatron.data.indexed import IndexedWriter

REPO = Path(__file__).resolve().parents[1]

FIRST_NODE = "FIRST_NODE"
RENDEZVOUS = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{FIRST_NODE}:29500")


def toy_prefix(out: Path, model: ModelCase) -> Path:
    """Path of the data of the model toy; each vocabulary has its own."""
    return out / "data" / f"toy{model.config['tokenizer']['vocab_size']}_document"


def make_toy_data(prefix: Path, vocab_size: int) -> None:
    """Makes documents in which each token nearly determines the next one, once."""
    if not prefix.with_suffix(".idx").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(0)
        with IndexedWriter(prefix, dtype=np.dtype(np.uint16)) as writer:
            for _ in range(400):
                steps = random.integers(1, 4, int(random.integers(50, 200)))
                writer.add_document(np.append(np.cumsum(steps) * 3 % vocab_size, vocab_size))


@dataclass(frozen=True)
class ExperimentRun:
    """One scheme of an experiment on a model.

    Args:
        experiment, model, scheme: the experiment, the model, and the name of the scheme.
        specs: specs of ``--compress``.
        out: folder of its log and checkpoints.
        extra: further flags.
        local: whether it runs on this machine.
    """

    experiment: Experiment
    model: ModelCase
    scheme: str
    specs: tuple[str, ...]
    out: Path
    extra: tuple[str, ...]
    local: bool

    def flags(self) -> list[str]:
        """All flags for pretrain_gpt.py."""
        experiment = self.experiment
        short = self.local and experiment.local_iterations is not None
        iterations = experiment.local_iterations if short else experiment.iterations
        words = [*self.model.flags(), "--train-iters", str(iterations), "--log-interval", "1", "--log-comm"]
        words += ["--log-json-file", str(self.out / "log.jsonl"), *experiment.flags]
        if not self.local:
            words += ["--save", str(self.out / "checkpoints"), "--load", str(self.out / "checkpoints")]
        for spec in self.specs:
            words += ["--compress", spec]
        return [*words, *self.extra]

    def command(self) -> list[str]:
        """The command on this machine, or on each node where the model takes several."""
        nodes, each = self.model.nodes, min(self.model.ranks, self.model.ranks_per_node)
        if self.local or nodes == 1:
            words = ["--nproc-per-node", str(self.model.ranks)]
        else:
            words = ["--nnodes", str(nodes), "--nproc-per-node", str(each), *RENDEZVOUS]
        return ["python", "tools/launch.py", *words, "pretrain_gpt.py", *self.flags()]

    @property
    def _job(self) -> str:
        return f"{self.experiment.name}-{self.model.name}-{self.scheme}"

    def slurm(self) -> list[str]:
        """The submission of ``examples/slurm/pretrain_gpt.sbatch``."""
        own = [f"--job-name={self._job}", f"--nodes={self.model.nodes}", f"--gpus-per-node={self.model.ranks_per_node}"]
        return ["sbatch", *own, "examples/slurm/pretrain_gpt.sbatch", *self.flags()]

    def lsf(self) -> list[str]:
        """The submission of ``examples/lsf/pretrain_gpt.lsf``, whose flags are in the environment."""
        return ["bsub", "-J", self._job, "-n", str(self.model.nodes), "-gpu", f"num={self.model.ranks_per_node}"]

    def environment(self) -> dict[str, str]:
        """The environment of the job scripts."""
        ranks = str(min(self.model.ranks, self.model.ranks_per_node))
        return {"RUN_DIR": str(self.out), "RANKS_PER_NODE": ranks, "FLAGS": shlex.join(self.flags())}


def start(run: ExperimentRun, how: str, turn: str = "") -> None:
    """Prints, runs or submits one run.

    Args:
        run: the run.
        how: print, local, slurm or lsf.
        turn: its round, for what is shown.

    Raises:
        UserError: when it fails.
        OSError: when its folder cannot be made.
    """
    if how == "print":
        where = f", on each of {run.model.nodes} nodes; {FIRST_NODE}: one of them" if run.model.nodes > 1 else ""
        print(f"# {run.scheme}{where}\n{shlex.join(run.command())}\n", flush=True)
        return
    run.out.mkdir(parents=True, exist_ok=True)
    if how == "local":
        (run.out / "log.jsonl").unlink(missing_ok=True)
        words = [sys.executable, "tools/launch.py", "--standalone", *run.command()[2:]]
        env, given = {"OMP_NUM_THREADS": "1", **os.environ}, None
    else:
        words = run.slurm() if how == "slurm" else run.lsf()
        env = {**os.environ, **run.environment()}
        given = None if how == "slurm" else (REPO / "examples" / "lsf" / "pretrain_gpt.lsf").read_text()
    name, log = f"{run.experiment.name} {run.model.name} {run.scheme}{turn}", run.out / "output.txt"
    try:
        if how == "local":
            status = run_shown(words, env, REPO, log, name)
        else:
            print(f"{name}: {words[0]}", flush=True)
            status = subprocess.run(words, cwd=REPO, env=env, input=given, text=True).returncode
    except OSError as error:
        if how == "local":
            raise
        raise UserError(f"{words[0]}: {error.strerror}; is it installed here?") from error
    if status:
        shown = f"; everything it said is in {log}\n{log.read_text()[-4000:]}" if how == "local" else ""
        raise UserError(f"{run.scheme}: {Path(words[0]).name} ended with exit status {status}{shown}")


def take_turns(runs: Sequence[ExperimentRun], rounds: int) -> None:
    """Runs the schemes on this machine, one after the other in each round, so that all see the same state of it.

    Raises:
        UserError: when a run fails.
        OSError: when a folder cannot be made.
    """
    for number in range(1, rounds + 1):
        for run in runs:
            start(replace(run, out=run.out / f"round{number}"), "local", f", round {number} of {rounds}")


def missing_flags(model: ModelCase, given: Mapping[str, str | None], extra: Sequence[str]) -> list[str]:
    """Flags of the data that a run of the model needs and nobody gives.

    Args:
        model: model that is trained.
        given: values of the flags of the data.
        extra: further flags, which may name other data or another tokenizer.
    """
    named = {word.split("=")[0] for word in extra}
    own = model.config["tokenizer"]["tokenizer_type"] == "GPT2BPETokenizer" and "--tokenizer-type" not in named
    needed = ["--data-path", *(("--vocab-file", "--merge-file") if own else ())]
    return [flag for flag in needed if not given[flag] and flag not in named]


def runs_of(
    options: argparse.Namespace, experiment: Experiment, model: ModelCase, extra: Sequence[str]
) -> list[ExperimentRun]:
    """The runs of an experiment, one for each scheme asked for.

    Raises:
        UserError: when the experiment has no such scheme, or no data is given.
    """
    schemes = read_yaml(CASES / "schemes.yaml")
    chosen = options.scheme.split(",") if options.scheme else list(experiment.schemes)
    unknown = [name for name in chosen if name not in schemes]
    if unknown:
        raise UserError(f"--scheme {unknown[0]}: the schemes are {', '.join(schemes)}")
    out = Path(options.out).resolve()
    given = {"--data-path": options.data_path, "--vocab-file": options.vocab_file, "--merge-file": options.merge_file}
    if model.name == "toy" and not options.data_path:
        given["--data-path"] = str(toy_prefix(out, model))
    missing = [] if options.report else missing_flags(model, given, extra)
    stand_ins = {flag: flag.strip("-").replace("-", "_").upper() for flag in missing}
    if missing and options.how != "print":
        raise UserError(f"{model.name} needs {', '.join(missing)}; only the model toy makes its own data")
    if missing:
        print(f"# {', '.join(stand_ins.values())}: {', '.join(missing)} put yours in\n", flush=True)
    data = [word for flag, value in {**given, **stand_ins}.items() if value for word in (flag, value)]
    return [
        ExperimentRun(
            experiment, model, name, specs_of(schemes[name], model), out / experiment.name / model.name / name,
            (*data, *extra), options.how == "local",
        )
        for name in chosen
    ]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("experiment", help=f"{', '.join([*names_in('experiments'), 'fig14'])}")
    made.add_argument("--model", help=f"{', '.join(names_in('models'))}; toy with --local unless given")
    made.add_argument("--replicas", type=int, help="data-parallel ones; those of the case unless given")
    made.add_argument("--scheme", help="comma-separated; all of the experiment unless given")
    how = made.add_mutually_exclusive_group()
    for name, text in (
        ("print", "print the commands (what happens unless another is asked for)"),
        ("local", "run on this machine, one scheme after the other (fig10: in turns), and report"),
        ("slurm", "submit a job for each scheme with sbatch"),
        ("lsf", "submit a job for each scheme with bsub"),
    ):
        how.add_argument(f"--{name}", dest="how", action="store_const", const=name, default="print", help=text)
    how.add_argument("--report", action="store_true", help="read the logs and write the table and the figure")
    made.add_argument("--rounds", type=int, help="runs of each scheme in fig10 --local, where schemes take turns (5)")
    made.add_argument("--out", default="asplos23_out", help="folder of logs and reports (asplos23_out)")
    made.add_argument("--data-path", help="prefix of the data")
    made.add_argument("--vocab-file", help="of the tokenizer")
    made.add_argument("--merge-file", help="of the tokenizer")
    return made


def measure_kernels(options: argparse.Namespace, extra: Sequence[str]) -> int:
    """Prints or runs the benchmark that is fig14; returns its exit status.

    Raises:
        UserError: when a flag of training runs is given.
        OSError: when its folder cannot be made.
    """
    names = ("report", "model", "replicas", "scheme", "rounds", "data_path", "vocab_file", "merge_file")
    given = [*(name for name in names if getattr(options, name)), options.how]
    if given[0] not in ("print", "local"):
        flag = f"--{given[0].replace('_', '-')}"
        raise UserError(f"{flag} is not for fig14, which measures this machine's kernels: use --print or --local")
    folder = Path(options.out).resolve() / "fig14"
    bench = ["-m", "benchmarks.kernels", "--out", str(folder), *extra]
    if options.how == "print":
        print(shlex.join(["python", *bench]), flush=True)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.run([sys.executable, *bench], cwd=REPO).returncode


def run_experiment(options: argparse.Namespace, extra: Sequence[str]) -> None:
    """Prints, runs, submits or reports the runs of an experiment.

    Raises:
        UserError: when the request is invalid, or a run fails.
        OSError: when the folder cannot be written.
    """
    experiment = read_experiment(options.experiment)
    if options.model is None and options.how != "local":
        raise UserError(f"--model is needed: {', '.join(names_in('models'))}")
    if options.rounds is not None:
        if options.how != "local" or experiment.local_rounds is None:
            raise UserError("--rounds is for fig10 --local, whose schemes take turns: leave it out")
        if options.rounds < 2:
            raise UserError(
                f"--rounds {options.rounds}: give at least 2, so that the runs of a scheme show their range"
            )
    layout = dict(experiment.layouts.get(options.model or "toy", {}))
    if options.replicas is not None:
        if options.replicas < 1:
            raise UserError(f"--replicas {options.replicas}: give at least 1")
        layout["replicas"] = options.replicas
    model = read_model(options.model or "toy", layout)
    runs = runs_of(options, experiment, model, extra)
    if options.how != "print" and not options.data_path and model.name == "toy":
        make_toy_data(toy_prefix(Path(options.out).resolve(), model), int(model.config["tokenizer"]["vocab_size"]))
    started = () if options.report else runs
    for log in (log for run in started if options.how != "print" for log in round_logs(run.out)):
        log.unlink()  # of an earlier comparison
    if options.how == "local" and experiment.local_rounds:
        take_turns(runs, options.rounds or experiment.local_rounds)
    else:
        for run in started:
            start(run, options.how)
    if options.report or options.how == "local":
        folder = runs[0].out.parent
        print(write_report(experiment.report, experiment.title, {run.scheme: run.out for run in runs}, folder))


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    options, extra = parser().parse_args(words[:cut]), words[cut + 1 :]
    try:
        if options.experiment == "fig14":
            return measure_kernels(options, extra)
        run_experiment(options, extra)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        place = error.filename or options.out
        print(f"error: {place}: {error.strerror}; give --out a folder that can be written", file=sys.stderr)
        return 1
    return 0
