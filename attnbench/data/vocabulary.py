"""Vocabulary of a text, and its tokens, one tensor a split."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attnbench.data.hub import read_hub
from attnbench.data.pieces import Text
from attnbench.data.texts import SPLITS, Texts, embedded_texts, read_user_texts
from attnbench.data.wikitext import read_wikitext2
from attnbench.settings.errors import UserError
from attnbench.settings.schema import DataSettings

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Last symbol of every vocabulary, for characters that the train split does not have."""

NUM_CODE_POINTS = 0x110000


@dataclass(slots=True, kw_only=True)
class Corpus:
    """Text as tokens, one a character."""

    name: str
    """wikitext2-raw-v1, wikitext2-v1, embedded, text:<file>, hub:<owner>/<name>:<configuration>, or parquet:<folder>
    for other files in WikiText-2's form."""
    fingerprint: str
    """12 hex digits of a hash over the names and texts of the splits: equal texts, equal fingerprint."""
    vocabulary: tuple[str, ...]
    """Characters of the train split in the order of their code points, then UNKNOWN; a token is an index here."""
    vocabulary_size: int
    """Number of symbols of the embedding: those of `vocabulary`, or more where the settings pad it."""
    tokens: dict[str, Tensor]
    """Tokens of each split, on the CPU: (number of characters,), of the smallest of uint8, int16 and int32 that fits;
    empty for a test split that is not there."""
    num_unknown: dict[str, int]
    """Number of UNKNOWN symbols in each split."""

    def encode(self, text: str) -> Tensor:
        """Return the tokens of any text, (number of characters,) int64 on the CPU."""
        return torch.from_numpy(encode(text, self.vocabulary)).long()

    def decode(self, tokens_T: Tensor) -> str:
        """Return the text of tokens on any device; padding symbols read as UNKNOWN."""
        return decode(tokens_T, self.vocabulary)


def load_corpus(settings: DataSettings, seq_len: int, root: Path) -> Corpus:
    """Read the corpus that `settings` names.

    Args:
        seq_len: every split must hold at least this many characters and one more, except a test split that is not
            wanted (data.test_fraction=0).
        root: the project's folder with data/; a relative data.path starts at the working directory.

    Raises:
        UserError: the text is missing, unreadable, malformed or too short, with the file and the way out.
    """
    texts = _read_texts(settings, root)
    for split in SPLITS:
        is_wanted = split != "test" or len(texts.splits[split]) or settings.test_fraction
        if is_wanted and len(texts.splits[split]) <= seq_len:
            raise UserError(
                f"{texts.origin}: its {split} split has {len(texts.splits[split])} characters and seq_len={seq_len}"
                f" needs {seq_len + 1}; give a longer text or a smaller seq_len"
            )
    vocabulary, fingerprint = build_vocabulary(texts.splits["train"]), fingerprint_of(texts)
    vocabulary_size = settings.vocabulary_size or len(vocabulary)
    if vocabulary_size < len(vocabulary):
        raise UserError(
            f"data.vocabulary_size={vocabulary_size}: {texts.name} has {len(vocabulary)} symbols, the unknown one"
            " included; give at least as many, or null"
        )
    # Frees the text piece by piece, so that text and tokens are never in memory as a whole together.
    encoded = {split: encode_pieces(texts.splits[split], vocabulary) for split in SPLITS}
    return Corpus(
        name=texts.name,
        fingerprint=fingerprint,
        vocabulary=vocabulary,
        vocabulary_size=vocabulary_size,
        tokens={split: torch.from_numpy(tokens) for split, (tokens, _) in encoded.items()},
        num_unknown={split: num_unknown for split, (_, num_unknown) in encoded.items()},
    )


def _read_texts(settings: DataSettings, root: Path) -> Texts:
    path = None if settings.path is None else Path(settings.path).expanduser()
    fractions = settings.validation_fraction, settings.test_fraction
    if settings.name == "wikitext2":
        return read_wikitext2(path, root)
    if settings.name == "embedded":
        if path is not None:
            raise UserError(f"data.path={path}: data=embedded reads no file; leave it out, or use data=text")
        return embedded_texts(root, *fractions)
    if settings.name != "text":
        return read_hub(settings.name, settings.config, settings.column, *fractions)
    if path is None:
        raise UserError("data.path=null: data=text needs data.path=FILE_OR_FOLDER of .txt or .parquet")
    return read_user_texts(path, *fractions)


def fingerprint_of(texts: Texts) -> str:
    """Return 12 hex digits of a hash over the names and texts of the splits."""
    digest = hashlib.sha256()
    for split in SPLITS:
        text = texts.splits[split]
        # The length keeps a text from running into the next split's name.
        digest.update(f"{split} {text.num_bytes}\n".encode())
        for piece in text.pieces:
            digest.update(piece)
    return digest.hexdigest()[:12]


def _code_points(text: str) -> np.ndarray:
    # surrogatepass: a prompt from a command line can hold halves of a pair; they become UNKNOWN like any stranger.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def build_vocabulary(text: Text) -> tuple[str, ...]:
    """Return every character of `text` in the order of code points, then UNKNOWN."""
    seen = np.zeros(NUM_CODE_POINTS, dtype=bool)
    for piece in text:
        seen[_code_points(piece)] = True
    return (*map(chr, np.flatnonzero(seen)), UNKNOWN)


def encode(text: str, vocabulary: tuple[str, ...]) -> np.ndarray:
    """Return the index of every character in `vocabulary`, the last for an unknown one; dtype as in `Corpus.tokens`."""
    return _token_of(vocabulary)[_code_points(text)]


def encode_pieces(text: Text, vocabulary: tuple[str, ...]) -> tuple[np.ndarray, int]:
    """Do the same for a text that is used up; return also the number of unknown characters."""
    token_of, num_unknown, start = _token_of(vocabulary), 0, 0
    tokens_N = np.empty(len(text), dtype=token_of.dtype)
    for piece in text.given_up():
        tokens = token_of[_code_points(piece)]
        tokens_N[start : start + len(tokens)] = tokens
        start, num_unknown = start + len(tokens), num_unknown + int((tokens == len(vocabulary) - 1).sum())
    return tokens_N, num_unknown


def _token_of(vocabulary: tuple[str, ...]) -> np.ndarray:
    """Return the token of every code point."""
    kind = next(kind for kind in (np.uint8, np.int16, np.int32) if len(vocabulary) - 1 <= np.iinfo(kind).max)
    token_of = np.full(NUM_CODE_POINTS, len(vocabulary) - 1, dtype=kind)
    characters = vocabulary[:-1]
    token_of[[ord(character) for character in characters]] = np.arange(len(characters))
    return token_of


def decode(tokens_T: Tensor, vocabulary: tuple[str, ...]) -> str:
    """Return the text of tokens on any device; a token past the vocabulary, of a padded embedding, is UNKNOWN."""
    return "".join(vocabulary[min(token, len(vocabulary) - 1)] for token in tokens_T.tolist())
