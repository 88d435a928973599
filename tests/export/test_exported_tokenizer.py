"""tokenizer.json of every kind of tokenizer gives our tokens, by Hugging Face's package and without code of ours."""

import json
import random

import pytest
import tokenizers

from attnbench.data.bpe import train_bpe
from attnbench.data.tokenizer import Bytes, Characters, Tokenizer
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
