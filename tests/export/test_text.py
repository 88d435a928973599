"""Text of a trained model: what unknown characters cost, and what stands before the first one."""

import math

import pytest

from attnbench.data.bpe import train_bpe
from attnbench.data.tokenizer import Bytes, Characters
from attnbench.export.text import BYTE_NATS, extra_nats, first_context, split

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def test_the_probabilities_of_all_next_characters_sum_up_to_at_most_one():
    characters = Characters(["a", "b", UNKNOWN])
    # One of the characters of each number of bytes, and how many there are: known, two of the first.
    kinds = {"c": 0x80 - 2, "\u00e9": 0x800 - 0x80, "\N{EURO SIGN}": 0x10000 - 0x1000, "\N{GRINNING FACE}": 0x100000}
    assert 0.5 < sum(number * math.exp(-extra_nats(characters, character)) for character, number in kinds.items()) < 1
    assert extra_nats(characters, "ab") == 0
    assert extra_nats(characters, "a\N{EURO SIGN}") == pytest.approx(3 * BYTE_NATS)
    assert extra_nats(Bytes(), "a\N{EURO SIGN}") == 0


def test_before_the_first_character_stands_one_that_is_known():
    assert first_context(Characters([*"\n xy", UNKNOWN])) == "\n"
    assert first_context(Characters([*" xy", UNKNOWN])) == " "
    assert first_context(Characters([*"xy", UNKNOWN])) == UNKNOWN
    assert first_context(Bytes()) == "\n"


def test_a_piece_of_a_word_across_the_end_of_a_context_is_the_continuation_s():
    bpe = train_bpe([b"the cat sees the dog and the cat " * 50], 270)
    whole = bpe.encode("the cat").tolist()
    before_T, after_T = split(bpe, "the ", "cat")
    assert [*before_T.tolist(), *after_T.tolist()] == whole
    assert bpe.decode(before_T.tolist()) == "the"
    assert bpe.decode(after_T.tolist()) == " cat"
    for tokenizer in (Bytes(), Characters([*"acht ", UNKNOWN])):
        before_T, after_T = split(tokenizer, "the ", "cat")
        assert tokenizer.encode("the ").tolist() == before_T.tolist()
        assert tokenizer.encode("cat").tolist() == after_T.tolist()
    assert [len(tokens_T) for tokens_T in split(bpe, "", "cat")] == [0, len(bpe.encode("cat"))]
