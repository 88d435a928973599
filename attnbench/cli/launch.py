"""Entry point of every command with a configuration: one job or a sweep, mistakes as one line."""

import gc
import logging
import os
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from attnbench.cli.compose import composed, keep_environment_out, own_conf, parse_once, prepared_words, uncollected
from attnbench.cli.help import help_text
from attnbench.cli.mistakes import EXPECTED, explain
from attnbench.cli.plain import without_hydra
from attnbench.cli.reading import read_settings
from attnbench.cli.sweeps import JobOutcome, SweepOutcomes, readable
from attnbench.machine.bars import AboveTheBar, wrapped
from attnbench.machine.ranks import ALONE, ranks_here, silent
from attnbench.machine.signals import interruptible, lasting_streams
from attnbench.results.row_files import begin_sitting
from attnbench.settings.errors import Interrupted, UserError, mendable
from attnbench.settings.escape import OneLine, printable
from attnbench.settings.schema import CONF

log = logging.getLogger(__name__)

FULL_ERROR = "HYDRA_FULL_ERROR"
"""Environment variable with which Hydra raises errors, and users see tracebacks."""

INTERRUPTED = "interrupted; the same command resumes from what is finished"
"""Message after a signal outside training, which handles signals itself."""

RANK_0_SECONDS = 10.0
"""Delay of a failing rank that prints nothing, so that rank 0 prints the error first."""

RERUN = "--experimental-rerun"
"""Hydra's option that unpickles a file, which can run any code."""


def launch(
    main: Callable[..., Path] | str,
    config_name: str,
    summarise: Callable[[Mapping[Path, Sequence[str]]], None] | None = None,
    read: Callable[[DictConfig, Any], Any] = read_settings,
    *,
    more: Sequence[Any] = (),
    together: bool = False,
) -> None:
    """Run a command: compose its settings and call `main` for each job.

    Args:
        main: does one job and returns the folder of its results. Its dotted name imports it after the settings are
            checked: torch takes longer to load than settings to check.
        summarise: called at the end with the folders of all jobs and the overrides of each.
        read: makes the argument of `main` from the composed configuration; a tuple is several arguments.
        more: further arguments of `main`.
        together: several processes of torchrun may call `main`; only rank 0 prints.

    Raises:
        SystemExit: 1 after an error, 128 plus its number after a signal.
    """
    done_here: list[JobOutcome] = []
    show_traceback = os.environ.get(FULL_ERROR) == "1"

    # In another process `done_here` is a copy, and only the returned value counts.
    @hydra.main(config_path=str(CONF), config_name=config_name, version_base="1.3")
    def job(config: DictConfig) -> JobOutcome:
        with lasting_streams():
            _begin_process()
            parse_once()
            words = readable(HydraConfig.get().overrides.task)
            try:
                with interruptible(INTERRUPTED):
                    wanted = read(config, HydraConfig.get())
                    arguments = wanted if isinstance(wanted, tuple) else (wanted,)
                    act = _imported(main) if isinstance(main, str) else main
                    folder = act(*arguments, *more)
                    outcome = JobOutcome(words=words, folder=str(folder))
            except Exception as error:
                print(wrapped(f"error: {explain(error)}"), file=sys.stderr, flush=True)
                if show_traceback or not (mendable(error) or isinstance(error, EXPECTED)):
                    traceback.print_exc()
                outcome = JobOutcome(words=words, folder=None, error=explain(error))
            done_here.append(outcome)
            return outcome

    exit_code, ranks = 0, ALONE
    with lasting_streams(), ExitStack() as stack:
        _begin_process()
        begin_sitting()
        try:
            ranks = ranks_here()
            if ranks.follows:
                stack.enter_context(silent())
                summarise = None
            with interruptible(INTERRUPTED), _errors_of_hydra_raised():
                if not (together or ranks == ALONE):
                    raise UserError(
                        f"torchrun: attnbench {config_name} runs in one process; attnbench train alone trains one "
                        "model on several GPUs, and plan.devices=all of attnbench compare gives each GPU a share of "
                        "the runs"
                    )
                _refuse_rerun(sys.argv[1:])
                given, sys.argv[1:] = _options_first(prepared_words(sys.argv[1:]))
                # Last, so that no file there hides a library.
                sys.path.append(os.getcwd())
                if given.config_dir is None:
                    given.config_dir = _add_own_conf()
                if given.help and given.config_path is None:
                    name = given.config_name or config_name
                    config = composed(name, given.overrides, given.config_dir)
                    # Unresolved: some values must still be given.
                    values: Any = OmegaConf.to_container(without_hydra(config))
                    print(help_text(name, values, config.hydra))
                else:
                    job()
        except Interrupted as interruption:
            # Over the ^C that a terminal shows.
            end = "\x1b[K\n" if sys.stderr.isatty() else "\n"
            print(wrapped(printable(str(interruption))), end=end, file=sys.stderr)
            exit_code = interruption.exit_code
        except Exception as error:
            # Jobs raise nothing: an error of the command line, or of a job whose process died.
            if show_traceback:
                raise
            print(wrapped(f"error: {explain(error, sys.argv[1:])}"), file=sys.stderr)
            exit_code = 1
        failed = _report(done_here, summarise if exit_code < 128 else None, show_traceback)
        exit_code = exit_code or failed
        if exit_code == 1 and ranks.follows:
            # All ranks have most errors, and torchrun ends the others after the first.
            time.sleep(RANK_0_SECONDS)
    if exit_code:
        raise SystemExit(exit_code)


def _imported(name: str) -> Callable[..., Path]:
    module, _, function = name.rpartition(".")
    with uncollected():
        found = getattr(import_module(module), function)
        # What is loaded stays; a collection, which comes as soon as it is allowed, would go through all of it.
        gc.freeze()
    return found


def _report(
    done_here: list[JobOutcome],
    summarise: Callable[[Mapping[Path, Sequence[str]]], None] | None,
    show_traceback: bool,
) -> int:
    """List failed jobs and summarise the others; return 1 if any failed, otherwise 0."""
    done_elsewhere = SweepOutcomes.read()
    outcomes = done_here or done_elsewhere
    failures = [printable(f"  {outcome.job}: {outcome.error}") for outcome in outcomes if outcome.folder is None]
    if failures and (len(outcomes) > 1 or not done_here):
        print(f"{len(failures)} of {len(outcomes)} jobs failed:", *failures, sep="\n", file=sys.stderr)
    folders = {Path(outcome.folder): outcome.words for outcome in outcomes if outcome.folder is not None}
    if folders and summarise is not None:
        # Also after errors, for the jobs that succeeded.
        try:
            summarise(folders)
        except Exception as error:
            text = mendable(error)
            if text is None or show_traceback:
                raise
            print(wrapped(f"error: {text}"), file=sys.stderr)
            return 1
    return 1 if failures else 0


@contextmanager
def _errors_of_hydra_raised() -> Iterator[None]:
    """Make Hydra raise its errors inside instead of printing several lines and exiting."""
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        del os.environ[FULL_ERROR]
        if before is not None:
            os.environ[FULL_ERROR] = before


def _options_first(words: Sequence[str]) -> tuple[Namespace, list[str]]:

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message}; NAME=VALUE gives a setting, and --help lists settings")

    parser = get_args_parser()
    parser.error = refuse
    given = parser.parse_intermixed_args(words)
    options = list(words)
    for word in given.overrides:
        options.remove(word)
    return given, [*options, *given.overrides]


def _add_own_conf() -> str | None:
    own = own_conf()
    if own is None:
        return None
    log.info("conf/ of this folder: its options join attnbench's own")
    sys.argv[1:1] = ["--config-dir", str(own)]
    return str(own)


def _refuse_rerun(words: Sequence[str]) -> None:
    for word in words:
        name = word.partition("=")[0]
        # argparse accepts unambiguous beginnings.
        if len(name) > 2 and RERUN.startswith(name):
            raise UserError(f"{word}: {RERUN} runs whatever its file holds; the same command resumes a run")


def _begin_process() -> None:
    """Print attnbench's log lines on standard error (standard output is for results); refuse environment variables."""
    keep_environment_out()
    logger = logging.getLogger("attnbench")
    if any(isinstance(handler, AboveTheBar) for handler in logger.handlers):
        return
    handler = AboveTheBar()
    handler.setFormatter(OneLine("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
