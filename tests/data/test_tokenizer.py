"""Tokenizers: ids, bytes and text are one another, whatever the text; and what a stranger's may not be."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.data import bpe
from attnbench.data.bpe import Bpe, chunks, from_state, train_bpe
from attnbench.data.tokenizer import UNKNOWN, Bytes, Characters, Tokenizer
from attnbench.settings.errors import UserError

TEXT = "the cat's naïve, and 12 dogs – they've slept; 中文 is read by 3 of them.\n" * 30
ODD = [*"ab '’s\n\t  1!\x1c–é\xa0\u3000\u0301中\x85Z²½_\x0b\U0001f600", "'ll", "'ve", " \n", "hello", " word"]


@pytest.fixture(scope="module")
def learned() -> Bpe:
    return train_bpe([TEXT.encode()], 300)


@pytest.fixture(scope="module")
def tokenizers(learned) -> list[Tokenizer]:
    return [Characters.of([TEXT.encode()]), Bytes(), learned]


def test_ids_are_the_text_and_their_bytes_and_characters_add_up(tokenizers):
    for tokenizer in tokenizers:
        ids = tokenizer.encode(TEXT)
        assert ids.dtype == tokenizer.dtype
        assert ids.max() < tokenizer.size == len(tokenizer.num_bytes_V)
        assert tokenizer.decode(ids) == TEXT
        assert int(tokenizer.num_bytes_V[ids].sum()) == len(TEXT.encode())
        assert int(tokenizer.num_characters_V[ids].sum()) == len(TEXT)
        again = from_state(json.loads(json.dumps(tokenizer.state())))
        assert again.encode(TEXT).tolist() == ids.tolist()
        assert again.fingerprint == tokenizer.fingerprint
    assert len({tokenizer.fingerprint for tokenizer in tokenizers}) == 3
    lengths = [len(tokenizer.encode(TEXT)) for tokenizer in tokenizers]
    assert lengths[1] > lengths[0] > 1.5 * lengths[2]


def test_an_unknown_character_is_one_id_of_characters_and_its_bytes_of_the_others(tokenizers):
    characters, of_bytes, learned = tokenizers
    assert characters.encode("a\u4e00").tolist()[1] == characters.size - 1 == characters.num_writable
    assert characters.decode(characters.encode("a\u4e00")) == f"a{UNKNOWN}"
    for tokenizer in (of_bytes, learned):
        assert tokenizer.decode(tokenizer.encode("a\u4e00")) == "a\u4e00"
        assert tokenizer.decode([tokenizer.size]) == UNKNOWN
        assert tokenizer.num_writable == tokenizer.size
        with pytest.raises(UserError, match="no UTF-8"):
            tokenizer.check_known("a\udcff")


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(ODD), max_size=30))
def test_bpe_has_the_ids_of_the_package(learned, parts):
    text = "".join(parts)
    assert learned.encode(text).tolist() == learned._encoder.encode(text).ids


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.sampled_from(ODD), max_size=200), size=st.integers(1, 40), at_most=st.sampled_from([24, 37]))
def test_a_text_is_cut_alike_however_it_comes(parts, size, at_most):
    text, before = "".join(parts), bpe.CHUNK_BYTES
    bpe.CHUNK_BYTES = at_most
    try:
        whole = list(chunks([text.encode()]))
        assert list(chunks(text[start : start + size].encode() for start in range(0, len(text), size))) == whole
        # From the end of any of them on too, as one that was cut off goes on.
        assert list(chunks([b"".join(whole[3:])])) == whole[3:]
    finally:
        bpe.CHUNK_BYTES = before
    assert b"".join(whole).decode() == text
    assert all(0 < len(chunk) <= at_most and chunk.decode() for chunk in whole)


def test_chunks_end_between_words(learned, monkeypatch):
    monkeypatch.setattr(bpe, "CHUNK_BYTES", 64)
    ids = learned.encode_utf8(TEXT.encode())
    assert ids.tolist() == learned._encoder.encode(TEXT).ids
    assert len(list(chunks([TEXT.encode()]))) > 30


def test_words_are_forgotten_when_they_are_too_many(learned, monkeypatch):
    expected = learned.encode(TEXT).tolist()
    monkeypatch.setattr(bpe, "MAX_CACHED_WORDS", 3)
    assert [learned.encode(line).tolist() for line in (TEXT, TEXT)] == [expected] * 2


def test_the_same_text_trains_the_same_bpe_and_its_beginning_alone(monkeypatch):
    again = train_bpe([TEXT[:99].encode(), TEXT[99:].encode()], 300)
    assert again.state() == train_bpe([TEXT.encode()], 300).state()
    monkeypatch.setattr(bpe, "CHUNK_BYTES", 128)
    monkeypatch.setattr(bpe, "MAX_TRAINING_BYTES", len(TEXT.encode()) - 200)
    expected = train_bpe([TEXT.encode()], 290).state()
    assert train_bpe([TEXT.encode(), b" qqqqqqqq" * 99], 290).state() == expected
    monkeypatch.setattr(bpe, "MAX_TRAINING_BYTES", 10**6)
    monkeypatch.setattr(bpe, "MAX_WORD_BYTES", 300)
    strange = " ".join(f"q{number}" for number in range(99)).encode()
    assert train_bpe([TEXT.encode(), strange], 290).state() == train_bpe([TEXT.encode(), strange * 2], 290).state()


@pytest.mark.parametrize(
    ("size", "message"),
    [(255, "data.vocabulary_size=255: .* at least 256"), (9999, r"the train split yields \d+ symbols of bpe")],
)
def test_a_size_that_bpe_cannot_have_is_refused(size, message):
    with pytest.raises(UserError, match=message):
        train_bpe([TEXT.encode()], size)


def altered(content: dict, **model) -> dict:
    return {**content, "model": {**content["model"], **model}}


def test_a_stranger_s_tokenizer_is_one_that_we_make(learned):
    content = learned.content
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    symbols = list(vocabulary)
    bad = [
        {},
        {**content, "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated"}},
        {**content, "model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}},
        altered(content, dropout=0.5),
        altered(content, merges=[*merges, ["a"]]),
        altered(content, merges=[*merges, ["qq", "zz"]]),
        altered(content, vocab={symbol: 2 * index for symbol, index in vocabulary.items()}),
        altered(content, vocab={**vocabulary, "中": len(vocabulary)}),
        altered(content, vocab={symbol: index for symbol, index in vocabulary.items() if index}),
        altered(content, vocab=symbols),
    ]
    for changed in bad:
        with pytest.raises(ValueError, match="its tokenizer"):
            Bpe(changed)
    for state in ({}, {"kind": "bpe"}, {"kind": "bytes", "more": 1}, {"kind": "characters", "vocabulary": ["ab"]}, []):
        with pytest.raises(ValueError, match=r"tokenizer|single characters"):
            from_state(state)  # pyright: ignore[reportArgumentType]


def test_counts_of_characters_are_of_those_that_begin(learned):
    ids = learned.encode("中文")
    assert len(ids) > 0
    assert learned.num_characters_V[ids].sum() == 2
    assert (np.diff([0, *np.cumsum(Bytes().num_characters_V[Bytes().encode("中文")])]) == [1, 0, 0, 1, 0, 0]).all()
    assert all(before <= after for before, after in pairwise(np.cumsum(learned.num_bytes_V)))
