"""Downloadable sets: their files, the steps that turn them into training data, and the user's next command."""

from __future__ import annotations

import importlib.util
import lzma
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from megatron.base.atomic import atomic_write
from megatron.base.errors import UserError, first_line
from tools.openwebtext.download_openwebtext import main as parquet_to_lines

REPO = Path(__file__).resolve().parents[2]
DATA = REPO / "dataset"
HUB = "https://huggingface.co"
S3 = "https://s3.amazonaws.com/models.huggingface.co/bert"
NGC = "https://api.ngc.nvidia.com/v2/models/nvidia"
_OSCAR_LINES = 790
"""Documents, of 79,000, that the JUPITER benchmark trains on."""


@dataclass(frozen=True)
class Remote:
    """A published file.

    Args:
        url: its address.
        path: path to save it to.
        size, digest: published size, and ``sha256:`` or ``git:`` with the published digest; empty if unknown.
    """

    url: str
    path: Path
    size: int | None = None
    digest: str = ""


@dataclass(frozen=True)
class Plan:
    """Files to download, the user's next command, and the step that turns the files into training data."""

    files: list[Remote]
    next: str
    finish: Callable[[], None] = lambda: None


def hub_files(mirror: str, repository: str, pattern: str, folder: Path, repo_type: str = "dataset") -> list[Remote]:
    """Files of a repository on the Hugging Face hub whose paths match a pattern, with their sizes and digests."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    try:
        api = HfApi(endpoint=mirror + HUB.removeprefix("https:/") if mirror else HUB, token=False)
        entries = list(api.list_repo_tree(repository, os.path.dirname(pattern) or None, repo_type=repo_type))
    except Exception as error:  # network, file or name errors: the library raises many types
        raise UserError(f"{repository} on the hub: {first_line(error)}") from error
    files = [entry for entry in entries if isinstance(entry, RepoFile)]
    base = f"{HUB}/{'datasets/' if repo_type == 'dataset' else ''}{repository}/resolve/main"
    remotes = [
        Remote(f"{base}/{file.path}", folder / os.path.basename(file.path), file.size,
               f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}")
        for file in sorted(files, key=lambda file: file.path) if fnmatch(file.path, pattern)
    ]  # fmt: skip
    if not remotes:
        paths = ", ".join(file.path for file in files[:20]) or "nothing"
        raise UserError(f"{repository} on the hub has no {pattern}; it has {paths}")
    return remotes


def _vocabulary(mirror: str, name: str, folder: Path, shards: int | None) -> Plan:
    if name == "bert":
        files = []
        for case in ("uncased", "cased"):
            (vocabulary,) = hub_files(mirror, f"google-bert/bert-large-{case}", "vocab.txt", folder, "model")
            files.append(replace(vocabulary, path=folder / f"bert-large-{case}-vocab.txt"))
        return Plan(files, f"give --vocab-file {files[0].path} to a model of words in lower case")
    vocab, merges = folder / "gpt2-vocab.json", folder / "gpt2-merges.txt"
    vocab_digest = "sha256:196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
    merges_digest = "sha256:1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    files = [
        Remote(f"{S3}/gpt2-vocab.json", vocab, 1_042_301, vocab_digest),
        Remote(f"{S3}/gpt2-merges.txt", merges, 456_318, merges_digest),
    ]
    return Plan(files, f"give --vocab-file {vocab} --merge-file {merges}")


def _checkpoint(mirror: str, name: str, folder: Path, shards: int | None) -> Plan:
    convert = f"python {REPO / 'tools' / 'ckpt_convert.py'} --load {folder} --save {folder}-mcc --to megatron-cc"
    if name == "gpt2_345m":
        archive = folder / "megatron_lm_345m_v0.0.zip"
        files = [Remote(f"{NGC}/megatron_lm_345m/versions/v0.0/zip", archive)]
        return Plan(files, f"{convert} (with GPT-2's --vocab-file and --merge-file)", lambda: unpack(archive))
    names = ["config.json", "model.safetensors", "vocab.json", "merges.txt"]
    repository = f"openai-community/{name}"
    return Plan([hub_files(mirror, repository, each, folder, "model")[0] for each in names], convert)


def _oscar(mirror: str, name: str, folder: Path, shards: int | None) -> Plan:
    packed, lines = folder / "oscar-1GB.jsonl.xz", folder / "oscar-10MB.jsonl"
    files = hub_files(mirror, "bigscience/misc-test-data", f"stas/{packed.name}", folder)
    return Plan(files, _preprocess(lines), lambda: write_first_lines(packed, lines, _OSCAR_LINES))


def _wikipedia(mirror: str, name: str, folder: Path, shards: int | None) -> Plan:
    is_default = name == KINDS["wikipedia"].names[0]
    lines = folder / ("wikipedia.jsonl" if is_default else f"wikipedia-{name}.jsonl")
    return _texts(mirror, "wikimedia/wikipedia", name, folder / "wikipedia" / name, lines, shards)


def _openwebtext(mirror: str, name: str, folder: Path, shards: int | None) -> Plan:
    lines = folder / "openwebtext.jsonl"
    plan = _texts(mirror, "Skylion007/openwebtext", "plain_text", folder / "openwebtext", lines, shards)
    clean = f"python {REPO / 'tools' / 'openwebtext' / 'pipeline.py'} --json {lines} --output-path {folder}/cleaned"
    return replace(plan, next=f"{clean} (to clean it once more), or {plan.next}")


def _texts(mirror: str, repository: str, name: str, folder: Path, lines: Path, shards: int | None) -> Plan:
    """Plan of a data set in Parquet files."""
    if importlib.util.find_spec("datasets") is None:
        raise UserError("the package datasets, which reads Parquet files, is missing: pip install -e '.[cleaning]'")
    files = hub_files(mirror, repository, f"{name}/*.parquet", folder)[:shards]
    return Plan(files, _preprocess(lines), lambda: write_lines([file.path for file in files], lines))


def _preprocess(lines: Path) -> str:
    """Command that tokenizes a text."""
    prefix, data = lines.with_suffix(""), "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --append-eod"
    command = f"python {REPO / 'tools' / 'preprocess_data.py'} --input {lines} --output-prefix {prefix}"
    return f"{command} --tokenizer-type GPT2BPETokenizer {data} --workers {os.cpu_count()}"


@dataclass(frozen=True)
class DownloadKind:
    """A kind of set.

    Args:
        about: description for ``--help``.
        names: names of its sets, the default first; ``*`` stands for any.
        plan: plan of a set, given the mirror, its name, the output folder and the number of shards.
        has_shards: whether it consists of many files, of which the first few suffice for a trial.
    """

    about: str
    names: tuple[str, ...]
    plan: Callable[[str, str, Path, int | None], Plan]
    has_shards: bool = False


CHECKPOINTS = ("gpt2_345m", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
KINDS = {
    "vocab": DownloadKind("vocabulary files", ("gpt2", "bert"), _vocabulary),
    "ckpt": DownloadKind("public checkpoints", CHECKPOINTS, _checkpoint),
    "wikipedia": DownloadKind("texts of Wikipedia", ("20231101.en", "*"), _wikipedia, has_shards=True),
    "openwebtext": DownloadKind("OpenWebText", ("plain_text",), _openwebtext, has_shards=True),
    "oscar": DownloadKind("the part of OSCAR of the JUPITER benchmark", ("stas",), _oscar),
}


def unpack(archive: Path) -> None:
    """Unpack an archive into its folder; complete files stay."""
    try:
        with zipfile.ZipFile(archive) as packed:
            sizes = {member: member.file_size for member in packed.infolist() if not member.is_dir()}
            paths = {member: archive.parent / member.filename for member in sizes}
            missing = [m for m, path in paths.items() if not path.is_file() or path.stat().st_size != sizes[m]]
            if missing and (damaged := packed.testzip()) is not None:  # before any file is written
                raise zipfile.BadZipFile(f"{damaged} is damaged")
            packed.extractall(archive.parent, missing)  # never outside of the folder
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise UserError(f"{archive}: is not an intact zip file ({error}); remove it and try again") from error


def write_first_lines(packed: Path, target: Path, count: int) -> None:
    """Write the first lines of an xz file, unless the target exists."""
    if target.exists():
        return
    try:
        with lzma.open(packed) as source, atomic_write(target) as file:
            file.writelines(line for _, line in zip(range(count), source, strict=False))
    except (lzma.LZMAError, EOFError) as error:
        raise UserError(f"{packed}: is not an intact xz file ({error}); remove it and try again") from error


def write_lines(shards: list[Path], target: Path) -> None:
    """Write Parquet files as JSON lines, unless the target is newer than all of them."""
    if not target.exists() or target.stat().st_mtime < max(shard.stat().st_mtime for shard in shards):
        parquet_to_lines.run(parquet_to_lines.parse(["--dataset", str(shards[0].parent), "--output", str(target)]))
