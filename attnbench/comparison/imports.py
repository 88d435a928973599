"""Import of runs: each is compared with the plan's own run, then all are taken over, or none.

Cells of the plan that have no results here are written, each results file with a mark of its origin, which all its rows
show.
"""

import json
import logging
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnbench.comparison.freeze import FREEZE, MISSING, changed_since, first_difference, scored_folders, shown_value
from attnbench.comparison.plan import Comparison
from attnbench.comparison.program import Driver
from attnbench.comparison.search import Found, Score
from attnbench.comparison.transfer import CarriedCells, read_cells, with_ending
from attnbench.comparison.variants import Compose
from attnbench.evals.runners.checkpoint import EvaluationJob
from attnbench.evals.runners.system import SystemJob
from attnbench.machine.environment import environment_id, timed_entries
from attnbench.results.files import replace_file
from attnbench.results.folder import config_text
from attnbench.results.job import Job, measured_by
from attnbench.results.row_files import parse_results
from attnbench.results.rows import IMPORTED, MAX_NUMBER, Measurement, ResultRow
from attnbench.settings.errors import UserError
from attnbench.settings.schema import MAX_VARIANTS, ComparisonSettings
from attnbench.settings.untrusted import MAX_JSON_BYTES, parse_json, parse_yaml, read_bounded_bytes
from attnbench.training.job import Run
from attnbench.verdict.axes import axes, is_chance

log = logging.getLogger(__name__)

TOLERANCE = 1e-6
"""Largest relative difference of perplexity or bits from the nats beside them."""

BY_EXECUTION = ("stack", "stack_too_large", "compiled")
"""Settings of rows that depend on the execution of a run."""

TRAINED = re.compile(r"(?P<of>.+?)(-lr[0-9.e+-]+)?-seed(?P<seed>\d{1,9})-[0-9a-f]{8}")
"""Folder of a training: its name without rate, and its seed."""

PlanIn = Callable[[Path], Comparison]
"""Resolves the plan in another outputs_dir."""


def import_for(settings: ComparisonSettings, compose: Compose, source: Path) -> None:
    """Import runs into a plan's folder, which the caller holds; see `import_cells`."""

    def plan_in(outputs: Path) -> Comparison:
        # All seeds that looks may add.
        plan = replace(settings.plan, in_looks=False)
        return Comparison(replace(settings, plan=plan, outputs_dir=str(outputs)), compose)

    folder = Path(settings.outputs_dir) / settings.plan.name
    number = import_cells(source, folder, plan_in)
    log.info(f"{number} results taken over from {source}")


def import_cells(source: Path, folder: Path, plan_in: PlanIn) -> int:
    """Import the runs of a file of `export_cells` that have no results here; return the number of new results.

    Nothing is written if the file cannot be read, a run differs from the plan's own, or a path here is a symbolic link.
    The caller holds the experiment's folder.
    """
    cells = read_cells(source)
    with _staging(folder) as staging:
        plan = plan_in(staging)
        stager = _Stager(cells, folder, plan.folder)
        timed = [*plan.timed, *(there for cell in plan.timed for there in _timed_elsewhere(cell, plan, cells))]
        trained = [cell for score in plan.scores for cell in _trained_elsewhere(score, plan, cells)]
        for cell in {cell.folder: cell for cell in (*timed, *trained)}.values():
            stager.stage(cell)
        # The shorter trainings of a search are known from the results of those before.
        plan.carry_out(Driver(before=stager.stage), Found())
        marks = {"sha256": cells.sha256, "when": datetime.now(UTC).isoformat(timespec="seconds")}
        freeze = _freeze_to_take(cells, folder, plan)
        taken = stager.taken(marks)
        # First: if this process is killed, the next import finds no runs scored without it.
        if freeze is not None:
            replace_file(folder / FREEZE, freeze)
        for path, text in taken.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            replace_file(plan.folder / path, text)
        # Results last, so that their environments exist.
        for path in sorted(taken, key=lambda path: path.endswith(".jsonl")):
            (plan.folder / path).replace(folder / path)
    others = len(cells.folders) - len(stager.found)
    if others:
        log.info(f"{source}: {others} of its {len(cells.folders)} runs are not in this plan, and are left out")
    return stager.num_results


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    staging = folder / ".import"
    # Left by a killed process.
    _remove(staging)
    try:
        staging.mkdir(parents=True)
        yield staging
    finally:
        _remove(staging)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _timed_elsewhere(cell: Job, plan: Comparison, cells: CarriedCells) -> list[Job]:
    """List a timed run under its names on the machines of the file."""
    if not isinstance(cell, SystemJob):
        return []
    prefix = cell.folder.relative_to(plan.folder).as_posix()[: -len("01234567")]
    found = []
    for name, files in cells.folders.items():
        if re.fullmatch(re.escape(prefix) + "[0-9a-f]{8}", name) and "environment.json" in files:
            stamp = _parsed(cells, f"{name}/environment.json", files["environment.json"])
            for is_lowered in (False, True):
                there = SystemJob(cell.run, cell.settings, timed_entries(stamp, is_lowered=is_lowered))
                found += [there] if there.folder.name == Path(name).name else []
    return found


def _trained_elsewhere(score: Score, plan: Comparison, cells: CarriedCells) -> list[Job]:
    """List the whole trainings of a score at the rates of the file. The scored rate may be unknown, as long as the
    search lacks results."""
    seeds = {*plan.seeds_of(score), *score.search_seeds}
    parts = TRAINED.fullmatch(score.prepared.folder.relative_to(plan.folder).as_posix())
    assert parts is not None
    found, number = [], Counter()
    for name, files in cells.folders.items():
        given = TRAINED.fullmatch(name)
        if given is None or given["of"] != parts["of"] or int(given["seed"]) not in seeds or "config.yaml" not in files:
            continue
        number[given["seed"]] += 1
        if number[given["seed"]] > MAX_VARIANTS:
            raise UserError(f"{cells.source}: {name}: more than {MAX_VARIANTS} trainings of one seed, as no plan has")
        train = _parsed(cells, f"{name}/config.yaml", files["config.yaml"]).get("train")
        rate = train.get("learning_rate") if isinstance(train, dict) else None
        if isinstance(rate, float):
            cell = score.at(rate, int(given["seed"]), None)
            found += [cell] if cell.folder.name == Path(name).name else []
    return found


def _freeze_to_take(cells: CarriedCells, folder: Path, plan: Comparison) -> str | None:
    """Return the text of freeze.json unless a plan was frozen or scored here; it must belong to this plan."""
    if cells.freeze is None or (folder / FREEZE).exists():
        return None
    content = _parsed(cells, FREEZE, cells.freeze)
    if scored := scored_folders(folder):
        log.warning(
            f"{cells.source}: its freeze.json is left out, as {len(scored)} runs were scored or timed here without it"
        )
        return None
    try:
        # Reports compare the date with the start of runs, which needs a time zone.
        _ = datetime.now(UTC) - datetime.fromisoformat(content["frozen"])
        changed = changed_since(plan, content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{cells.where(FREEZE)}: not what freeze=true writes ({error})") from None
    if changed is not None:
        raise UserError(f"{cells.where(FREEZE)}: {changed}; it is of another plan")
    return cells.freeze


class _Stager:
    """Checks the runs of a file in a staging folder. The plan looks for its runs in `staged`."""

    def __init__(self, cells: CarriedCells, folder: Path, staged: Path) -> None:
        self.cells, self.folder, self.staged = cells, folder, staged
        self.found: set[str] = set()
        """Folders of the file that are the plan's."""
        self.files: dict[str, dict[str, str]] = {}
        """Texts of imported runs, by folder and name."""
        self.num_results = 0

    def stage(self, cell: Job) -> None:
        """Put a run into the staging folder: the finished one of this experiment or, checked, that of the file."""
        if cell.folder.exists():
            return
        name = cell.folder.relative_to(self.staged).as_posix()
        here, files = self.folder / name, self.cells.folders.get(name)
        if files is not None:
            self.found.add(name)
            self._refuse_links(name, files)
        whole = [path.name for job in cell.parts if (path := here / "results" / job.results.name).exists()]
        carried = [job for job in cell.parts if files is not None and f"results/{job.results.name}" in files]
        new = [job for job in carried if job.results.name not in whole]
        if files is not None and carried:
            environments = self._checked(name, files, carried)
            if new:
                # The hash in the folder's name vouches for the plan's own.
                config = cell.config() or {}
                config |= {name: str(self.folder.parent) for name in ("outputs_dir",) if name in config}
                self.files[name] = self._beside(here, environments | {"config.yaml": config_text(config)}) | {
                    f"results/{job.results.name}": files[f"results/{job.results.name}"] for job in new
                }
                self.num_results += len(new)
        (cell.folder / "results").mkdir(parents=True)
        for path in whole:
            (cell.folder / "results" / path).symlink_to((here / "results" / path).resolve())
        for job in new:
            assert files is not None
            job.results.write_text(files[f"results/{job.results.name}"], encoding="utf-8")

    def taken(self, mark: dict[str, str]) -> dict[str, str]:
        """Return the texts to write by path, results with the new mark."""
        return {
            f"{folder}/{name}": _marked(text, mark) if name.endswith(".jsonl") else text
            for folder, files in self.files.items()
            for name, text in files.items()
        }

    def _refuse_links(self, name: str, files: dict[str, str]) -> None:
        for path in (f"{name}/{file}" for file in files):
            parts = path.split("/")
            paths = [self.folder.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
            link = next((path for path in paths if path.is_symlink()), None)
            if link is not None:
                raise UserError(f"{self.cells.where(path)}: {link} is a symbolic link, over which nothing is written")

    def _beside(self, here: Path, files: dict[str, str]) -> dict[str, str]:
        """Return the config and environments that are missing here; a second environment is named by its id."""
        beside = {}
        for name, text in files.items():
            path = here / name
            if (
                name == "environment.json"
                and path.exists()
                and read_bounded_bytes(path, MAX_JSON_BYTES) != text.encode()
            ):
                name = f"environment-{environment_id(parse_json(text))}.json"
            if not (here / name).exists():
                beside[name] = text
        return beside

    def _checked(self, name: str, files: dict[str, str], carried: Sequence[Job]) -> dict[str, str]:
        """Compare the rows of the file with the plan's own run; return the texts of its environments."""
        cells = self.cells
        if "environment.json" not in files:
            raise UserError(f"{cells.source}: {name}: comes without its environment.json")
        texts = {file: text for file, text in files.items() if file.startswith("environment")}
        stamps = {}
        for file in texts:
            stamp = _parsed(cells, f"{name}/{file}", texts[file])
            stamps[environment_id(stamp)] = stamp
            if file not in ("environment.json", f"environment-{environment_id(stamp)}.json"):
                raise UserError(f"{cells.where(f'{name}/{file}')}: has the id {environment_id(stamp)}")
        for job in carried:
            self._check_rows(job, f"{name}/results/{job.results.name}", files, stamps)
        return texts

    def _check_rows(self, job: Job, path: str, files: dict[str, str], stamps: dict[str, dict[str, Any]]) -> None:
        where = self.cells.where(path)
        copy = self.staged.parent / "checked.jsonl"
        copy.write_text(files[f"results/{job.results.name}"], encoding="utf-8")
        try:
            rows = parse_results(copy)
        except UserError as error:
            raise UserError(
                f"{where}: {str(error).replace(f'{copy}:', 'row ').replace(str(copy), 'its rows')}"
            ) from None
        finally:
            copy.unlink()
        if not rows:
            raise UserError(f"{where}: has no rows")
        for number, row in enumerate(rows, start=1):
            try:
                _check_identity(row, job, stamps)
                _check_settings(row, job)
                check_value(row.measurement)
            except ValueError as error:
                raise UserError(f"{where}: row {number}: {error}") from None
        try:
            run = job.run if isinstance(job, EvaluationJob) else job
            is_text = isinstance(run, Run)
            check_together(rows, is_of_characters=is_text and run.corpus.tokenizer.kind == "characters")
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None


def _parsed(cells: CarriedCells, path: str, text: str) -> dict[str, Any]:
    if path in cells.parsed:
        return cells.parsed[path]
    try:
        content = json.loads(json.dumps(parse_yaml(text), default=str)) if path.endswith(".yaml") else parse_json(text)
        if not isinstance(content, dict):
            raise ValueError("no names and values")
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{cells.where(path)}: cannot be read ({str(error).strip().partition(chr(10))[0]})") from None
    cells.parsed[path] = content
    return content


def _without_neutral(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_neutral(item) for name, item in value.items() if not _is_neutral(item)}
    return [_without_neutral(item) for item in value] if isinstance(value, list) else value


def _is_neutral(value: Any) -> bool:
    return value is None or value is False or value in ("none", {}, [])


def _difference(given: Any, wanted: Any, where: str = "") -> str | None:
    found = first_difference(given, wanted, where)
    if found is None:
        return None
    where, *values = found
    given, wanted = ("nothing" if value is MISSING else shown_value(value) for value in values)
    return f"{where}: {given} is given, and the plan's run has {wanted}"


def _check_identity(row: ResultRow, job: Job, stamps: dict[str, dict[str, Any]]) -> None:
    given = row.identity
    stamp = stamps.get(given.environment)
    if stamp is None:
        raise ValueError(f"environment: {given.environment} is the id of none of its environments, {', '.join(stamps)}")
    of_stamp = {name: stamp.get(name) for name in ("device", "commit", "dirty")}
    wanted = {
        **job.columns(),
        **measured_by(of_stamp),
        "environment": given.environment,
        "run": job.folder.name,
        "evaluation": job.evaluation,
        "config_hash": job.config_hash,
    }
    # No number depends on it.
    wanted.pop("num_devices", None)
    for name, value in wanted.items():
        if getattr(given, name) != value:
            raise ValueError(f"{name}: {getattr(given, name)!r} is given, and the plan's run has {value!r}")


def _check_settings(row: ResultRow, job: Job) -> None:
    given = row.measurement.settings
    for name, value in json.loads(json.dumps(job.row_settings())).items():
        if name not in BY_EXECUTION:
            found = _difference(_without_neutral(given.get(name)), _without_neutral(value), f"settings.{name}")
            if found is not None:
                raise ValueError(found)


def check_value(row: Measurement) -> None:
    """Refuse a number that its metric cannot have; the ValueError names the metric."""
    if row.value is None:
        return
    numbers = [number for number in (row.low, row.value, row.high) if number is not None]
    if numbers != sorted(numbers):
        raise ValueError(f"{row.metric}: value {row.value} lies outside of its interval [{row.low}, {row.high}]")
    if is_share(row.metric) and not 0 <= row.value <= 1:
        raise ValueError(f"{row.metric}: value {row.value} is no share, from 0 to 1")
    if row.metric == "solved" and row.value not in (0, 1):
        raise ValueError(f"solved: value {row.value} is neither 0 nor 1")
    # Only a number without a unit, such as a fitted exponent, may be negative.
    if row.unit and row.value < 0:
        raise ValueError(f"{row.metric}: value {row.value} is below 0")
    if row.num_samples is not None and row.num_samples < 1:
        raise ValueError(f"{row.metric}: num_samples={row.num_samples} is below 1")


def is_share(metric: str) -> bool:
    return metric.endswith("accuracy") or metric in ("selection", "solved", "rise_share")


def check_together(rows: Sequence[ResultRow], *, is_of_characters: bool) -> None:
    """Refuse rows of one file that contradict each other; the ValueError names the metric.

    Args:
        is_of_characters: a token is a character, so that perplexity is that of the nats a character.
    """
    by_place: dict[str, dict[str, float | None]] = {}
    for row in rows:
        # Each metric has a chance level of its own.
        place = {name: value for name, value in axes(row.measurement.settings).items() if not is_chance(name)}
        metrics = by_place.setdefault(json.dumps(place, sort_keys=True), {})
        if row.measurement.metric in metrics:
            raise ValueError(f"{row.measurement.metric}: there are two rows of it at one setting")
        metrics[row.measurement.metric] = row.measurement.value
    for metrics in by_place.values():
        nats = metrics.get("nats_per_character")
        for metric in ("bits_per_character", *(["perplexity"] if is_of_characters else [])):
            value = metrics.get(metric)
            if nats is None:
                if value is not None:
                    raise ValueError(f"{metric}: value {value} stands without its nats")
            elif metric in metrics and nats < math.log(MAX_NUMBER):
                wanted = math.exp(nats) if metric == "perplexity" else nats / math.log(2)
                if value is None or not math.isclose(value, wanted, rel_tol=TOLERANCE):
                    raise ValueError(f"{metric}: value {value} is not that of its nats, {wanted}")
    values = {row.measurement.metric: row.measurement.value for row in rows}
    if values.get("solved") == 1 and values.get("steps_to_95", 0) is None:
        raise ValueError("solved: value 1 stands beside a steps_to_95 that was not reached")


def _marked(text: str, mark: dict[str, str]) -> str:
    rows, _, ending = text.rstrip("\n").rpartition("\n")
    content = json.loads(ending)
    return with_ending(f"{rows}\n", content | {IMPORTED: [*content.get(IMPORTED, []), mark]})
