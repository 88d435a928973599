"""Hydra's side: from a command line to `RunSettings`, and from every mistake to one line that names the setting."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from attnbench.errors import Interrupted, UserError
from attnbench.reading import read_settings
from attnbench.settings import RunSettings

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
EXPECTED = (UserError, HydraException, OmegaConfBaseException)


def launch(
    main: Callable[[Any], Path],
    config_name: str,
    summarise: Callable[[Sequence[Path]], None] | None = None,
    read: Callable[[DictConfig, Any], Any] = read_settings,
) -> None:
    """Runs a script: composes its settings, calls `main` once a job, and exits with 0 only if every job did well.

    Args:
        main: does one job and returns the folder it left its results in.
        summarise: called at the end with the folders of all jobs that this process ran.
        read: makes of the composed configuration what `main` takes.
    """
    _show_log()
    failures: list[str] = []
    folders: list[Path] = []
    started: list[str] = []
    # Without this Hydra prints tracebacks, or eight lines, and ends the process itself.
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"

    @hydra.main(config_path=str(CONF), config_name=config_name, version_base="1.3")
    def job(config: DictConfig) -> None:
        started.append(" ".join(HydraConfig.get().overrides.task) or "the run")
        try:
            folders.append(main(read(config, HydraConfig.get())))
        except Exception as error:
            # Whatever ended it, a job says so at once and the sweep's other jobs still run.
            failures.append(f"{started[-1]}: {explain(error)}")
            print(f"error: {explain(error)}", file=sys.stderr, flush=True)
            if HydraConfig.get().mode == RunMode.RUN and isinstance(error, EXPECTED) and not show_traceback:
                # Hydra would add a line of its own; in a sweep this would end the other jobs.
                raise SystemExit(1) from None
            raise

    try:
        job()
    except Interrupted as interruption:
        print(interruption, file=sys.stderr)
        raise SystemExit(interruption.exit_code) from None
    except KeyboardInterrupt:
        # Outside training, which handles it itself, there is nothing to save.
        print("interrupted; the same command goes on from what is finished", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        # What Hydra raises before the first job is about the command line, whatever its type.
        if show_traceback or (started and not isinstance(error, EXPECTED)):
            raise
        if not started:
            print(f"error: {explain(error, sys.argv[1:])}", file=sys.stderr)
            raise SystemExit(2) from None
    finally:
        if failures and len(started) > 1:
            print(f"{len(failures)} of {len(started)} jobs failed:", file=sys.stderr)
            print("\n".join(f"  {failure}" for failure in failures), file=sys.stderr)
    if folders and summarise is not None:
        summarise(folders)
    if failures:
        raise SystemExit(1)


class _AboveTheBar(logging.Handler):
    """Writes lines to standard error without breaking a progress bar that is being drawn there."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def _show_log() -> None:
    """attnbench's own lines go to standard error, bare; standard output is for results."""
    handler = _AboveTheBar()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("attnbench")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def compose(overrides: Sequence[str] = (), config_name: str = "train") -> RunSettings:
    """The settings that a command line with these overrides would give, checked in the same way.

    Inside a job it finds what the job's own command line found, a --config-dir too.

    Raises:
        UserError: what the command line would have printed.
    """
    in_job = GlobalHydra.instance().is_initialized()
    with nullcontext() if in_job else hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            config = hydra.compose(config_name, list(overrides), return_hydra_config=True)
            return read_settings(config, config.hydra)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise UserError(explain(error, overrides)) from error


def explain(error: BaseException, overrides: Sequence[str] = ()) -> str:
    """One line for a mistake, whoever found it: which setting, which value, and what is allowed.

    Args:
        overrides: those of the command line, where the error may not know what value was given.
    """
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        return f"{group}={name}: unknown; there is {', '.join(sorted(error.options))}"
    cause = error.__cause__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, OmegaConfBaseException):
        known = ", ".join(key for key in map(str, cause.parent_node or ()) if key not in ("_target_", "hydra"))
        given = next((word for word in overrides if word.split("=")[0] == cause.full_key), cause.full_key)
        return f"{given}: unknown setting; there is {known}" if known else _first_line(cause)
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    setting = getattr(error, "full_key", None)
    line = lines[0] if lines else type(error).__name__
    return f"{setting}: {line}" if setting and setting not in line else line
