"""Ranks compare their flags, code and file contents before they start."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

import megatron
from megatron.base.code_digest import code_digest
from megatron.base.option import FieldOption, field_options
from megatron.base.regular import fingerprint, open_regular, read_regular
from megatron.config.run import RunConfig, run_sections
from megatron.distributed.errors import format_ranks
from megatron.training.config_agreement import first_difference
from megatron.training.identity import identity_of
from tests.support.corpus import write_documents
from tests.support.tiny import tiny_config

FIELDS = [field for name, cls in run_sections().items() for field in field_options(name, cls)]
FREE = {field.flag for field in FIELDS if field.option.may_differ}
BY_CONTENTS = {field.flag for field in FIELDS if field.option.contents}


def _sections(config: RunConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in run_sections()}


def _other(field: FieldOption, value: Any) -> Any:
    """Another value of the field's type."""
    if field.is_list:
        return [*(value or []), 1 if field.element is int else "other"]
    if field.element is bool:
        return not value
    if field.choices:
        return next(choice for choice in field.choices if choice != value)
    return "other" if field.element is str else (value or 0) + 1


def test_every_flag_is_compared_unless_it_may_differ() -> None:
    sections = _sections(tiny_config({}, 1))
    before = identity_of(sections)
    for field in FIELDS:
        section = sections[field.section]
        value = _other(field, getattr(section, field.name))
        if field.option.contents == "blend":
            value = ["1.0", "other", "2.0", "another"]
        changed = {**sections, field.section: dataclasses.replace(section, **{field.name: value})}
        message = first_difference({0: before, 3: identity_of(changed)})
        if field.flag in FREE:
            assert message is None, field.flag
        else:
            assert message is not None, field.flag
            assert f"--{field.flag} is " in message
            assert " on rank 0 and " in message
            assert " on rank 3; " in message


def test_only_flags_of_a_machine_or_a_single_rank_may_differ() -> None:
    logs = {"tensorboard-dir", "log-txt-file", "log-json-file", "profile-trace", "progress-bar", "peak-tflops"}
    logs |= {"wandb-project", "wandb-exp-name", "wandb-save-dir", "mlflow-experiment", "print-config"}
    assert logs | {"local-rank", "kill-switch-file", "data-cache-path", "num-workers"} == FREE
    paths = {field.flag for field in FIELDS if field.element is str and not field.choices}
    assert paths >= BY_CONTENTS
    assert {"data-path", "vocab-file", "merge-file", "tokenizer-model", "compress-module"} <= BY_CONTENTS


def test_the_scratch_folder_of_a_codec_may_differ() -> None:
    def identity(spec: str) -> Any:
        compression = dataclasses.replace(tiny_config({}, 1).compression, compress=[spec])
        return identity_of({"compression": compression})

    with_folder = identity("pp-forward=delta,bits=4,folder=/a,cache=9")
    assert first_difference({0: with_folder, 1: identity("pp-forward=delta,bits=4,cache=9")}) is None
    assert first_difference({0: with_folder, 1: identity("pp-forward=delta,bits=3,cache=9")}) is not None


def test_files_are_compared_by_contents(tmp_path: Path) -> None:
    def identity(*words: str | int | Path) -> Any:
        return identity_of({"data": dataclasses.replace(tiny_config({}, 1).data, data_path=[str(w) for w in words])})

    corpus, copy, other = (write_documents(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert first_difference({0: identity(corpus), 1: identity(copy)}) is None
    message = first_difference({0: identity(corpus), 1: identity(copy), 2: identity(other), 3: identity(other)})
    assert message is not None
    assert "the .bin file of dataset 1 of --data-path is " in message
    assert " on ranks 0, 1 and " in message
    assert " on ranks 2, 3; " in message
    weights = first_difference({0: identity(1, corpus, 2, other), 1: identity(1, corpus, 3, other)})
    assert "the weight of dataset 2 of --data-path is 2 on rank 0 and 3 on rank 1" in str(weights)
    lengths = first_difference({0: identity(corpus), 1: identity(1, corpus)})
    assert "the number of words of --data-path is 1" in str(lengths)


def test_another_version_of_the_code_is_named_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = _sections(tiny_config({}, 1))
    ours = identity_of(sections)
    (tmp_path / "module.py").write_text("x = 1\n")
    monkeypatch.setattr(megatron, "__path__", [str(tmp_path)])
    monkeypatch.setattr(
        "megatron.training.identity.code_digest", code_digest.__wrapped__
    )  # not the digest of the first call
    sections["training"] = dataclasses.replace(sections["training"], seed=99)
    message = first_difference({0: ours, 1: identity_of(sections)})
    assert message is not None
    assert message.startswith("the ranks do not agree: the code of the package megatron")


def test_identities_of_large_files_and_folders(tmp_path: Path) -> None:
    path = tmp_path / "large"
    data = bytearray(3 << 20)
    path.write_bytes(data)
    before = fingerprint(path)
    for offset in (0, len(data) - 1):
        data[offset] ^= 1
        path.write_bytes(data)
        assert fingerprint(path) != before
        data[offset] ^= 1
    path.write_bytes(data + b"\0")
    assert fingerprint(path) != before
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_bytes(b"1")
    before = fingerprint(folder)
    (folder / "a").rename(folder / "b")
    assert fingerprint(folder) != before


def test_pipes_and_folders_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "missing"):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory|No such file"):
            open_regular(tmp_path / name)
        assert fingerprint(tmp_path / name).startswith("unreadable") or name == "."
    (tmp_path / "text").write_bytes(b"abcdef")
    assert read_regular(tmp_path / "text", 4) == b"abcd"
    assert read_regular(tmp_path / "text") == b"abcdef"


def test_long_lists_of_ranks_are_shortened() -> None:
    assert format_ranks([3]) == "rank 3"
    assert format_ranks(range(1, 9)) == "ranks 1, 2, 3, 4 and 4 more"
    values = first_difference({rank: {"x": str(rank % 5)} for rank in range(10)})
    assert values is not None
    assert values.endswith("(and 2 more); make it the same on all of them")


def test_long_values_are_shortened_to_their_difference() -> None:
    long = "/" + "a" * 200
    message = first_difference({0: {"x": f"{long}/one{long}"}, 1: {"x": f"{long}/two"}})
    assert message is not None
    assert "/one" in message
    assert "/two on rank 1" in message
    assert len(message) < 400
