"""Run a plan: searches and scored runs several at a time, then timed runs alone; write one record and one report.
Finished runs are not run again, so that an interrupted comparison resumes."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path

from attnbench.comparison.dry_run import list_jobs
from attnbench.comparison.freeze import check_frozen, freeze, unbooked_seeds
from attnbench.comparison.imports import import_for
from attnbench.comparison.live import LiveReport
from attnbench.comparison.looks import look_again
from attnbench.comparison.plan import Comparison
from attnbench.comparison.program import Answer, Driver, Stack, ask_for
from attnbench.comparison.progress import Progress, kind_of, say_why_again, stages
from attnbench.comparison.record import former_record, write_record
from attnbench.comparison.search import Found
from attnbench.comparison.slurm.run import StillRunning, run_on_slurm
from attnbench.comparison.slurm.task import different_host
from attnbench.comparison.stacks import compiled, in_stacks, sizes
from attnbench.comparison.transfer import export_cells
from attnbench.comparison.variants import Compose
from attnbench.comparison.workers import gpus_and_workers, run_here
from attnbench.machine.device import resolve_device
from attnbench.machine.processes import IdleWorkers, Outcome
from attnbench.machine.signals import interruptible
from attnbench.report.inputs import read_inputs
from attnbench.report.terminal import print_comparison
from attnbench.results.folder import holding
from attnbench.results.job import Job
from attnbench.results.row_files import begin_sitting
from attnbench.settings.errors import UserError
from attnbench.settings.schema import ComparisonSettings
from attnbench.training.wandb import beside, choose_mode

log = logging.getLogger(__name__)

OWN_LAYER = "plan.variants.mine=[attn=module,attn.path=my_layer:MyLayer]"
"""Override that adds a user's layer to a plan."""


def compare(settings: ComparisonSettings, compose: Compose, *, prints: bool = True) -> Path:
    """Carry out a plan and write comparison.json and report/, mirrored to wandb; return the experiment's folder. Failed
    runs are an error after the others ran and the report was written.

    Args:
        compose: from the words of an attnbench train command line to its settings.
        prints: print the table of scores and the next commands.
    """
    folder = Path(settings.outputs_dir) / settings.plan.name
    is_only_read = settings.imported is None and (settings.exported is not None or settings.plan.dry_run)
    is_only_read &= not settings.freeze
    with nullcontext() if is_only_read else holding(folder, waits=False):
        if settings.imported is not None:
            import_for(settings, compose, Path(settings.imported))
        if settings.exported is not None:
            log.info(f"{export_cells(folder, Path(settings.exported))} results written to {settings.exported}")
            return folder
        try:
            return _carry_out(settings, compose, folder, prints=prints)
        except StillRunning as status:
            log.info(str(status))
            return folder


def _carry_out(settings: ComparisonSettings, compose: Compose, folder: Path, *, prints: bool) -> Path:
    comparison = Comparison(settings, compose)
    if settings.freeze:
        path = freeze(comparison)
        log.info(f"frozen: {path}; commit it before the first run is scored, then run the same without freeze=true")
        if unbooked := unbooked_seeds(comparison):
            log.warning(
                f"plan.seeds: {unbooked[0]} is not among the seeds that docs/results/SEEDS books for plan="
                f"{settings.plan.name}, and no table of it is published with others"
            )
        return folder
    is_frozen = check_frozen(comparison)
    # An impossible mode is refused before hours of work.
    mode = "none" if settings.plan.dry_run else choose_mode(settings.logger)[0]
    files = run_plan(comparison, is_frozen=is_frozen)
    if settings.plan.dry_run:
        if comparison.failures:
            raise UserError(f"{len(comparison.failures)} cannot run, named above; the others are listed")
        return folder
    if not files:
        raise UserError(f"{folder}: no run has results; {len(comparison.failures)} failed")
    _show(comparison, is_frozen=is_frozen, mirrored=mode != "none", prints=prints)
    if comparison.failures:
        label, reason = next(iter(comparison.failures.items()))
        raise UserError(
            f"{len(comparison.failures)} failed, listed in comparison.json; the same command tries them again; the "
            f"first: {label}: {reason}"
        )
    return folder


def run_plan(comparison: Comparison, *, is_frozen: bool) -> list[Path]:
    """Make the runs that are not done, write comparison.json, and return the results of all that are done."""
    settings, folder = comparison.settings, comparison.folder
    # A clock can be set, so the duration is not read off it.
    started, mark, former = datetime.now(UTC), time.monotonic(), former_record(comparison)
    begin_sitting()
    comparison.settle()
    searched, timed = (comparison.wanted(jobs) for jobs in (comparison.searched, comparison.timed))
    number = Counter(map(kind_of, [*searched, *timed, *comparison.to_score()]))
    listed = ", ".join(f"{count} {name}" for name, count in stages(number).items())
    frozen = "Pre-registered." if is_frozen else "Not pre-registered; freeze=true does that."
    log.info(f"plan={settings.plan.name}: {number.total()} runs ({listed}), in {folder}/. {frozen}")
    if settings.plan.dry_run:
        list_jobs(comparison, searched, timed)
        return []
    if settings.launcher == "local":
        log.info(f"{_at_a_time(settings)[0]} at a time, timed runs alone; their output: {folder}/output.log")
    progress = Progress(number, settings.plan.costs, tells_now=settings.launcher == "local")
    answers: dict[Path, Answer] = {path: it for path, it in comparison.answers.items() if isinstance(it, list)}
    driver = Driver(
        answers=answers if not settings.rerun else {},
        rerun=settings.rerun,
        may_run=lambda job: comparison.is_wanted(job.evaluation),
        stacks=partial(in_stacks, size_of=sizes(settings.plan.stack, resolve_device(settings.device), folder)),
    )
    counted, found, is_over = {job.folder for job in (*searched, *timed)}, Found(), False

    def record() -> bool:
        """Write comparison.json, but keep the old one until something has been scored."""
        comparison.settle(driver.answers)
        if not is_over and not comparison.results_of(comparison.shown()):
            return False
        write_record(comparison, started, time.monotonic() - mark, former)
        return True

    live = LiveReport(folder, record, is_wanted=settings.report)

    def on_asked(asked: list[Job], finished: list[Job]) -> None:
        # Scored runs are counted from the beginning, until a look adds seeds.
        if not comparison.num_seeds:
            counted.update(job.folder for jobs in found.scored.values() for job in jobs)
        progress.add([job for job in comparison.wanted(asked) if job.folder not in counted])
        progress.skip([*comparison.wanted(finished), *(it for it in timed if asked and it.folder in driver.answers)])
        # What is timed runs alone.
        if not is_over:
            live.write()

    driver.on_asked = on_asked
    with (
        interruptible(f"stopped, what is finished is in {folder}; the same command resumes"),
        closing(progress),
        IdleWorkers() as idle,
    ):
        try:
            execute = partial(_execute, comparison, progress, idle, num_timed=len(timed))
            goes_on = comparison.carry_out(driver, found, execute)
            while goes_on and settings.plan.in_looks and look_again(comparison, driver):
                driver.run(comparison.programs(found), execute)
            is_over = True
            live.write_last()
            driver.run([ask_for(comparison.timed if goes_on else [])], partial(execute, is_timed=True))
        finally:
            # Also after an interruption, so that there is a report.
            comparison.failures |= driver.failures
            for score in comparison.scores if is_over else ():
                if score.name in found.undecided and comparison.is_wanted(score.evaluation):
                    comparison.fail(score.name, str(found.undecided[score.name]))
            record()
            live.end()
    return comparison.results_of(comparison.shown())


def _execute(
    comparison: Comparison,
    progress: Progress,
    idle: IdleWorkers,
    stacks: list[Stack],
    more: Callable[[], list[Stack]],
    *,
    is_timed: bool = False,
    num_timed: int = 0,
) -> Generator[Outcome[Stack], None, None]:
    """Run stacks on this host or the cluster, and report each outcome.

    Args:
        more: called after each outcome on this host; a cluster gets its stacks as the next array job.
        num_timed: runs left for the timed call.
    """
    settings = comparison.settings
    _compile(settings, stacks)
    todo = list(chain(*stacks))
    if is_timed:
        say_why_again(todo)
        idle.end()
    number = len(todo) if is_timed else max(progress.left.total() - num_timed, len(todo))
    progress.begin(todo, max(1, min(_at_a_time(settings)[is_timed], number)))

    def more_here() -> list[Stack]:
        stacks = more()
        _compile(settings, stacks)
        progress.extend(list(chain(*stacks)))
        return stacks

    if settings.launcher == "slurm":
        outcomes = run_on_slurm(settings, stacks, comparison.folder, is_timed=is_timed)
    else:
        # Timings from two hosts cannot share a table.
        if is_timed and (reason := different_host(comparison.folder / ".slurm", anew=settings.rerun)):
            raise UserError(reason)
        output = comparison.folder / "output.log"
        outcomes = run_here(settings, stacks, is_timed=is_timed, log=output, number=number, idle=idle, more=more_here)
    with closing(outcomes):
        for outcome in outcomes:
            for job in outcome.item:
                seconds = outcome.seconds / len(outcome.item)
                progress.report(Outcome(item=job, seconds=seconds, error=outcome.error))
            yield outcome


def _compile(settings: ComparisonSettings, stacks: list[Stack]) -> None:
    if settings.plan.stack is None:
        compiled(list(chain(*stacks)), _num_devices(settings))


def _at_a_time(settings: ComparisonSettings) -> tuple[int, int]:
    """Count the runs that are made at a time: untimed, timed."""
    num_devices = _num_devices(settings)
    return num_devices * settings.plan.num_workers, 1 if settings.launcher == "slurm" else num_devices


def _num_devices(settings: ComparisonSettings) -> int:
    """A task of a cluster counts as one."""
    return settings.slurm.tasks if settings.launcher == "slurm" else max(1, len(gpus_and_workers(settings)[0]))


def _show(comparison: Comparison, *, is_frozen: bool, mirrored: bool, prints: bool) -> None:
    settings, folder, plan = comparison.settings, comparison.folder, comparison.plan
    inputs = read_inputs(folder)
    if prints:
        print_comparison(inputs)
    page = None
    if settings.report:
        from attnbench.report.page import write_report

        page = write_report(folder, inputs=inputs)
        log.info(f"report, for a browser: {page}")
    # A frozen plan takes no other variant; a factorial names its parts for each.
    if prints and not is_frozen and not plan.factors and "mine" not in plan.variants:
        log.info(
            "your layer (class MyLayer in my_layer.py of this folder) beside these; nothing else runs again; "
            "plan.recipe=bare besides takes the parts away that they have and it has not:"
        )
        log.info(f'  {settings.command} "{OWN_LAYER}"')
    if mirrored:
        from attnbench.report.workspace import show_comparison

        root, shown = beside(settings.outputs_dir), page and page.parent
        show_comparison(folder, settings.logger, root=root, report=shown, inputs=inputs)
