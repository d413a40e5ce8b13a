"""filter_ngrams: bad flags and files; test_cleaning has its rules."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from megatron.data.lines import lines
from tests.unit.openwebtext.support import FILL, RUN, Refusal, read, write
from tools.openwebtext import filter_ngrams


def flags_of(tmp_path: Path, *extra: str) -> list[str]:
    data = write(tmp_path / "data", [{"text": f"{FILL}{RUN}. {FILL}"}])
    task = write(tmp_path / "task", [{"q": RUN}])
    base = ["--dedup-dataset", data, "text", "--output", str(tmp_path / "out"), "--num-threads", "1"]
    return [*base, "--task-files", task, "q", *extra]


@pytest.mark.parametrize(
    "flags",
    [
        ["--splits-count", "-1"], ["--key-threshold", "0"], ["--key-threshold", "-3"], ["--filter-text-char-len", "-3"],
        ["--remove-char-each-side", "-500"],
    ],
)  # fmt: skip
def test_impossible_thresholds_are_refused(flags: list[str], tmp_path: Path, refused: Refusal) -> None:
    assert " ".join(flags) in refused(filter_ngrams, flags_of(tmp_path, *flags))
    assert not (tmp_path / "out").exists()


def test_a_pipe_is_read_once(tmp_path: Path, refused: Refusal) -> None:
    saved, pipe = tmp_path / "dictionary.json.gz", tmp_path / "pipe"
    assert filter_ngrams.main(flags_of(tmp_path, "--save-dictionary", str(saved))) == 0
    expected = read(tmp_path / "out")
    assert len(expected) == 2
    os.mkfifo(pipe)
    flags = flags_of(tmp_path)
    flags[1] = str(pipe)
    assert "only once" in refused(filter_ngrams, flags)
    feeder = threading.Thread(target=lambda: pipe.write_bytes((tmp_path / "data").read_bytes()), daemon=True)
    feeder.start()
    assert filter_ngrams.main([*flags[:-3], "--load-dictionary", str(saved)]) == 0
    feeder.join()
    assert read(tmp_path / "out") == expected


@pytest.mark.parametrize("flag", ["--save-dictionary", "--report"])
def test_outputs_must_differ_from_inputs_and_each_other(flag: str, tmp_path: Path, refused: Refusal) -> None:
    for name, message in (("data", "overwritten"), ("task", "overwritten"), ("out", "twice")):
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        assert message in refused(filter_ngrams, flags_of(tmp_path, flag, str(tmp_path / name)))
        assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize("text", ['{"a b c": null}', '{"a b c": 1e999}', '{"a b c": -1}', "[1]", "{", "[" * 9999])
def test_a_malformed_dictionary_is_refused(text: str, tmp_path: Path, refused: Refusal) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(text)
    assert f"--load-dictionary {saved}" in refused(filter_ngrams, flags_of(tmp_path, "--load-dictionary", str(saved)))
    assert "No such file" in refused(filter_ngrams, flags_of(tmp_path, "--load-dictionary", str(tmp_path / "none")))


def test_a_dictionary_may_have_several_lines(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    assert filter_ngrams.main(flags_of(tmp_path, "--save-dictionary", str(saved))) == 0
    saved.write_text(json.dumps(json.loads(saved.read_bytes()), indent=2))
    before = list(lines(tmp_path / "out"))
    assert filter_ngrams.main([*flags_of(tmp_path)[:-3], "--load-dictionary", str(saved)]) == 0
    assert list(lines(tmp_path / "out")) == before


@pytest.mark.parametrize(
    ("line", "message"), [('{"x": 1}', "no text 'q'"), ("{", "not JSON"), ("3", "not a JSON object")]
)
def test_a_broken_task_is_named(line: str, message: str, tmp_path: Path, refused: Refusal) -> None:
    flags = flags_of(tmp_path)
    (tmp_path / "task").write_text(f'\n{{"q": "a"}}\n\n{line}\n')
    error = refused(filter_ngrams, flags)
    assert f"{tmp_path / 'task'}, line 4" in error
    assert message in error
    assert "--skip-bad-lines" not in error  # that flag is for the data


def test_a_missing_network_is_one_line(tmp_path: Path, refused: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets, hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")

    def fail(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(hub.HfApi, "dataset_info", fail)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("is slow to give up"))
    assert "--tasks squad" in refused(filter_ngrams, flags_of(tmp_path, "--tasks", "squad"))
