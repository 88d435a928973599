"""Several corpora in one comparison: an evaluation of a language model is one on each of them.

Its files and rows on the disk name evaluation and corpus apart, and are those of any other plan. Side by side they are
read as `perplexity on wikitext2` and `perplexity on enwik8`, so that no number of one is ever held against the other.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from attnbench.results.rows import ResultRow

ON = " on "
"""Between an evaluation and its corpus; neither name can have spaces."""

BYTES, BPE = ":bytes", ":bpe-"
"""Ends of the name of a corpus whose tokens are no characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpora:
    """The corpora of a comparison, and what is repeated on each of them."""

    names: dict[str, str]
    """By what rows call it (`text:words@8145388310a2`), the name of its yaml."""
    evaluations: list[str]
    """Those that are repeated, `training` among them; all others do not depend on the corpus, and run once."""

    def named(self, evaluation: str) -> list[str]:
        """List the names of an evaluation: one, or one on each corpus."""
        if evaluation not in self.evaluations:
            return [evaluation]
        return [on_corpus(evaluation, name) for name in self.names.values()]

    def by_corpus(self, rows: Iterable[ResultRow]) -> list[ResultRow]:
        """Name the evaluation of each row with its corpus, where it is repeated."""
        return [self._renamed(row) for row in rows]

    def _renamed(self, row: ResultRow) -> ResultRow:
        identity = row.identity
        if identity.evaluation not in self.evaluations or identity.corpus not in self.names:
            return row
        evaluation = on_corpus(identity.evaluation, self.names[identity.corpus])
        return replace(row, identity=replace(identity, evaluation=evaluation))


def on_corpus(evaluation: str, corpus: str | None) -> str:
    """Name an evaluation on a corpus; None: there is but one, which no name says."""
    return evaluation if corpus is None else f"{evaluation}{ON}{corpus}"


def split_name(name: str) -> tuple[str, str | None]:
    """Part the name of an evaluation from its corpus; None where it names none."""
    evaluation, on, corpus = name.partition(ON)
    return evaluation, corpus if on else None


def corpus_name(text: str, tokenizer: str, size: int) -> str:
    """Name a corpus by its text and, where a token is no character, by its tokenizer's kind and size."""
    return text + {"characters": "", "bytes": BYTES, "bpe": f"{BPE}{size}"}[tokenizer]


def units_of(label: str | None) -> str:
    """Name what the tokens are of the corpus that rows call by this label, its name and fingerprint."""
    name = (label or "").rpartition("@")[0]
    return "bytes" if name.endswith(BYTES) else "tokens" if BPE in name else "characters"


def as_measured(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """Name the evaluation of each row as it stands in its file, beside the corpus that a column of its own names."""

    def measured(row: ResultRow) -> ResultRow:
        return replace(row, identity=replace(row.identity, evaluation=split_name(row.identity.evaluation)[0]))

    return [measured(row) for row in rows]
