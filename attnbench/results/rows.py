"""Result rows: a measurement and its identity. Text is stored as given, and escaped when it is printed."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from attnbench.settings.check import check_options
from attnbench.settings.errors import UserError
from attnbench.settings.schema import SELECTION_SEED

SCHEMA = 1
"""Number of the row format; a file with another one is refused."""

STATUSES = ("ok", "out_of_memory", "unsupported", "not_reached", "diverged", "failed")

TRAINING = "training"
"""The `evaluation` of a training's rows."""

DEVICE = "device"
"""The `variant` of measurements of the device itself."""

HASH = "[0-9a-f]" * 8
"""Pattern of a hash in file names, for glob."""

TEST_OF_BEST = {"split": "test", "checkpoint": "best"}
"""Settings of the scores that compare trained models."""

MIXER_OPTIONS, EVALUATION_OPTIONS = "mixer_options", "evaluation_options"
"""Settings of every row of a mixer: its options as built, and those of the evaluation; see verdict/axes.py for axes."""

IMPORTED = "imported"
"""Setting of every row of an imported cell: a mark for each import, see comparison/imports.py."""

REFERENCE, REFERENCE_RATIO = "reference_milliseconds", "reference_ratio"
"""Settings of a timed row: times of a reference just before and after, and the row's own over them; see
evals/lib/reference.py."""

NUMBERS = ("batch_size", "budget", "chance", "learning_rate", "length", "num_pairs", "sequence_length", "width")
"""Settings that verdicts and pages compute with."""

MAX_NUMBER = 1e100
"""Largest number of a row; sums and squares of such numbers are finite."""

COLUMNS = (
    *("schema", "experiment", "run", "mixer", "variant", "backend", "model", "parameters", "seq_len", "evaluation"),
    *("metric", "value", "unit", "low", "high", "num_samples", "status", "reason"),
    *("seed", "precision", "device", "num_devices", "environment", "commit", "corpus", "config_hash", "settings"),
)
"""The columns of every row and of results.csv, in order."""


@dataclass(slots=True, kw_only=True)
class Measurement:
    """One number, or a status with the reason why there is none.

    Raises:
        ValueError: these contradict each other, a number is beyond MAX_NUMBER, or one of NUMBERS is not a number.
    """

    metric: str
    value: float | None
    unit: str
    """Unit of the value; empty for a pure number."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Position of the number on the evaluation's axes: {"split": "test", "length": 50}."""
    low: float | None = None
    high: float | None = None
    """Ends of the interval, in `unit`."""
    num_samples: int | None = None
    """Number of items (labels, seeds, repetitions) behind the value."""
    status: str = "ok"
    reason: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"{self.metric}: status {self.status!r} must be one of {', '.join(STATUSES)}")
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        for name, number in numbers.items():
            if number is None:
                continue
            if self.status != "ok":
                raise ValueError(f"{self.metric}: {name}={number} beside status {self.status}, which has none")
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError(f"{self.metric}: {name} must be a number, not {type(number).__name__}")
            # Not "above": NaN is refused too.
            if not abs(number) <= MAX_NUMBER:
                raise ValueError(
                    f"{self.metric}: {name}={number}: not finite, or beyond {MAX_NUMBER:g}: needs a status"
                )
        if self.status == "ok" and self.value is None:
            raise ValueError(f"{self.metric}: status ok needs a value")
        if self.status != "ok" and not self.reason:
            raise ValueError(f"{self.metric}: status {self.status} needs a reason")
        for name, setting in self.settings.items():
            if name == REFERENCE:
                is_list = isinstance(setting, list)
                if not is_list or not all(type(ms) in (int, float) and 0 < ms <= MAX_NUMBER for ms in setting):
                    raise ValueError(f"{self.metric}: settings.{name}: must be a list of numbers above 0")
            if name in NUMBERS or name == REFERENCE_RATIO or name.startswith("chance_"):
                is_number = isinstance(setting, int | float) and not isinstance(setting, bool)
                if not is_number or not abs(setting) <= MAX_NUMBER:
                    shown = json.dumps(setting, default=str)
                    raise ValueError(
                        f"{self.metric}: settings.{name}={shown}: must be a number, at most {MAX_NUMBER:g}"
                    )


@dataclass(slots=True, kw_only=True, frozen=True)
class Identity:
    """The columns shared by the rows of one results file."""

    experiment: str
    run: str
    """Name of the folder under outputs/<experiment> that holds the run."""
    mixer: str
    variant: str
    backend: str
    """Name of the backend as resolved, never `auto`."""
    model: str
    parameters: int | None
    """Number of parameters of the model as built; None where the evaluation builds models of its own."""
    seq_len: int | None
    """Positions of the training sequences."""
    evaluation: str
    seed: int
    precision: str
    device: str
    """The device's name, without an index."""
    num_devices: int
    environment: str
    """Fingerprint of the run's environment.json."""
    commit: str
    corpus: str | None
    """Name and fingerprint of the data; None where no corpus is read."""
    config_hash: str


@dataclass(slots=True, kw_only=True, frozen=True)
class ResultRow:
    identity: Identity
    measurement: Measurement
    sitting: str = field(default="", compare=False)
    """Start of the command that measured it, if its file says; not a column."""

    @property
    def measured_in(self) -> str:
        """The sitting, if known, and the environment: rows that differ in it had another load."""
        return f"{self.sitting} {self.identity.environment}"

    def to_dict(self) -> dict[str, Any]:
        """Return the row by the names and in the order of COLUMNS."""
        content: dict[str, Any] = {"schema": SCHEMA}
        # Without the copies of `asdict`: a table may have ten thousand rows.
        for part in (self.identity, self.measurement):
            content |= {entry.name: getattr(part, entry.name) for entry in fields(part)}
        return {name: content[name] for name in COLUMNS}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "ResultRow":
        """Raises ValueError for another schema number, a column missing or unknown, or a measurement that contradicts
        itself."""
        if content.get("schema") != SCHEMA:
            raise ValueError(f"schema {content.get('schema')}, and this version of attnbench reads schema {SCHEMA}")
        missing, unknown = set(COLUMNS) - set(content), set(content) - set(COLUMNS)
        if missing or unknown:
            raise ValueError(
                "columns " + ", ".join([f"-{n}" for n in sorted(missing)] + [f"+{n}" for n in sorted(unknown)])
            )
        identity = {entry.name: content[entry.name] for entry in fields(Identity)}
        measurement = {entry.name: content[entry.name] for entry in fields(Measurement)}
        try:
            check_options(Identity, identity, group="")
            check_options(Measurement, measurement, group="")
        except UserError as error:
            raise ValueError(str(error)) from None
        return cls(identity=Identity(**identity), measurement=Measurement(**measurement))


def is_search(seed: int) -> bool:
    """Rows of a search stand in no table."""
    return seed >= SELECTION_SEED


def same_corpus(rows: Iterable[ResultRow]) -> str | None:
    """Return the one corpus of all `rows`; None if they read none. Numbers of several corpora cannot be compared."""
    corpora = {row.identity.corpus for row in rows}
    if len(corpora) > 1:
        names = ", ".join(sorted("(none)" if name is None else name for name in corpora))
        raise UserError(f"rows of different corpora cannot be compared: {names}; make a table of each")
    return corpora.pop() if corpora else None
