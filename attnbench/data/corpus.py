"""Corpus: texts as tokens, one tensor for each split, and their tokenizer."""

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from attnbench.data import shards
from attnbench.data.books import authors_of, find_books
from attnbench.data.bpe import from_state, train_bpe
from attnbench.data.enwik import FILES, find_enwik
from attnbench.data.hub import find_hub
from attnbench.data.pieces import KEPT_BYTES, Text, walk
from attnbench.data.shards import Split, Tokens
from attnbench.data.texts import SPLITS, CorpusSource, Texts, find_embedded, find_user_texts
from attnbench.data.tokenizer import Bytes, Characters, Tokenizer
from attnbench.data.wikitext import find_wikitext2
from attnbench.results.corpora import corpus_name, has_authors
from attnbench.results.files import replace_file
from attnbench.settings.errors import UserError
from attnbench.settings.paths import user_path
from attnbench.settings.schema import DataSettings

NATS_OF_A_BYTE = math.log(256)
"""Charge for each byte of an unknown character: a guess among all bytes."""


@dataclass(slots=True, kw_only=True)
class Lengths:
    """Length of some tokens of a split, in other units."""

    num_tokens: int
    num_characters: int
    num_bytes: float
    """Bytes of UTF-8; an unknown character counts with the mean of those in its split."""
    num_unknown_bytes: float
    """Bytes of unknown characters alone."""

    def nats_per_character(self, nats: float) -> float:
        # In this order, so that a factor of 1 changes no digit.
        return nats * (self.num_tokens / self.num_characters)

    def bits_per_byte(self, nats: float) -> float:
        """Unknown characters cost eight bits a byte more."""
        total = nats * self.num_tokens + NATS_OF_A_BYTE * self.num_unknown_bytes
        return total / self.num_bytes / math.log(2)


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class Corpus:
    name: str
    """wikitext2-raw-v1, wikitext2-v1, embedded, text:<file>, hub:<owner>/<name>:<configuration>, books, enwik8,
    text8, or parquet:<folder> for other files in WikiText-2's form; then :bytes or :bpe-<size> where a token is no
    character."""
    origin: str
    """See `texts.Texts`."""
    fingerprint: str
    """12 hex digits of a hash over the names and texts of the splits, and the tokenizer unless it is characters."""
    tokenizer: Tokenizer
    vocabulary_size: int
    """Number of symbols of the embedding: the tokenizer's, or more where the settings pad it."""
    tokens: dict[str, Tensor]
    """Tokens of each split on the CPU, (N,), of the first of uint8, int16, uint16 and int32 that fits; empty for a
    missing test split. Those of a long text are mapped from data/tokens."""
    splits: dict[str, Split]
    train_count_V: Tensor
    """Occurrences of each token in the train split, (tokenizer.size,) int64."""
    mappings: list[mmap.mmap] = field(default_factory=list)
    """Files that `tokens` are mapped from."""

    def release(self) -> None:
        """Give up the pages of mapped tokens that were read: they would count as this process's memory."""
        for mapping in self.mappings:
            mapping.madvise(mmap.MADV_DONTNEED)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Characters of the train split by code point, then UNKNOWN; empty for other tokenizers."""
        return self.tokenizer.vocabulary if isinstance(self.tokenizer, Characters) else ()

    @property
    def num_unknown(self) -> dict[str, int]:
        return {split: sizes.num_unknown for split, sizes in self.splits.items()}

    def decode(self, tokens_T: Tensor) -> str:
        """Return the text of tokens; padding symbols are UNKNOWN."""
        return self.tokenizer.decode(tokens_T.tolist())

    def count(self, tokens_N: Tensor) -> Tensor:
        """Count each of some tokens on the CPU, (tokenizer.size,) int64."""
        return torch.from_numpy(shards.count_ids(tokens_N.numpy(), self.tokenizer.size))

    def lengths(self, split: str, count_V: Tensor) -> Lengths:
        counted = Split.of(self.tokenizer, count_V.numpy(), 0)
        sizes = self.splits[split]
        unknown = counted.num_unknown * sizes.num_unknown_bytes / sizes.num_unknown if sizes.num_unknown else 0.0
        return Lengths(
            num_tokens=counted.num_tokens,
            num_characters=counted.num_characters,
            num_bytes=unknown - counted.num_unknown_bytes,
            num_unknown_bytes=unknown,
        )

    def first_characters(self, split: str, wanted: int | None) -> tuple[Tensor, dict[str, int]]:
        """Return the first tokens of a split, at most `wanted` characters, and that number as a row's setting; all
        tokens, and no setting, if `wanted` is None or not below the length."""
        tokens_N = self.tokens[split]
        if wanted is None or wanted >= self.splits[split].num_characters:
            return tokens_N, {}
        # A token of bytes may have none.
        first_N = tokens_N[: 4 * wanted].int().numpy()
        ends_N = np.cumsum(self.tokenizer.num_characters_V[first_N])
        number = int(np.searchsorted(ends_N, wanted, side="right"))
        return tokens_N[:number], {"characters": wanted}

    def authors(self, split: str) -> Tensor | None:
        """Return the number of the author of each token of a split, (N,) int64; None without authors."""
        if not has_authors(self.name):
            return None
        authors_B, ends_B = np.array(authors_of(split), dtype=np.int64).T
        # Characters that begin before each token.
        length_N = self.tokenizer.num_characters_V[self.tokens[split].numpy()]
        start_N = np.cumsum(length_N) - length_N
        return torch.from_numpy(authors_B[np.searchsorted(ends_B, start_N, side="right")])


LOADED: WeakValueDictionary[tuple[Any, ...], "Corpus"] = WeakValueDictionary()
"""Corpora in use, so that the variants of a plan share one: by the folder of their tokens, their source's files and the
size of the vocabulary."""


def load_corpus(settings: DataSettings, seq_len: int, root: Path) -> Corpus:
    """Read the corpus that `settings` names, or open its tokens if they were made before.

    Args:
        seq_len: every split needs more tokens than this, except a test split that is not wanted
            (data.test_fraction=0).
        root: folder of data/; a relative data.path starts at the working directory.
    """
    source = _find(settings, root)
    names = ("name", "config", "files", "column", "validation_fraction", "test_fraction", "tokenizer")
    key = {name: getattr(settings, name) for name in names}
    # For other tokenizers it only pads the embedding.
    key["vocabulary_size"] = settings.vocabulary_size if settings.tokenizer == "bpe" else None
    folder = shards.folder_of(root, source.label, key, source.files)
    # With their whole paths: the folder's key has only the names, sizes and dates of the files.
    place = (folder, *(path.resolve() for path in source.files), settings.vocabulary_size)
    corpus = LOADED.get(place)
    if corpus is None:
        corpus = LOADED[place] = _corpus(_tokens(source, settings, folder), settings.vocabulary_size)
    for split in SPLITS:
        num_tokens = len(corpus.tokens[split])
        is_wanted = split != "test" or num_tokens or settings.test_fraction
        if is_wanted and num_tokens <= seq_len:
            raise UserError(
                f"{corpus.origin}: its {split} split has {num_tokens} {corpus.tokenizer.units} and seq_len={seq_len}"
                f" needs {seq_len + 1}; give a longer text or a smaller seq_len"
            )
    return corpus


def _corpus(tokens: Tokens, wanted_size: int | None) -> Corpus:
    tokenizer = tokens.tokenizer
    vocabulary_size = wanted_size or tokenizer.size
    if vocabulary_size < tokenizer.size:
        unknown = ", the unknown one included" if tokenizer.kind == "characters" else ""
        raise UserError(
            f"data.vocabulary_size={vocabulary_size}: {tokens.name} has {tokenizer.size} symbols{unknown}; give at"
            " least as many, or null"
        )
    fingerprint = tokens.fingerprint
    if tokenizer.kind != "characters":
        fingerprint = hashlib.sha256(f"{fingerprint} {tokenizer.fingerprint}".encode()).hexdigest()[:12]
    return Corpus(
        name=corpus_name(tokens.name, tokenizer.kind, tokenizer.size),
        origin=tokens.origin,
        fingerprint=fingerprint,
        tokenizer=tokenizer,
        vocabulary_size=vocabulary_size,
        tokens={split: _tensor(tokens.ids[split], tokenizer.size) for split in SPLITS},
        splits=tokens.splits,
        train_count_V=torch.from_numpy(tokens.train_count_V),
        mappings=tokens.mappings,
    )


def _tensor(ids: np.ndarray, size: int) -> Tensor:
    """Share the memory, signed where possible: torch lacks operations on unsigned numbers."""
    if ids.dtype.itemsize == 4 or (ids.dtype.itemsize == 2 and size <= 2**15):
        ids = ids.view(f"int{8 * ids.dtype.itemsize}")
    return torch.from_numpy(ids)


def _find(settings: DataSettings, root: Path) -> CorpusSource:
    path = None if settings.path is None else user_path(settings.path)
    fractions = settings.validation_fraction, settings.test_fraction
    if settings.name == "wikitext2":
        return find_wikitext2(path, root)
    if settings.name == "books":
        return find_books(path, root)
    if settings.name in FILES:
        return find_enwik(settings.name, path, root)
    if settings.name == "embedded":
        if path is not None:
            raise UserError(f"data.path={path}: data=embedded reads no file; leave it out, or use data=text")
        return find_embedded(root, *fractions)
    if settings.name != "text":
        return find_hub(settings.name, settings.config, settings.files, settings.column, *fractions)
    if path is None:
        raise UserError("data.path=null: data=text needs data.path=FILE_OR_FOLDER of .txt or .parquet")
    return find_user_texts(path, *fractions)


def _tokens(source: CorpusSource, settings: DataSettings, folder: Path) -> Tokens:
    """Open the tokens of a corpus, or make them: of a short text in memory, otherwise in the folder."""
    if shards.is_made(folder):
        return shards.opened(folder)
    texts = source.read()
    num_bytes = {split: text.num_bytes for split, text in texts.splits.items()}
    if settings.tokenizer != "bpe" and sum(num_bytes.values()) <= KEPT_BYTES:
        return _in_memory(texts, num_bytes, _tokenizer(settings, texts, None))
    with shards.making(folder):
        # Another process may have made it meanwhile.
        if not shards.is_made(folder):
            tokenizer = _tokenizer(settings, texts, folder / "bpe.json")
            fingerprint, splits = _hashed(texts.splits, num_bytes)
            shards.make(folder, splits, num_bytes, tokenizer, texts.name, texts.origin, fingerprint)
    return shards.opened(folder)


def _tokenizer(settings: DataSettings, texts: Texts, path: Path | None) -> Tokenizer:
    """Make the tokenizer, or read one of bpe that was kept at `path`."""
    if settings.tokenizer == "bytes":
        return Bytes()
    if settings.tokenizer == "characters":
        return Characters.of(texts.splits["train"])
    assert path is not None
    if path.exists():
        try:
            return from_state(shards.read_made(path))
        except ValueError as error:
            raise UserError(f"{path}: {error}; remove {path.parent}, the same command makes it anew") from None
    if settings.vocabulary_size is None:
        raise UserError("data.vocabulary_size=null: data.tokenizer=bpe needs it, 8192 say")
    tokenizer = train_bpe(texts.splits["train"], settings.vocabulary_size)
    replace_file(path, json.dumps(tokenizer.state()))
    return tokenizer


def _hashed(
    splits: Mapping[str, Text], num_bytes: Mapping[str, int]
) -> tuple[Callable[[], str], Iterator[tuple[str, Iterator[bytes]]]]:
    """Return the fingerprint of the splits, known once all are read, and their texts, each to be read before the
    next.

    The fingerprint is 12 hex digits of a hash over the names and texts.
    """
    digest = hashlib.sha256()

    def hashing(pieces: Iterable[tuple[str, bytes]]) -> Iterator[bytes]:
        for _, piece in pieces:
            digest.update(piece)
            yield piece

    def read() -> Iterator[tuple[str, Iterator[bytes]]]:
        there = groupby(walk(splits), key=lambda item: item[0])
        split, pieces = next(there, ("", iter(())))
        for name in splits:
            # The length keeps a text from running into the next split's name.
            digest.update(f"{name} {num_bytes[name]}\n".encode())
            if name == split:
                yield name, hashing(pieces)
                split, pieces = next(there, ("", iter(())))
            else:
                yield name, iter(())

    return lambda: digest.hexdigest()[:12], read()


def _in_memory(texts: Texts, num_bytes: Mapping[str, int], tokenizer: Tokenizer) -> Tokens:
    ids: dict[str, np.ndarray] = {}
    fingerprint, splits = _hashed(texts.splits, num_bytes)
    for split, pieces in splits:
        parts = [tokenizer.encode_utf8(piece) for piece in pieces]
        ids[split] = np.concatenate([np.empty(0, tokenizer.dtype), *parts])
    count_V = {split: shards.count_ids(ids[split], tokenizer.size) for split in ids}
    return Tokens(
        name=texts.name,
        origin=texts.origin,
        fingerprint=fingerprint(),
        tokenizer=tokenizer,
        ids=ids,
        splits={split: Split.of(tokenizer, count_V[split], num_bytes[split]) for split in ids},
        train_count_V=count_V["train"],
    )
