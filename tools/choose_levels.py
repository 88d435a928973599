"""Levels and steps of the ladder by the rule of docs/ladder.md, from the rows of finished pilots.

python tools/choose_levels.py outputs/ladder_pilot [MORE ...] [--json]

Takes outputs folders and exported cells.jsonl.gz, of any numbers of steps. Prints Markdown, or JSON.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from attnbench.comparison.transfer import read_cells
from attnbench.evals.ladder_state import GROUPS
from attnbench.results.numbers import reaches
from attnbench.results.row_files import read_results
from attnbench.results.rows import EVALUATION_OPTIONS, ResultRow, is_search
from attnbench.settings.errors import UserError

STEPS = (2000, 5000, 10_000, 20_000, 50_000)
"""Numbers of steps that may be taken, the smallest first."""

NUM_SEEDS, NUM_SEARCH, NUM_SCORED = 3, 6, 8
"""Scored seeds of a pilot; trainings of a search and scored ones that the price is of."""

SOLVED, RISE, MIDDLE, APART = 0.95, 0.02, (0.1, 0.9), 0.15
"""Accuracies of the rule; MIDDLE is scaled, between chance and 1."""

FEWEST, NUM_INFORMATIVE = 3, 2
"""Fewest levels of a ladder, and fewest informative ones."""

MINUTES = 8
"""Most minutes that the ladder of one mixer may take."""

ANCHORS = ("softmax", "linear", "mamba2", "gated_deltanet")
PRICED = ("softmax", "gated_deltanet")
REFERENCES = {
    "ladder_recall": ("softmax",),
    "ladder_copy": ("softmax",),
    "ladder_state": ("lstm", "deltaproduct"),
    "ladder_range": ("softmax_nope", "window"),
}
AXES = {
    "ladder_recall": "num_pairs",
    "ladder_copy": "length",
    "ladder_state": "training_lengths",
    "ladder_range": "sequence_length",
}
"""Setting with the level in the rows of accuracy."""

OF_A_RUN = ("num_steps", "num_train_sequences", "check_interval_steps", "match")
OF_A_RULE = ("rules", "vocabulary_size")
"""Options in which runs of one pilot may differ; the second of probes with rules."""

Level = tuple[str, int]
"""A level's rule, empty but for states, and its number."""


@dataclass(kw_only=True)
class Pilot:
    """Scores of one probe in one setting, at several numbers of steps."""

    probe: str
    options: dict[str, Any]
    levels: list[Level]
    """From the easiest."""
    chance: dict[Level, float] = field(default_factory=dict)
    """The largest that the rows name: of a constant answer, or of one that knows the string's symbols."""
    scores: dict[tuple[str, int, Level], dict[int, float | None]] = field(default_factory=dict)
    """Accuracy by variant, steps and level, and then by seed."""
    seconds: dict[tuple[str, int, bool], dict[str, list[float]]] = field(default_factory=dict)
    """Card seconds of trainings by variant, steps and whether they are a search's, and then by rule."""

    def accuracies(self, variant: str, steps: int, level: Level) -> list[float]:
        """Accuracies of all seeds, 0 where the training diverged; empty unless there are three."""
        found = [value or 0.0 for _, value in sorted(self.scores.get((variant, steps, level), {}).items())]
        return found if len(found) >= NUM_SEEDS else []

    def mean(self, variant: str, steps: int, level: Level) -> float | None:
        found = self.accuracies(variant, steps, level)
        return fmean(found) if found else None

    def holds(self, steps: int, level: Level) -> bool:
        """Tell if a reference has solved a level in every seed."""
        of_references = [self.accuracies(variant, steps, level) for variant in REFERENCES[self.probe]]
        return any(found and all(reaches(value, SOLVED) for value in found) for found in of_references)

    @property
    def steps(self) -> list[int]:
        """Numbers of steps that were run."""
        return sorted({steps for _, steps, _ in self.scores})

    def _lacking(self, steps: int, anchors: Sequence[str] = ANCHORS) -> list[str]:
        def lacks(variant: str) -> bool:
            return any(not self.accuracies(variant, steps, level) for level in self.levels)

        references = REFERENCES[self.probe]
        needed = (*anchors, *(references if all(map(lacks, references)) else ()))
        return [variant for variant in dict.fromkeys(needed) if lacks(variant)]

    def held(self) -> list[Level]:
        """Levels that decide about steps: those that a reference holds at the most steps it was run for."""
        most = max((steps for steps in self.steps if not self._lacking(steps, ())), default=0)
        return [level for level in self.levels if self.holds(most, level)]

    def lacking(self, steps: int) -> list[str]:
        """Say which scores are missing to judge a number of steps."""
        missing = {at: self._lacking(at) for at in (steps, 4 * steps)}
        missing = {steps // 4: self._lacking(steps // 4, ()), **missing}
        return [f"no scores of {', '.join(names)} at {at:,} steps" for at, names in missing.items() if names]

    def against(self, steps: int) -> list[str]:
        """Say what speaks against a number of steps that can be judged; nothing if the rule takes it."""
        told = [] if self.held() else ["no reference holds a level"]
        for level in self.held():
            if not self.holds(steps // 4, level):
                told.append(f"{named(level)}: no reference has solved it at {steps // 4:,} steps")
            for anchor in ANCHORS:
                before, after = (fmean(self.accuracies(anchor, at, level)) for at in (steps, 4 * steps))
                if not reaches(before, SOLVED) and reaches(after - before, RISE):
                    told.append(f"{named(level)}: {anchor} rises from {before:.3f} to {after:.3f} at {4 * steps:,}")
        return told

    def scaled(self, variant: str, steps: int, level: Level) -> float:
        return (fmean(self.accuracies(variant, steps, level)) - self.chance[level]) / (1 - self.chance[level])

    def is_informative(self, steps: int, level: Level) -> bool:
        """Tell if an anchor is between chance and the threshold, or two are apart."""
        means = [fmean(self.accuracies(anchor, steps, level)) for anchor in ANCHORS]
        scaled = [self.scaled(anchor, steps, level) for anchor in ANCHORS]
        is_between = any(reaches(value, MIDDLE[0]) and not reaches(value, MIDDLE[1]) for value in scaled)
        return is_between or reaches(max(means) - min(means), APART)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the rule says about one pilot."""

    steps: int | None
    is_converged: bool
    against: dict[int, list[str]]
    """What speaks against each number of steps."""
    kept: list[Level]
    informative: list[Level]
    window: list[Level]
    """Levels of the ladder; empty: the probe has no score."""
    dropped: dict[str, str]
    """Reason by level."""
    outcome: str


def decide(pilot: Pilot, candidates: Sequence[int] = STEPS) -> Decision:
    against = {steps: pilot.lacking(steps) or pilot.against(steps) for steps in candidates}
    taken = next((steps for steps, told in against.items() if not told), None)
    steps = taken or max((steps for steps in candidates if not pilot.lacking(steps)), default=None)
    if steps is None:
        nothing: dict[str, Any] = {"kept": [], "informative": [], "window": [], "dropped": {}}
        return Decision(
            steps=None, is_converged=False, against=against, **nothing, outcome="no number of steps can be judged"
        )
    holding = [level for level in pilot.levels if pilot.holds(steps, level)]
    kept = without_gaps(pilot.levels, holding)
    informative = [level for level in kept if pilot.is_informative(steps, level)]
    chosen = window(kept, informative, from_first=pilot.probe == "ladder_range")
    if any(level not in kept for level in pilot.levels[:2]):
        chosen, outcome = [], "left out: no reference holds the first two levels"
    elif len(kept) < FEWEST:
        chosen, outcome = [], f"a table without a score: {len(kept)} levels are kept, and a ladder has {FEWEST}"
    elif len(informative) < NUM_INFORMATIVE:
        again = "halve the width and repeat the pilot; after that a table without a score"
        chosen, outcome = [], f"{len(informative)} informative levels, of {NUM_INFORMATIVE}: {again}"
    else:
        outcome = "a ladder" if taken else "a ladder, not converged"
    reasons = {
        named(level): (
            f"no reference has {SOLVED} in {NUM_SEEDS} of {NUM_SEEDS} seeds"
            if level not in holding
            else "it is beyond a level, or beside a length of a group, that is not kept"
            if level not in kept
            else "kept, and not beside an informative level"
        )
        for level in pilot.levels
        if level not in (chosen or kept)
    }
    return Decision(
        steps=steps,
        is_converged=taken is not None,
        against=against,
        kept=kept,
        informative=informative,
        window=chosen,
        dropped=reasons,
        outcome=outcome,
    )


def units(levels: Sequence[Level]) -> list[list[Level]]:
    """Return the levels of each group together, other levels one by one."""
    found: dict[Any, list[Level]] = {}
    for level in levels:
        found.setdefault(level[0] or level, []).append(level)
    return list(found.values())


def without_gaps(levels: Sequence[Level], holding: Sequence[Level]) -> list[Level]:
    """Keep the levels before the first that is not held; of states each group that is held at all its lengths."""
    kept: list[Level] = []
    for unit in units(levels):
        if all(level in holding for level in unit):
            kept += unit
        elif not unit[0][0]:
            break
    return kept


def window(kept: Sequence[Level], informative: Sequence[Level], *, from_first: bool = False) -> list[Level]:
    """Return the shortest run with all informative levels, one more on each side, widened to the fewest.

    Args:
        from_first: the first level is always in, as models are trained at it.
    """
    groups = units(kept)
    places = [place for place, group in enumerate(groups) if any(level in informative for level in group)]
    if not places:
        return []
    first, last = max(0, places[0] - 1), min(len(groups) - 1, places[-1] + 1)
    first = 0 if from_first else first
    while sum(map(len, groups[first : last + 1])) < FEWEST and (first, last) != (0, len(groups) - 1):
        first, last = (first, last + 1) if last + 1 < len(groups) else (first - 1, last)
    return [level for group in groups[first : last + 1] for level in group]


def named(level: Level) -> str:
    return f"{level[0]} x{level[1]}" if level[0] else str(level[1])


def read_rows(path: Path) -> list[ResultRow]:
    """Read the rows of an outputs folder, or of a file that export= wrote."""
    if path.is_dir():
        files = sorted(path.rglob("results/*.jsonl"))
        return [row for file in files if file.name.startswith("ladder_") for row in read_results(file)]
    texts = [
        text
        for files in read_cells(path).folders.values()
        for name, text in files.items()
        if name.startswith("results/ladder_")
    ]
    return [ResultRow.from_dict(json.loads(line)) for text in texts for line in text.splitlines()[:-1]]


def pilots(rows: Iterable[ResultRow]) -> list[Pilot]:
    """Group rows by probe and setting.

    Raises:
        UserError: two trainings of one seed and number of steps have other accuracies.
    """
    found: dict[tuple[str, str], Pilot] = {}
    for row in rows:
        if row.identity.evaluation not in AXES:
            continue
        others = (*OF_A_RUN, *(OF_A_RULE if "rule" in row.measurement.settings else ()))
        options = {name: value for name, value in options_of(row).items() if name not in others}
        key = (row.identity.evaluation, json.dumps(options, sort_keys=True))
        pilot = found.setdefault(key, Pilot(probe=row.identity.evaluation, options=options, levels=[]))
        if row.measurement.metric == "accuracy":
            _add_score(pilot, row)
        elif row.measurement.metric == "tokens_per_second":
            _add_seconds(pilot, row)
    for pilot in found.values():
        pilot.levels.sort(key=lambda level: (("", *GROUPS).index(level[0]), level[1]))
    return sorted(found.values(), key=lambda pilot: (list(AXES).index(pilot.probe), -pilot.options.get("dim", 0)))


def options_of(row: ResultRow) -> dict[str, Any]:
    return row.measurement.settings[EVALUATION_OPTIONS]


def _add_score(pilot: Pilot, row: ResultRow) -> None:
    identity, measurement, settings = row.identity, row.measurement, row.measurement.settings
    if measurement.status not in ("ok", "diverged"):
        return
    level = (settings.get("rule", ""), settings[AXES[pilot.probe]])
    if level not in pilot.levels:
        pilot.levels.append(level)
    pilot.chance[level] = max(value for name, value in settings.items() if name.startswith("chance"))
    assert isinstance(identity.seed, int)
    by_seed = pilot.scores.setdefault((identity.variant, options_of(row)["num_steps"], level), {})
    if by_seed.setdefault(identity.seed, measurement.value) != measurement.value:
        what = f"{pilot.probe} {named(level)}, {identity.variant}, seed {identity.seed}"
        raise UserError(f"{what}: two trainings of {options_of(row)['num_steps']} steps differ; give the rows of one")


def _add_seconds(pilot: Pilot, row: ResultRow) -> None:
    """Add the seconds of a training's steps, at the speed of their second half: without the first step and scoring."""
    settings, speed, options = row.measurement.settings, row.measurement.value, options_of(row)
    # Beside others that are no stack it has no speed of its own; with length buckets the speed is of shorter sequences.
    if speed is None or (settings.get("shared_device") and "stack" not in settings) or options.get("length_buckets"):
        return
    assert row.identity.seq_len is not None
    key = (row.identity.variant, options["num_steps"], is_search(row.identity.seed))
    of_rule = pilot.seconds.setdefault(key, {}).setdefault(settings.get("rule", ""), [])
    positions = options["num_steps"] * options["batch_size"] * row.identity.seq_len
    of_rule.append(positions / speed / settings.get("stack", 1))


def price(pilot: Pilot, variant: str, steps: int) -> float | None:
    """Return the card seconds of six search and eight scored trainings; None: not measured."""
    mean = {
        searched: sum(fmean(values) for values in pilot.seconds.get((variant, steps, searched), {}).values())
        for searched in (True, False)
    }
    return NUM_SEARCH * mean[True] + NUM_SCORED * mean[False] if all(mean.values()) else None


def described(pilot: Pilot, candidates: Sequence[int]) -> dict[str, Any]:
    """Return scores, decision and price of a pilot, as JSON has them."""
    made, known = decide(pilot, candidates), pilot.steps
    variants = dict.fromkeys((*ANCHORS, *REFERENCES[pilot.probe]))
    accuracy = [
        {"level": named(level), "steps": steps, "variant": variant, "mean": pilot.mean(variant, steps, level)}
        | {"solved": sum(reaches(it, SOLVED) for it in found), "seeds": len(found)}
        for level in pilot.levels
        for steps in known
        for variant in variants
        if (found := pilot.accuracies(variant, steps, level))
    ]
    names = {name: list(map(named, getattr(made, name))) for name in ("kept", "informative", "window")}
    return {
        "probe": pilot.probe,
        "width": pilot.options.get("dim"),
        "chance": {named(level): pilot.chance[level] for level in pilot.levels},
        "accuracy": accuracy,
        **asdict(made),
        **names,
        "price": {variant: {steps: price(pilot, variant, steps) for steps in known} for variant in PRICED},
        "seconds": sum(sum(values) for by_rule in pilot.seconds.values() for values in by_rule.values()),
    }


def totals(all_described: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return the price of all probes that are ladders at their steps, for each mixer; None: one is not measured."""
    ladders = [it for it in all_described if it["window"]]
    sums: dict[str, float | None] = {}
    for variant in PRICED:
        prices = [it["price"][variant].get(it["steps"]) for it in ladders]
        sums[variant] = None if not prices or None in prices else sum(prices)
    return sums


def markdown(all_described: Sequence[dict[str, Any]], minutes: float) -> str:
    return "\n".join([line for it in all_described for line in _page(it)] + list(_total(all_described, minutes)))


def _page(told: dict[str, Any]) -> Iterator[str]:
    variants = list(dict.fromkeys(it["variant"] for it in told["accuracy"]))
    references = REFERENCES[told["probe"]]
    cells = {(it["level"], it["steps"], it["variant"]): it for it in told["accuracy"]}
    yield f"## {told['probe']}, width {told['width']}\n"
    yield f"Accuracy; of references also the seeds with {SOLVED} or more.\n"
    heads = ["level", "chance", "steps", *(f"{it} (reference)" if it in references else it for it in variants)]
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for level, steps in dict.fromkeys((it["level"], it["steps"]) for it in told["accuracy"]):
        found = [cells.get((level, steps, variant)) for variant in variants]
        shown = [_cell(it, is_reference=it is not None and it["variant"] in references) for it in found]
        yield f"| {level} | {told['chance'][level]:.3f} | {steps:,} | {' | '.join(shown)} |"
    yield ""
    for steps, reasons in told["against"].items():
        yield f"- {steps:,} steps: {'; '.join(reasons) or 'the rule takes them'}."
    yield f"- Steps: {told['steps'] or 'none'}{'' if told['is_converged'] else ', not converged'}."
    for name in ("kept", "informative", "window"):
        yield f"- {name.capitalize()}: {', '.join(told[name]) or 'none'}."
    for level, reason in told["dropped"].items():
        yield f"- Dropped: {level}, {reason}."
    yield f"- Outcome: {told['outcome']}."
    for variant, by_steps in told["price"].items():
        for steps, value in by_steps.items():
            shown = "not measured" if value is None else f"{value:.0f} card seconds"
            yield f"- Price of {variant} at {steps:,} steps ({NUM_SEARCH} search, {NUM_SCORED} scored): {shown}."
    yield f"- All trainings of this pilot: {told['seconds'] / 60:.1f} card minutes.\n"


def _cell(found: dict[str, Any] | None, *, is_reference: bool) -> str:
    if found is None:
        return ""
    return f"{found['mean']:.3f}" + (f" ({found['solved']}/{found['seeds']})" if is_reference else "")


def _total(all_described: Sequence[dict[str, Any]], minutes: float) -> Iterator[str]:
    yield "## Price of the ladder\n"
    for variant, value in totals(all_described).items():
        if value is None:
            yield f"- {variant}: not measured at the steps of every ladder."
        else:
            fits = "within" if value <= 60 * minutes else "over"
            yield f"- {variant}: {value / 60:.1f} minutes, {fits} the {minutes:g} minutes."


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="outputs folders, or files of export=")
    parser.add_argument("--steps", nargs="+", type=int, default=STEPS, help="that may be taken (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="price of one mixer's ladder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(words)
    try:
        found = pilots(row for path in given.paths for row in read_rows(path))
    except UserError as error:
        parser.exit(1, f"error: {error}\n")
    told = [described(pilot, sorted(given.steps)) for pilot in found]
    if given.json:
        print(json.dumps({"pilots": told, "seconds": totals(told), "minutes": given.minutes}, indent=1))
    else:
        print(markdown(told, given.minutes))


if __name__ == "__main__":
    main()
