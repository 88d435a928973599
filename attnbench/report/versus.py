"""Compare two experiments, each variant with itself: did a change help?

A side is the folder of an experiment, or FOLDER@COMMIT or FOLDER@DATE for the rows of one commit, or those measured on
one day (2026-11-24, in local time).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from attnbench.report.inputs import Inputs, Protocol, read_inputs
from attnbench.report.page import write_page
from attnbench.report.sections import words
from attnbench.report.sections.answer import beyond_training, noise_lines
from attnbench.report.sections.verdicts import verdict_lines
from attnbench.results.metrics import Primary
from attnbench.results.row_files import started_at
from attnbench.results.rows import EVALUATION_OPTIONS, MIXER_OPTIONS, ResultRow, is_search
from attnbench.results.tables import NOTHING, Table, print_table
from attnbench.settings.errors import UserError
from attnbench.verdict.family import pair_of, primary_figures
from attnbench.verdict.ranking import Pair, Verdict, judge
from attnbench.verdict.seeds import Figure

COMMIT = re.compile(r"[0-9a-f]{4,40}(-dirty)?")
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")

COLUMNS = ("commit", "environment", "device", "precision", "backend", "model", "parameters", "seq_len")
"""Columns of rows in which sides may differ, in addition to options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    name: str
    """Suffix of its variants: "softmax (before)"."""
    inputs: Inputs

    def variant(self, name: str) -> str:
        return f"{name} ({self.name})"


def write_versus(first: str, second: str, *, target: Path | None = None) -> Path:
    """Compare the variants of the second side with those of the first; print a table, write a page and return its path.

    Raises:
        UserError: identical sides; no common variant, seed, or metric at the same setting; rows of different corpora;
        any error of read_inputs.
    """
    before, after = _sides(first, second)
    shared = [name for name in before.inputs.protocol.variants if name in after.inputs.protocol.variants]
    if not shared:
        lists = [words.listed(side.inputs.protocol.variants) for side in (before, after)]
        raise UserError(f"{first} and {second} have no variant in common: {lists[0]}, and {lists[1]}")
    inputs = _joined(before, after, shared)
    over_seeds, known = inputs.figures, inputs.primaries
    pairs = [
        _pair(evaluation, primary, after.variant(name), before.variant(name), over_seeds)
        for evaluation, primary in known.items()
        for name in shared
    ]
    if not any(len(pair.differences) > 1 for pair in pairs):
        reasons = "; ".join(dict.fromkeys(pair.obstacle or _seeds_text(pair, over_seeds) for pair in pairs))
        raise UserError(f"{first} and {second} cannot be compared: {reasons or 'nothing there has a primary metric'}")
    verdicts = judge(pairs)
    print_table(_table(verdicts, over_seeds, (before, after), shared))
    lines = verdict_lines(verdicts) | noise_lines(verdicts) | beyond_training(over_seeds, known)
    lines["What changed"] = _changes(before, after, shared)
    folder = _folder(second)[0]
    target = target or folder / f"report-against-{re.sub(r'[^A-Za-z0-9_.-]+', '_', before.name)}"
    return write_page(inputs, verdicts, lines, target=target)


def _folder(side: str) -> tuple[Path, str]:
    folder, _, chosen = side.rpartition("@")
    if Path(side).exists() or not folder:
        return Path(side), ""
    if not COMMIT.fullmatch(chosen) and not DATE.fullmatch(chosen):
        raise UserError(f"{side}: {chosen} must be a commit, or a date like 2026-11-24")
    return Path(folder), chosen


def _sides(first: str, second: str) -> tuple[Side, Side]:
    (folder, chosen), (other_folder, other_chosen) = _folder(first), _folder(second)
    if folder.resolve() == other_folder.resolve() and (chosen == other_chosen or not (chosen and other_chosen)):
        raise UserError(f"{first} and {second} are the same folder; name another, or a commit of each: {folder}@COMMIT")
    names = [folder.resolve().name, other_folder.resolve().name]
    if names[0] == names[1]:
        # Then the commits or dates are the names, or the full paths.
        is_one = folder.resolve() == other_folder.resolve()
        names = [chosen, other_chosen] if is_one else [str(path.resolve()) for path in (folder, other_folder)]
    given = [(folder, chosen, names[0]), (other_folder, other_chosen, names[1])]
    before, after = (Side(name=name, inputs=_read(where, which)) for where, which, name in given)
    return before, after


def _read(folder: Path, chosen: str) -> Inputs:
    if not folder.is_dir():
        raise UserError(f"{folder}: is not a folder")
    there: dict[str, None] = {}
    day = cache(_day)

    def is_chosen(row: ResultRow, path: Path) -> bool:
        value = day(path) if DATE.fullmatch(chosen) else row.identity.commit
        there[value] = None
        return value.startswith(chosen)

    try:
        inputs = read_inputs(folder, keep=is_chosen if chosen else None)
    except UserError:
        if not there or any(value.startswith(chosen) for value in there):
            raise
        raise UserError(f"{folder}@{chosen}: has no such rows, only rows of {words.listed(sorted(there))}") from None
    variants = {row.identity.variant for row in inputs.rows}
    named = [name for name in inputs.protocol.variants if name in variants]
    return replace(inputs, protocol=replace(inputs.protocol, variants=named))


def _day(path: Path) -> str:
    """Return the local day on which the measurements of a results file began.

    The file's own date would be that of its last copy. Tables of rows lack a start.
    """
    moment = started_at(path) if path.suffix == ".jsonl" else None
    return "an unknown day" if moment is None else moment.astimezone().date().isoformat()


def _joined(before: Side, after: Side, shared: Sequence[str]) -> Inputs:
    def renamed(side: Side) -> list[ResultRow]:
        of_it = [row for row in side.inputs.rows if row.identity.variant in shared]
        # Runs with equal names are in two folders.
        return [
            replace(
                row,
                identity=replace(
                    row.identity,
                    variant=side.variant(row.identity.variant),
                    run=f"{side.name}/{row.identity.run}",
                ),
            )
            for row in of_it
        ]

    variants = [side.variant(name) for name in shared for side in (before, after)]
    folders = {f"{side.name}/{run}": path for side in (before, after) for run, path in side.inputs.folders.items()}
    # Other entries of the two records do not apply to both.
    protocol = Protocol(
        plan=f"{after.name} against {before.name}",
        command="",
        variants=variants,
        rank=variants,
        reference=None,
        files=None,
        evaluations=after.inputs.protocol.evaluations,
        corpora=after.inputs.protocol.corpora,
        failures=[*before.inputs.protocol.failures, *after.inputs.protocol.failures],
    )
    return Inputs(
        rows=[row for side in (before, after) for row in renamed(side)],
        control=[],
        protocol=protocol,
        environments=before.inputs.environments | after.inputs.environments,
        folders=folders,
    )


def _pair(evaluation: str, primary: Primary, first: str, second: str, over_seeds: Sequence[Figure]) -> Pair:
    of_it = [figure for figure in over_seeds if figure.evaluation == evaluation]
    scores = [figure for figure in of_it if primary.takes(figure.metric, figure.settings)]
    settings = [[figure.settings for figure in scores if figure.variant == name] for name in (first, second)]
    common = [figure for figure in scores if all(figure.settings in of_side for of_side in settings)]
    if any(settings) and not common:
        empty = pair_of(evaluation, primary, first, second, {})
        return replace(empty, obstacle=f"{evaluation} has no setting in common")
    return pair_of(evaluation, primary, first, second, primary_figures(common, primary, (first, second)), of_it)


def _seeds_text(pair: Pair, over_seeds: Sequence[Figure]) -> str:
    seeds = []
    for name in (pair.first, pair.second):
        of_it = [f for f in over_seeds if f.variant == name and f.settings == pair.settings]
        seeds.append(", ".join(str(seed) for seed in sorted({seed for f in of_it for seed in f.values})))
    number = len(pair.differences) or "no"
    return f"{number} common seed in {pair.evaluation} ({seeds[0]} and {seeds[1]}), and a test needs two"


def _table(
    verdicts: Sequence[Verdict], over_seeds: Sequence[Figure], sides: tuple[Side, Side], shared: Sequence[str]
) -> Table:
    names = {sides[1].variant(name): name for name in shared}

    def score(pair: Pair, variant: str) -> str:
        key = pair.evaluation, pair.primary.metric, pair.settings
        matching = [f for f in over_seeds if (f.evaluation, f.metric, f.settings) == key and f.variant == variant]
        return words.outcome(matching[0]) if matching else NOTHING

    lines = [
        [
            names[it.pair.first],
            f"{it.pair.evaluation} (nats)" if it.pair.primary.kind == "nats" else it.pair.evaluation,
            score(it.pair, it.pair.second),
            score(it.pair, it.pair.first),
            words.difference(it),
            _outcome(it),
        ]
        for it in verdicts
    ]
    headers = ["variant", "evaluation", *(side.name for side in sides), "difference", "verdict"]
    note = "Undecided: the number of seeds in brackets would decide. Differences of nats are in % of perplexity."
    title = f"{sides[1].name} against {sides[0].name}"
    return Table(title=title, headers=headers, lines=lines, num_labels=2, notes=[note])


def _outcome(verdict: Verdict) -> str:
    if verdict.winner is not None:
        return verdict.outcome
    if verdict.is_equivalent:
        return f"equivalent{words.of_seeds(verdict)}"
    return verdict.reason or f"undecided ({words.seeds_text(verdict)})"


def _changes(before: Side, after: Side, shared: Sequence[str]) -> list[str]:
    texts: dict[str, list[str]] = {}
    for name in shared:
        there, here = (_conditions(side.inputs.rows, name) for side in (before, after))
        differing = [
            f"{key} {'/'.join(there.get(key, ())) or 'none'} → {'/'.join(here.get(key, ())) or 'none'}"
            for key in dict.fromkeys([*there, *here])
            if there.get(key) != here.get(key)
        ]
        texts.setdefault("; ".join(differing) or "nothing that the rows say", []).append(name)
    return [f"{words.listed(names)}: {text}." for text, names in texts.items()]


def _conditions(rows: Sequence[ResultRow], variant: str) -> dict[str, list[str]]:
    """Return the conditions under which the rows of a variant were made, with sorted values."""
    texts: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.identity.variant != variant or is_search(row.identity.seed):
            continue
        entries: dict[str, Any] = {column: getattr(row.identity, column) for column in COLUMNS}
        settings = row.measurement.settings
        for kind in (MIXER_OPTIONS, EVALUATION_OPTIONS):
            options = settings.get(kind)
            where = "" if kind == MIXER_OPTIONS else f"{row.identity.evaluation} "
            entries |= {
                f"{where}{name}": value for name, value in (options.items() if isinstance(options, dict) else ())
            }
        entries[f"{row.identity.evaluation} learning_rate"] = settings.get("learning_rate")
        for name, value in entries.items():
            if value is not None:
                texts.setdefault(name, {})[words.shown_value(value)] = None
    return {name: sorted(values) for name, values in texts.items()}
