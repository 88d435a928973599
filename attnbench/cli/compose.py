"""Hydra's side: from a command line to `RunSettings`, and from every mistake to one line that names the setting."""

import fcntl
import json
import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import hydra
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from tqdm import tqdm

from attnbench.cli.help import list_groups, list_settings, scripts_with
from attnbench.cli.reading import read_mixer, read_settings
from attnbench.machine.signals import interruptible
from attnbench.machine.streams import lasting_streams
from attnbench.results.files import replace_file
from attnbench.settings.errors import Interrupted, UserError, did_you_mean, mendable
from attnbench.settings.escaping import OneLine, printable
from attnbench.settings.schema import CONF, MixerSettings, RunSettings, setting_of

SUBMITIT = ("submitit_local", "submitit_slurm")
MOST_WORD_CHARACTERS = 2**14
"""Hydra's parser takes a second for each hundred thousand."""

FULL_ERROR = "HYDRA_FULL_ERROR"
"""The environment's variable that has Hydra raise its errors, and a user see tracebacks."""

INTERRUPTED = "interrupted; the same command goes on from what is finished"
"""Outside training, which handles signals itself, there is nothing to save."""

EXPECTED = (HydraException, OmegaConfBaseException)
"""Errors that are the user's to mend beside those of `mendable`."""

RERUN = "--experimental-rerun"
"""Hydra's own option, which unpickles the file that it names: whoever wrote the file then runs what they like."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Outcome:
    """What became of one job."""

    job: str
    """The overrides that tell it from the sweep's others."""
    folder: str | None
    error: str = ""
    """One line, where there is no folder."""


@lasting_streams()
def launch(
    main: Callable[[Any], Path],
    config_name: str,
    summarise: Callable[[Sequence[Path]], None] | None = None,
    read: Callable[[DictConfig, Any], Any] = read_settings,
) -> None:
    """Runs a script: composes its settings, calls `main` once a job, and exits with 0 only if every job did well.

    Args:
        main: does one job and returns the folder it left its results in.
        summarise: called at the end with the folders of all jobs, in whatever process they ran.
        read: makes of the composed configuration what `main` takes.
    """
    _show_log()
    _keep_environment_out()
    _explain_settings(config_name)
    own: list[Outcome] = []
    show_traceback = os.environ.get(FULL_ERROR) == "1"

    # May be sent to another process, and then `own` is a copy there: what it returns is what counts.
    @hydra.main(config_path=str(CONF), config_name=config_name, version_base="1.3")
    def job(config: DictConfig) -> Outcome:
        own.append(_do_job(main, read, config, show_traceback))
        return own[-1]

    exit_code = 0
    try:
        with interruptible(INTERRUPTED), _errors_of_hydra_raised():
            _refuse_rerun(sys.argv[1:])
            job()
    except Interrupted as interruption:
        print(printable(str(interruption)), file=sys.stderr)
        exit_code = interruption.exit_code
    except Exception as error:
        # Jobs raise nothing: this is about the command line, or about a job whose process died.
        if show_traceback:
            raise
        print(f"error: {explain(error, sys.argv[1:])}", file=sys.stderr)
        exit_code = 2
    elsewhere = SweepOutcomes.read()
    outcomes = own or elsewhere
    failures = [printable(f"  {outcome.job}: {outcome.error}") for outcome in outcomes if outcome.folder is None]
    if failures and (len(outcomes) > 1 or not own):
        print(f"{len(failures)} of {len(outcomes)} jobs failed:", *failures, sep="\n", file=sys.stderr)
    folders = [Path(outcome.folder) for outcome in outcomes if outcome.folder is not None]
    if folders and summarise is not None and exit_code in (0, 2):
        try:
            summarise(folders)
        except Exception as error:
            text = mendable(error)
            if text is None or show_traceback:
                raise
            print(f"error: {text}", file=sys.stderr)
            exit_code = exit_code or 2
    if failures or exit_code:
        raise SystemExit(exit_code or 1)


@contextmanager
def _errors_of_hydra_raised() -> Iterator[None]:
    """Inside, Hydra raises what went wrong; otherwise it prints tracebacks, or eight lines, and ends the process."""
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        del os.environ[FULL_ERROR]
        if before is not None:
            os.environ[FULL_ERROR] = before


def _refuse_rerun(words: Sequence[str]) -> None:
    for word in words:
        name = word.partition("=")[0]
        # Hydra's parser takes any beginning of the name that no other option shares.
        if len(name) > 2 and RERUN.startswith(name):
            raise UserError(f"{word}: {RERUN} runs whatever its file holds; the same command goes on with a run")


@lasting_streams()
def _do_job(main: Callable[[Any], Path], read: Callable[..., Any], config: DictConfig, show_traceback: bool) -> Outcome:
    """Whatever ends it, a job says so at once and the sweep's other jobs still run."""
    _show_log()
    _keep_environment_out()
    name = " ".join(HydraConfig.get().overrides.task) or "the run"
    try:
        with interruptible(INTERRUPTED):
            return Outcome(job=name, folder=str(main(read(config, HydraConfig.get()))))
    except Exception as error:
        print(f"error: {explain(error)}", file=sys.stderr, flush=True)
        if show_traceback or not (mendable(error) or isinstance(error, EXPECTED)):
            traceback.print_exc()
        return Outcome(job=name, folder=None, error=explain(error))


class SweepOutcomes(Callback):
    """Keeps on disk what became of a sweep's jobs, which may run in other processes and on other machines.

    Hydra tells nobody what they returned. Named in the configuration, as Hydra asks of its callbacks.
    """

    VARIABLE = "ATTNBENCH_SWEEP"
    """Where in this process's environment the folder of the sweep stands, which Hydra composes and keeps to itself."""

    def __init__(self) -> None:
        self.folder: str | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Makes the folder, on the disk that the outputs are on; refuses a device that nobody chose."""
        words, launcher = config.hydra.overrides.task, config.hydra.runtime.choices["hydra/launcher"]
        is_chosen = config.device != "auto" or any(word.startswith("device=") for word in words)
        if launcher in SUBMITIT and (not is_chosen or "device=auto" in words):
            # No exception: Hydra turns those of callbacks into warnings.
            print(
                f"error: device=auto: with hydra/launcher={launcher} name it, device=cpu or device=cuda: jobs see only "
                "the GPUs that hydra.launcher.gpus_per_node asks for, and none without it",
                file=sys.stderr,
            )
            raise SystemExit(2)
        folder = Path(config.hydra.sweep.dir).resolve()
        with suppress(OSError):
            # Where nothing can be written, the sweep itself says so.
            folder.mkdir(parents=True, exist_ok=True)
            with _held(folder):
                _remove_abandoned(folder)
                self.folder = os.environ[self.VARIABLE] = mkdtemp(prefix=".sweep-", dir=folder)
                # For as long as this process lives, so that no other sweep takes the folder for one left behind.
                _try_to_hold(os.open(self.folder, os.O_RDONLY))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Writes a job's outcome, in the process that ran it."""
        if self.folder is not None:
            path = Path(self.folder) / f"{config.hydra.job.num:06}.json"
            replace_file(path, json.dumps(asdict(job_return.return_value)))

    @classmethod
    def read(cls) -> list[Outcome]:
        """What became of the jobs of this process's sweep, in their order; removes the folder."""
        folder = os.environ.pop(cls.VARIABLE, None)
        if folder is None:
            return []
        found = [
            Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(Path(folder).glob("*.json"))
        ]
        shutil.rmtree(folder)
        return found


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """No other sweep looks for abandoned folders, or makes its own, inside; where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Removes what sweeps that were killed have left."""
    for path in folder.glob(".sweep-????????"):
        descriptor = os.open(path, os.O_RDONLY)
        if _try_to_hold(descriptor):
            shutil.rmtree(path)
        os.close(descriptor)


def _try_to_hold(descriptor: int) -> bool:
    """Hold the file, until this process closes it or ends; False where another one does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def compose_mixers(names: Sequence[str] | None) -> list[MixerSettings]:
    """Mixers as their yamls of attn/ have them, those of a --config-dir too; inside a job.

    Args:
        names: of yamls; None for all there are.
    """
    if names is None:
        names = sorted(GlobalHydra.instance().config_loader().get_group_options("attn"))
    configs = [hydra.compose("train", [f"attn={name}"], return_hydra_config=True) for name in names]
    return [read_mixer(config, config.hydra) for config in configs]


class _AboveTheBar(logging.Handler):
    """Writes lines to standard error without breaking a progress bar that is being drawn there."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def _keep_environment_out() -> None:
    """A configuration is written into the run's folder and to wandb: keys in the environment must not get there."""

    def refuse(*words: str) -> None:
        raise UserError("a configuration may not read environment variables, which hold keys")

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)


def _explain_settings(config_name: str) -> None:
    """Define ${help:groups} and ${help:settings}, which the yamls' help templates name."""

    def explained(what: str, *, _root_: DictConfig) -> str:
        choices, sources = _root_.hydra.runtime.choices, _root_.hydra.runtime.config_sources
        folders = [Path(source.path) for source in sources if source.schema == "file"]
        if what == "groups":
            text = list_groups(config_name, folders)
        else:
            shown = OmegaConf.masked_copy(_root_, [str(name) for name in _root_ if name != "hydra"])
            values: Any = OmegaConf.to_container(shown)
            text = list_settings(values, choices, config_name, folders)
        # Hydra fills in names behind a dollar sign.
        return text.replace("$", "$$")

    OmegaConf.register_new_resolver("help", explained, replace=True)


def _show_log() -> None:
    """attnbench's own lines go to standard error, bare; standard output is for results."""
    logger = logging.getLogger("attnbench")
    if any(isinstance(handler, _AboveTheBar) for handler in logger.handlers):
        return
    handler = _AboveTheBar()
    handler.setFormatter(OneLine("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def compose(
    overrides: Sequence[str] = (), config_name: str = "train", *, config_dir: Path | str | None = None
) -> RunSettings:
    """The settings that a command line with these overrides would give, checked in the same way.

    Inside a job it finds what the job's own command line found, a --config-dir too.

    Args:
        config_dir: the command line's --config-dir, a folder with yamls of your own; the classes that they name are
            then trusted.

    Raises:
        UserError: what the command line would have printed.
    """
    for word in overrides:
        if re.match(r"[+~]*(@[^=]*)?(=|$)", word):
            raise UserError(f"{word}: names no setting; NAME=VALUE does")
        if len(word) > MOST_WORD_CHARACTERS:
            raise UserError(f"{word}: longer than the {MOST_WORD_CHARACTERS} characters of a word; put it into a yaml")
    _keep_environment_out()
    in_job = GlobalHydra.instance().is_initialized()
    if in_job and config_dir is not None:
        raise UserError(f"config_dir={config_dir}: inside a job the command line's --config-dir is what counts")
    with nullcontext() if in_job else hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        if config_dir is not None:
            _search_first(Path(config_dir).expanduser())
        try:
            config = hydra.compose(config_name, list(overrides), return_hydra_config=True)
            return read_settings(config, config.hydra)
        except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
            raise UserError(explain(error, overrides)) from error


def _search_first(folder: Path) -> None:
    """Has Hydra look for yamls in this folder before conf/, as it does for a command line with --config-dir."""
    if not folder.is_dir():
        raise UserError(f"config_dir={folder}: there is no such folder")
    loader: Any = GlobalHydra.instance().config_loader()
    path = loader.get_search_path()
    path.prepend("command-line", f"file://{folder.resolve()}", SearchPathQuery(provider="schema"))
    loader.repository.initialize_sources(path)


def explain(error: BaseException, overrides: Sequence[str] = ()) -> str:
    """One line for a mistake, whoever found it: which setting, which value, and what is allowed.

    Args:
        overrides: those of the command line, where the error may not know what value was given.
    """
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}: must be given"
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if group == "hydra/launcher" and name in SUBMITIT:
            return f"{group}={name}: not installed; pip install 'hydra-submitit-launcher==1.2.0'"
        if name and not group:
            known = sorted(path.stem for path in CONF.glob("*.yaml"))
            return (
                f"--config-name {name}: unknown in the folder that was searched; attnbench's own has {', '.join(known)}"
            )
        known = sorted(error.options or _options(group, str(error)))
        return f"{group}={name}: unknown{did_you_mean(name, known)}; there is {', '.join(known)}"
    text = mendable(error)
    if text is not None:
        return text
    if type(error).__module__.startswith("submitit."):
        # Its second line says what is the matter; jobs that it had not come to yet know nothing of it.
        return f"{' '.join(str(error).splitlines()[:2])}; its log lies there, and jobs that still run go on"
    unread = _unread(error, overrides)
    if unread is not None:
        return unread
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return (
            f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: no yaml ({getattr(error, 'problem', error)})"
        )
    cause = error.__cause__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, OmegaConfBaseException):
        known = [key for key in map(str, cause.parent_node or ()) if key not in ("_target_", "hydra")]
        key = str(cause.full_key)
        given = next((word for word in overrides if f"{setting_of(word)}.".startswith(f"{key}.")), key)
        if known:
            near, others = did_you_mean(key.rpartition(".")[2], known), "" if "." in key else _elsewhere(given)
            return f"{given}: unknown setting{near}; there is {', '.join(known)}{others}"
        return _first_line(cause)
    group = re.match(r"Could not override '([^'@]+)", str(error))
    if isinstance(error, ConfigCompositionException) and group:
        given = next((word for word in overrides if setting_of(word) == group[1]), group[1])
        return f"{given}: unknown setting{_elsewhere(given)}"
    return _first_line(error)


def _elsewhere(word: str) -> str:
    """The scripts that take this word of a command line, where it is not the one that was called."""
    scripts = scripts_with(setting_of(word).partition(".")[0])
    return f"; {' and '.join(scripts)} has it: python scripts/{scripts[0]} {word}" if scripts else ""


def _unread(error: BaseException, overrides: Sequence[str]) -> str | None:
    """One line for a word that Hydra's grammar has no value for, or of which it would make a sweep."""
    line = _first_line(error)
    if isinstance(error, OverrideParseException):
        word, reason = error.override, "Hydra's grammar has no such value"
    elif line.startswith("Ambiguous value for argument"):
        word, reason = next((word for word in overrides if word in line), line), "commas make several values of it"
    else:
        return None
    if word.startswith("prompt="):
        way_out = "such a prompt goes to standard input, or into a file that prompt_file= names"
    else:
        way_out = "quotes inside of quotes keep a value whole, -m makes a sweep of several"
    return f"{printable(word)}: {reason}; {way_out}"


def _options(group: str, message: str) -> set[str]:
    """The yamls of a group in the folders that Hydra says it searched: it names none where a list was given."""
    folders = re.findall(r"path=file://(.+)", message)
    return {path.stem for folder in folders for path in Path(folder).glob(f"{group}/*.yaml")}


def _first_line(error: BaseException) -> str:
    lines = [printable(line.strip()) for line in str(error).splitlines() if line.strip()]
    setting = getattr(error, "full_key", None)
    line = lines[0] if lines else type(error).__name__
    return f"{setting}: {line}" if setting and setting not in line else line
