"""Byte-pair encoding by Hugging Face's `tokenizers`, which only this module imports.

The tokenizer.json has one form: bytes as symbols (`ByteLevel`, as GPT-2's) and merges. The package cuts a text into
words and encodes each. Cutting by the same rule here, and encoding each different word once, takes a third of the time;
a test holds both equal.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from attnbench.data.tokenizer import NUM_BYTES, UNKNOWN, Bytes, Characters, Tokenizer, num_starts
from attnbench.settings.errors import UserError

MAX_TRAINING_BYTES = 100 * 10**6
"""Longest beginning of the train split that merges are learned from."""

MAX_WORD_BYTES = 2**21
"""Limit of its different words together: learning takes more than a hundred times as much memory."""

MAX_CACHED_WORDS = 2**18
CHUNK_BYTES = 2**16
"""Longest text that is encoded at once."""

WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"""
"""GPT-2's rule for ASCII: English suffixes, letters, digits, others, each with a space before it; white space."""

ASCII_WORDS = re.compile(WORDS, re.ASCII)
MIXED_WORDS = re.compile(rf" ?[\x00-\x08\x0e-\x1f!-\x7f]*+[^\x00-\x7f]\S*|{WORDS}", re.ASCII)
"""The same; a character beyond ASCII makes everything up to white space one word, which the package cuts."""

OTHER_WHITE_SPACE = re.compile("[\x85\xa0\u1680\u180e\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
"""White space beyond ASCII, which the package joins with that of ASCII."""

SAFE_CUT = re.compile(rb"[!-\x7f](?=[ \n][!-\x7f])")
"""Place behind which a text may be cut without changing its words."""


class Bpe(Tokenizer):
    """Bytes, and pieces of words made by merging frequent pairs. Raises ValueError if `content`, of the tokenizer.json,
    is no tokenizer of `train_bpe`."""

    kind, units = "bpe", "tokens"

    def __init__(self, content: dict[str, Any]) -> None:
        symbols = _symbols(content)
        self.content = content
        self._encoder = _package().Tokenizer.from_str(json.dumps(content))
        self._bytes_of = [bytes(BYTE_OF[character] for character in symbol) for symbol in symbols]
        self.size = self.num_writable = len(symbols)
        self.num_bytes_V = np.array([len(piece) for piece in self._bytes_of], dtype=np.int64)
        self.num_characters_V = num_starts(self._bytes_of)
        self._ids_of: dict[str, list[int]] = {}

    def encode_utf8(self, text: bytes) -> np.ndarray:
        parts = [self._encoded(chunk.decode()) for chunk in chunks([text])]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def chunks(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        return chunks(pieces)

    def _encoded(self, text: str) -> np.ndarray:
        if OTHER_WHITE_SPACE.search(text):
            return np.array(self._encoder.encode(text).ids, self.dtype)
        words = (ASCII_WORDS if text.isascii() else MIXED_WORDS).findall(text)
        ids_of = self._ids_of
        new = {word for word in words if word not in ids_of}
        if len(ids_of) + len(new) > MAX_CACHED_WORDS:
            ids_of.clear()
            new = set(words)
        for word in new:
            ids_of[word] = self._encoder.encode(word).ids
        return np.fromiter(chain.from_iterable(map(ids_of.__getitem__, words)), self.dtype)

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        unknown = UNKNOWN.encode()
        return b"".join(self._bytes_of[index] if index < self.size else unknown for index in ids)

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, "tokenizer": self.content}


def train_bpe(pieces: Iterable[bytes], vocabulary_size: int) -> Bpe:
    """Learn merges: a function of the text, the size and the package's version.

    Args:
        pieces: of the train split, of whole characters; read up to MAX_TRAINING_BYTES and MAX_WORD_BYTES.
    """
    if vocabulary_size < NUM_BYTES:
        raise UserError(
            f"data.vocabulary_size={vocabulary_size}: with data.tokenizer=bpe at least {NUM_BYTES}, one a byte"
        )
    package = _package()
    encoder = _empty(package)
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    encoder.train_from_iterator(_first(chunks(pieces)), trainer)
    trained = Bpe(json.loads(encoder.to_str()))
    if trained.size < vocabulary_size:
        raise UserError(
            f"data.vocabulary_size={vocabulary_size}: the train split yields {trained.size} symbols of bpe; give at "
            "most as many, or a longer text"
        )
    return trained


def _first(texts: Iterable[bytes]) -> Iterator[str]:
    num_bytes = num_word_bytes = 0
    seen: set[str] = set()
    for content in texts:
        text = content.decode()
        new = {*MIXED_WORDS.findall(text)} - seen
        num_bytes, num_word_bytes = num_bytes + len(content), num_word_bytes + sum(len(word.encode()) for word in new)
        if num_bytes > MAX_TRAINING_BYTES or num_word_bytes > MAX_WORD_BYTES:
            return
        seen |= new
        yield text


def chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Cut a text into chunks of at most CHUNK_BYTES and whole characters, between words where possible. The cuts depend
    on the whole text, not on its pieces."""
    rest = b""
    for piece in pieces:
        rest += piece
        start = 0
        # As far as a cut needs to look ahead.
        while len(rest) - start > CHUNK_BYTES + 4:
            end = _cut(rest, start)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    while rest:
        end = _cut(rest, 0) if len(rest) > CHUNK_BYTES else len(rest)
        yield rest[:end]
        rest = rest[end:]


def _cut(text: bytes, start: int) -> int:
    stop = start + CHUNK_BYTES
    # The last place is near the end nearly always, and a search there costs nothing.
    for first in (max(start, stop - 2**10), start):
        places = [match.end() for match in SAFE_CUT.finditer(text, first, stop)]
        if places:
            return places[-1]
    while text[stop] & 0xC0 == 0x80:
        stop -= 1
    return stop


def _package() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "data.tokenizer=bpe: needs the package tokenizers, which is not installed; pip install tokenizers"
        ) from None
    return tokenizers


def _empty(package: Any) -> Any:
    encoder = package.Tokenizer(package.models.BPE())
    encoder.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = package.decoders.ByteLevel()
    return encoder


def _symbols(content: dict[str, Any]) -> list[str]:
    """Return the symbols of a tokenizer.json by id; refuse one that `train_bpe` does not make, which might cost the
    package any amount of time."""
    ours = json.loads(_empty(_package()).to_str())
    model = content.get("model")
    if not isinstance(model, dict):
        raise ValueError("its tokenizer has no model")
    vocabulary, merges = model.get("vocab"), model.get("merges")
    plain = {**content, "model": {**model, "vocab": ours["model"]["vocab"], "merges": ours["model"]["merges"]}}
    if plain != ours or not isinstance(vocabulary, dict) or not isinstance(merges, list):
        raise ValueError("its tokenizer is no bpe as attnbench makes it")
    if sorted(map(repr, vocabulary.values())) != sorted(map(repr, range(len(vocabulary)))):
        raise ValueError("the ids of its tokenizer are not 0, 1, 2, ...")
    symbols = sorted(vocabulary, key=vocabulary.__getitem__)
    if not set(BYTE_OF) <= set(symbols) or any(not symbol or not set(symbol) <= set(BYTE_OF) for symbol in symbols):
        raise ValueError("the symbols of its tokenizer are not bytes and what they were merged to")
    for merge in merges:
        is_pair = isinstance(merge, list) and len(merge) == 2 and all(isinstance(part, str) for part in merge)
        if not is_pair or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise ValueError("a merge of its tokenizer is none of two symbols to a third")
    return symbols


def _byte_of() -> dict[str, int]:
    """Return the byte of each `ByteLevel` character: printable bytes are themselves, others U+0100 and up, in order."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(NUM_BYTES) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(NUM_BYTES + number): byte for number, byte in enumerate(hidden)}


BYTE_OF = _byte_of()


def from_state(state: dict[str, Any]) -> Tokenizer:
    """Make a tokenizer of its `state`, which may be untrusted; raises ValueError if it is none."""
    match state:
        case {"kind": "characters", "vocabulary": list(vocabulary), **rest} if not rest:
            if any(not isinstance(symbol, str) or len(symbol) != 1 for symbol in vocabulary):
                raise ValueError("its vocabulary is no list of single characters")
            return Characters(vocabulary)
        case {"kind": "bytes", **rest} if not rest:
            return Bytes()
        case {"kind": "bpe", "tokenizer": dict(content), **rest} if not rest:
            return Bpe(content)
    raise ValueError("it is no tokenizer")
