"""Several corpora in one comparison.

Files and rows name evaluation and corpus apart. Verdicts and reports use `perplexity on wikitext2` and `perplexity on
enwik8`, so that numbers of different corpora are never compared.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from attnbench.results.rows import ResultRow

ON = " on "
"""Between an evaluation and its corpus; neither name can have spaces."""

BYTES, BPE = ":bytes", ":bpe-"
"""Ends of the name of a corpus whose tokens are no characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpora:
    names: dict[str, str]
    """Name of the yaml by the label in rows, `text:words@8145388310a2`."""
    evaluations: list[str]
    """Repeated evaluations, with `training`; all others run once."""

    def named(self, evaluation: str) -> list[str]:
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
    return evaluation if corpus is None else f"{evaluation}{ON}{corpus}"


def split_name(name: str) -> tuple[str, str | None]:
    evaluation, on, corpus = name.partition(ON)
    return evaluation, corpus if on else None


def has_authors(corpus: str | None) -> bool:
    """Tell if a corpus, by its name or its label in rows, has texts of known authors."""
    return re.split("[:@]", corpus or "")[0] == "books"


def corpus_name(text: str, tokenizer: str, size: int) -> str:
    """Name a corpus by its text and, unless tokens are characters, kind and size of its tokenizer."""
    return text + {"characters": "", "bytes": BYTES, "bpe": f"{BPE}{size}"}[tokenizer]


def units_of(label: str | None) -> str:
    name = (label or "").rpartition("@")[0]
    return "bytes" if name.endswith(BYTES) else "tokens" if BPE in name else "characters"


def as_measured(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """Name the evaluation as it stands in its file, beside the column of the corpus."""

    def measured(row: ResultRow) -> ResultRow:
        return replace(row, identity=replace(row.identity, evaluation=split_name(row.identity.evaluation)[0]))

    return [measured(row) for row in rows]
