"""The scripts of dataset/, against a server of this machine: messages, files and refusals."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import lzma
import os
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.base.errors import UserError
from tests.support.cli import REPO
from tests.support.disk import largest_file
from tests.support.shared import shared_path
from tests.unit.downloads.server import Published
from tools.downloads import catalog
from tools.downloads.catalog import Remote
from tools.downloads.download import MIRROR, fetch, main

SCRIPTS = sorted((REPO / "dataset").glob("*.sh"))
HOMES = {"huggingface.co", "s3.amazonaws.com", "api.ngc.nvidia.com"}
"""Of what is published."""

S3 = "/s3.amazonaws.com/models.huggingface.co/bert"
NGC = "/api.ngc.nvidia.com/v2/models/nvidia/megatron_lm_345m/versions/v0.0/zip"


def _run(published: Published, folder: Path, *words: str) -> int:
    return main(["--mirror", published.address, "--output-dir", str(folder), *words])


def _zip(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return packed.getvalue()


def _script(name: str, published: Published, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script of dataset/ as a user does, in another folder."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, MIRROR: published.address, "PYTHONPATH": ""}
    command = ["bash", str(REPO / "dataset" / name), *words]
    return subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=280)


def test_the_vocabulary_of_gpt2_is_downloaded(
    published: Published, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocab, merges = shared_path("data/gpt2-vocab.json"), shared_path("data/gpt2-merges.txt")
    if vocab is None or merges is None:
        pytest.skip("GPT-2's vocabulary is not here")
    published.files |= {f"{S3}/gpt2-vocab.json": vocab.read_bytes(), f"{S3}/gpt2-merges.txt": merges.read_bytes()}
    assert _run(published, tmp_path, "vocab") == 0
    assert (tmp_path / "gpt2-vocab.json").read_bytes() == vocab.read_bytes()
    assert (tmp_path / "gpt2-merges.txt").read_bytes() == merges.read_bytes()
    output = capsys.readouterr().out
    assert f"{published.address}{S3}/gpt2-vocab.json\n  -> {tmp_path}/gpt2-vocab.json, 1,042,301 bytes\n" in output
    assert output.count("as published\n") == 2
    assert output.endswith("download: 2 files, 1,498,619 bytes\n")


def test_the_vocabularies_of_bert_are_downloaded(published: Published, tmp_path: Path) -> None:
    for case in ("cased", "uncased"):
        files = {"vocab.txt": f"[PAD]\n{case}\n".encode(), "config.json": b"{}"}
        published.add_hub("models", f"google-bert/bert-large-{case}", files)
    assert _run(published, tmp_path, "vocab", "bert") == 0
    contents = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert contents == {f"bert-large-{case}-vocab.txt": f"[PAD]\n{case}\n" for case in ("cased", "uncased")}


def test_a_checkpoint_in_an_archive_is_unpacked(published: Published, tmp_path: Path) -> None:
    inside = {"latest_checkpointed_iteration.txt": b"release", "release/mp_rank_00/model_optim_rng.pt": bytes(1000)}
    published.files[NGC] = _zip(inside)
    published.lengths = False
    assert _run(published, tmp_path, "ckpt") == 0
    for name, data in inside.items():
        assert (tmp_path / name).read_bytes() == data
    (tmp_path / "release/mp_rank_00/model_optim_rng.pt").write_bytes(b"half")
    times = (tmp_path / "latest_checkpointed_iteration.txt").stat().st_mtime_ns
    assert _run(published, tmp_path, "ckpt") == 0
    assert (tmp_path / "release/mp_rank_00/model_optim_rng.pt").read_bytes() == bytes(1000)
    assert (tmp_path / "latest_checkpointed_iteration.txt").stat().st_mtime_ns == times
    assert len(published.requests) == 1


def _damaged_zip() -> bytes:
    archive = bytearray(_zip({"model.pt": os.urandom(1000)}))
    archive[500] ^= 1
    return bytes(archive)


@pytest.mark.parametrize("data", [b"<html>sorry</html>", _damaged_zip()], ids=["no archive", "damaged"])
def test_a_damaged_archive_is_refused(
    data: bytes, published: Published, tmp_path: Path, error_line: Callable[[], str]
) -> None:
    published.files[NGC] = data
    assert _run(published, tmp_path, "ckpt") == 2
    assert "is not an intact zip file" in error_line()
    assert [path.name for path in tmp_path.iterdir()] == ["megatron_lm_345m_v0.0.zip"]


def test_an_archive_never_writes_outside_of_its_folder(published: Published, tmp_path: Path) -> None:
    published.files[NGC] = _zip({"../outside": bytes(100)})
    assert _run(published, tmp_path / "checkpoint", "ckpt") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoint_of_the_hub_is_downloaded(
    published: Published, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: name.encode() for name in ("config.json", "model.safetensors", "vocab.json", "merges.txt", "tf.h5")}
    published.add_hub("models", "openai-community/gpt2-medium", files, large=".safetensors")
    assert _run(published, tmp_path, "ckpt", "gpt2-medium") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(set(files) - {"tf.h5"})
    output = capsys.readouterr().out
    assert "config.json: 11 bytes, git " in output
    assert "model.safetensors: 17 bytes, sha256 " in output
    assert f"--load {tmp_path} " in output


def test_a_file_missing_from_the_hub_is_named(
    published: Published, tmp_path: Path, error_line: Callable[[], str]
) -> None:
    published.add_hub("models", "openai-community/gpt2", {"config.json": b"{}", "model.bin": b""})
    assert _run(published, tmp_path, "ckpt", "gpt2") == 2
    message = "openai-community/gpt2 on the hub has no model.safetensors; it has config.json, model.bin"
    assert error_line() == f"download: error: {message}"


def _parquet(rows: list[dict[str, str]]) -> bytes:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    packed = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows), packed)
    return packed.getvalue()


@pytest.mark.slow
def test_wikipedia_becomes_lines(
    published: Published, tmp_path: Path, capsys: pytest.CaptureFixture[str], error_line: Callable[[], str]
) -> None:
    """Stopped in the second of three files, and run again."""
    pytest.importorskip("datasets")
    rows = [[{"url": f"u{shard}{n}", "text": f"text {shard} {n}"} for n in range(3)] for shard in range(3)]
    files = {f"20231101.de/train-0000{n}-of-00003.parquet": _parquet(rows[n]) for n in range(3)}
    published.add_hub("datasets", "wikimedia/wikipedia", files, "20231101.de", ".parquet")
    second = f"/huggingface.co/datasets/wikimedia/wikipedia/resolve/main/{sorted(files)[1]}"
    published.statuses[second] = [403]
    assert _run(published, tmp_path, "wikipedia", "20231101.de") == 2
    assert "returned error: 403; run the command again to continue" in error_line()
    assert not (tmp_path / "wikipedia-20231101.de.jsonl").exists()
    published.requests.clear()
    assert _run(published, tmp_path, "wikipedia", "20231101.de") == 0
    assert [path.rsplit("/", 1)[1] for path, _ in published.requests] == [
        "20231101.de",
        "train-00001-of-00003.parquet",
        "train-00002-of-00003.parquet",
    ]
    lines = [json.loads(line) for line in (tmp_path / "wikipedia-20231101.de.jsonl").read_text().splitlines()]
    assert lines == [row for shard in rows for row in shard]
    assert f"--input {tmp_path}/wikipedia-20231101.de.jsonl " in capsys.readouterr().out


@pytest.mark.slow
def test_each_wikipedia_has_its_own_lines(published: Published, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for language in ("de", "en"):
        files = {f"20231101.{language}/train-00000-of-00001.parquet": _parquet([{"text": language}])}
        published.add_hub("datasets", "wikimedia/wikipedia", files, f"20231101.{language}", ".parquet")
    for language in ("de", "en", "de"):
        assert _run(published, tmp_path, "wikipedia", f"20231101.{language}") == 0
    texts = {path.name: json.loads(path.read_text())["text"] for path in tmp_path.glob("*.jsonl")}
    assert texts == {"wikipedia-20231101.de.jsonl": "de", "wikipedia.jsonl": "en"}


@pytest.mark.slow
def test_some_shards_of_openwebtext_and_then_all(published: Published, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    files = {f"plain_text/train-0000{n}-of-00002.parquet": _parquet([{"text": f"text {n}"}]) for n in range(2)}
    published.add_hub("datasets", "Skylion007/openwebtext", files, "plain_text", ".parquet")
    texts = []
    for flags in (["--shards", "1"], []):
        assert _run(published, tmp_path, "openwebtext", *flags) == 0
        lines = (tmp_path / "openwebtext.jsonl").read_text().splitlines()
        texts.append([json.loads(line)["text"] for line in lines])
    assert texts == [["text 0"], ["text 0", "text 1"]]


def test_the_oscar_subset_of_the_benchmark_is_downloaded(published: Published, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {number}"}) + "\n" for number in range(1000)]
    packed = lzma.compress("".join(lines).encode())
    published.add_hub("datasets", "bigscience/misc-test-data", {"stas/oscar-1GB.jsonl.xz": packed}, "stas", ".xz")
    assert _run(published, tmp_path, "oscar") == 0
    assert (tmp_path / "oscar-10MB.jsonl").read_text() == "".join(lines[:790])


def test_a_damaged_compressed_text_is_refused(tmp_path: Path) -> None:
    packed = tmp_path / "x.jsonl.xz"
    packed.write_bytes(lzma.compress(os.urandom(5000))[:-100])
    with pytest.raises(UserError, match=r"x.jsonl.xz: is not an intact xz file"):
        catalog.write_first_lines(packed, tmp_path / "x.jsonl", 10**6)
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vocab", "gpt3"], "vocab gpt3: give gpt2 or bert"),
        (["ckpt", "--shards", "2"], "--shards: ckpt does not come in shards; drop it"),
        (["wikipedia", "--shards", "0"], "--shards 0: give at least 1"),
        (["vocab", "--mirror", "mirror.example"], "--mirror mirror.example: is not the address of a web server"),
    ],
)
def test_impossible_flags_are_refused(
    published: Published, tmp_path: Path, words: list[str], message: str, error_line: Callable[[], str]
) -> None:
    assert _run(published, tmp_path, *words) == 2
    assert error_line() == f"download: error: {message}"
    assert published.requests == []


DATA = random.Random(0).randbytes(1_000_000)


@pytest.fixture
def remote(published: Published, tmp_path: Path) -> Remote:
    """A file of the server, and its destination."""
    published.files["/host/file"] = DATA
    return Remote("https://host/file", tmp_path / "file", len(DATA), f"sha256:{hashlib.sha256(DATA).hexdigest()}")


def _ranges(published: Published) -> list[str | None]:
    return [byte_range for _, byte_range in published.requests]


def test_a_file_is_requested_once(published: Published, remote: Remote, tmp_path: Path) -> None:
    url = f"{published.address}/host/file"
    assert fetch(remote, url) == f"1,000,000 bytes, sha256 {remote.digest[7:]}, as published"
    assert remote.path.read_bytes() == DATA
    assert fetch(remote, url).endswith("as published; it already existed")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert len(published.requests) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_resumed(ranges: bool, published: Published, remote: Remote) -> None:
    published.breaks["/host/file"], published.ranges = [400_000, 300_000][: 1 + ranges], ranges
    fetch(remote, f"{published.address}/host/file")
    assert remote.path.read_bytes() == DATA
    if ranges:
        assert _ranges(published) == [None, "bytes=400000-", "bytes=700000-"]


def test_a_later_call_resumes(published: Published, remote: Remote) -> None:
    published.breaks["/host/file"] = [400_000, 0]
    with pytest.raises(UserError, match="run the command again to continue"):
        fetch(remote, f"{published.address}/host/file")
    assert remote.path.with_name("file.part").read_bytes() == DATA[:400_000]
    published.requests.clear()
    fetch(remote, f"{published.address}/host/file")
    assert _ranges(published) == ["bytes=400000-"]
    assert remote.path.read_bytes() == DATA


def test_a_complete_partial_file_is_only_renamed(published: Published, remote: Remote) -> None:
    """A call may have been killed before the renaming."""
    remote.path.with_name("file.part").write_bytes(DATA)
    fetch(replace(remote, size=None), f"{published.address}/host/file")
    assert remote.path.read_bytes() == DATA


def test_a_busy_server_is_retried(published: Published, remote: Remote) -> None:
    published.statuses["/host/file"] = [503]
    fetch(remote, f"{published.address}/host/file")
    assert remote.path.read_bytes() == DATA


def test_a_missing_file_is_one_line(published: Published, remote: Remote) -> None:
    with pytest.raises(UserError, match=r"/host/other: .*404; run the command again") as caught:
        fetch(remote, f"{published.address}/host/other")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [DATA[:-1] + b"!", DATA + b"more", DATA[:10]])
def test_unexpected_content_is_refused_and_removed(data: bytes, published: Published, remote: Remote) -> None:
    published.files["/host/file"] = data
    with pytest.raises(UserError, match=r"published; it is removed|run the command again to continue"):
        fetch(remote, f"{published.address}/host/file")
    assert not remote.path.exists()


def test_existing_files_are_never_overwritten(published: Published, remote: Remote) -> None:
    remote.path.write_bytes(b"mine")
    with pytest.raises(UserError, match="has 4 bytes, but 1,000,000 are published; move it away"):
        fetch(remote, f"{published.address}/host/file")
    assert remote.path.read_bytes() == b"mine"


def test_a_folder_allows_one_process_at_a_time(published: Published, remote: Remote) -> None:
    with remote.path.with_name("file.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="file: another process is downloading it"):
            fetch(remote, f"{published.address}/host/file")


def test_a_full_disk_is_one_line_and_keeps_the_partial_file(published: Published, remote: Remote) -> None:
    with largest_file(1 << 18), pytest.raises(UserError, match="run the command again to continue"):
        fetch(remote, f"{published.address}/host/file")
    fetch(remote, f"{published.address}/host/file")
    assert _ranges(published)[-1] == f"bytes={1 << 18}-"
    assert remote.path.read_bytes() == DATA


def test_a_hub_without_a_file_list_is_one_line(
    published: Published, tmp_path: Path, error_line: Callable[[], str]
) -> None:
    published.files["/huggingface.co/api/models/openai-community/gpt2/tree/main"] = b"<html>"
    for name in ("gpt2", "gpt2-xl"):
        assert _run(published, tmp_path, "ckpt", name) == 2
        assert f"openai-community/{name} on the hub: " in error_line()


def test_each_kind_has_a_script() -> None:
    assert {path.name for path in SCRIPTS} == {f"download_{kind}.sh" for kind in catalog.KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", catalog.KINDS)
def test_each_script_announces_its_actions(kind: str, published: Published) -> None:
    """Without requests to the mirror except for lists; other hosts must be known."""
    for case in ("cased", "uncased"):
        published.add_hub("models", f"google-bert/bert-large-{case}", {"vocab.txt": b""})
    published.add_hub("datasets", "wikimedia/wikipedia", {"20231101.en/t.parquet": b""}, "20231101.en")
    published.add_hub("datasets", "Skylion007/openwebtext", {"plain_text/t.parquet": b""}, "plain_text")
    published.add_hub("datasets", "bigscience/misc-test-data", {"stas/oscar-1GB.jsonl.xz": b""}, "stas")
    done = _script(f"download_{kind}.sh", published, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert all("/api/" in path for path, _ in published.requests)
    addresses = re.findall(rf"^{published.address}/([^/]+)/\S+\n  -> {REPO}/(\w+)/", done.stdout, re.MULTILINE)
    assert addresses
    for home, folder in addresses:
        assert home in HOMES
        assert folder == ("checkpoints" if kind == "ckpt" else "dataset")
    assert not (REPO / "checkpoints").exists()
