"""Bytes a stranger might send: a valid file with something wrong in it, a function of the generator alone."""

import random
from collections.abc import Callable, Sequence

NUMBERS = [bytes([value]) * width for value in (0x00, 0x7F, 0x80, 0xFF) for width in (1, 2, 4, 8)]
"""What a length or an offset is when it lies."""


def mutated(original: bytes, words: Sequence[bytes], draw: random.Random) -> bytes:
    """One to eight changes of `original`: bits, bytes, runs, lengths, or `words` of the format in a wrong place."""
    content = bytearray(original)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 8))):
        draw.choice(CHANGES)(content, words, draw)
    return bytes(content)


def _place(content: bytearray, draw: random.Random) -> int:
    # Lengths and offsets stand at the ends of files, so these are hit more often than their share.
    size = len(content)
    head, tail = draw.randint(0, min(size, 64)), size - draw.randint(0, min(size, 512))
    return draw.choice((draw.randint(0, size), draw.randint(0, size), draw.randint(0, size), head, tail))


def _flip(content: bytearray, words: Sequence[bytes], draw: random.Random) -> None:
    if content:
        content[min(_place(content, draw), len(content) - 1)] ^= 1 << draw.randrange(8)


def _overwrite(content: bytearray, words: Sequence[bytes], draw: random.Random) -> None:
    start, put = _place(content, draw), draw.choice((*NUMBERS, draw.randbytes(draw.randint(1, 16))))
    content[start : start + len(put)] = put


def _insert(content: bytearray, words: Sequence[bytes], draw: random.Random) -> None:
    start = _place(content, draw)
    content[start:start] = draw.choice((draw.choice(words), draw.choice(words) * draw.choice((2, 5000)), b"\n"))


def _replace(content: bytearray, words: Sequence[bytes], draw: random.Random) -> None:
    """Takes out one word where it stands and puts another there."""
    there = [word for word in words if word and word in content]
    if there:
        word = draw.choice(there)
        start = content.find(word, draw.randrange(len(content)))
        start = content.find(word) if start < 0 else start
        content[start : start + len(word)] = draw.choice(words)


def _delete(content: bytearray, words: Sequence[bytes], draw: random.Random) -> None:
    start = _place(content, draw)
    del content[start : start + draw.choice((1, 4, 64, 1024))]


def _repeat(content: bytearray, words: Sequence[bytes], draw: random.Random) -> None:
    start = _place(content, draw)
    part = content[start : start + draw.choice((4, 64, 1024))]
    target = _place(content, draw)
    content[target:target] = part


def _truncate(content: bytearray, words: Sequence[bytes], draw: random.Random) -> None:
    del content[_place(content, draw) :]


CHANGES: list[Callable[[bytearray, Sequence[bytes], random.Random], None]] = [
    *(_flip, _overwrite, _insert, _replace, _replace, _delete, _repeat, _truncate),
]
