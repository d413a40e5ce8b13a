"""Examples and documents match the project: their commands parse, their files exist."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from torch.distributed.run import get_args_parser

from megatron.base.documents import parse_yaml
from megatron.base.errors import UserError
from megatron.base.option import field_options
from megatron.compression.builtin import BUILTIN
from megatron.compression.outer import PRESETS, OuterOptions
from megatron.compression.points import EXPERT_LEGS, EXPERTS, Point
from megatron.compression.registry import Registry
from megatron.compression.schedule import RunLength
from megatron.compression.spec import expand_spec, read_specs
from megatron.config.compression import CompressionConfig
from megatron.config.flags import parse_args, parse_program
from megatron.config.model_types import PROGRAMS, ModelType
from megatron.config.optimizer import OptimizerConfig
from megatron.config.run import RunConfig
from megatron.config.tasks import TaskCheckpointConfig, TaskConfig, build_task_run, parse_task
from megatron.config.translate.known import read_known_flags
from megatron.evaluation.command import ZeroShotFlags
from megatron.evaluation.harness_command import EvaluationFlags
from megatron.evaluation.sweep_command import SweepFlags
from megatron.inference.flags import ModelFlags, SamplingFlags, parse_flags
from megatron.inference.generate_command import DESCRIPTION, GenerationTaskFlags
from megatron.inference.serve_command import ServerFlags
from megatron.training.metrics import Evaluation, PointTraffic, StepMetrics
from megatron.training.sinks import JsonLinesSink
from tests.support.documented import python_blocks
from tools.site_hooks import on_page_markdown

REPO = Path(__file__).resolve().parents[2]
GENERATED = ("docs/reference/flags.md", "docs/reference/flags-of-others.md")
DOCUMENTS = {
    str(path.relative_to(REPO)): path.read_text(encoding="utf-8")
    for path in (REPO / "README.md", *sorted((REPO / "docs").rglob("*.md")))
}
WRITTEN = {name: text for name, text in DOCUMENTS.items() if name not in GENERATED}
"""Documents without the generated ones."""

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
    """Run an example with a launcher that only records its arguments."""
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
    parsed, flags, _ = parse_task(_recorded_arguments(REPO / "examples" / name, tmp_path, "tasks/main.py"))
    parsed.config = build_task_run(parsed, flags, 8, (10**5, 10**4))
    config = parsed.resolve(8, cuda_available=True)
    assert (flags.task, config.training.global_batch_size) == TASK_EXAMPLES[name]
    assert config.precision.bf16
    assert not [note for note in parsed.notes if "no effect" in note]


def test_every_example_is_tested() -> None:
    folder = REPO / "examples"
    scripts = {str(path.relative_to(folder)) for path in (*folder.glob("*.sh"), *folder.glob("moe/*.sh"))}
    assert scripts == {*WORLDS, *TASK_EXAMPLES, "quickstart.sh", "finetune_gpt2_aqsgd.sh", "finetune_deberta_aqsgd.sh"}
    for script in scripts:
        subprocess.run(["bash", "-n", str(folder / script)], check=True)


def _blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of each code block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def _commands(text: str) -> list[list[str]]:
    """Commands of the code blocks, without sudo and comments. Words after an ellipsis belong to the same command."""
    blocks = [block for language, block in _blocks(text) if language in ("", "bash")]
    lines = [line.strip().removeprefix("sudo ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(("python ", "make ", "examples/"))]


COMMANDS = [(name, words) for name, text in WRITTEN.items() for words in _commands(text)]
TRAINING = {"pretrain_gpt.py": "gpt", "pretrain_bert.py": "bert", "pretrain_t5.py": "t5"}


def test_the_pages_have_commands() -> None:
    pages = {name for name, _ in COMMANDS}
    assert len(COMMANDS) >= 60
    assert {"README.md", "docs/guides/training.md", *(f"docs/tutorial/{name}" for name in TUTORIALS)} <= pages


TUTORIALS = ("first-run.md", "compress-a-run.md", "two-machines.md")


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: value if isinstance(value, str) else value[1])
def test_commands_parse(page: str, words: list[str]) -> None:
    """Each command names a file or a target that exists, and training commands have flags that exist and resolve."""
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
        return
    if words[0].startswith("examples/"):
        assert (REPO / words[0]).is_file()
        return
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None
        return
    assert (REPO / words[1]).is_file(), page
    program = next((word for word in words if word in TRAINING), None)
    if program is not None:
        ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
        _check_training(program, words[words.index(program) + 1 :], ranks)
    elif words[1] == "tools/generate_samples_gpt.py":
        parse_flags(words[2:], {"task": GenerationTaskFlags, "sampling": SamplingFlags}, words[1], DESCRIPTION)


def _check_training(program: str, arguments: list[str], ranks: int) -> None:
    kind = cast(ModelType, TRAINING[program])
    is_complete = not {"...", "--config"} & set(arguments)
    words = [word for word in arguments if word not in ("...", "&")]
    if "--help" in words or "--list-compressors" in words:
        return
    if "--config" in words:
        index = words.index("--config")
        assert words[index + 1].endswith(".yaml")
        del words[index : index + 2]
    parsed = parse_program(words, kind)  # raises for a flag or a value that does not exist
    read_specs(parsed.config.compression.compress, _registry(parsed.config), RunLength(1000))
    if is_complete:
        parsed.resolve(ranks)


def _registry(config: RunConfig) -> Registry:
    """The built-in compressors, and the --compress-module ones of the page about writing compressors."""
    registry = Registry(BUILTIN)
    if config.compression.compress_module:
        for block in (python_blocks("extend/compressor.md")[0], *python_blocks("extend/advanced-compressors.md")):
            namespace: dict[str, Any] = {}
            exec(block, namespace)
            namespace["register"](registry)
    return registry


POINTS = "|".join([*(point.value for point in Point if point.compressible), *EXPERT_LEGS, EXPERTS])
SPEC = re.compile(rf"(?<![\w-])((?:{POINTS})=[a-z][^\s`|;]*)")
SPECS = [(name, match) for name, text in WRITTEN.items() for match in SPEC.findall(text)]


def test_specs_are_accepted() -> None:
    """All specs of --compress in the pages, in sentences and tables too."""
    assert len(SPECS) >= 100
    registry = _registry(RunConfig(compression=CompressionConfig(compress_module=["mine.py"])))
    for page, text in SPECS:
        spec = text.rstrip(".,:)")
        if spec.endswith(("=...", "=SPEC")) or "=NAME" in spec:
            continue
        needs = ",warmup=10" if "quantized-adam" in spec and "warmup" not in spec else ""
        try:
            assert read_specs(expand_spec(spec + needs), registry, RunLength(1000))
        except UserError as error:
            raise AssertionError(f"{page}: {error}") from error


def _flags_of_sections() -> str:
    """Flags of the programs whose flags are generated from sections of their own."""
    sections: tuple[type, ...] = (ModelFlags, SamplingFlags, GenerationTaskFlags, ServerFlags, EvaluationFlags)
    sections += (ZeroShotFlags, SweepFlags, TaskConfig, TaskCheckpointConfig)
    return " ".join(f"--{flag}" for cls in sections for field in field_options("", cls) for flag in field.flags)


def test_flags_named_in_documents_exist() -> None:
    fields = DOCUMENTS["docs/reference/flags.md"]
    outside = {"--no-python", "--signals-to-handle", "--model_args", "--model"}
    scripts = [
        *(REPO / "tools").rglob("*.py"),
        *(REPO / "benchmarks").rglob("*.py"),
        *(REPO / "megatron").rglob("*command.py"),
        *(REPO / "megatron" / "launcher").glob("*.py"),
        *(REPO / "tests").glob("conftest.py"),
        REPO / "ASPLOS23" / "run.py",
    ]
    tools = "".join(path.read_text() for path in scripts) + _flags_of_sections() + _flags_of_torchrun()
    for name, text in WRITTEN.items():
        named = set(re.findall(r"(?<![\w-])--[a-zA-Z][a-zA-Z0-9_-]*", text))
        for written in named - outside:
            flag = written.replace("_", "-")
            exists = f"`{flag}`" in fields or f"{flag} " in fields or flag.strip("-") in read_known_flags()
            assert exists or f'"{flag.strip("-")}"' in tools or flag in tools, f"{name} names {flag}"


def _flags_of_torchrun() -> str:
    return " ".join(flag.replace("_", "-") for flag in re.findall(r"--[a-z_-]+", get_args_parser().format_help()))


def test_tables_of_defaults_are_current() -> None:
    muon, islands = (DOCUMENTS[f"docs/guides/{name}.md"] for name in ("muon", "islands"))
    flags = dict(re.findall(r"^\| `--(muon-[a-z-]+)` \| `?([\w.]+)`? \|", muon, re.MULTILINE))
    names = ("muon_momentum", "muon_num_ns_steps", "muon_scale_mode", "muon_extra_scale_factor")
    optimizer, outer = OptimizerConfig(lr=1.0), OuterOptions()
    assert flags == {name.replace("_", "-"): str(getattr(optimizer, name)) for name in names}
    presets = dict(re.findall(r"^\| `([a-z]+)` \| `([^`|]+)` \|$", islands, re.MULTILINE))
    assert {name: dict(pair.split("=") for pair in words.split(",")) for name, words in presets.items()} == PRESETS
    options: dict[str, str] = {}
    for written, cell in re.findall(r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*) \| .* \| ([^|]+) \|$", islands, re.MULTILINE):
        points = re.findall(r"`([a-z-]+)`", written)
        options |= dict(zip(points, cell.split(", "), strict=False))
    defaults = {option.flag: option.default for option in field_options("outer", OuterOptions)}
    defaults |= {"outer-momentum": outer.momentum, "offload": "on" if outer.offload else "off"}
    assert {name: options[name] for name in defaults} == {name: _in_words(value) for name, value in defaults.items()}


def _in_words(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


READMES = [
    path
    for pattern in ("*/README.md", "megatron/**/README.md", "examples/*/README.md", "tools/*/README.md")
    for path in sorted(REPO.glob(pattern))
]


def _anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


FOLDERS = ("megatron", "tools", "tests", "benchmarks", "examples", "tasks", "dataset", "ASPLOS23")
"""Folders with files that the pages name without their folder."""


def test_the_candidates_of_the_automatic_choice_are_current() -> None:
    """Their table has what the compressors declare, in the order of the points."""
    section = DOCUMENTS["docs/results/loss.md"].partition("## Candidates of the automatic choice")[2]
    text = section.partition("\n#")[0]
    rows = [
        f"| `{rung.spec(point, name, 64)}` | {iterations:,} | {', '.join(f'{value:+.3f}%' for value in values)} "
        f"| {fmean(values):+.3f}% | {rung.highest_increase(iterations):.2f}% "
        f"| {'-' if rung.residual is None else f'{rung.residual:g}'} |"
        for point in Point
        if point is not Point.EMBED_GRAD
        for name, registration in sorted(BUILTIN.items())
        for rung in registration.ladder.get(point, ())
        for iterations, values in sorted(rung.increases.items())
    ]
    assert rows
    assert re.findall(r"^\| `.*$", text, re.MULTILINE) == rows


def test_links_and_anchors_resolve() -> None:
    paths = [REPO / name for name in DOCUMENTS] + READMES
    checked = 0
    for path in dict.fromkeys(paths):
        prose = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            assert not target.startswith("/"), f"{path} links to {target}"
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            linked = path.parent / file if file else path
            assert linked.exists(), f"{path} links to {target}"
            if anchor:
                assert anchor in _anchors(linked.read_text(encoding="utf-8")), f"{path} links to {target}"
            checked += 1
    assert checked >= 300


def test_every_field_of_the_json_lines_is_documented(tmp_path: Path) -> None:
    page = DOCUMENTS["docs/reference/log-and-json.md"]
    points = {"dp-grad": PointTraffic(2.0, 1.0, 0.1, 0.1, residual=1.0, staleness=1.0, inside_bytes=1.0)}
    metrics = StepMetrics(
        iteration=1, losses={"lm loss": 2.0}, global_batch_size=1, seq_length=8, loss_scale=1.0, grad_norm=1.0,
        params_norm=1.0, num_zeros=1.0, expert_loads={0: [1.0, 1.0]}, epoch=0.5, curriculum_seqlen=8,
        decoupled_learning_rate=0.1, mfu=0.5, remaining_seconds=1.0, memory_bytes=1, computed_s=0.1, traffic=points,
        controllers={"dp-grad": {"rank": 4.0}}, timers_ms={"forward": [1.0]},
    )  # fmt: skip
    sink = JsonLinesSink(tmp_path / "log.jsonl", 0)
    sink.window(metrics)
    sink.evaluation(Evaluation(iteration=1, losses={"lm loss": 2.0}, consumed_samples=1, samples=1))
    train, validation = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    for field in (*train, *validation, *train["comm"]["dp-grad"]):
        assert f"`{field}`" in page, field


def test_files_named_in_documents_exist() -> None:
    names = {path.name for folder in REPO.iterdir() for path in folder.rglob("*") if folder.name in FOLDERS}
    names |= {path.name for path in REPO.iterdir()}
    for name, text in DOCUMENTS.items():
        for path in re.findall(r"`((?:megatron|tools|docs|examples|tests|benchmarks)/[\w/.-]+)`", text):
            assert (REPO / path).exists(), f"{name} names {path}"
        for path in re.findall(r"`(\w+\.(?:py|sh))`", text):
            assert path in names or f"Save this as `{path}`" in text, f"{name} names {path}"


def test_code_blocks_are_complete() -> None:
    """Fences come in pairs; Python blocks compile, and YAML blocks parse."""
    for name, text in DOCUMENTS.items():
        assert text.count("\n```") % 2 == 0, f"{name}: a code block is not closed"
        for language, block in _blocks(text):
            assert language in ("", "python", "yaml", "bash"), f"{name}: a block of {language}"
            if language == "python":
                compile(block, name, "exec")
            elif language == "yaml":
                assert isinstance(parse_yaml(block, name), dict)


def test_the_run_of_the_tutorial_resolves() -> None:
    block = DOCUMENTS["docs/tutorial/compress-a-run.md"].partition("```yaml\n")[2].partition("```")[0]
    words = [text for key, value in parse_yaml(block, "run.yaml").items() for text in (f"--{key}", str(value))]
    config = parse_args(words).resolve(2)
    assert config.parallel.data_parallel_size(2) == 2


def test_untested_hardware_is_named_in_a_single_table() -> None:
    pattern = re.compile(r"(not|never) (yet )?(been )?run on|on a GPU yet|\| not run \|", re.IGNORECASE)
    pages = {name for name, text in WRITTEN.items() if pattern.search(text)}
    assert pages == {"docs/guides/gpus.md"}
    text = DOCUMENTS["docs/guides/gpus.md"]
    table = text.partition("## What has run on which hardware")[2].partition("\n## ")[0]
    assert not pattern.search(text.replace(table, ""))


def test_pages_are_short() -> None:
    """120 lines of README, 70 for a compressor, 250 for any other page; results hold tables."""
    for name, text in WRITTEN.items():
        lines = len(text.splitlines())
        is_compressor = "compressors/" in name and not name.endswith("index.md")
        limit = 120 if name == "README.md" else 70 if is_compressor else 250
        assert lines <= limit, f"{name} has {lines} lines"


def test_the_site_has_every_page() -> None:
    site = yaml.safe_load((REPO / "mkdocs.yml").read_text())
    pages = re.findall(r"[\w/-]+\.md", json.dumps(site["nav"]))
    assert sorted(f"docs/{page}" for page in pages) == sorted(name for name in DOCUMENTS if name != "README.md")


def test_links_out_of_the_site_become_paths() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/experts.md"))
    text = "[examples](../../examples/moe) and [GPUs](gpus.md#determinism) and [T](../tutorial/first-run.md), `a\\|b`"
    expected = "`examples/moe` and [GPUs](gpus.md#determinism) and [T](../tutorial/first-run.md), <code>a&#124;b</code>"
    assert on_page_markdown(text, page=page) == expected


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "guides" / "gpus.html").is_file()


def test_every_package_readme_names_its_modules() -> None:
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
    """The jobs of examples/slurm/radius.sh, and the start of its runs that are not dense."""
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
    arguments = ["--save", "checkpoints", *words[words.index("examples/slurm/pretrain_gpt.sbatch") + 1 :]]
    config = parse_args(arguments).resolve(64, cuda_available=True)
    assert config.training.seed == 5
    assert bool(config.compression.compress) == (scheme != "dense")
