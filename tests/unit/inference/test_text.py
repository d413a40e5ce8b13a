"""Streams of tokens as text, against the text of all tokens at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers

from megatron.config.tokenizer import TokenizerConfig
from megatron.inference.text import TextStream, continuation
from megatron.tokenizer.api import Tokenizer
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.null import NullTokenizer


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """GPT-2's, with a token for each byte, so that characters come in parts."""
    folder = tmp_path_factory.mktemp("vocabulary")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = Rust(models.BPE({"<|endoftext|>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}, []))
    rust.decoder = decoders.ByteLevel()
    rust.model.save(str(folder))
    vocabulary, merges = str(folder / "vocab.json"), str(folder / "merges.txt")
    return build_tokenizer(TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges))


@given(text=st.text(max_size=40), stop=st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_pieces_make_the_text_up_to_a_stop_string(bytes_tokenizer: Tokenizer, text: str, stop: list[str]) -> None:
    stream = TextStream(bytes_tokenizer, stop)
    found = ""
    for token in bytes_tokenizer.tokenize(text):
        found += stream.add(token)
        assert text.startswith(found)
    found += stream.finish()
    cuts = [at for at in (text.find(one) for one in stop) if at >= 0]
    assert stream.stopped == bool(cuts)
    assert found == text[: min(cuts, default=len(text))]


def test_parts_of_a_character_are_held_back_until_it_is_whole(bytes_tokenizer: Tokenizer) -> None:
    stream = TextStream(bytes_tokenizer)
    pieces = [stream.add(token) for token in bytes_tokenizer.tokenize("a€b")]
    assert pieces == ["a", "", "", "€", "b"]


def test_what_ends_within_a_character_is_shown_at_the_end(bytes_tokenizer: Tokenizer) -> None:
    stream = TextStream(bytes_tokenizer)
    for token in bytes_tokenizer.tokenize("a€")[:-1]:
        stream.add(token)
    assert stream.finish() == "\ufffd"


def test_a_continuation_is_written_as_behind_its_prompt() -> None:
    tokenizer = NullTokenizer(100)
    assert tokenizer.detokenize([1, 2, 3]) == "1 2 3"
    assert continuation(tokenizer, [1, 2, 3], 1) == " 2 3"
    assert continuation(tokenizer, [1, 2, 3], 0) == "1 2 3"
