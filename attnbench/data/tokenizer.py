"""Tokenizers: text to token ids and back, and the bytes of an id. Without torch.

`characters` has an id for each character of the train split, `bytes` one for each byte of UTF-8, `bpe` (data/bpe.py)
bytes and frequent pieces of words.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from attnbench.settings.errors import UserError
from attnbench.settings.escape import printable

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Last symbol of a vocabulary of characters, for characters that the train split lacks."""

NUM_CODE_POINTS = 0x110000
NUM_BYTES = 256

MAX_NAMED = 10
"""Most unknown characters in a message."""


class Tokenizer(ABC):
    """Text to ids 0 ... size - 1 and back; an embedding may be padded beyond them."""

    kind: ClassVar[str]
    """The value of data.tokenizer."""
    units: ClassVar[str]
    """Ids in messages: characters, bytes, tokens."""
    size: int
    """Number of ids."""
    num_writable: int
    """Number of first ids that a model may write: all but that of unknown characters."""
    num_bytes_V: np.ndarray
    """Bytes of UTF-8 of each id, (size,) int64; 0 for unknown characters."""
    num_characters_V: np.ndarray
    """Characters that begin in each id, (size,) int64."""

    @abstractmethod
    def encode_utf8(self, text: bytes) -> np.ndarray:
        """Return the ids of valid UTF-8, of `dtype`."""

    @abstractmethod
    def to_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of ids, perhaps part of a character; an id past the last is UNKNOWN."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the argument of `bpe.from_state` that makes the same tokenizer, in JSON's types."""

    @property
    def dtype(self) -> np.dtype:
        """The smallest of uint8, uint16 and uint32 that holds every id."""
        return np.dtype(next(kind for kind in (np.uint8, np.uint16, np.uint32) if self.size - 1 <= np.iinfo(kind).max))

    @property
    def fingerprint(self) -> str:
        """12 hex digits of a hash; equal fingerprints give equal ids."""
        return hashlib.sha256(json.dumps(self.state(), sort_keys=True).encode()).hexdigest()[:12]

    def chunks(self, pieces: Iterable[bytes]) -> Iterable[bytes]:
        """Cut a text into parts whose ids, joined, are those of the whole."""
        return pieces

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of any text. Raises UnicodeEncodeError for halves of surrogate pairs, which only `characters`
        has an id for."""
        return self.encode_utf8(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; incomplete characters are UNKNOWN."""
        return self.to_bytes(ids).decode("utf-8", "replace")

    def check_known(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("the prompt is no UTF-8") from None


class Characters(Tokenizer):
    """One id for each character, its place in `vocabulary`; the last, UNKNOWN, stands for all others."""

    kind = units = "characters"

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self.vocabulary = tuple(vocabulary)
        self.size, self.num_writable = len(self.vocabulary), len(self.vocabulary) - 1
        self.num_bytes_V = np.array([len(_utf8(symbol)) for symbol in self.vocabulary], dtype=np.int64)
        self.num_bytes_V[-1:] = 0
        self.num_characters_V = np.ones(self.size, dtype=np.int64)
        characters = self.vocabulary[:-1]
        self._id_of = np.full(NUM_CODE_POINTS, max(0, self.size - 1), dtype=self.dtype)
        self._id_of[[ord(character) for character in characters]] = np.arange(len(characters))

    @classmethod
    def of(cls, pieces: Iterable[bytes]) -> "Characters":
        """Collect the characters of a text, in the order of their code points."""
        seen = np.zeros(NUM_CODE_POINTS, dtype=bool)
        for piece in pieces:
            seen[np.frombuffer(piece, dtype=np.uint8) if piece.isascii() else code_points(piece.decode())] = True
        return cls((*map(chr, np.flatnonzero(seen)), UNKNOWN))

    def encode_utf8(self, text: bytes) -> np.ndarray:
        if text.isascii():
            return self._id_of[np.frombuffer(text, dtype=np.uint8)]
        return self._id_of[code_points(text.decode())]

    def encode(self, text: str) -> np.ndarray:
        return self._id_of[code_points(text)]

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        return _utf8("".join(self.vocabulary[min(index, self.size - 1)] for index in ids))

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, "vocabulary": list(self.vocabulary)}

    def check_known(self, text: str) -> None:
        known = set(self.vocabulary[:-1])
        strange = list(dict.fromkeys(character for character in text if character not in known))
        if strange:
            names = [f"{printable(c)} (U+{ord(c):04X})" for c in strange[:MAX_NAMED]]
            names += [f"{len(strange) - MAX_NAMED} more"] if len(strange) > MAX_NAMED else []
            raise UserError(
                f"the prompt has {', '.join(names)}: not among the {len(known)} characters of the run's corpus"
            )


class Bytes(Tokenizer):
    """One id for each byte of UTF-8."""

    kind = units = "bytes"

    def __init__(self) -> None:
        self.size = self.num_writable = NUM_BYTES
        self.num_bytes_V = np.ones(NUM_BYTES, dtype=np.int64)
        self.num_characters_V = num_starts([bytes([byte]) for byte in range(NUM_BYTES)])

    def encode_utf8(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(bytes([index]) if index < NUM_BYTES else _utf8(UNKNOWN) for index in ids)

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind}


def code_points(text: str) -> np.ndarray:
    """Return the code points of a text, (characters,) uint32."""
    # surrogatepass: a prompt from a command line can hold halves of a pair, which become UNKNOWN.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def num_starts(pieces: Iterable[bytes]) -> np.ndarray:
    """Count the characters that begin in each piece of UTF-8."""
    return np.array([sum(byte & 0xC0 != 0x80 for byte in piece) for piece in pieces], dtype=np.int64)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
