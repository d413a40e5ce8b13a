"""The tool that trains a vocabulary."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megatron.base.errors import UserError
from megatron.data.preprocess.vocab_command import main, train
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from tests.support.disk import largest_file


def test_vocabulary_is_deterministic_and_holds_end_of_text(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"the value of item {n % 7} is {n}\n"}) + "\n" for n in range(300)))
    assert train([corpus], tmp_path / "a", 300) == 300
    train([corpus], tmp_path / "b", 300)
    for name in ("vocab.json", "merges.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    vocabulary = json.loads((tmp_path / "a" / "vocab.json").read_text())
    assert sorted(vocabulary.values()) == list(range(300))
    assert "<|endoftext|>" in vocabulary
    assert len((tmp_path / "a" / "merges.txt").read_text().splitlines()) == 1 + 300 - 257
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["merges.txt", "vocab.json"]


def test_vocabulary_training_names_the_bad_line(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "good"}\n{"words": "bad"}\n')
    with pytest.raises(UserError, match=r"corpus.jsonl:2: .*'text'"):
        train([corpus], tmp_path / "out", 300)
    with pytest.raises(UserError, match="--vocab-size 256 must exceed the 256 byte values"):
        train([corpus], tmp_path / "out", 256)


def test_a_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = _corpus(tmp_path)
    out = tmp_path / "out"
    with largest_file(1000):
        assert (
            main(["--input", str(corpus), "--vocab-size", "300", "--output-dir", str(out), "--log-interval", "1000"])
            == 2
        )
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: --output-dir {out}: File too large")
    assert not list(out.iterdir())


def _corpus(folder: Path, documents: int = 300) -> Path:
    path = folder / "corpus.jsonl.gz"
    lines = [json.dumps({"title": f"item {n}", "text": f"the value of item {n % 7} is {n}"}) for n in range(documents)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_the_command_prints_progress_and_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--input", str(_corpus(tmp_path)), "--output-dir", str(tmp_path / "new" / "vocabulary")]
    assert main([*flags, "--vocab-size", "300", "--log-interval", "100"]) == 0
    captured = capsys.readouterr()
    assert "Processed 300 documents" in captured.err
    assert "read 300 documents; counting and merging pairs" in captured.err
    assert "300 entries in vocab.json and merges.txt (read 300 documents, " in captured.out
    folder = tmp_path / "new" / "vocabulary"
    tokenizer = GPT2BPETokenizer(folder / "vocab.json", folder / "merges.txt")
    ids = tokenizer.tokenize("the value of item 5")
    assert tokenizer.detokenize(ids) == "the value of item 5"
    assert len(ids) < 12


def test_keys_and_a_number_of_documents_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--input", str(_corpus(tmp_path)), "--vocab-size", "1000", "--json-keys", "title", "text"]
    for name, extra in (("all", []), ("some", ["--documents", "2"])):
        assert main([*flags, "--output-dir", str(tmp_path / name), *extra]) == 0
    captured = capsys.readouterr()
    assert "no other pair occurs 2 times" in captured.out
    assert "(read 300 documents, " in captured.out
    assert "(read 2 documents, " in captured.out
    assert "read 2 documents; counting and merging pairs" in captured.err
    sizes = {name: len(json.loads((tmp_path / name / "vocab.json").read_text())) for name in ("all", "some")}
    assert 257 < sizes["some"] < sizes["all"] < 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--vocab-size": "256"}, "--vocab-size 256 must exceed the 256 byte values"),
        ({"--vocab-size": str(10**18)}, "at most 10,000,000"),
        ({"--vocab-size": "many"}, "--vocab-size: invalid int value: 'many'"),
        ({"--documents": "0"}, "--documents 0: give at least 1"),
        ({"--min-frequency": str(10**30)}, "less than 2**63"),
        ({"--input": "none.jsonl"}, "--input none.jsonl: is not a file"),
        ({"--input": "empty"}, "empty: there is no text"),
        ({"--input": "blank"}, "blank: there is no text"),
        ({"--json-keys": "words"}, "corpus.jsonl.gz:1: no key 'words' (there are: 'title', 'text')"),
        ({"--output-dir": "empty"}, "--output-dir empty: File exists"),
        ({"--nothing": "1"}, "unrecognized arguments: --nothing"),
    ],
)
def test_errors_are_one_line(
    change: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "blank").write_text('{"text": ""}\n' * 3)
    flags = {"--input": _corpus(tmp_path).name, "--output-dir": "out", "--vocab-size": "300"} | change
    assert main([word for pair in flags.items() for word in pair]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not list(tmp_path.glob("out/*"))
