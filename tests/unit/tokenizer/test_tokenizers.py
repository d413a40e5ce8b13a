"""Every tokenizer against another implementation, and refused flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.base.errors import UserError
from megatron.config.tokenizer import TOKENIZER_TYPES, TokenizerConfig
from megatron.tokenizer.api import Tokenizer
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.wordpiece import word_piece_ids
from tests.support.shared import shared_path

CORPUS = [
    "The quick brown fox's tail wasn't longer than 12 inches, they'll say.\n\n\tIndented  text, twice.\n",
    "def f(x_1):\r\n    return {'a': [x**2 for x in range(10)]}  # done!!",
    "Zażółć gęślą jaźń; naïve café — “quoted” … 東京タワー 123 ½ ⅷ 🤖👩‍👩‍👧",
] * 4

# Characters at which cutting a text into words can go wrong, mixed with any other.
TRICKY = "ab'sdtmrevl 019 \t\n\r\x0b\x0c\x1c\x1f\x7f\x85\xa0\u2003\u3000éßждñ½ⅷ٣漢字\u2018\u2019“”—…\u0301🤖!\"#_.,"
TEXT = st.text(st.one_of(st.sampled_from(TRICKY), st.characters(exclude_categories=["Cs"])), max_size=60)
ENGLISH = st.lists(
    st.sampled_from(
        ["the ", "cat's", " don't", "\n\n", "  ", "\u2013", " naïve", " 3.14", "end.", "\u3000", " \xa0 ", "''s"]
    ),
    max_size=40,
).map("".join)


def flags(name: Any, **given_flags: Any) -> TokenizerConfig:
    return TokenizerConfig(tokenizer_type=name, **{k: _text(v) for k, v in given_flags.items()})


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def write_gpt2_files(folder: Path) -> tuple[Path, Path]:
    """GPT-2's own files if they exist, else a small vocabulary trained here."""
    vocab, merges = shared_path("data/gpt2-vocab.json"), shared_path("data/gpt2-merges.txt")
    if vocab is not None and merges is not None:
        return vocab, merges
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(CORPUS, vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(folder))
    return folder / "vocab.json", folder / "merges.txt"


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_gpt2_files(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def gpt2(gpt2_files: tuple[Path, Path]) -> Tokenizer:
    return build_tokenizer(flags("GPT2BPETokenizer", vocab_file=gpt2_files[0], merge_file=gpt2_files[1]))


@pytest.fixture(scope="module")
def hugging_face_gpt2(gpt2_files: tuple[Path, Path]) -> Any:
    transformers = pytest.importorskip("transformers")
    vocab = json.loads(gpt2_files[0].read_text(encoding="utf-8"))
    merges = gpt2_files[1].read_text(encoding="utf-8").split("\n")[1:]
    pairs = [tuple(line.split(" ")) for line in merges if line]
    return transformers.GPT2TokenizerFast(vocab=vocab, merges=pairs)


@settings(max_examples=400, deadline=None)
@given(text=st.one_of(TEXT, ENGLISH))
def test_gpt2_equals_hugging_face(gpt2: Tokenizer, hugging_face_gpt2: Any, text: str) -> None:
    ids = gpt2.tokenize(text)
    assert ids == hugging_face_gpt2.encode(text)
    assert gpt2.detokenize(ids) == text


def test_gpt2_equals_hugging_face_on_long_texts(gpt2: Tokenizer, hugging_face_gpt2: Any) -> None:
    path = shared_path("data/wikitext-2-valid.txt")
    text = path.read_text(encoding="utf-8")[:200_000] if path is not None else "\n".join(CORPUS)
    texts = [text, *text.split("\n")[:200], *CORPUS]
    assert gpt2.tokenize_batch(texts) == [hugging_face_gpt2.encode(long_text) for long_text in texts]


def test_gpt2_encodes_end_of_text_in_a_text_as_plain_text(gpt2: Tokenizer) -> None:
    text = "before<|endoftext|>after"
    ids = gpt2.tokenize(text)
    assert gpt2.eod not in ids
    assert gpt2.detokenize(ids) == text
    assert gpt2.eod == gpt2.vocab_size - 1 or gpt2.eod == 0
    assert gpt2.detokenize([gpt2.eod]) == "<|endoftext|>"


def test_the_word_cache_of_gpt2_is_bounded(gpt2_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = build_tokenizer(flags("GPT2BPETokenizer", vocab_file=gpt2_files[0], merge_file=gpt2_files[1]))
    expected = fresh.tokenize_batch(CORPUS)
    monkeypatch.setattr("megatron.tokenizer.gpt2._CACHE_WORDS", 3)
    assert fresh.tokenize_batch(CORPUS) == expected


BERT_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "un", "##want", "##ed", "cafe", "café"]
BERT_WORDS += ["The", "C", "##a", "##t", "!", "'", "[", "]", "sep", "漢", "a", "b", "##b"]


@pytest.fixture(scope="module")
def bert_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("\n".join(BERT_WORDS) + "\n", encoding="utf-8")
    return path


@settings(max_examples=100, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            ["the", "The", " ", "cats", "unwanted!", "café", "CAFÉ", "[SEP]", "漢字", "abb", "'", "\t", "x" * 150]
        )
    ).map("".join),
    lower=st.booleans(),
)
def test_bert_equals_the_reference_algorithm(bert_file: Path, text: str, lower: bool) -> None:
    """Against Hugging Face's BertTokenizer where nothing in the text is a special token."""
    name = "BertWordPieceLowerCase" if lower else "BertWordPieceCase"
    tokenizer = build_tokenizer(flags(name, vocab_file=bert_file))
    words = {word: number for number, word in enumerate(BERT_WORDS)}
    assert tokenizer.tokenize(text) == [words[piece] for piece in reference_wordpiece(text, lower)]
    assert tokenizer.tokenize_batch([text, "", text])[1:] == [[], tokenizer.tokenize(text)]


def reference_wordpiece(text: str, lower: bool) -> list[str]:
    """BERT's published algorithm: split at white space, signs and Chinese characters, then greedy longest match."""
    import unicodedata

    if lower:
        text = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    split = "".join(f" {c} " if c in "![]'漢字" else c for c in text)
    pieces: list[str] = []
    for word in split.split():
        word_pieces, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = ("##" if start else "") + word[start:end]
                if piece in BERT_WORDS:
                    word_pieces.append(piece)
                    start = end
                    break
            else:
                word_pieces, start = ["[UNK]"], len(word)
        pieces += word_pieces
    return pieces


def test_bert_special_ids(bert_file: Path) -> None:
    tokenizer = build_tokenizer(flags("BertWordPieceLowerCase", vocab_file=bert_file, vocab_extra_ids=5))
    count = len(BERT_WORDS)
    assert (tokenizer.bos, tokenizer.eod, tokenizer.vocab_size) == (count, count + 1, count + 2 + 5)
    assert tokenizer.detokenize(tokenizer.tokenize("The cats")) == "the cats"
    ids = word_piece_ids(tokenizer)
    named = ("[CLS]", "[SEP]", "[PAD]", "[MASK]")
    assert (ids.cls, ids.sep, ids.pad, ids.mask) == tuple(BERT_WORDS.index(name) for name in named)
    assert (ids.bos, ids.eos) == (tokenizer.bos, tokenizer.eod)
    assert list(ids.sentinels) == list(range(count + 2, count + 7))
    continuing = {number for number, word in enumerate(BERT_WORDS) if word.startswith("##")}
    assert set(ids.continues_v.nonzero()[0].tolist()) == continuing
    assert len(ids.continues_v) == tokenizer.vocab_size


@pytest.mark.parametrize("lower", [True, False])
def test_bert_equals_transformers(bert_file: Path, lower: bool) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertTokenizer(str(bert_file), do_lower_case=lower)
    tokenizer = build_tokenizer(flags("BertWordPieceLowerCase" if lower else "BertWordPieceCase", vocab_file=bert_file))
    for text in [*CORPUS, "The cats unwanted! caf\u00e9 CAF\u00c9 \u6f22\u5b57 abb 'b a\tb", "a" * 100, ""]:
        assert tokenizer.tokenize(text) == theirs.encode(text, add_special_tokens=False)
    assert (word_piece_ids(tokenizer).mask, word_piece_ids(tokenizer).pad) == (
        theirs.mask_token_id,
        theirs.pad_token_id,
    )


ODD_ENTRIES = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "", "x\u2028y", "tail"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("begin", ["", "\ufeff"])
def test_unusual_line_separators_shift_no_id(tmp_path: Path, end: str, begin: str) -> None:
    """The library's own reader numbers the lines alike, whatever they hold, and transformers' reader, too."""
    from tokenizers import models

    words = [*BERT_WORDS, *ODD_ENTRIES]
    vocab = tmp_path / "vocab.txt"
    vocab.write_bytes((begin + "".join(word + end for word in words)).encode())
    tokenizer = build_tokenizer(flags("BertWordPieceCase", vocab_file=vocab))
    assert tokenizer.tokenize("the tail") == [BERT_WORDS.index("the"), len(words) - 1]
    assert tokenizer.eod == len(words) + 1
    theirs = models.WordPiece.read_file(str(vocab))
    assert theirs["tail"] == len(words) - 1
    bert = pytest.importorskip("transformers.models.bert.tokenization_bert")
    assert bert.load_vocab(str(vocab))["tail"] == len(words) - 1


def test_a_vocabulary_with_a_line_separator(tmp_path: Path) -> None:
    path = shared_path("data/reports/wordpiece/vocab.txt")
    if path is None:
        path = tmp_path / "vocab.txt"
        path.write_bytes("[PAD] [UNK] [CLS] [SEP] [MASK] a \u2028 the cat sat ##s ".replace(" ", "\n").encode())
    tokenizer = build_tokenizer(flags("BertWordPieceLowerCase", vocab_file=path))
    assert tokenizer.tokenize("the cat sat") == [7, 8, 9]


@pytest.mark.parametrize("missing", ["[MASK]", "[CLS]", "[SEP]", "[PAD]"])
def test_a_vocabulary_without_special_tokens_is_refused(tmp_path: Path, missing: str) -> None:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(word for word in BERT_WORDS if word != missing))
    with pytest.raises(UserError) as caught:
        build_tokenizer(flags("BertWordPieceCase", vocab_file=vocab))
    assert str(caught.value) == f"--vocab-file {vocab}: has no {missing}, so it is not a BERT vocab.txt"


@pytest.fixture(scope="module")
def sentence_piece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("sp")
    text = folder / "text.txt"
    text.write_text("\n".join(CORPUS), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "m"),
        vocab_size=160,
        hard_vocab_limit=False,
        byte_fallback=False,
        minloglevel=2,
    )
    return folder / "m.model"


@pytest.mark.parametrize("name", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentence_piece_equals_the_library(sentence_piece_file: Path, name: str) -> None:
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(sentence_piece_file))
    tokenizer = build_tokenizer(flags(name, tokenizer_model=sentence_piece_file, vocab_extra_ids=3))
    assert tokenizer.tokenize_batch(CORPUS) == [library.encode(text) for text in CORPUS]
    assert tokenizer.tokenize(CORPUS[0]) == library.encode(CORPUS[0])
    assert tokenizer.detokenize(library.encode("They'll say")) == "They'll say"
    assert (tokenizer.eod, tokenizer.bos) == (library.eos_id(), library.bos_id())
    assert tokenizer.vocab_size == library.get_piece_size() + 3
    assert tokenizer.name == "SentencePieceTokenizer"


def test_hugging_face_folder(tmp_path: Path, gpt2_files: tuple[Path, Path], gpt2: Tokenizer) -> None:
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer(str(gpt2_files[0]), str(gpt2_files[1]))
    bpe.enable_truncation(5)
    bpe.enable_padding(length=9)
    bpe.add_special_tokens(["<extra>"])
    bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<extra>"}, "bos_token": None})
    )
    for name in ("HFTokenizer", "HuggingFaceTokenizer"):
        tokenizer = build_tokenizer(flags(name, tokenizer_model=tmp_path))
        # Neither cut at 5 nor padded to 9, the folder's settings of training.
        assert tokenizer.tokenize_batch(CORPUS) == gpt2.tokenize_batch(CORPUS)
        assert tokenizer.detokenize(tokenizer.tokenize(CORPUS[2])) == CORPUS[2]
        assert (tokenizer.eod, tokenizer.vocab_size) == (gpt2.vocab_size, gpt2.vocab_size + 1)
        assert tokenizer.bos is None


def test_hugging_face_folder_without_tokenizer_json(tmp_path: Path, bert_file: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text(bert_file.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True, "eos_token": "[SEP]"})
    )
    tokenizer = build_tokenizer(flags("HFTokenizer", tokenizer_model=tmp_path))
    bert = build_tokenizer(flags("BertWordPieceLowerCase", vocab_file=bert_file))
    assert tokenizer.tokenize("The cats") == bert.tokenize("The cats")
    assert tokenizer.eod == BERT_WORDS.index("[SEP]")


@given(ids=st.lists(st.integers(0, 1000)))
def test_null_tokenizer(ids: list[int]) -> None:
    tokenizer = build_tokenizer(flags("NullTokenizer", vocab_size=1000))
    assert (tokenizer.eod, tokenizer.vocab_size) == (1000, 1001)
    assert tokenizer.tokenize(tokenizer.detokenize(ids)) == ids
    assert tokenizer.tokenize_batch(["1 2", "3"]) == [[1, 2], [3]]


@pytest.mark.parametrize("text", ["1 b", "1001", "-1", "1.5"])
def test_null_tokenizer_refuses_invalid_ids(text: str) -> None:
    with pytest.raises(UserError, match="NullTokenizer"):
        build_tokenizer(flags("NullTokenizer", vocab_size=1000)).tokenize(text)


def test_each_type_is_a_tokenizer(gpt2: Tokenizer, bert_file: Path, sentence_piece_file: Path) -> None:
    built = [
        gpt2,
        build_tokenizer(flags("SentencePieceTokenizer", tokenizer_model=sentence_piece_file)),
        build_tokenizer(flags("BertWordPieceLowerCase", vocab_file=bert_file)),
        build_tokenizer(flags("BertWordPieceCase", vocab_file=bert_file)),
        build_tokenizer(flags("NullTokenizer", vocab_size=7)),
    ]
    assert [tokenizer.name for tokenizer in built] == [name for name in TOKENIZER_TYPES if name != "HFTokenizer"]
    for tokenizer in built:
        assert isinstance(tokenizer, Tokenizer)
        assert tokenizer.tokenize("") == []
        assert 0 <= tokenizer.eod < tokenizer.vocab_size


@pytest.mark.parametrize(
    ("given_flags", "message"),
    [
        ({"name": None}, "--tokenizer-type is missing"),
        ({"name": "GPT2BPETokeniser"}, "the nearest is GPT2BPETokenizer"),
        ({"name": "GPT2BPETokenizer"}, "needs --vocab-file"),
        ({"name": "GPT2BPETokenizer", "vocab_file": "/no/such"}, "--vocab-file /no/such: no such file"),
        ({"name": "GPT2BPETokenizer", "vocab_file": "JUNK"}, "needs --merge-file"),
        ({"name": "GPT2BPETokenizer", "vocab_file": "JUNK", "merge_file": "JUNK"}, "not GPT-2's vocab.json"),
        ({"name": "GPT2BPETokenizer", "vocab_file": "NOEND", "merge_file": "NOMERGES"}, "has no <|endoftext|>"),
        ({"name": "SentencePieceTokenizer", "tokenizer_model": "JUNK"}, "is not a SentencePiece model"),
        ({"name": "BertWordPieceCase", "vocab_file": "JUNK"}, "has no \\[UNK\\]"),
        ({"name": "HFTokenizer", "tokenizer_model": "JUNK"}, "no such folder"),
        ({"name": "HFTokenizer", "tokenizer_model": "FOLDER"}, "tokenizer.json cannot be read"),
        ({"name": "NullTokenizer"}, "needs --vocab-size"),
    ],
)
def test_invalid_flags_are_refused(tmp_path: Path, given_flags: dict[str, Any], message: str) -> None:
    paths = {name: tmp_path / name for name in ("JUNK", "NOEND", "NOMERGES", "FOLDER")}
    paths["JUNK"].write_text("junk\n")
    paths["NOEND"].write_text('{"a": 0}')
    paths["NOMERGES"].write_text("#version: 0.2\n")
    paths["FOLDER"].mkdir()
    (paths["FOLDER"] / "tokenizer.json").write_text("{}")
    values = {key: paths.get(str(value), value) for key, value in given_flags.items()}
    with pytest.raises(UserError, match=message.replace("|", "\\|")) as caught:
        build_tokenizer(flags(**values))
    assert "\n" not in str(caught.value)
