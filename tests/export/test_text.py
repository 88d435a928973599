"""Text of a trained model: what unknown characters cost, and what stands before the first one."""

import math

import pytest

from attnbench.data.tokenizer import Bytes, Characters
from attnbench.export.text import BYTE_NATS, extra_nats, first_context

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
