"""tokenizer.json of every kind of tokenizer gives our tokens, by Hugging Face's package and without code of ours."""

import json
import math
import random

import pytest
import tokenizers

from attnbench.data.bpe import train_bpe
from attnbench.data.tokenizer import Bytes, Characters, Tokenizer
from attnbench.export.text import BYTE_NATS, extra_nats, first_context, split
from attnbench.export.tokenizer import OTHERWISE, tokenizer_files

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
LEARNT = "the quick brown fox jumps over the lazy dog, the café  and the naïve\n\n" * 30
TEXTS = [
    *(
        LEARNT[:200],
        "",
        " ",
        "\n\n\r\n\t x",
        f"a{UNKNOWN}b",
        "<unknown> </s> [UNK]",
        "\N{GRINNING FACE}é\u0301 \u2028z",
    ),
    "".join(map(chr, random.Random(0).sample(range(0x20, 0xD800), 300))),
]


def kinds() -> list[Tokenizer]:
    return [
        Characters([*sorted(set(LEARNT)), UNKNOWN]),
        Characters([*sorted({*LEARNT, UNKNOWN}), UNKNOWN]),
        Bytes(),
        train_bpe([LEARNT.encode()], 300),
    ]


@pytest.mark.parametrize("ours", kinds(), ids=["characters", "characters-with-the-symbol", "bytes", "bpe"])
def test_the_tokens_are_ours(ours):
    files = tokenizer_files(ours)
    theirs = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    assert theirs.get_vocab_size() == ours.size
    for text in TEXTS:
        ids = ours.encode(text).tolist()
        assert theirs.encode(text).ids == ids, text
        expected = ours.decode(ids)
        if OTHERWISE[0] in files["tokenizer.json"]:
            # The symbol of the corpus keeps its name; that of unknown characters, which is the same, has another.
            is_unknown = [token == ours.size - 1 for token in ids]
            expected = "".join(OTHERWISE[0] if it else c for it, c in zip(is_unknown, expected, strict=True))
        assert theirs.decode(ids, skip_special_tokens=False) == expected


def test_what_loads_it_needs_no_code_of_ours():
    files = tokenizer_files(Bytes())
    assert sorted(files) == ["tokenizer.json", "tokenizer_config.json"]
    assert "auto_map" not in json.loads(files["tokenizer_config.json"])


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
