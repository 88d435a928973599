"""A text in pieces, so that it is read, cut and made into tokens without two copies in memory. Knows no torch."""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import BinaryIO

from attnbench.machine.memory import trim

PIECE_BYTES = 2**20

TRIMMED_BYTES = 2**24
"""Number of bytes given up between two requests that the C library return freed memory: it keeps a hole a piece."""


@dataclass(slots=True)
class Text:
    """Characters as UTF-8, a mebibyte or so a piece: as a `str`, all take four bytes where one needs them."""

    pieces: list[bytes] = field(default_factory=list)
    """Each of whole characters."""
    lengths: list[int] = field(default_factory=list)
    """Characters of each."""

    @classmethod
    def of(cls, text: str) -> "Text":
        """Make a text of a `str`."""
        result = cls()
        for start in range(0, len(text), PIECE_BYTES):
            result.append(text[start : start + PIECE_BYTES])
        return result

    @classmethod
    def read(cls, file: BinaryIO) -> "Text":
        """Read all of an open file.

        Raises:
            UnicodeDecodeError: it is no UTF-8; `start` counts from the beginning of the file.
        """
        result, decoder, position = cls(), getincrementaldecoder("utf-8")(), 0
        while True:
            # The decoder keeps the first bytes of a character that the block cuts.
            rest, block = decoder.getstate()[0], file.read(PIECE_BYTES)
            try:
                length = len(decoder.decode(block, final=not block))
            except UnicodeDecodeError as error:
                start, end = error.start + position, error.end + position
                raise UnicodeDecodeError(error.encoding, error.object, start, end, error.reason) from None
            content = rest + block
            piece = content[: len(content) - len(decoder.getstate()[0])]
            result.pieces.append(piece)
            result.lengths.append(length)
            position += len(piece)
            if not block:
                return result

    def append(self, text: str) -> None:
        """Add characters at the end."""
        self.pieces.append(text.encode())
        self.lengths.append(len(text))

    def extend(self, other: "Text") -> None:
        """Add another's pieces at the end."""
        self.pieces += other.pieces
        self.lengths += other.lengths

    def __len__(self) -> int:
        return sum(self.lengths)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.pieces))

    def __iter__(self) -> Iterator[str]:
        return (piece.decode() for piece in self.pieces)

    def __str__(self) -> str:
        return "".join(self)

    def is_blank(self) -> bool:
        """Return whether there is nothing but white space, or nothing at all."""
        return all(not piece or piece.isspace() for piece in self)

    def given_up(self) -> Iterator[str]:
        """Yield the pieces in order; each leaves the text when the next is requested."""
        num_bytes = 0
        while self.pieces:
            num_bytes += len(self.pieces[0])
            yield self.pieces.pop(0).decode()
            del self.lengths[0]
            if num_bytes > TRIMMED_BYTES:
                num_bytes = 0
                trim()

    def between(self, first: int, last: int) -> "Text":
        """Return characters first to last - 1; pieces that lie between as a whole are shared."""
        result = Text()
        for piece, length, start in zip(self.pieces, self.lengths, self._starts(), strict=False):
            if first <= start and start + length <= last:
                result.pieces.append(piece)
                result.lengths.append(length)
            elif first < start + length and start < last:
                result.append(piece.decode()[max(0, first - start) : last - start])
        return result

    def line_start(self, lowest: int, wanted: int) -> int:
        """Return the start of the line with character `wanted`, if not before `lowest`; otherwise `wanted`."""
        for piece, start in reversed([*zip(self.pieces, self._starts(), strict=False)]):
            if lowest < wanted and start < wanted:
                line_end = piece.decode().rfind("\n", max(0, lowest - start), wanted - start)
                if line_end >= 0:
                    return start + line_end + 1
            if start <= lowest:
                break
        return wanted

    def _starts(self) -> list[int]:
        return [0, *accumulate(self.lengths)]


def joined(texts: Iterable[Text]) -> Text:
    """Join texts by line ends."""
    result = Text()
    for index, text in enumerate(texts):
        if index:
            result.append("\n")
        result.extend(text)
    return result
