"""What can be downloaded, from where, and what is done with it then."""

from __future__ import annotations

import importlib.util
import lzma
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from megatron.base.atomic import atomic_write
from megatron.base.errors import UserError
from tools.downloads.fetching import Remote, Web
from tools.openwebtext.download_openwebtext import main as to_lines

REPO = Path(__file__).resolve().parents[2]
DATA = REPO / "dataset"

_S3 = "https://s3.amazonaws.com/models.huggingface.co/bert"
_NGC = "https://api.ngc.nvidia.com/v2/models/nvidia"
_OSCAR_LINES = 790
"""Of OSCAR's 79,000 that the JUPITER benchmark trains on."""


@dataclass(frozen=True)
class Plan:
    """A set: its files, what is done with them, and what the user may do next.

    Args:
        files: files to download.
        then: makes what training reads of them; does nothing that is done already.
        next: a sentence.
    """

    files: list[Remote]
    then: Callable[[], None]
    next: str


@dataclass(frozen=True)
class DownloadKind:
    """A kind of set.

    Args:
        about: what it is.
        names: what there is of it, the default first; a name that ends in ``*`` stands for any.
        folder: where a name's files go unless the user says otherwise.
        plan: a name's plan for a folder. It may ask the hub what there is.
        shards: whether it comes in many files, of which the first few are good for a trial.
    """

    about: str
    names: tuple[str, ...]
    folder: Callable[[str], Path]
    plan: Callable[[Web, str, Path, int | None], Plan]
    shards: bool = False


def _nothing() -> None:
    """What is done with files that training reads as they are."""


def _vocabulary(web: Web, name: str, folder: Path, _: int | None) -> Plan:
    vocab, merges = folder / "gpt2-vocab.json", folder / "gpt2-merges.txt"
    if name == "bert":
        files = []
        for case in ("uncased", "cased"):
            (found,) = _wanted(web, "models", f"google-bert/bert-large-{case}", ["vocab.txt"])
            files.append(replace(found, path=folder / f"bert-large-{case}-vocab.txt"))
        return Plan(files, _nothing, f"give --vocab-file {files[0].path} to a model of words in lower case")
    digests = (
        "sha256:196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
        "sha256:1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    )
    files = [
        Remote(f"{_S3}/gpt2-vocab.json", vocab, 1_042_301, digests[0]),
        Remote(f"{_S3}/gpt2-merges.txt", merges, 456_318, digests[1]),
    ]
    return Plan(files, _nothing, f"give --vocab-file {vocab} --merge-file {merges}")


def _checkpoint(web: Web, name: str, folder: Path, _: int | None) -> Plan:
    convert = f"python {REPO / 'tools' / 'ckpt_convert.py'} --load {folder} --save {folder}-mcc --to megatron-cc"
    if name == "gpt2_345m":
        archive = Remote(f"{_NGC}/megatron_lm_345m/versions/v0.0/zip", folder / "megatron_lm_345m_v0.0.zip")
        return Plan([archive], lambda: unpack(archive.path), f"{convert} (with GPT-2's --vocab-file and --merge-file)")
    names = ["config.json", "model.safetensors", "vocab.json", "merges.txt"]
    found = _wanted(web, "models", f"openai-community/{name}", names)
    return Plan([replace(each, path=folder / each.path) for each in found], _nothing, convert)


def _oscar(web: Web, _: str, folder: Path, __: int | None) -> Plan:
    packed, lines = folder / "oscar-1GB.jsonl.xz", folder / "oscar-10MB.jsonl"
    (found,) = _wanted(web, "datasets", "bigscience/misc-test-data", [f"stas/{packed.name}"], "stas")
    remote = replace(found, path=packed)
    return Plan([remote], lambda: first_lines(packed, lines, _OSCAR_LINES), _preprocess(lines))


def _wikipedia(web: Web, name: str, folder: Path, shards: int | None) -> Plan:
    return _texts(web, "wikimedia/wikipedia", name, folder / "wikipedia" / name, folder / "wikipedia.jsonl", shards)


def _openwebtext(web: Web, _: str, folder: Path, shards: int | None) -> Plan:
    lines = folder / "openwebtext.jsonl"
    plan = _texts(web, "Skylion007/openwebtext", "plain_text", folder / "openwebtext", lines, shards)
    clean = f"python {REPO / 'tools' / 'openwebtext' / 'pipeline.py'} --json {lines} --output-path {folder}/cleaned"
    return replace(plan, next=f"{clean} (to clean it once more), or {plan.next}")


def _texts(web: Web, repository: str, place: str, folder: Path, lines: Path, shards: int | None) -> Plan:
    """The plan of a data set that the hub has as Parquet files in one of its folders."""
    if importlib.util.find_spec("datasets") is None:
        raise UserError("datasets is missing, which reads Parquet files: pip install -e '.[cleaning]'")
    found = _wanted(web, "datasets", repository, [f"{place}/*.parquet"], place)[:shards]
    files = [replace(each, path=folder / each.path.name) for each in found]
    return Plan(files, lambda: write_lines([file.path for file in files], lines), _preprocess(lines))


def _preprocess(lines: Path) -> str:
    """How text becomes what training reads."""
    prefix, data = lines.with_suffix(""), "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --append-eod"
    command = f"python {REPO / 'tools' / 'preprocess_data.py'} --input {lines} --output-prefix {prefix}"
    return f"{command} --tokenizer-type GPT2BPETokenizer {data} --workers {os.cpu_count()}"


def _wanted(web: Web, kind: str, repository: str, names: list[str], folder: str = "") -> list[Remote]:
    """Those files of a folder of the hub that fit any of some names, in the order of the names.

    Raises:
        UserError: when a name fits none.
    """
    there = sorted(web.hub_files(kind, repository, folder), key=lambda file: str(file.path))
    found = []
    for name in names:
        fitting = [file for file in there if fnmatch(str(file.path), name)]
        if not fitting:
            known = ", ".join(str(file.path) for file in there[:20]) or "nothing"
            raise UserError(f"{repository} on the hub has no {name}; it has {known}")
        found += fitting
    return found


KINDS = {
    "vocab": DownloadKind("vocabulary files", ("gpt2", "bert"), lambda name: DATA, _vocabulary),
    "ckpt": DownloadKind(
        "public checkpoints",
        ("gpt2_345m", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
        lambda name: REPO / "checkpoints" / name,
        _checkpoint,
    ),
    "wikipedia": DownloadKind("texts of Wikipedia", ("20231101.en", "*"), lambda name: DATA, _wikipedia, shards=True),
    "openwebtext": DownloadKind("OpenWebText", ("plain_text",), lambda name: DATA, _openwebtext, shards=True),
    "oscar": DownloadKind("the part of OSCAR of the JUPITER benchmark", ("stas",), lambda name: DATA, _oscar),
}
"""What there is, by name."""


def unpack(archive: Path) -> None:
    """Unpacks an archive into its folder; files that are there in full stay.

    Raises:
        UserError: when it is damaged.
    """
    try:
        with zipfile.ZipFile(archive) as packed:
            for member in packed.infolist():
                target = archive.parent / member.filename
                if not target.resolve().is_relative_to(archive.parent.resolve()):
                    raise UserError(f"{archive}: would write {member.filename} outside of its folder")
                if member.is_dir() or (target.is_file() and target.stat().st_size == member.file_size):
                    continue
                with packed.open(member) as source, atomic_write(target) as file:  # reading compares checksums
                    shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise UserError(f"{archive}: is no sound zip file ({error}); remove it and run it again") from error


def first_lines(packed: Path, target: Path, count: int) -> None:
    """Writes the first lines of an xz file, unless they are there.

    Raises:
        UserError: when it cannot be unpacked.
    """
    if target.exists():
        return
    try:
        with lzma.open(packed) as source, atomic_write(target) as file:
            for _, line in zip(range(count), source, strict=False):
                file.write(line)
    except (lzma.LZMAError, EOFError) as error:
        raise UserError(f"{packed}: is no sound xz file ({error}); remove it and run it again") from error


def write_lines(shards: list[Path], target: Path) -> None:
    """Writes Parquet files as JSON lines, unless that was done after the last of them came.

    Raises:
        UserError: when they cannot be read.
    """
    if target.exists() and target.stat().st_mtime >= max(shard.stat().st_mtime for shard in shards):
        return
    to_lines.run(to_lines.parse(["--dataset", str(shards[0].parent), "--output", str(target)]))
