"""Zero-shot tasks against plain loops over single texts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.evaluation import continuation, lambada, wikitext
from megatron.evaluation.command import main
from megatron.evaluation.detokenize import wikitext as written
from megatron.inference.model import LoadedModel, load_model
from megatron.models.context import ForwardContext
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from tests.support.llama import write_sentence_piece
from tests.unit.convert.support import LENGTH, MODELS, saved_model


@given(count=st.integers(2, 70), length=st.integers(1, 20), data=st.data())
def test_windows_predict_every_token_once_with_enough_before_it(count: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length))
    tokens = list(range(count))
    windows = wikitext.split_windows(tokens, length, stride)
    predicted = [token for window in windows for token in window.tokens[len(window.tokens) - window.targets :]]
    assert predicted == tokens[1:]
    for window in windows:
        assert len(window.tokens) <= length + 1
        assert list(window.tokens) == tokens[window.tokens[0] : window.tokens[0] + len(window.tokens)]
        assert window.targets <= len(window.tokens) - 1
    for window in windows[1:]:
        assert len(window.tokens) - 1 - window.targets == length - stride


@pytest.mark.parametrize(
    ("published", "usual"),
    [
        ("= = Reception = =\n", "== Reception ==\n"),
        (" = Robert <unk> = \n", " = Robert <unk> =\n"),
        ("1 @,@ 000 @.@ 5 km @-@ long , it ( see [ 1 ] ) ended .", "1,000.5 km-long, it (see [1]) ended ."),
        ('he said " yes " ; she left . ', 'he said "yes"; she left. '),
        ("Boulter 's play was 20 \N{DEGREE SIGN} C", "Boulter's play was 20\N{DEGREE SIGN}C"),
        ("the boys ' room", "the boys' room"),
    ],
)  # fmt: skip
def test_the_spelling_of_wikitext_is_undone(published: str, usual: str) -> None:
    assert written(published) == usual


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("saved"), MODELS["gpt2"])


@pytest.fixture(scope="module")
def model(saved: Path) -> LoadedModel:
    return load_model(saved, device=torch.device("cpu"))


def _logits(model: LoadedModel, tokens: list[int]) -> Any:
    with torch.no_grad():
        return model.stage.logits(model.stage(torch.tensor([tokens]), ForwardContext()))[:, 0].double()


@pytest.mark.parametrize("stride", [0, 5])
def test_wikitext_is_the_mean_over_all_tokens(
    saved: Path, model: LoadedModel, stride: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = torch.randint(0, 96, (50,), generator=torch.Generator().manual_seed(4)).tolist()
    path = tmp_path / "text.txt"
    path.write_text(" ".join(map(str, tokens)))
    loss, done = 0.0, 0
    while done < len(tokens) - 1:
        new = min(LENGTH if not done else stride or LENGTH, len(tokens) - 1 - done)
        start = max(done - (LENGTH - (stride or LENGTH)), 0) if done else 0
        logprobs = _logits(model, tokens[start : done + new]).log_softmax(-1)
        for position in range(done, done + new):
            loss -= float(logprobs[position - start, tokens[position + 1]])
        done += new
    loss /= len(tokens) - 1
    flags = ["--task", "WIKITEXT103", "--valid-data", str(path), "--load", str(saved), "--micro-batch-size", "3"]
    assert main([*flags, "--overlapping-eval", str(stride)]) == 0
    rule, line, again = capsys.readouterr().out.splitlines()
    assert rule == again == "-" * (len(line) + 1)
    expected = f"{loss:.4E} | ppl: {math.exp(loss):.4E} | adjusted ppl: {math.exp(loss):.4E} | token ratio: 1.0 |"
    assert line == f" validation results on WIKITEXT103 | avg loss: {expected}"


@pytest.mark.parametrize("strict", [False, True])
def test_lambada_counts_texts_with_the_likeliest_end(
    saved: Path, model: LoadedModel, strict: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = torch.Generator().manual_seed(5)
    texts, correct = [], 0
    for number in range(12):
        tokens = torch.randint(0, 96, (4 + number,), generator=generator).tolist()
        best = int(_logits(model, tokens[-LENGTH:])[-1].argmax())
        right = number % 3 == 0 and best < 96
        texts.append([*tokens, best if right else (best + 1) % 96])
        correct += right
    path = tmp_path / "lambada.jsonl"
    rows = [{"text": " ".join(map(str, tokens)), "more": "\u2028"} for tokens in texts]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    flags = ["--task", "LAMBADA", "--valid-data", str(path), "--load", str(saved), "--micro-batch-size", "5"]
    assert main([*flags, *(["--strict-lambada"] if strict else [])]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert correct
    assert line == (
        f" validation results on LAMBADA | number correct: {correct:.4E} | total examples: {12:.4E} | "
        f"avg accuracy: {correct / 12:.4E}"
    )


def test_every_token_of_a_strict_word_must_be_predicted() -> None:
    class Letters:
        """Tokenizer with a token for each character."""

        def tokenize(self, text: str) -> list[int]:
            return [ord(character) for character in text]

    letters: Any = Letters()
    window = lambada.last_word_window("the old house", letters, 100, strict=True)
    assert "".join(map(chr, window.tokens)) == "the old house"
    assert window.targets == 6
    assert lambada.last_word_window("the old house", letters, 100, strict=False).targets == 1
    cut = lambada.last_word_window("the old house", letters, 4, strict=True)
    assert (len(cut.tokens), cut.targets) == (5, 4)


@pytest.mark.parametrize("text", ["the old house", "the old  dog\n", " a €", "the 'dog'"])
def test_a_strict_word_is_cut_from_the_tokens_of_the_whole_text(text: str, tmp_path: Path) -> None:
    """A SentencePiece tokenizer with a dummy prefix splits a word differently at the start of a text."""
    write_sentence_piece(tmp_path / "tokenizer.model")
    tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
    window = lambada.last_word_window(text, tokenizer, 100, strict=True)
    word = text.split()[-1]
    before = text[: text.rfind(word)].strip()
    assert list(window.tokens) == tokenizer.tokenize(f"{before} {word}")
    split = len(window.tokens) - window.targets
    assert tokenizer.detokenize(window.tokens[:split]) == before
    assert tokenizer.detokenize(window.tokens)[len(before) :] == f" {word}"


def test_a_strict_word_includes_the_token_shared_with_its_prefix() -> None:
    class Pairs:
        """Tokenizer with a token for each two characters."""

        def tokenize(self, text: str) -> list[int]:
            return [hash(text[i : i + 2]) for i in range(0, len(text), 2)]

    pairs: Any = Pairs()
    window = lambada.last_word_window("the dog", pairs, 100, strict=True)
    assert list(window.tokens) == [hash(pair) for pair in ("th", "e ", "do", "g")]
    assert window.targets == 3, "'e ' is no end of 'the'"


@given(
    documents=st.lists(st.lists(st.integers(0, 5), max_size=40), max_size=6),
    places=st.builds(
        continuation.QuestionOptions, st.integers(1, 20), st.integers(1, 5), st.integers(1, 4), st.integers(2, 5)
    ),
)
def test_questions_are_passages_with_wrong_answers_from_elsewhere(
    documents: list[list[int]], places: continuation.QuestionOptions
) -> None:
    length = places.prompt + places.continuation
    cuts = [
        tuple(document[i : i + length]) for document in documents for i in range(0, len(document) - length + 1, length)
    ]
    questions = continuation.make_questions(documents, places)
    assert len(questions) <= min(places.samples, len(cuts))
    expected = iter(cuts)
    for question in questions:
        true, *wrong = question
        assert true in expected, "each place once, in the order of the text"
        assert len(wrong) == places.choices - 1
        assert true not in wrong
        assert all(text[: places.prompt] == true[: places.prompt] for text in wrong)
        assert all(any(cut[places.prompt :] == text[places.prompt :] for cut in cuts) for text in wrong)


def test_continuations_are_found_greedily_and_ranked_by_likelihood(
    saved: Path, model: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = torch.Generator().manual_seed(6)
    documents = []
    for number in range(9):
        tokens = torch.randint(0, 96, (5,), generator=generator).tolist()
        for step in range(3):
            best = int(_logits(model, tokens)[-1, :96].argmax())
            tokens.append(best if number >> step & 1 else (best + 7) % 96)
        documents.append(tokens)
    documents.append(list(range(7)))  # a token short
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join(map(str, tokens))}) + "\n" for tokens in documents))
    sizes = ["--prompt-tokens", "5", "--continuation-tokens", "3", "--choices", "3", "--micro-batch-size", "4"]
    assert main(["--task", "CONTINUATION", "--valid-data", str(path), "--load", str(saved), *sizes]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    exact, matches, ranked = 0, 0, 0
    for number, tokens in enumerate(documents[:9]):
        likelihoods = []
        for index in (number, (number + 3) % 9, (number + 6) % 9):
            row = [*tokens[:5], *documents[index][5:]]
            logprobs = _logits(model, row).log_softmax(-1)
            likelihoods.append(sum(float(logprobs[i - 1, row[i]]) for i in range(5, 8)))
        ranked += likelihoods[0] > max(likelihoods[1:])
        grown = tokens[:5]
        while len(grown) < 8 and (best := int(_logits(model, grown)[-1].argmax())) == tokens[len(grown)]:
            grown.append(best)
        matches += len(grown) - 5
        exact += len(grown) == 8
    assert 0 < exact < 9
    assert 0 < ranked < 9

    def error(count: int) -> float:
        return math.sqrt(count / 9 * (1 - count / 9) / 9)

    assert line == (
        f" validation results on CONTINUATION | exact match: {exact / 9:.4E} +- {error(exact):.1E} | "
        f"matched tokens: {matches / 9:.4E} | ranking accuracy: {ranked / 9:.4E} +- {error(ranked):.1E} "
        f"(by chance 0.33) | total examples: {9:.4E}"
    )


FEW = ["--prompt-tokens", "1", "--continuation-tokens", "1", "--choices", "3"]


@pytest.mark.parametrize(
    ("task", "content", "flags", "message"),
    [
        ("LAMBADA", '{"text": "1 2 3"}\n{"txt": "1 2"}\n', [], "line 2"),
        ("LAMBADA", '{"text": "1"}\n', [], "line 1"),
        ("LAMBADA", '{"text": "1 2"}\n{"text": "a \\ud800 b"}\n', [], "line 2"),
        ("LAMBADA", '{"text": "1 2"}\n' + "[" * 100_000, [], "line 2"),
        ("LAMBADA", b'{"text": "1 2"}\n\xff', [], "line 2: is not UTF-8"),
        ("LAMBADA", "", [], "no text"),
        ("WIKITEXT103", b"1 2\n3\n\xff 4", [], "line 3: is not UTF-8"),
        ("WIKITEXT103", "one\ntwo\nthree", [], "separated by a space"),
        ("LAMBADA", None, [], "No such file"),
        ("WIKITEXT103", "", [], "at least two words"),
        ("WIKITEXT103", "1 2 3", ["--overlapping-eval", "17"], "--overlapping-eval 17"),
        ("CONTINUATION", '{"text": "1 2 3"}', [], "more than the 16 tokens"),
        ("CONTINUATION", '{"text": "1 2 3"}', ["--prompt-tokens", "3", "--continuation-tokens", "1"], "give more text"),
        ("CONTINUATION", '{"text": "1 2 3 4 5"}', FEW, "too few different passages of 2 tokens for --choices 3"),
        ("CONTINUATION", '{"text": "1 2 1 2 1 2"}', FEW, "too few different passages of 2 tokens for --choices 3"),
        ("CONTINUATION", '{"text": "1 2 3"}', [*FEW, "--samples", "2"], "--samples 2 is less than --choices 3"),
        ("CONTINUATION", '{"text": "1 2 3"}\n{}', [], "line 2"),
        ("CONTINUATION", '{"text": "1 2 3"}', ["--choices", "1"], "--choices"),
        ("WIKITEXT103", "1 2 3", ["--epochs", "3"], "--finetune"),
        ("MNLI", "1 2 3", [], "--task"),
    ],
)
def test_bad_input_is_one_line(
    saved: Path, tmp_path: Path, error_line: Callable[[], str], task: str, content: str | bytes | None,
    flags: list[str], message: str,
) -> None:  # fmt: skip
    path = tmp_path / "data"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert main(["--task", task, "--valid-data", str(path), "--load", str(saved), *flags]) == 2
    assert message in error_line()
