"""A text that is read piece by piece, so that it is never in memory as a whole. Knows no torch."""

import math
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import groupby
from typing import BinaryIO, NamedTuple

import numpy as np

PIECE_BYTES = 2**20

BYTE_ORDER_MARK = "\ufeff"
"""Character with which some editors begin a file of UTF-8; it is no part of the text."""

KEPT_BYTES = 2**26
"""Largest text that stays in memory from its first pass to the last."""


class Size(NamedTuple):
    """Length of a text."""

    num_bytes: int
    num_characters: int


class Text:
    """UTF-8 in pieces of whole characters, a mebibyte or so each, or a part of such a text.

    Args:
        read: reads it from the beginning; called anew at each pass, unless it is short.
    """

    def __init__(self, read: Callable[[], Iterator[bytes]]) -> None:
        self._read = read
        self._kept: list[bytes] | None = None
        self.whole, self.start, self.stop = self, 0, math.inf

    @classmethod
    def of(cls, text: str) -> "Text":
        """Make a text of a `str`."""
        pieces = [text[start : start + PIECE_BYTES].encode() for start in range(0, len(text), PIECE_BYTES)]
        return cls(lambda: iter(pieces))

    def part(self, start: int, stop: float) -> "Text":
        """Return bytes start ... stop - 1 of a whole text, both of which must be starts of characters."""
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
    def size(self) -> Size:
        """Count it, which reads it."""
        num_bytes = characters = 0
        for piece in self:
            num_bytes, characters = num_bytes + len(piece), characters + num_characters(piece)
        return Size(num_bytes, characters)

    @property
    def num_bytes(self) -> int:
        """Length in bytes; of a part without reading it."""
        return self.size.num_bytes if self.whole is self else int(self.stop) - self.start

    def line_starts(self, wanted: list[int]) -> list[int]:
        """Return for each of these characters of a whole text, which rise, the byte at which its line starts; where
        that is not behind the result before, the byte of the character itself."""
        # Of each: the byte behind the last line end before it, and its own.
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
    """Yield the pieces of texts in their order, each with its text's name; parts of one text, in the order in which
    they stand there, are read in one pass."""
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
    """Join texts by line ends."""
    parts = list(texts)

    def read() -> Iterator[bytes]:
        for index, text in enumerate(parts):
            if index:
                yield b"\n"
            # Not by the text itself, which would be kept in memory if it is short: there may be many.
            yield from text._read()

    return parts[0] if len(parts) == 1 else Text(read)


def read_utf8(file: BinaryIO) -> Iterator[bytes]:
    """Yield the text of an open file, without a byte order mark at its start; see `whole_characters`."""
    pieces = whole_characters(file)
    if first := next(pieces, b"").removeprefix(BYTE_ORDER_MARK.encode()):
        yield first
    yield from pieces


def whole_characters(file: BinaryIO) -> Iterator[bytes]:
    """Yield the UTF-8 of an open file in pieces that cut no character.

    Raises:
        UnicodeDecodeError: it is no UTF-8; `start` counts from the beginning of the file.
    """
    decoder, position = getincrementaldecoder("utf-8")(), 0
    while True:
        # The decoder keeps the first bytes of a character that the block cuts.
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
    """Return the number of characters of UTF-8, or of those that begin in a part of it."""
    if text.isascii():
        return len(text)
    return int(np.count_nonzero(np.frombuffer(text, dtype=np.uint8) & 0xC0 != 0x80))


def is_blank(text: bytes) -> bool:
    """Return whether there is nothing but white space, or nothing at all."""
    return not text or text.isspace() or (not text.isascii() and text.decode().isspace())
