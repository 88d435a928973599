"""Inputs of a report: rows, the record of the comparison, environments."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from attnbench.machine.environment import commit_of, environment_id
from attnbench.report.sections.examples import example_lines
from attnbench.results.corpora import Corpora
from attnbench.results.metrics import Primary
from attnbench.results.row_files import read_results
from attnbench.results.row_tables import read_csv, table_of
from attnbench.results.rows import DEVICE, ResultRow, is_search
from attnbench.results.tables import cells_of
from attnbench.settings.check import check_options, read
from attnbench.settings.errors import UserError
from attnbench.settings.schema import MAX_PAIRED, MAX_VARIANTS
from attnbench.settings.untrusted import read_object
from attnbench.verdict.axes import distinguish_variants
from attnbench.verdict.control import control_of, judge_control
from attnbench.verdict.family import name_family
from attnbench.verdict.frozen import frozen_sentence, imported_sentence
from attnbench.verdict.ranking import Verdict
from attnbench.verdict.rates import Choice
from attnbench.verdict.seeds import Figure, figures
from attnbench.verdict.summary import evaluation_class, primary_metrics, verdicts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    purpose: str
    plots: list[tuple[str, str]] | None
    """(metric, axis) pairs; None if unknown."""
    primary: Primary | None = None
    """The metric of its verdicts; None if it has none or is unknown."""
    example: list[str] = field(default_factory=list)
    """Lines of input and target; see report/sections/examples.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The record of a comparison, from comparison.json."""

    plan: str
    command: str
    variants: list[str]
    rank: list[str]
    tested: list[str] | None = None
    """Evaluations whose primary metric is tested; None: all that have one."""
    descriptive: list[str] = field(default_factory=list)
    """Sentences about evaluations that are not tested."""
    reference: str | None
    in_looks: bool = False
    control_seeds: list[int] = field(default_factory=list)
    corpora: Corpora | None = None
    """Corpora of a plan with several; its evaluations of language models are named with their corpus."""
    factors: list[str] = field(default_factory=list)
    files: list[str] | None
    """Results files, relative to the experiment's folder; None: all files there."""
    evaluations: dict[str, About] = field(default_factory=dict)
    shared: dict[str, dict[str, str]] = field(default_factory=dict)
    """By evaluation, variants that are one model with another, and that other, which alone has rows."""
    rates: list[Choice] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    protocols: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Rules of the latest run, by evaluation; see `results.protocol`."""
    first_scored: str | None = None
    without_start: int = 0
    """Number of their results without a start."""
    started: str | None = None
    seconds: float | None = None
    trained: str = ""
    """How its language models were trained: "3,000 steps of 32 × 256 characters"."""
    sittings: dict[str, str] = field(default_factory=dict)
    """Process start of each timed run and each training, by config_hash."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Derived results are computed once."""

    rows: list[ResultRow]
    """Rows of single seeds, in the order of the variants."""
    control: list[ResultRow]
    protocol: Protocol
    environments: dict[str, dict[str, Any] | None]
    """Environment by fingerprint, for all fingerprints in rows; None if no file has it."""
    folders: dict[str, Path]
    """Folders of the runs that are on this disk."""
    frozen: str = ""
    """Sentence on pre-registration; empty without a comparison."""

    @cached_property
    def imported(self) -> str:
        return imported_sentence([*self.rows, *self.control])

    @cached_property
    def figures(self) -> list[Figure]:
        return figures(self.rows, self.protocol.shared)

    @cached_property
    def primaries(self) -> dict[str, Primary]:
        """Tested primary metrics by evaluation, also without measurements."""
        measured = (figure.evaluation for figure in self.figures)
        return _primaries([*self.protocol.evaluations, *measured], self.protocol)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        protocol = self.protocol
        return verdicts_of(
            self.figures,
            rank=protocol.rank,
            reference=protocol.reference,
            primaries=self.primaries,
            in_looks=protocol.in_looks,
        )

    @cached_property
    def control_verdicts(self) -> list[Verdict]:
        reference = self.protocol.reference
        if reference is None:
            return []
        return judge_control(self.rows, self.control, reference=reference, primaries=self.primaries)


def read_inputs(folder: Path) -> Inputs:
    """Read an experiment of outputs/, a run of it, or a folder with a results.csv or results.csv.gz."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise UserError(f"{folder}: {what}; give an experiment of outputs/, or a run")
    record = _read_json(folder / "comparison.json")
    table = table_of(folder)
    if table.exists() and (record is None or record.get("files") is None):
        files, runs = [], {}
        rows = read_csv(table)
    else:
        files = _results_files(folder, record)
        rows_by_file = {path: read_results(path) for path in files}
        rows = [row for group in rows_by_file.values() for row in group]
        runs = {group[0].identity.run: path.parent.parent for path, group in rows_by_file.items() if group}
    # Rows of the device state its limits, which are not scores.
    rows = [row for row in rows if row.identity.mixer or row.identity.variant != DEVICE]
    if not rows:
        raise UserError(f"{folder}: no results; an experiment's folder has runs with results/*.jsonl, or results.csv")
    if record is None:
        rows = distinguish_variants([row for row in rows if not is_search(row.identity.seed)])
        if not rows:
            raise UserError(f"{folder}: nothing is scored yet, {len(files)} trainings of searches have results")
    protocol = _protocol(record, rows, folder)
    # Rows of a results.csv lack this column.
    rows = [replace(it, sitting=it.sitting or protocol.sittings.get(it.identity.config_hash, "")) for it in rows]
    if protocol.corpora is not None:
        rows = protocol.corpora.by_corpus(rows)
    shown, control = control_of(rows, protocol.control_seeds)
    position = {name: index for index, name in enumerate(protocol.variants)}
    folders = dict.fromkeys([folder, *(path.parent.parent for path in files)])
    return Inputs(
        rows=sorted(shown, key=lambda row: position.get(row.identity.variant, len(position))),
        control=control,
        protocol=protocol,
        environments=_environments(folders, rows),
        folders=runs,
        frozen=_frozen(folder, protocol, rows) if record is not None else "",
    )


def _frozen(folder: Path, protocol: Protocol, rows: Sequence[ResultRow]) -> str:
    primaries = _primaries([*protocol.evaluations, *(row.identity.evaluation for row in rows)], protocol)
    path = folder / "freeze.json"
    freeze = _read_json(path)
    try:
        return frozen_sentence(
            freeze,
            rows,
            family=name_family(
                rank=protocol.rank, reference=protocol.reference, evaluations=list(primaries), shared=protocol.shared
            ),
            protocols=protocol.protocols,
            first_scored=protocol.first_scored,
            num_without_start=protocol.without_start,
            committed=commit_of(path) if freeze is not None else None,
            rates=protocol.rates,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: not what attnbench compare freeze=true writes ({type(error).__name__} {error})"
        ) from error


def about(evaluation: str, protocol: Protocol) -> About:
    if evaluation in protocol.evaluations:
        recorded = protocol.evaluations[evaluation]
        # Records of earlier versions have no example.
        return recorded if recorded.example else replace(recorded, example=_example(evaluation))
    cls = evaluation_class(evaluation)
    if cls is None:
        return About(purpose="", plots=None)
    return About(purpose=purpose_of(cls), plots=list(cls.plots) or None, example=_example(evaluation))


def _example(evaluation: str) -> list[str]:
    cls = evaluation_class(evaluation)
    return [] if cls is None else example_lines(cls)


def purpose_of(cls: type) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0]


def _primaries(evaluations: Iterable[str], protocol: Protocol) -> dict[str, Primary]:
    names = [name for name in dict.fromkeys(evaluations) if protocol.tested is None or name in protocol.tested]
    known = {name: about(name, protocol).primary or primary_metrics([name]).get(name) for name in names}
    return {name: primary for name, primary in known.items() if primary is not None}


def _results_files(folder: Path, record: dict[str, Any] | None) -> list[Path]:
    if record is not None and record.get("files") is not None:
        paths = [Path(str(name)) for name in record["files"]]
        for path in paths:
            if path.is_absolute() or ".." in path.parts:
                raise UserError(f"{folder / 'comparison.json'}: {path} is outside the experiment's folder")
        return [folder / path for path in paths]
    # The first place is for a single run, such as one of a bench that was interrupted and has no results.csv.
    places = ("results/*.jsonl", "*/results/*.jsonl", "cells/*/results/*.jsonl")
    found = [path for place in places for path in sorted(folder.glob(place))]
    # Probes and timings of a run lie beside it.
    return [*found, *(path for cell in cells_of(folder) for path in sorted((cell / "results").glob("*.jsonl")))]


def _protocol(record: dict[str, Any] | None, rows: Sequence[ResultRow], folder: Path) -> Protocol:
    variants = list(dict.fromkeys(row.identity.variant for row in rows))
    # Operators' implementations are shown but not ranked; neither are many variants without a reference.
    mixers = list(dict.fromkeys(row.identity.variant for row in rows if row.identity.mixer))
    defaults = {
        "plan": folder.name,
        "command": "",
        "variants": variants,
        "rank": mixers if len(mixers) <= MAX_PAIRED else [],
        "reference": None,
        "files": None,
    }
    names = {entry.name for entry in fields(Protocol)}
    given = {name: value for name, value in (record or {}).items() if name in names}
    try:
        for rate in given.get("rates", []):
            check_options(Choice, rate, group="rates")
        given["rates"] = [Choice(**rate) for rate in given.get("rates", [])]
        given["evaluations"] = {name: _about(**entry) for name, entry in given.get("evaluations", {}).items()}
        if given.get("corpora") is not None:
            given["corpora"] = read(Corpora, given["corpora"], "corpora")
        check_options(Protocol, given, given=defaults, group="")
    except (TypeError, ValueError, AttributeError, UserError) as error:
        path = folder / "comparison.json"
        raise UserError(f"{path}: its rates, evaluations or other entries are not a comparison's ({error})") from error
    protocol = Protocol(**{**defaults, **given})
    known = list(dict.fromkeys([*protocol.variants, *variants]))
    grid = {rate for choice in protocol.rates for rate in choice.grid}
    # Each is a line in every plot or a column of a table.
    for what, number in (("variants", len(known)), ("learning rates", len(grid))):
        if number > MAX_VARIANTS:
            raise UserError(f"{folder}: has {number} {what}, but a report shows at most {MAX_VARIANTS}")
    return replace(protocol, variants=known)


def _about(
    *, purpose: str, plots: list[list[str]], primary: dict[str, Any] | None = None, example: Sequence[str] = ()
) -> About:
    texts = [purpose, *(word for pair in plots for word in pair), *example]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("purpose, plots and example must be text")
    main = read(Primary, primary, "primary") if primary is not None else None
    pairs = [(metric, axis) for metric, axis in plots]
    return About(purpose=purpose, plots=pairs, primary=main, example=[*example])


def _environments(folders: Iterable[Path], rows: Sequence[ResultRow]) -> dict[str, dict[str, Any] | None]:
    stamps: dict[str, dict[str, Any]] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("environment*.json"))):
        stamp = read_object(path, "you may remove the file: the report then names its fingerprint only")
        stamps[environment_id(stamp)] = stamp
    return {name: stamps.get(name) for name in dict.fromkeys(row.identity.environment for row in rows)}


def _read_json(path: Path) -> dict[str, Any] | None:
    return read_object(path) if path.exists() else None
