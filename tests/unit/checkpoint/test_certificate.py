"""Certificates: what they hold, and that verification finds every change in one line."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.code_digest import code_digest
from megatron.base.errors import UserError
from megatron.base.regular import fingerprint
from megatron.checkpoint.certificate import (
    CERTIFICATE,
    AutoDecision,
    Certificate,
    InputFile,
    LossCheck,
    SampledPoint,
    Statements,
    TrafficSpan,
    read_certificate,
)
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.saver import CheckpointSaver
from megatron.checkpoint.verify_command import HEADER_BYTES, main
from megatron.config.flags import parse_args
from megatron.kernels.native import kernels_digest
from megatron.training.certificate import CertificateRecord
from tests.support.corpus import tiny_flags
from tests.support.reseal import reseal
from tests.unit.checkpoint.test_save_load import model, shards

SPECS = ["dp-grad=powersgd,rank=4"]
SPAN = TrafficSpan(0, 3, 2, 10, {"dp-grad": 1_000_000, "control": 1000}, 1_005_000, ["lo"], 1_002_000)


def _statements(**changes: Any) -> Statements:
    values: dict[str, Any] = {
        "code": code_digest(),
        "kernels": kernels_digest(),
        "torch": torch.__version__,
        "inputs": [],
        "traffic": [SPAN],
        "samples": [SampledPoint("dp-grad", True, 8, 5e-8, "ab" * 32), SampledPoint("pp-forward", False, 4, 0.1, "c")],
        "not_sampled": {"pp-backward": "nothing so far"},
        "auto": AutoDecision(SPECS, 0.1, 0.4, 0.11, 0.12, ["--compress auto: predicted"]),
        **changes,
    }
    return Statements(**values)


def _save(root: Path, statements: Statements, choice: Any = None, *, async_: bool = False) -> Path:
    choice = {"specs": SPECS} if choice is None else choice
    common = {"iteration": 3, "certificate": statements.to_dict(), "compression_choice": choice}
    saver = CheckpointSaver(root, async_=async_)
    saver.save(3, shards(model(3.0)), common, "seed: 1\n", statements=statements)
    saver.finish_save()
    return root / "iter_0000003"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _save(tmp_path, _statements())


def _refusal(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The single line of a verification that fails."""
    assert main([str(folder), *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("verify: error: ")
    return line


def _reseal_certificate(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a certificate and makes its digest match."""
    content = json.loads((folder / CERTIFICATE).read_text())["content"]
    change(content)
    digest = sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / CERTIFICATE).write_text(json.dumps({"sha256": digest, "content": content}))


@pytest.mark.parametrize("async_", [False, True], ids=["at once", "in the background"])
def test_a_checkpoint_is_certified_with_a_line_for_each_check(
    async_: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _save(tmp_path, _statements(), async_=async_)
    for words in ([str(folder)], [str(tmp_path)], [str(folder), "--strict"]):
        assert main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{folder}: certified"
        kinds = [line.strip().partition(":")[0] for line in lines[1:]]
        assert kinds == ["files", "statements", "bytes", "residuals", "residuals", "residuals", "replicas", "auto"]
        assert "1.0010 times as many by the ranks' connections, 1.0040 times as many by lo" in lines[3]
        assert "predicted 0.1 s an iteration, 0.4 s without; trial steps 0.11 s; measured 0.12 s" in lines[-1]
    assert set(read_certificate(folder).files) == {f.name for f in folder.iterdir()} - {CERTIFICATE}


def test_a_run_without_certificates_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path, 3, shards(model(3.0)), {}, "seed: 1\n")
    line = _refusal(tmp_path, capsys)
    assert line.endswith("certificate.json is missing: it was saved without --certificate, or removed")


def test_certificates_of_the_first_format_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As if with the defaults of what they, and the checkpoint's statements, do not have."""
    statements = _statements()

    def first_format(stated: dict[str, Any]) -> dict[str, Any]:
        for span in stated["traffic"]:
            del span["uncompressed"]
        for name in ("increases", "checks", "uncompressed_trial_s", "settings", "after"):
            del stated["auto"][name]
        return stated

    class FirstFormat(Statements):
        def to_dict(self) -> dict[str, Any]:
            return first_format(super().to_dict())

    old = FirstFormat(**{name: getattr(statements, name) for name in vars(statements)})
    folder = _save(tmp_path, old)
    _reseal_certificate(folder, lambda content: content.update(format=1))
    assert '"uncompressed"' not in (folder / CERTIFICATE).read_text()
    assert main([str(folder), "--strict"]) == 0, capsys.readouterr().err
    record = CertificateRecord()
    record.load_state_dict(old.to_dict())  # a resumed run goes on with them
    assert record.state_dict() == statements.to_dict()


CHECK = {"iteration": 1, "increase": 0.1, "eased": ""}


@pytest.mark.parametrize(
    "checks",
    [5, [5], [{}], *([{**CHECK, **bad}] for bad in ({"increase": -0.1}, {"increase": "a"}, {"iteration": -1}))],
)
def test_bad_checks_are_refused(checks: Any) -> None:
    stated = _statements().to_dict()
    stated["auto"]["checks"] = checks
    with pytest.raises(UserError, match="here, auto"):
        Statements.read(stated, "here")


AUTO_FLAGS = {"compress": ["auto"], "save": "folder"}
NO_FLUSH = {"delay": 1, "no_pipeline_flush": True, "pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("flags", "certified"),
    [
        (AUTO_FLAGS, True),
        ({**AUTO_FLAGS, **NO_FLUSH}, True),
        ({**AUTO_FLAGS, "certificate": "false"}, False),
        ({**AUTO_FLAGS, "save": None}, False),
        ({**AUTO_FLAGS, "compress": None}, False),
    ],
)
def test_runs_that_choose_compressors_are_certified_if_they_save(flags: dict[str, Any], certified: bool) -> None:
    config = parse_args(tiny_flags(Path("data"), **flags)).resolve(2)
    assert config.checkpoint.certificate is certified


def test_damaged_statements_of_a_checkpoint_are_refused() -> None:
    with pytest.raises(UserError, match="the certificate's statements in the checkpoint: not_sampled is missing"):
        CertificateRecord().load_state_dict({"code": 1})
    record = CertificateRecord()
    record.load_state_dict(_statements().to_dict())
    assert record.state_dict() == _statements().to_dict()
    assert CertificateRecord().state_dict() == {}


texts = st.text(max_size=20)
counts = st.integers(0, 1 << 60)


@settings(max_examples=50, deadline=None)
@given(
    ledger=st.dictionaries(texts, counts, max_size=3),
    others=st.tuples(st.none() | counts, st.none() | counts, texts),
    samples=st.lists(st.tuples(texts, st.booleans(), st.integers(1, 9), st.floats(0, 1e30), texts), max_size=3),
    auto=st.none() | st.tuples(st.lists(texts), st.floats(0, 9), st.floats(0, 9), st.none() | st.floats(0, 9)),
    reasons=st.dictionaries(texts, texts, max_size=2),
)
def test_any_statements_come_back_equal(
    ledger: dict[str, int], others: Any, samples: Any, auto: Any, reasons: Any
) -> None:
    interfaces, connections, reason = others
    statements = _statements(
        inputs=[InputFile(reason, reason, reason)],
        traffic=[TrafficSpan(1, 2, 3, 4, ledger, interfaces, [reason], connections, reason, ledger)],
        samples=[SampledPoint(*entry) for entry in samples],
        not_sampled=reasons,
        differences=[reason],
        auto=auto
        and AutoDecision(
            auto[0],
            auto[1],
            auto[2],
            auto[3],
            auto[3],
            [reason],
            {reason: auto[1]},
            [LossCheck(7, auto[2])],
            auto[3],
            [reason],
            7,
        ),
    )
    assert Statements.read(json.loads(json.dumps(statements.to_dict())), "here") == statements
    content = json.loads(Certificate(3, 2, {"a": "b"}, statements).render())["content"]
    assert content["statements"] == statements.to_dict()


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list) and value:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries:
            yield from _leaves(entry, (*path, key))
    else:
        yield path


def _change_leaf(content: dict[str, Any], path: tuple[Any, ...]) -> None:
    *parents, last = path
    target: Any = content
    for key in parents:
        target = target[key]
    value = target[last]
    if isinstance(value, bool):
        target[last] = not value
    else:
        target[last] = value + 1 if isinstance(value, int | float) else "other" if isinstance(value, str) else ["other"]


def test_every_changed_value_of_a_certificate_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With and without a digest that matches."""
    intact = (folder / CERTIFICATE).read_bytes()
    content = json.loads(intact)["content"]
    paths = list(_leaves(content))
    assert len(paths) > 35
    for path in paths:
        changed = copy.deepcopy(content)
        _change_leaf(changed, path)
        (folder / CERTIFICATE).write_text(json.dumps({"sha256": json.loads(intact)["sha256"], "content": changed}))
        assert "is damaged: its digest does not match" in _refusal(folder, capsys), path
        (folder / CERTIFICATE).write_bytes(intact)
        _reseal_certificate(folder, partial(_change_leaf, path=path))
        assert "damaged" not in _refusal(folder, capsys), path
        (folder / CERTIFICATE).write_bytes(intact)
    assert main([str(folder)]) == 0


def test_every_changed_file_is_found_and_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted(folder.iterdir()):
        intact = path.read_bytes()
        for at in (0, len(intact) // 2, len(intact) - 1):
            path.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
            assert path.name in _refusal(folder, capsys)
        path.write_bytes(intact + b"x")
        assert path.name in _refusal(folder, capsys)
        path.unlink()
        assert path.name in _refusal(folder, capsys)
        os.mkfifo(path)
        assert path.name in _refusal(folder, capsys)
        path.unlink()
        path.write_bytes(intact)
    assert main([str(folder)]) == 0


def test_another_configuration_with_matching_checksums_is_found(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reseal(folder, {"config.yaml": b"seed: 2\n"})
    line = _refusal(folder, capsys)
    assert "config.yaml differs" in line or "metadata.json differs" in line


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"connections": 1_011_000 + HEADER_BYTES * 2 * 10 + 2000}, "bytes differ"),
        ({"connections": 990_000}, "bytes differ"),
        ({"interfaces": 990_000}, "bytes differ"),
        ({"interfaces": 1_030_000, "connections": None}, "bytes differ"),
        ({"interfaces": 9_000_000}, ""),  # other programs
        ({"connections": 1_011_000 + HEADER_BYTES * 2 * 10 - 1000}, ""),
        ({"interfaces": None, "names": [], "connections": None, "reason": "no counters"}, ""),
    ],
)
def test_bytes_must_agree_within_one_percent_and_headers(
    changes: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = [SPAN, dataclasses.replace(SPAN, after=3, until=5, **changes)]
    folder = _save(tmp_path, _statements(traffic=spans))
    if line:
        assert line in _refusal(folder, capsys)
        assert main([str(folder)]) == 2
        assert "iterations 4 to 5" in capsys.readouterr().err
    else:
        assert main([str(folder)]) == 0
        text = capsys.readouterr().out
        assert ("no counters" in text) == ("reason" in changes)
        assert ("with other programs" in text) == (changes.get("interfaces") == 9_000_000)


@pytest.mark.parametrize(("connections", "is_right"), [(1_002_000, True), (900_000, False), (None, True)])
def test_connections_are_compared_without_interfaces(connections: int | None, is_right: bool, tmp_path: Path) -> None:
    """As after an interface was replaced."""
    span = dataclasses.replace(SPAN, interfaces=None, connections=connections, reason="veth0 was removed")
    assert (main([str(_save(tmp_path, _statements(traffic=[span])))]) == 0) is is_right


def test_residuals_and_replicas_must_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = _statements(samples=[SampledPoint("dp-grad", True, 8, 1.1e-6, "ab")])
    assert "residuals do not add up at dp-grad" in _refusal(_save(tmp_path / "lost", lost), capsys)
    lossy = _statements(samples=[SampledPoint("dp-grad", False, 8, 0.9, "ab")])
    assert main([str(_save(tmp_path / "lossy", lossy))]) == 0
    assert "0.9 in 8 samples of messages without a residual" in capsys.readouterr().out
    differ = _statements(differences=["layers.0.bias on rank 0 and rank 1"])
    assert "replicas differ: layers.0.bias" in _refusal(_save(tmp_path / "differ", differ), capsys)


def test_the_choice_must_be_that_of_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = _statements(auto=AutoDecision(["dp-grad=topk"], 0.1, 0.4, None, None, []))
    assert "auto differs from the choice" in _refusal(_save(tmp_path, other), capsys)


def test_a_choice_without_a_statement_is_said_to_have_no_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(_save(tmp_path, _statements(auto=None)))]) == 0
    line = f"  auto: {SPECS[0]}, chosen in a run without --certificate: no evidence"
    assert line in capsys.readouterr().out.splitlines()


def test_times_are_those_of_the_specs_that_were_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = "dp-grad=fixpoint,bits=4"
    auto = AutoDecision(SPECS, 0.1, 0.4, 0.11, 0.12, ["--compress auto: predicted"], {chosen: 0.3})
    assert main([str(_save(tmp_path, _statements(auto=auto)))]) == 0
    line = f"  auto: {SPECS[0]} now; times of the choice, {chosen}: predicted 0.1 s an iteration"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    "choice",
    [
        {"specs": 5},
        {"specs": [5]},
        {"specs": SPECS, "turned_off": None},
        [SPECS],
        pytest.param({}, id="no choice"),
    ],
)
def test_a_choice_that_no_run_writes_is_one_line(
    choice: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "common.json" in _refusal(_save(tmp_path, _statements(), choice), capsys)


@pytest.mark.parametrize(("specs", "is_right"), [([], True), (SPECS, False)])
def test_a_compressor_that_was_turned_off_is_not_in_use(specs: list[str], is_right: bool, tmp_path: Path) -> None:
    turned_off = [SPECS[0].partition("=")[0]]
    statements = _statements(auto=AutoDecision(specs, 0.1, 0.4, None, None, []))
    folder = _save(tmp_path, statements, choice={"specs": SPECS, "turned_off": turned_off})
    assert (main([str(folder)]) == 0) is is_right


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"code": "0"}, "the code of the package"),
        ({"kernels": "0"}, "the compiled kernels"),
        ({"torch": "1.0"}, "torch is "),
    ],
)
def test_another_machine_is_a_warning_unless_strict(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _save(tmp_path, _statements(**changes))
    assert main([str(folder)]) == 0
    assert f"  warning: {words}" in capsys.readouterr().out
    assert words in _refusal(folder, capsys, "--strict")


def test_input_files_are_compared_where_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.bin"
    data.write_bytes(b"text")
    inputs = [InputFile("the .bin file of dataset 1 of --data-path", str(data), fingerprint(data))]
    folder = _save(tmp_path / "saved", _statements(inputs=inputs))
    assert main([str(folder), "--strict"]) == 0
    assert "warning" not in capsys.readouterr().out
    data.write_bytes(b"tent")
    assert main([str(folder)]) == 0
    assert "warning: the .bin file of dataset 1 of --data-path" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["a\0b", "a\ud800"])
def test_input_files_with_impossible_names_are_a_warning(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _save(tmp_path, _statements(inputs=[InputFile("--vocab-file", path, "1 byte")]))
    assert main([str(folder)]) == 0
    assert "  warning: --vocab-file, a\\" in capsys.readouterr().out
    assert "is unreadable (" in _refusal(folder, capsys, "--strict")


def test_texts_of_a_certificate_keep_to_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal sees no control character, and statements add no line."""
    folder = _save(tmp_path / "reasons", _statements(not_sampled={"\x1b[2J": "\n  replicas: forged", "\ud800": "é"}))
    assert main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4] == r"  residuals: \x1b[2J: not sampled: \n  replicas: forged"
    assert lines[-3] == r"  residuals: \ud800: not sampled: é"
    differ = _save(tmp_path / "differ", _statements(differences=["\x1b[2J"]))
    assert _refusal(differ, capsys).endswith(r"replicas differ: \x1b[2J")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", ".", "a\0b", "sub/file"])
def test_files_outside_the_folder_are_refused(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _reseal_certificate(folder, lambda content: content["files"].update({name: "0"}))
    assert "is not the name of a file in this folder" in _refusal(folder, capsys)


@pytest.mark.parametrize("name", ["..", "", "other.bin"])
def test_files_that_the_checkpoint_does_not_list_are_refused(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _reseal_certificate(folder, lambda content: content["files"].update({name: "0"}))
    assert f"{name} is a file of the certificate, but not of the checkpoint" in _refusal(folder, capsys)


def test_other_files_and_folders_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "other.bin").write_bytes(b"")
    assert _refusal(folder, capsys).endswith("other.bin is not a file of the checkpoint")
    (folder / "other.bin").unlink()
    (folder / "sub").mkdir()
    assert _refusal(folder, capsys).endswith("sub is not a file of the checkpoint")


def test_a_name_that_occurs_twice_is_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other readers might take the first."""
    text = (folder / CERTIFICATE).read_text()
    changed = text.replace('"iteration": 3,', '"iteration": 999999, "iteration": 3,', 1)
    assert changed != text
    (folder / CERTIFICATE).write_text(changed)
    assert "certificate.json is damaged" in _refusal(folder, capsys)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"sha256": 1, "content": null}',
        pickle.dumps({"content": {}}),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_damaged_certificates_are_one_line(data: bytes, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / CERTIFICATE).write_bytes(data)
    assert "certificate.json is damaged" in _refusal(folder, capsys)


def test_an_unknown_format_and_missing_folders_are_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _reseal_certificate(folder, lambda content: content.update(format=3))
    assert "has format 3; this version reads formats 1 and 2" in _refusal(folder, capsys)
    assert "is not a folder" in _refusal(tmp_path / "missing", capsys)
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoint" in _refusal(tmp_path / "empty", capsys)


@settings(max_examples=60, deadline=None)
@given(path=st.integers(0, 10**6), value=st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5))
def test_values_of_any_kind_never_end_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, path: int, value: Any
) -> None:
    root = tmp_path_factory.mktemp("any")
    folder = _save(root, _statements())

    def change(content: dict[str, Any]) -> None:
        leaves = list(_leaves(content))
        *parents, last = leaves[path % len(leaves)]
        target: Any = content
        for key in parents:
            target = target[key]
        target[last] = value

    _reseal_certificate(folder, change)
    assert main([str(folder)]) in (0, 2)
    shutil.rmtree(root)
