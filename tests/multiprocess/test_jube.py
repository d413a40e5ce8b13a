"""The JUPITER benchmark's workflow, run by JUBE; sbatch and srun are stand-ins that run everything here."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.config.flags import parse_args
from megatron.config.run import RunConfig
from megatron.data.preprocess import command, vocab_command
from tests.support.cli import REPO
from tests.support.jubench import COLUMNS, workflow
from tests.unit.config.original_scripts import JUPITER

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.usefixtures("warm"),
    pytest.mark.skipif(shutil.which("jube") is None, reason="jube is missing: apt-get install jube"),
]

WORKFLOW = REPO / "jube" / "megatron_cc.yaml"

SBATCH = """
for word; do
  case $word in
    --output=*) out=${word#*=} ;;
    --error=*) err=${word#*=} ;;
    --*) ;;
    *) break ;;
  esac
  printf '%s\\n' "$word" >>"$RECORD"
  shift
done
printf '%s\\n' "$@" >"$RECORD.job"
echo "Submitted batch job 4711"
[ -n "$ONLY_RECORD" ] || SLURM_JOB_ID=4711 setsid bash "$@" >"$out" 2>"$err" </dev/null &
"""


class Jube:
    """JUBE in a folder of a test.

    Args:
        folder: for runs and stand-ins.
        env: variables that a user exports.
    """

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self.record = folder / "sbatch.words"
        tools = folder / "bin"
        tools.mkdir()
        for name, text in (("sbatch", SBATCH), ("srun", 'shift\nexec "$@"\n')):
            (tools / name).write_text(f"#!/bin/bash\n{text}")
            (tools / name).chmod(0o755)
        path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
        variables = {
            "PATH": path,
            "RECORD": str(self.record),
            "OMP_NUM_THREADS": "1",
            "ONLY_RECORD": "",
            "EXTRA_FLAGS": "",
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.env = {**inherited, **variables, **env}

    def __call__(self, *words: str, status: int = 0) -> str:
        """Output of JUBE."""
        command = ["jube", *words]
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=250)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run(self, *tags: str, status: int = 0) -> str:
        words = ["run", str(WORKFLOW), "--tag", *tags, "--outpath", "runs", "--error", "--hide-animation"]
        return self(*words, status=status)

    @property
    def work(self) -> Path:
        """The folder that the first run works in."""
        return self.folder / "runs" / "000000" / "000000_train" / "work"

    def wait(self) -> None:
        """Waits for the end of the job."""
        while not any((self.work / name).exists() for name in ("ready", "error")):
            time.sleep(0.2)
        assert (self.work / "ready").exists(), "".join(path.read_text() for path in self.work.glob("job.*"))

    def table(self, runs: str = "runs") -> dict[str, str]:
        """The only row of the result table."""
        rows = self("result", runs, "--analyse", "--id", "last", "--style", "csv")
        (row,) = csv.DictReader(line for line in rows.splitlines() if "," in line)
        return row


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables that name a corpus and its vocabulary."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [f"the value of item {n % 7} is {n}, and that of the next {n + 1}. " * 5 for n in range(300)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    words = ["--input", str(folder / "corpus.jsonl")]
    assert vocab_command.main([*words, "--vocab-size", "300", "--output-dir", str(folder)]) == 0
    files = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    flags = ["--tokenizer-type", "GPT2BPETokenizer", *files, "--append-eod", "--workers", "1"]
    assert command.main([*words, "--output-prefix", str(folder / "corpus"), *flags]) == 0
    return {"DATA_PATH": str(folder / "corpus_text_document"), "VOCAB_FILE": files[1], "MERGE_FILE": files[3]}


def _faster(work: Path) -> list[dict[str, float]]:
    """The log intervals of a run. Both of its logs then tell of a device whose TFLOP/s two digits can show."""
    log, records = work / "job.out", work / "log.jsonl"
    events = [json.loads(line) for line in records.read_text().splitlines()]
    windows = [event for event in events if event["kind"] == "train"]
    for number, window in enumerate(windows):
        window |= {"benchmark_tflops": 137.89 + number, "model_tflops": 103.41 + 2 * number}
    rates = iter(windows)
    log.write_text(
        re.sub(r"TFLOPs: [\d.]+", lambda _: f"TFLOPs: {next(rates)['benchmark_tflops']:.2f}", log.read_text())
    )
    records.write_text("".join(json.dumps(event) + "\n" for event in events))
    return windows


@pytest.mark.parametrize(("size", "ranks", "batch"), [("13", 2, 8), ("175", 4, 4)])
def test_a_run_ends_in_a_table(size: str, ranks: int, batch: int, data: dict[str, str], tmp_path: Path) -> None:
    """JUPITER's two configurations in toy size, submitted, waited for, analyzed; the benchmark reads the same."""
    jube = Jube(tmp_path, **data)
    jube.run(size, "toy")
    jube.wait()
    jube("continue", "runs", "--error", "--hide-animation")
    windows = _faster(jube.work)
    row = jube.table()
    assert [window["iteration"] for window in windows] == [10, 20]
    assert len(list((jube.work / "ranks").rglob("stdout.log"))) == ranks

    seconds = sum(round(window["seconds_per_iteration"], 4) for window in windows) / len(windows)
    assert {name: row[name] for name in ("Job", "Model", "Batch size", "Iterations")} == {
        "Job": "4711",
        "Model": f"{size}B (toy)",
        "Batch size": str(batch),
        "Iterations": "20",
    }
    assert float(row["Seconds per iteration"]) == pytest.approx(seconds, abs=6e-5)
    assert float(row["Tokens/s"]) == pytest.approx(batch * 64 / seconds, rel=1e-6, abs=6e-3)
    assert float(row["TFLOP/s per device (benchmark)"]) == pytest.approx(138.39, abs=6e-3)
    assert float(row["TFLOP/s per device (model)"]) == pytest.approx(104.41, abs=6e-3)
    assert float(row["Report time (s)"]) == pytest.approx(20e6 / (batch * 64 / seconds), rel=1e-6, abs=6e-3)

    (tmp_path / "benchmark.yaml").write_text(workflow(str(jube.work / "job.out"), batch, 64))
    jube("run", "benchmark.yaml", "--outpath", "theirs", "--error", "--hide-animation")
    theirs = jube.table("theirs")
    assert [float(theirs[name]) for name in COLUMNS[:2]] == [4711, 20]
    assert float(theirs["tflops_pat_avg"]) == pytest.approx(138.39)
    assert float(theirs["tokens_per_second"]) == pytest.approx(float(row["Tokens/s"]), abs=6e-3)
    assert float(theirs["throughput_in_time"]) == pytest.approx(float(row["Report time (s)"]), abs=6e-3)


def _configuration(flags: list[str], world_size: int) -> RunConfig:
    """The configuration that flags ask for, without files, logs and the end of the run."""
    config = parse_args(flags).resolve(world_size, cuda_available=True)
    training = replace(config.training, exit_duration_in_mins=None)
    return replace(config, training=training)


SECTIONS = ("model", "parallel", "training", "optimizer", "precision", "recompute", "validation")
"""Of a configuration, that both must agree in."""


@pytest.mark.parametrize(
    ("tags", "script"), [(["13"], "jupiter 13B"), (["175"], "jupiter 175B"), (["175", "bf16"], None)]
)
def test_full_sizes_are_the_benchmarks(
    tags: list[str], script: str | None, data: dict[str, str], tmp_path: Path
) -> None:
    jube = Jube(tmp_path, **data, ONLY_RECORD="1")
    jube.run(*tags)
    nodes = {"13": 8, "175": 96}[tags[0]]
    minutes = {"13": 30, "175": 45}[tags[0]]
    options = jube.record.read_text().splitlines()
    assert {f"--nodes={nodes}", "--ntasks-per-node=1", "--gpus-per-node=4", f"--time={minutes}"} <= set(options)
    _, repository, *numbers = (tmp_path / "sbatch.words.job").read_text().splitlines()[:4]
    assert Path(repository).resolve() == REPO
    assert numbers == [str(nodes), "4"]
    flags = (tmp_path / "sbatch.words.job").read_text().splitlines()[4:]
    assert flags[flags.index("--exit-duration-in-mins") + 1] == str(minutes - 5)
    ours = _configuration(flags, nodes * 4)
    if script is None:
        assert ours.precision.bf16
        return
    theirs = _configuration(JUPITER[script].flags.split(), nodes * 4)
    for name in SECTIONS:
        assert getattr(ours, name) == getattr(theirs, name)


def _refusal(jube: Jube, *tags: str) -> str:
    """Output of a run that cannot be submitted."""
    output = jube.run(*tags, status=1)
    assert not jube.record.exists()
    return output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"DATA_PATH": ""}, "DATA_PATH: is not set"),
        ({"VOCAB_FILE": "vocab.json"}, "VOCAB_FILE vocab.json: begins at no folder that all ranks know"),
        ({"MERGE_FILE": "/no/such"}, "/no/such: is no file that can be read"),
    ],
)
def test_missing_files_are_named_before_a_job_waits(
    change: dict[str, str], message: str, data: dict[str, str], tmp_path: Path
) -> None:
    assert message in _refusal(Jube(tmp_path, **{**data, **change}), "13")


def test_unknown_tags_are_refused(data: dict[str, str], tmp_path: Path) -> None:
    jube = Jube(tmp_path, **data)
    assert "give a tag: 13 or 175" in _refusal(jube, "toy")
    assert "give a tag: 13 or 175" in _refusal(jube, "13", "175")
    assert "tag local: 8 nodes are more than this machine; add the tag toy" in _refusal(jube, "13", "local")


@pytest.mark.parametrize("status", [0, 3])
def test_a_job_without_slurm(status: int, data: dict[str, str], tmp_path: Path) -> None:
    """A stand-in for the launcher writes down its arguments, and ends with a status."""
    jube = Jube(tmp_path, **data, EXTRA_FLAGS="--compress dp-grad=fixpoint,bits=8")
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@"\nexit {status}\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    jube.run("175", "toy", "local", status=1 if status else 0)
    assert not jube.record.exists()
    assert sorted(path.name for path in jube.work.glob("[er]*")) == ["error" if status else "ready"]
    words = (jube.work / "job.out").read_text().splitlines()
    assert words[0].endswith("tools/launch.py")
    assert "--standalone" in words
    assert words[-2:] == ["--compress", "dp-grad=fixpoint,bits=8"]
    config = parse_args(words[words.index(f"{words[0][: -len('tools/launch.py')]}pretrain_gpt.py") + 1 :]).resolve(4)
    assert (config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size) == (2, 2)
