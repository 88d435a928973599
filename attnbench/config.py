"""Hydra's side: from a command line to `RunSettings`, and from every mistake to one line that names the setting."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from attnbench.errors import Interrupted, UserError
from attnbench.registry import build, check_options, resolve
from attnbench.settings import (
    DataSettings,
    EvaluationSettings,
    LoggerSettings,
    MixerSettings,
    ModelSettings,
    RunSettings,
    TrainSettings,
    check,
    check_run,
)

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
EXPECTED = (UserError, HydraException, OmegaConfBaseException)
CLOSED_GROUPS = {"model": ModelSettings, "data": DataSettings, "train": TrainSettings, "logger": LoggerSettings}


def launch(
    main: Callable[[RunSettings], Path], config_name: str, summarise: Callable[[Sequence[Path]], None] | None = None
) -> None:
    """Runs a script: composes its settings, calls `main` once a job, and exits with 0 only if every job did well.

    Args:
        main: does one job and returns the folder it left its results in.
        summarise: called at the end with the folders of all jobs that this process ran.
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
            folders.append(main(read_settings(config, HydraConfig.get())))
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

    Raises:
        UserError: what the command line would have printed.
    """
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            config = hydra.compose(config_name, list(overrides), return_hydra_config=True)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise UserError(explain(error, overrides)) from error
        try:
            return read_settings(config, config.hydra)
        except OmegaConfBaseException as error:
            raise UserError(explain(error, overrides)) from error


def read_settings(config: DictConfig, hydra_config: Any) -> RunSettings:
    """Checks a composed configuration and turns it into plain settings.

    Raises:
        UserError: an unknown, deleted, missing or impossible setting, named with its value and what is allowed.
    """
    for override in hydra_config.overrides.task:
        if override.startswith("~"):
            raise UserError(f"{override}: a setting cannot be deleted; null or another value turns it off")
    # The hydra node is left out before resolving: some of its values exist only inside a job.
    names = [str(name) for name in config if name != "hydra"]
    values: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, names), resolve=True, throw_on_missing=True)
    choices = hydra_config.runtime.choices
    for group in ("attn", *CLOSED_GROUPS):
        if not isinstance(values.get(group), dict):
            raise UserError(f"{group}={values.get(group)}: must name a yaml of {group}/")
    closed = {group: _closed(cls, group, values.pop(group)) for group, cls in CLOSED_GROUPS.items()}
    evaluations = [_evaluation(name, options) for name, options in (values.pop("eval", None) or {}).items()]
    mixer = MixerSettings(name=choices["attn"], **_open("attn", values.pop("attn")))
    values |= {"experiment": Path(choices.get("experiment") or "default").name, "trusted": _trusted(hydra_config)}
    values |= {**closed, "mixer": mixer, "evaluations": evaluations}
    return _checked(values)


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


def _closed(cls: type, group: str, values: dict[str, Any]) -> Any:
    """A dataclass of settings from a yaml of a closed group."""
    check_options(cls, values, group=group)
    # A whole number is a fine float; a file that says 2 and one that says 2.0 are one configuration.
    numbers = {entry.name: float(values[entry.name]) for entry in fields(cls) if _is_float(entry, values)}
    settings = cls(**{**values, **numbers})
    check(settings, f"{group}.")
    return settings


def _is_float(entry: Any, values: dict[str, Any]) -> bool:
    return entry.type is float and entry.name in values


def _open(group: str, values: dict[str, Any]) -> dict[str, Any]:
    """Target and options from a `_target_` yaml of an open group."""
    if not isinstance(values.get("_target_"), str):
        raise UserError(f"{group}: its yaml names no class under _target_")
    return {"target": values["_target_"], "options": {key: value for key, value in values.items() if key != "_target_"}}


def _evaluation(name: str, values: Any) -> EvaluationSettings:
    if not isinstance(values, dict):
        raise UserError(f"eval.{name}={values}: unknown setting; eval=[NAME, ...] chooses evaluations")
    return EvaluationSettings(name=name, **_open(f"eval.{name}", values))


def _checked(values: dict[str, Any]) -> RunSettings:
    """What stands at the top level, and what only fits or fails together; torch is imported last."""
    top_level = ("seq_len", "seed", "device", "match", "outputs_dir", "rerun")
    known = {entry.name for entry in fields(RunSettings)}
    for name, value in values.items():
        if name not in known:
            raise UserError(f"{name}={value}: unknown setting; at the top level there is {', '.join(top_level)}")
    given = {name: values[name] for name in top_level if name in values}
    check_options(RunSettings, given, given=known - set(top_level), group="")
    settings = RunSettings(**values)
    check(settings)
    check_run(settings)
    _check_machine(settings)
    return settings


def _check_machine(settings: RunSettings) -> None:
    """Refuses a device that is not there, a kernel that cannot run on it, and parts that do not fit together."""
    # Imported here: torch takes longer to load than all the checks before this one.
    from attnbench.evals.base import Evaluation
    from attnbench.model import build_meta, resolve_mixer
    from attnbench.runtime import resolve_device, resolve_precision

    device_type = resolve_device(settings.device).type
    precision = resolve_precision(settings.train.precision, device_type)
    mixer = resolve_mixer(
        settings.mixer, settings.model, device_type=device_type, precision=precision, trusted=settings.trusted
    )
    build_meta([mixer] * settings.model.num_layers, settings.model, vocabulary_size=1, trusted=settings.trusted)
    for evaluation in settings.evaluations:
        cls = resolve(evaluation.target, Evaluation, settings.trusted)
        check_options(cls, evaluation.options, group=f"eval.{evaluation.name}")
        # Built once already here: what its constructor refuses should not come to light after hours of training.
        build(evaluation.target, evaluation.options, Evaluation, settings.trusted)


def _trusted(hydra_config: Any) -> frozenset[str]:
    """The classes that yamls under the command line's --config-dir name."""
    found = set()
    for source in hydra_config.runtime.config_sources:
        if source.provider != "command-line":
            continue
        for group in ("attn", "eval"):
            for path in Path(source.path).glob(f"{group}/*.yaml"):
                target = OmegaConf.select(OmegaConf.load(path), "_target_")
                found |= {target} if isinstance(target, str) else set()
    return frozenset(found)
