"""Streams of tokens as text, compared with the text of all tokens at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers

from megatron.config.tokenizer import TokenizerConfig
from megatron.inference.text import TextStream, TokenDecoder, continuation, prompt_text, token_texts
from megatron.tokenizer.api import Tokenizer
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.null import NullTokenizer
from tests.support.llama import BOS, EOS, WORDS, write_sentence_piece

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CHARACTERS = st.sampled_from("ab€") | st.characters(codec="utf-8")  # the former, so that stop strings occur and overlap


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """GPT-2's, with a token for each byte, so that characters come in several tokens."""
    folder = tmp_path_factory.mktemp("vocabulary")
    rust = Rust(models.BPE({"<|endoftext|>": 0, **{c: i + 1 for i, c in enumerate(ALPHABET)}}, []))
    rust.decoder = decoders.ByteLevel()
    rust.model.save(str(folder))
    vocabulary, merges = str(folder / "vocab.json"), str(folder / "merges.txt")
    return build_tokenizer(TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges))


@given(text=st.text(CHARACTERS, max_size=40), stop=st.lists(st.text(CHARACTERS, min_size=1, max_size=4), max_size=3))
def test_pieces_add_up_to_the_text_before_a_stop_string(bytes_tokenizer: Tokenizer, text: str, stop: list[str]) -> None:
    stream = TextStream(bytes_tokenizer, stop)
    output = ""
    for token in bytes_tokenizer.tokenize(text):
        output += stream.add_token(token)
        assert text.startswith(output)
    output += stream.finish()
    beginnings = (text[:end] for end in range(1, len(text) + 1))
    cuts = [[at for at in map(beginning.find, stop) if at >= 0] for beginning in beginnings]
    first_cuts = next(filter(None, cuts), [len(text)])  # where the first stop string to end begins
    assert stream.stopped == any(cuts)
    assert output == text[: min(first_cuts)]


def test_of_several_stop_strings_that_end_in_a_token_the_first_cuts() -> None:
    stream = TextStream(NullTokenizer(10_000), ["3", "234"])
    assert stream.add_token(1234) == "1"


def test_incomplete_characters_are_held_back(bytes_tokenizer: Tokenizer) -> None:
    stream = TextStream(bytes_tokenizer)
    pieces = [stream.add_token(token) for token in bytes_tokenizer.tokenize("a€b")]
    assert pieces == ["a", "", "", "€", "b"]


def test_an_incomplete_last_character_is_shown_at_the_end(bytes_tokenizer: Tokenizer) -> None:
    stream = TextStream(bytes_tokenizer)
    for token in bytes_tokenizer.tokenize("a€")[:-1]:
        stream.add_token(token)
    assert stream.finish() == "\ufffd"


@pytest.fixture(scope="module")
def llama_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SentencePiece with a dummy prefix and tokens of single bytes."""
    path = tmp_path_factory.mktemp("llama") / "tokenizer.model"
    write_sentence_piece(path)
    return build_tokenizer(TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(path)))


TEXTS = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)), max_size=8).map(" ".join)


@given(text=TEXTS, cut=st.integers(0, 30))
def test_texts_of_tokens_equal_transformers_incremental_decoding(
    bytes_tokenizer: Tokenizer, llama_tokenizer: Tokenizer, text: str, cut: int
) -> None:
    """After any prompt, even a prompt that ends within a character."""
    for tokenizer in (bytes_tokenizer, llama_tokenizer):
        tokens = tokenizer.tokenize(text)
        texts = token_texts(tokenizer, tokens)
        assert "".join(texts) == tokenizer.detokenize(tokens)
        prompt, continuation_ids = tokens[:cut], tokens[cut:]
        decoder = TokenDecoder(tokenizer, prompt)
        pieces = [decoder.add_token(token) for token in continuation_ids]
        assert pieces == texts[cut:]
        assert prompt_text(tokenizer, prompt) == "".join(texts[:cut])
    rust = Rust(models.BPE({"<|endoftext|>": 0, **{c: i + 1 for i, c in enumerate(ALPHABET)}}, []))
    rust.decoder = decoders.ByteLevel()
    stream = decoders.DecodeStream(skip_special_tokens=False)
    tokens = bytes_tokenizer.tokenize(text.replace("\ufffd", ""))
    assert token_texts(bytes_tokenizer, tokens) == [stream.step(rust, token) or "" for token in tokens]


def test_spaces_and_multi_token_characters_are_kept(llama_tokenizer: Tokenizer) -> None:
    tokens = llama_tokenizer.tokenize("the dog saw €")
    assert token_texts(llama_tokenizer, tokens) == ["the", " ", "d", "o", "g", " saw", " ", "", "", "€"]
    prompt, tail = tokens[:-2], tokens[-2:]
    stream = TextStream(llama_tokenizer, context=prompt)
    assert prompt_text(llama_tokenizer, prompt) + "".join(map(stream.add_token, tail)) == "the dog saw €"


def test_a_textless_token_removes_no_space(llama_tokenizer: Tokenizer) -> None:
    words, continuation = llama_tokenizer.tokenize("the house"), llama_tokenizer.tokenize("saw")
    tokens = [*words, BOS, EOS, *continuation]
    assert "".join(token_texts(llama_tokenizer, tokens)) == llama_tokenizer.detokenize(tokens) == "the house saw"


def test_a_preview_equals_the_text_after_adding_the_token(llama_tokenizer: Tokenizer) -> None:
    decoder = TokenDecoder(llama_tokenizer)
    for token in llama_tokenizer.tokenize("the dog saw €"):
        text = decoder.preview(token)
        assert text == decoder.preview(token) == decoder.add_token(token)


def test_a_continuation_is_written_as_after_its_prompt() -> None:
    tokenizer = NullTokenizer(100)
    assert tokenizer.detokenize([1, 2, 3]) == "1 2 3"
    assert continuation(tokenizer, [1, 2, 3], 1) == " 2 3"
    assert continuation(tokenizer, [1, 2, 3], 0) == "1 2 3"


class CountingTokenizer(NullTokenizer):
    """Byte-level tokenizer without merges, with a textless token; counts the tokens that it decodes."""

    TEXTLESS = 256

    def __init__(self, pieces: list[bytes] | None = None) -> None:
        super().__init__(300)
        self.parts = [bytes([value]) for value in range(256)] if pieces is None else pieces
        self.decoded = 0

    def detokenize(self, tokens: Sequence[int]) -> str:
        self.decoded += len(tokens)
        pieces = [self.parts[token] for token in tokens if token != self.TEXTLESS]
        return b"".join(pieces).decode(errors="replace")


@pytest.mark.parametrize("unit", [[0x80], [0xF0, 0x9F, 0x98], [CountingTokenizer.TEXTLESS], [0xE2, 256, 256]])
def test_decoding_work_is_linear_in_the_tokens(unit: list[int]) -> None:
    work = []
    for count in (1000, 3000):
        tokenizer = CountingTokenizer()
        tokens = [0x61, *unit * (count // len(unit))]
        texts = token_texts(tokenizer, tokens)
        assert "".join(texts) == CountingTokenizer().detokenize(tokens)
        work.append(tokenizer.decoded)
    assert work[1] < 3.1 * work[0]
    assert work[1] < 50 * 3000


@example(tokens=[0x80] * 3 + [CountingTokenizer.TEXTLESS] * 6)
@example(tokens=[0x80, 0xE2, 0x80, 0xE2, 0x80, *[CountingTokenizer.TEXTLESS] * 4, 0x80])
@given(tokens=st.lists(st.sampled_from([0x61, 0x80, 0x82, 0xAC, 0xE2, 0xF0, 0x9F, 0x98, 256]), max_size=40))
def test_texts_of_broken_characters_add_up(tokens: list[int]) -> None:
    tokenizer = CountingTokenizer()
    decoder, texts = TokenDecoder(tokenizer), []
    for token in tokens:
        text = decoder.preview(token)
        texts.append(decoder.add_token(token))
        assert texts[-1] == text
    assert "".join(texts) + decoder.finish() == tokenizer.detokenize(tokens)


def test_characters_after_many_broken_ones_are_complete() -> None:
    tokens = [0x80] * 20 + list("😀€".encode())
    texts = token_texts(CountingTokenizer(), tokens)
    assert texts[20:] == ["\ufffd", "", "", "\ufffd" * 2 + "😀", "", "", "€"]


def test_tokens_ending_within_characters_lose_nothing() -> None:
    """Byte-level merges across characters, as in Thai: each token ends a character and begins another."""
    text = "กขคงจฉชซฌญฎฏฐฑฒณ"
    data = text.encode()
    byte_pieces = [data[:2], *(data[at : at + 3] for at in range(2, len(data), 3))]
    tokenizer = CountingTokenizer(byte_pieces)
    stream = TextStream(tokenizer)
    pieces = [stream.add_token(token) for token in range(len(byte_pieces))]
    assert "".join(pieces) + stream.finish() == text
    assert pieces[6] == text[5]
