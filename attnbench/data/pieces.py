"""A text in pieces, so that it is read, cut and made into tokens without ever being there twice. Knows no torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import BinaryIO

from attnbench.machine.memory import trim

PIECE_BYTES = 2**20

TRIMMED_BYTES = 2**24
"""Given up between two requests that the C library return what it was freed: it would keep a hole per piece."""


@dataclass(slots=True)
class Text:
    """Characters as UTF-8, a mebibyte or so a piece: as a `str`, all take four bytes where one needs them."""

    pieces: list[bytes] = field(default_factory=list)
    """Each of whole characters."""
    lengths: list[int] = field(default_factory=list)
    """Characters of each."""

    @classmethod
    def of(cls, text: str) -> "Text":
        """The same as a `str`."""
        found = cls()
        for start in range(0, len(text), PIECE_BYTES):
            found.append(text[start : start + PIECE_BYTES])
        return found

    @classmethod
    def read(cls, file: BinaryIO) -> "Text":
        """All of an open file.

        Raises:
            UnicodeDecodeError: it is no UTF-8; `start` counts from the beginning of the file.
        """
        found, rest, position = cls(), b"", 0
        while block := file.read(PIECE_BYTES):
            content = rest + block
            whole = len(content) - _cut_off(content)
            found._append_bytes(content[:whole], position)
            position, rest = position + whole, content[whole:]
        found._append_bytes(rest, position)
        return found

    def append(self, text: str) -> None:
        """Adds characters at the end."""
        self.pieces.append(text.encode())
        self.lengths.append(len(text))

    def extend(self, other: "Text") -> None:
        """Adds another's pieces at the end."""
        self.pieces += other.pieces
        self.lengths += other.lengths

    def _append_bytes(self, content: bytes, position: int) -> None:
        try:
            self.lengths.append(len(content.decode()))
        except UnicodeDecodeError as error:
            start, end = error.start + position, error.end + position
            raise UnicodeDecodeError(error.encoding, error.object, start, end, error.reason) from None
        self.pieces.append(content)

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
        """Whether there is nothing but white space, or nothing at all."""
        return all(not piece or piece.isspace() for piece in self)

    def given_up(self) -> Iterator[str]:
        """Its pieces, in order, each gone from here when the next is asked for."""
        num_bytes = 0
        while self.pieces:
            num_bytes += len(self.pieces[0])
            yield self.pieces.pop(0).decode()
            del self.lengths[0]
            if num_bytes > TRIMMED_BYTES:
                num_bytes = 0
                trim()

    def between(self, first: int, last: int) -> "Text":
        """Characters first to last - 1; pieces that lie in between as a whole are shared."""
        found = Text()
        for piece, length, start in zip(self.pieces, self.lengths, self._starts(), strict=False):
            if first <= start and start + length <= last:
                found.pieces.append(piece)
                found.lengths.append(length)
            elif first < start + length and start < last:
                found.append(piece.decode()[max(0, first - start) : last - start])
        return found

    def line_start(self, lowest: int, wanted: int) -> int:
        """Where the line that character `wanted` is in begins, if not before `lowest`; otherwise `wanted`."""
        for piece, start in reversed([*zip(self.pieces, self._starts(), strict=False)]):
            if lowest < wanted and start < wanted:
                found = piece.decode().rfind("\n", max(0, lowest - start), wanted - start)
                if found >= 0:
                    return start + found + 1
            if start <= lowest:
                break
        return wanted

    def _starts(self) -> list[int]:
        return [0, *accumulate(self.lengths)]


def joined(texts: Iterable[Text]) -> Text:
    """All of them, a line end between two."""
    found = Text()
    for index, text in enumerate(texts):
        if index:
            found.append("\n")
        found.extend(text)
    return found


def _cut_off(content: bytes) -> int:
    """How many bytes at the end are the beginning of a character; what is no UTF-8 may give any of 0 to 3."""
    for back in range(1, min(4, len(content) + 1)):
        byte = content[-back]
        if byte >= 0xC0:
            width = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if width > back else 0
        if byte < 0x80:
            return 0
    return 0
