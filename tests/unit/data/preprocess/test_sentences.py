"""Sentences: nltk's model from a local folder, and the rules without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.preprocess.sentences import rule_spans, sentence_splitter


def sentences(text: str) -> list[str]:
    return [text[begin:end] for begin, end in rule_spans(text)]


@pytest.mark.parametrize(
    "expected",
    [
        ["One two.", "Three four five!", "Six?"],
        ["Mr. Smith met Dr. J. Doe at 3.5 p.m. yesterday.", 'He said: "Hello!"', "Then he left (fast)."],
        ["It rained (all day.)", "'Why?' he asked.", "No. 5 won..."],
        ["See Fig. 3, pp. 4-5 and e.g. the U.S. Army.", "Yes."],
        ["Wait... and see.", "(So they did.)", "12 came."],
        ["Version 2.0 is out at www.example.com.", "Get it?!", "Now."],
        ["\u4f60\u597d\u3002", "\u4ed6\u8bf4\uff01", "\u597d"],
    ],
)
def test_rules(expected: list[str]) -> None:
    glue = "" if expected[0].endswith("\u3002") else " "
    assert sentences(glue.join(expected)) == expected


def test_an_empty_line_ends_a_sentence() -> None:
    assert sentences("  A title\n \nand text\nover two lines.\n\n\nMore") == [
        "A title",
        "and text\nover two lines.",
        "More",
    ]
    assert sentences(" \n\n ") == []


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("aA1 .!?\n\"')(\u3002\u201d\u2026"), max_size=60))
def test_rules_lose_nothing_but_white_space(text: str) -> None:
    spans = rule_spans(text)
    assert all(begin < end and not text[begin].isspace() and not text[end - 1].isspace() for begin, end in spans)
    assert "".join("".join(sentences(text)).split()) == "".join(text.split())
    assert [begin for begin, _ in spans] == sorted(begin for begin, _ in spans)
    assert "".join(sentence_splitter("no such language", keep_newlines=True)(text)) == text


def test_the_model_of_nltk_is_read_from_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nltk_data = pytest.importorskip("nltk.data")
    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    (folder / "abbrev_types.txt").write_text("flurb\n")
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (folder / name).write_text("")
    text = "They met Flurb. Smith there. It rained."
    assert sentence_splitter("english", keep_newlines=False)(text) == ["They met Flurb.", "Smith there.", "It rained."]
    monkeypatch.setattr(nltk_data, "path", [str(tmp_path)])
    assert sentence_splitter("english", keep_newlines=False)(text) == ["They met Flurb. Smith there.", "It rained."]


def test_without_nltk_the_rules_split_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nltk.tokenize", None)
    assert sentence_splitter("english", keep_newlines=True)("One. Two.") == ["One. ", "Two."]
