"""Examples and documents say only what is so: their commands parse, their files exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron.base.option import field_options
from megatron.compression.builtin import BUILTIN
from megatron.compression.outer import PRESETS, OuterOptions
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import read_specs, specs_by_point
from megatron.config.flags import parse_args, parse_program
from megatron.config.kinds import PROGRAMS, ModelType
from megatron.config.optimizer import OptimizerConfig
from megatron.config.tasks import TaskCheckpointConfig, TaskConfig, parse_task, sized
from megatron.config.translate.known import KNOWN_FLAGS
from megatron.evaluation.command import ZeroShotFlags
from megatron.evaluation.harness_command import EvaluationFlags
from megatron.evaluation.sweep_command import SweepFlags
from megatron.inference.flags import ModelFlags, SamplingFlags, parse_flags
from megatron.inference.generate_command import DESCRIPTION, GenerationTaskFlags
from megatron.inference.serve_command import ServerFlags

REPO = Path(__file__).resolve().parents[2]
PAGES = ("architecture", "bert", "t5", "tasks", "moe", "muon", "islands", "guides/training")
DOCUMENTS = [REPO / "README.md", *(REPO / "docs" / f"{name}.md" for name in PAGES)]

TASK_EXAMPLES = {"finetune_mnli_distributed.sh": ("MNLI", 64), "finetune_race_distributed.sh": ("RACE", 128)}
"""Task, and sequences of a global batch."""
WORLDS = {
    "pretrain_gpt.sh": 1,
    "pretrain_gpt_distributed.sh": 8,
    "pretrain_gpt_distributed_with_mp.sh": 8,
    "pretrain_bert.sh": 1,
    "pretrain_bert_distributed.sh": 8,
    "pretrain_bert_distributed_with_mp.sh": 8,
    "pretrain_t5.sh": 1,
    "pretrain_t5_distributed.sh": 8,
    "pretrain_t5_distributed_with_mp.sh": 8,
    "pretrain_gpt3_175B.sh": 1024,
    "switch_to_radius.sh": 8,
    "moe/pretrain_gpt_350M_PR-MoE.sh": 64,
    "moe/pretrain_gpt_1.3B_MoE-128.sh": 128,
}


def _recorded_arguments(script: Path, folder: Path, program: str) -> list[str]:
    """Runs an example with a launcher that only writes down what it was asked to run."""
    record = folder / "argv"
    for name in ("python", "srun"):
        stub = folder / name
        stub.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(record))}\n')
        stub.chmod(0o755)
    (folder / "scontrol").write_text("#!/bin/sh\necho localhost\n")
    (folder / "scontrol").chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(script)], check=True, env=env, cwd=REPO)
    words = record.read_text().splitlines()
    return words[words.index(program) + 1 :]


@pytest.mark.parametrize("name", WORLDS)
def test_examples_resolve_for_their_world(name: str, tmp_path: Path) -> None:
    kind: ModelType = "bert" if "bert" in name else "t5" if "t5" in name else "gpt"
    parsed = parse_program(_recorded_arguments(REPO / "examples" / name, tmp_path, PROGRAMS[kind]), kind)
    config = parsed.resolve(WORLDS[name], cuda_available=True)
    assert config.precision.bf16
    assert not [note for note in parsed.notes if "no effect" in note]


@pytest.mark.parametrize("name", TASK_EXAMPLES)
def test_examples_of_tasks_resolve_for_their_world(name: str, tmp_path: Path) -> None:
    parsed, given, _ = parse_task(_recorded_arguments(REPO / "examples" / name, tmp_path, "tasks/main.py"))
    parsed.config = sized(parsed, given, 8, (10**5, 10**4))
    config = parsed.resolve(8, cuda_available=True)
    assert (given.task, config.training.global_batch_size) == TASK_EXAMPLES[name]
    assert config.precision.bf16
    assert not [note for note in parsed.notes if "no effect" in note]


def test_every_example_is_tested() -> None:
    folder = REPO / "examples"
    scripts = {str(path.relative_to(folder)) for path in (*folder.glob("*.sh"), *folder.glob("moe/*.sh"))}
    assert scripts == {*WORLDS, *TASK_EXAMPLES, "quickstart.sh", "finetune_gpt2_aqsgd.sh", "finetune_deberta_aqsgd.sh"}
    for script in scripts:
        subprocess.run(["bash", "-n", str(folder / script)], check=True)


def _commands(text: str) -> list[list[str]]:
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(("python ", "make "))]


@pytest.mark.parametrize("page", ["README.md", "docs/guides/training.md"])
def test_commands_for_beginners_parse(page: str) -> None:
    commands = _commands((REPO / page).read_text())
    assert len(commands) >= 5
    targets = re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE)
    for words in commands:
        if words[0] == "make":
            assert words[1] in targets
            continue
        assert (REPO / words[1]).is_file()
        if words[1] == "pretrain_gpt.py":
            parse_args(words[2:]).resolve(1)
        elif words[1] == "tools/generate_samples_gpt.py":
            parse_flags(words[2:], {"task": GenerationTaskFlags, "sampling": SamplingFlags}, words[1], DESCRIPTION)


@pytest.mark.parametrize("page", ["README.md", "docs/guides/training.md", "docs/islands.md", "docs/moe.md"])
def test_specs_for_beginners_are_accepted(page: str) -> None:
    specs = re.findall(r"--compress ([a-z-]+=[a-z][^\s`]*)", (REPO / page).read_text())
    assert specs
    for spec in specs:
        assert read_specs(specs_by_point(spec), Registry(BUILTIN), RunLength(1000)), spec


def _flags_of_sections() -> str:
    """Flags of the programs whose flags are generated from sections of their own."""
    sections: tuple[type, ...] = (ModelFlags, SamplingFlags, GenerationTaskFlags, ServerFlags, EvaluationFlags)
    sections += (ZeroShotFlags, SweepFlags, TaskConfig, TaskCheckpointConfig)
    return " ".join(f"--{flag}" for cls in sections for field in field_options("", cls) for flag in field.flags)


def test_flags_named_in_documents_exist() -> None:
    fields = (REPO / "docs" / "flags.md").read_text()
    outside = {"--nproc-per-node", "--no-python", "--max-restarts", "--train-iters", "--signals-to-handle"}
    for document in DOCUMENTS:
        named = set(re.findall(r"(?<![\w-])--[a-zA-Z0-9_-]+", document.read_text()))
        scripts = [
            *(REPO / "tools").rglob("*.py"),
            *(REPO / "benchmarks").rglob("*.py"),
            *(REPO / "megatron").rglob("*command.py"),
            *(REPO / "megatron" / "launcher").glob("*.py"),
            REPO / "ASPLOS23" / "run.py",
        ]
        tools = "".join(path.read_text() for path in scripts) + _flags_of_sections()
        for written in named - outside:
            flag = written.replace("_", "-")
            known = f"`{flag}`" in fields or f"{flag} " in fields or flag.strip("-") in KNOWN_FLAGS
            assert known or f'"{flag.strip("-")}"' in tools or flag in tools, f"{document.name} names {flag}"


def test_the_tables_of_muon_and_of_islands_have_the_programs_defaults() -> None:
    muon, islands = ((REPO / "docs" / f"{name}.md").read_text() for name in ("muon", "islands"))
    flags = dict(re.findall(r"^\| `--(muon-[a-z-]+)` \| `?([\w.]+)`? \|", muon, re.MULTILINE))
    names = ("muon_momentum", "muon_num_ns_steps", "muon_scale_mode", "muon_extra_scale_factor")
    optimizer, outer = OptimizerConfig(lr=1.0), OuterOptions()
    assert flags == {name.replace("_", "-"): str(getattr(optimizer, name)) for name in names}
    presets = dict(re.findall(r"^\| `([a-z]+)` \| `([^`|]+)` \|$", islands, re.MULTILINE))
    assert {name: dict(pair.split("=") for pair in words.split(",")) for name, words in presets.items()} == PRESETS
    options: dict[str, str] = {}
    for written, cell in re.findall(r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*) \| .* \| ([^|]+) \|$", islands, re.MULTILINE):
        found = re.findall(r"`([a-z-]+)`", written)
        options |= dict(zip(found, cell.split(", "), strict=False))
    defaults = {option.flag: option.default for option in field_options("outer", OuterOptions)}
    defaults |= {"outer-momentum": outer.momentum, "offload": "on" if outer.offload else "off"}
    assert {name: options[name] for name in defaults} == {name: _in_words(value) for name, value in defaults.items()}


def _in_words(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_files_named_in_documents_exist() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
        for path in re.findall(r"`((?:megatron|tools|docs|examples)/[\w/.]+)`", text):
            assert (REPO / path).exists(), f"{document.name} names {path}"


def test_every_package_s_readme_names_its_modules() -> None:
    packages = [path.parent for path in (REPO / "megatron").glob("*/__init__.py")]
    packages += [path.parent for path in (REPO / "megatron/parallel").glob("*/__init__.py")]
    assert len(packages) >= 19
    for package in packages:
        readme = (package / "README.md").read_text()
        if package.name in ("compression", "config", "planner", "tokenizer"):
            continue  # many files of a kind, which the README describes together
        for module in package.glob("*.py"):
            assert module.name == "__init__.py" or f"{module.name}`" in readme, f"{module}: not in the README"


@pytest.mark.parametrize("model", ["355M", "2.0B"])
@pytest.mark.parametrize("scheme", ["dense", "radius", "topk"])
def test_radius_runs_resolve(model: str, scheme: str, tmp_path: Path) -> None:
    """What examples/slurm/radius.sh submits, and where a run that is not dense begins."""
    record, dense, run = tmp_path / "argv", tmp_path / "dense", tmp_path / "run"
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {shlex.quote(str(record))}\n')
    (tmp_path / "sbatch").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN_DIR": str(run), "DENSE_DIR": str(dense)}
    command = ["bash", "examples/slurm/radius.sh", model, scheme, "--seed", "5"]
    done = subprocess.run(command, env=env, cwd=REPO, capture_output=True, text=True)
    if scheme != "dense":
        assert done.returncode == 1
        assert "holds no checkpoint: run the dense one first" in done.stderr
        (dense / "iter_0000070").mkdir(parents=True)
        (dense / "latest_checkpointed_iteration.txt").write_text("70")
        done = subprocess.run(command, env=env, cwd=REPO, capture_output=True, text=True)
        assert (run / "checkpoints" / "iter_0000070").is_dir()
        assert (run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "70"
    assert done.returncode == 0, done.stderr
    words = record.read_text().splitlines()
    given = ["--save", "checkpoints", *words[words.index("examples/slurm/pretrain_gpt.sbatch") + 1 :]]
    config = parse_args(given).resolve(64, cuda_available=True)
    assert config.training.seed == 5
    assert bool(config.compression.compress) == (scheme != "dense")
