"""Text of a trained model: what unknown characters cost, and what stands before the first one."""

import math

import pytest

from attnbench.export.text import BYTE_NATS, Characters


def test_the_probabilities_of_all_next_characters_sum_up_to_at_most_one():
    text = Characters([*"ab", "\N{REPLACEMENT CHARACTER}"])
    # One of the characters of each number of bytes, and how many there are: known, two of the first.
    kinds = {"c": 0x80 - 2, "\u00e9": 0x800 - 0x80, "\N{EURO SIGN}": 0x10000 - 0x1000, "\N{GRINNING FACE}": 0x100000}
    assert 0.5 < sum(number * math.exp(-text.extra_nats(character)) for character, number in kinds.items()) < 1
    assert text.extra_nats("ab") == 0
    assert text.extra_nats("a\N{EURO SIGN}") == pytest.approx(3 * BYTE_NATS)
    assert text.first_context() == "\N{REPLACEMENT CHARACTER}"
    assert Characters([*" \nx", "?"]).first_context() == "\n"
