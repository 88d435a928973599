"""Texts read in pieces, never in memory as a whole. Without torch."""

import math
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import groupby
from typing import BinaryIO, NamedTuple

import numpy as np

PIECE_BYTES = 2**20

BYTE_ORDER_MARK = "\ufeff"
"""Character that some editors put before UTF-8; no part of the text."""

KEPT_BYTES = 2**26
"""Largest text that stays in memory after its first pass."""


class TextSize(NamedTuple):
    num_bytes: int
    num_characters: int


class Text:
    """UTF-8 in pieces of whole characters, about a mebibyte each, or a part of such a text.

    Args:
        read: reads it from the beginning; called at each pass unless the text is short.
    """

    def __init__(self, read: Callable[[], Iterator[bytes]]) -> None:
        self._read = read
        self._kept: list[bytes] | None = None
        self.whole, self.start, self.stop = self, 0, math.inf

    def part(self, start: int, stop: float) -> "Text":
        """Return bytes start ... stop - 1 of a whole text; characters must begin at both."""
        part = Text(self._read)
        part.whole, part.start, part.stop = self, start, stop
        return part

    def __iter__(self) -> Iterator[bytes]:
        if self.whole is not self:
            yield from (piece for _, piece in walk({"": self}))
            return
        if self._kept is not None:
            yield from self._kept
            return
        kept, num_bytes = [], 0
        for piece in self._read():
            num_bytes += len(piece)
            if num_bytes > KEPT_BYTES:
                kept = None
            if kept is not None:
                kept.append(piece)
            yield piece
        self._kept = kept

    def __str__(self) -> str:
        return b"".join(self).decode()

    @cached_property
    def size(self) -> TextSize:
        """Size of the text, by reading it."""
        num_bytes = characters = 0
        for piece in self:
            num_bytes, characters = num_bytes + len(piece), characters + num_characters(piece)
        return TextSize(num_bytes, characters)

    @property
    def num_bytes(self) -> int:
        return self.size.num_bytes if self.whole is self else int(self.stop) - self.start

    def line_starts(self, wanted: list[int]) -> list[int]:
        """Return for each of these ascending characters of a whole text the byte at which its line starts, or its own
        byte if that line starts before the previous result."""
        # For each: the byte behind the last line end before it, and its own.
        behind, places = [0] * len(wanted), [0] * len(wanted)
        character = byte = 0
        for piece in self:
            end = character + num_characters(piece)
            for index, goal in enumerate(wanted):
                if goal > character:
                    inside = piece if goal >= end else piece.decode()[: goal - character].encode()
                    places[index] = byte + len(inside)
                    line_end = inside.rfind(b"\n")
                    behind[index] = behind[index] if line_end < 0 else byte + line_end + 1
            character, byte = end, byte + len(piece)
            if character >= max(wanted, default=0):
                break
        starts: list[int] = []
        for line_start, place in zip(behind, places, strict=True):
            starts.append(line_start if line_start > max(starts, default=0) else place)
        return starts


def walk(texts: Mapping[str, Text]) -> Iterator[tuple[str, bytes]]:
    """Yield the pieces of texts in order, with the text's name; successive parts of a whole text take one pass."""
    for _, group in groupby(texts.items(), key=lambda item: id(item[1].whole)):
        parts, position = list(group), 0
        whole, end = parts[0][1].whole, parts[-1][1].stop
        for piece in whole:
            for name, text in parts:
                start, stop = max(0, text.start - position), min(len(piece), text.stop - position)
                if start < stop:
                    yield name, piece[start : int(stop)]
            position += len(piece)
            if position >= end:
                break


def joined(texts: Iterable[Text]) -> Text:
    parts = list(texts)

    def read() -> Iterator[bytes]:
        for index, text in enumerate(parts):
            if index:
                yield b"\n"
            # Iterating over the text itself would keep short texts in memory, and there may be many.
            yield from text._read()

    return parts[0] if len(parts) == 1 else Text(read)


def read_utf8(file: BinaryIO) -> Iterator[bytes]:
    """Leave out a byte order mark."""
    pieces = whole_characters(file)
    if first := next(pieces, b"").removeprefix(BYTE_ORDER_MARK.encode()):
        yield first
    yield from pieces


def whole_characters(file: BinaryIO) -> Iterator[bytes]:
    """Yield the UTF-8 of an open file in pieces of whole characters. Raises UnicodeDecodeError, whose `start` counts
    from the beginning of the file."""
    decoder, position = getincrementaldecoder("utf-8")(), 0
    while True:
        # The decoder keeps the first bytes of a cut character.
        rest, block = decoder.getstate()[0], file.read(PIECE_BYTES)
        if block and not rest and block.isascii():
            position += len(block)
            yield block
            continue
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            start, end = error.start + position, error.end + position
            raise UnicodeDecodeError(error.encoding, error.object, start, end, error.reason) from None
        content = rest + block
        piece = content[: len(content) - len(decoder.getstate()[0])]
        position += len(piece)
        if piece:
            yield piece
        if not block:
            return


def num_characters(text: bytes) -> int:
    """Count the characters that begin in a part of UTF-8."""
    if text.isascii():
        return len(text)
    return int(np.count_nonzero(np.frombuffer(text, dtype=np.uint8) & 0xC0 != 0x80))


def is_blank(text: bytes) -> bool:
    return not text or text.isspace() or (not text.isascii() and text.decode().isspace())
