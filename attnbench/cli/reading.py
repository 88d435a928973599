"""From a composed configuration to plain settings: every name, type and value checked before torch is loaded."""

import json
import logging
import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnbench.cli.help import scripts_with
from attnbench.settings.documents import MOST_YAML_BYTES, parse_yaml, read_bounded
from attnbench.settings.errors import UserError, did_you_mean
from attnbench.settings.registry import build, check_options, resolve, trust
from attnbench.settings.schema import (
    BenchSettings,
    ComparisonSettings,
    DataSettings,
    DoctorSettings,
    EvaluationSettings,
    GenerationSettings,
    LoggerSettings,
    MixerSettings,
    ModelSettings,
    PlanSettings,
    RunSettings,
    TrainSettings,
    check,
    check_name,
    check_names,
    check_plan,
    check_run,
    setting_of,
)

log = logging.getLogger(__name__)

TOP_LEVEL = ("seq_len", "seed", "device", "match", "outputs_dir", "rerun")
"""Settings of a training that belong to no group."""

CLOSED_GROUPS = {"model": ModelSettings, "data": DataSettings, "train": TrainSettings, "logger": LoggerSettings}


def read_settings(config: DictConfig, hydra_config: Any) -> RunSettings:
    """Checks a composed configuration and turns it into plain settings.

    Raises:
        UserError: an unknown, deleted, missing or impossible setting, named with its value and what is allowed.
    """
    values = _plain(config, hydra_config)
    choices = hydra_config.runtime.choices
    for group in ("attn", *CLOSED_GROUPS):
        if not isinstance(values.get(group), dict):
            raise UserError(f"{group}={values.get(group)}: must name a yaml of {group}/")
    _give_way(values["train"], hydra_config.overrides.task)
    closed = {group: _closed(cls, group, values.pop(group)) for group, cls in CLOSED_GROUPS.items()}
    evaluations = [_evaluation(name, options) for name, options in (values.pop("eval", None) or {}).items()]
    mixer = MixerSettings(name=choices["attn"], **_open("attn", values.pop("attn")))
    # Before what is made here, which would take the place of one of the same name without a word.
    _refuse_unknown(values, TOP_LEVEL)
    values |= {"experiment": _experiment(hydra_config)}
    values |= {**closed, "mixer": mixer, "evaluations": evaluations, "named_options": _named_options(hydra_config)}
    return _checked(values)


def read_comparison(config: DictConfig, hydra_config: Any) -> ComparisonSettings:
    """Checks the configuration of compare.py; its variants are checked when the plan is carried out.

    Raises:
        UserError: as read_settings.
    """
    values = _plain(config, hydra_config)
    choices = hydra_config.runtime.choices
    if not isinstance(values.get("plan"), dict):
        raise UserError(f"plan={values.get('plan')}: must name a yaml of plan/")
    _refuse_unknown(values, ("device", "outputs_dir", "rerun", "report", "export", "import"), but=("plan", "logger"))
    plan = {"name": Path(choices["plan"]).name, **values.pop("plan")}
    if isinstance(plan.get("variants"), dict):
        # Nothing can be deleted on a command line.
        plan["variants"] = {name: words for name, words in plan["variants"].items() if words is not None}
    values |= {
        "plan": _closed(PlanSettings, "plan", plan),
        "logger": _closed(LoggerSettings, "logger", values["logger"]),
    }
    values |= {"exported": values.pop("export", None), "imported": values.pop("import", None)}
    values["command"] = _typed("compare", hydra_config)
    own = ("outputs_dir", "device", "rerun", "report", "exported", "imported")
    given = {name: values[name] for name in own}
    check_options(ComparisonSettings, given, given=("plan", "logger", "command"), group="")
    settings = ComparisonSettings(**values)
    check_plan(settings.plan)
    if not settings.outputs_dir:
        raise UserError("outputs_dir=: must name a folder; outputs is the usual one")
    return settings


def read_doctor(config: DictConfig, hydra_config: Any) -> DoctorSettings:
    """Checks the configuration of doctor.py.

    Raises:
        UserError: as read_settings.
    """
    values = _plain(config, hydra_config)
    _refuse_unknown(values, [entry.name for entry in fields(DoctorSettings)])
    check_options(DoctorSettings, values, group="")
    return DoctorSettings(**values)


def read_bench(config: DictConfig, hydra_config: Any) -> BenchSettings:
    """Checks the configuration of benchmark.py, the bench's own constructor included.

    Raises:
        UserError: as read_settings.
    """
    values = _plain(config, hydra_config)
    if not isinstance(values.get("bench"), dict):
        raise UserError(f"bench={values.get('bench')}: must name a yaml of bench/")
    own = ("precision", "device", "outputs_dir", "rerun")
    _refuse_unknown(values, own, but=("bench",))
    given = {name: values[name] for name in own}
    check_options(BenchSettings, given, given=("name", "target", "options", "command"), group="")
    settings = BenchSettings(
        name=Path(hydra_config.runtime.choices["bench"]).name,
        **_open("bench", values["bench"]),
        **given,
        command=_typed("benchmark", hydra_config),
    )
    check(settings)
    check_name("bench", settings.name)
    if not settings.outputs_dir:
        raise UserError("outputs_dir=: must name a folder; outputs is the usual one")
    # Imported here: torch takes longer to load than all the checks before this one.
    from attnbench.bench.base import Bench

    cls = resolve(settings.target, Bench)
    check_options(cls, settings.options, group="bench")
    build(settings.target, settings.options, Bench)
    return settings


def read_mixer(config: DictConfig, hydra_config: Any) -> MixerSettings:
    """The mixer of a training's configuration, whether or not it can run here."""
    options = _open("attn", _plain(config, hydra_config)["attn"])
    return MixerSettings(name=hydra_config.runtime.choices["attn"], **options)


def read_evaluation(config: DictConfig, hydra_config: Any) -> tuple[Path, RunSettings]:
    """Checks the configuration of evaluate.py: the folder of a run, and its own settings with what is wanted now.

    Raises:
        UserError: as read_settings; or the folder holds no run.
    """
    values = _plain(config, hydra_config)
    folder = Path(str(values.get("run"))).absolute()
    stored = stored_settings(folder)
    evaluations = [_evaluation(name, options) for name, options in (values.pop("eval", None) or {}).items()]
    now = {"device": values.pop("device"), "rerun": values.pop("rerun")}
    _refuse_unknown(values, ("run", *now))
    others = {entry.name for entry in fields(RunSettings)} - set(now)
    check_options(RunSettings, now, given=others, group="")
    # A run that was moved has its cells beside it, where it lies now.
    place = {"experiment": folder.parent.name, "outputs_dir": str(folder.parent.parent)}
    settings = replace(stored, **now, **place, evaluations=evaluations)
    _check_machine(settings)
    return folder, settings


def read_generation(config: DictConfig, hydra_config: Any) -> tuple[GenerationSettings, RunSettings]:
    """Checks the configuration of generate.py: its own settings, and those of the run, on the device wanted now.

    Raises:
        UserError: as read_settings; two prompts, or the folder holds no run.
    """
    values = _plain(config, hydra_config)
    _refuse_unknown(values, [entry.name for entry in fields(GenerationSettings)])
    check_options(GenerationSettings, values, group="")
    settings = GenerationSettings(**values)
    check(settings)
    if settings.prompt is not None and settings.prompt_file is not None:
        raise UserError(f"prompt={settings.prompt} and prompt_file={settings.prompt_file}: give one of them")
    stored = stored_settings(Path(settings.run).absolute())
    mixer = stored.mixer
    if settings.backend is not None:
        mixer = replace(mixer, options={**mixer.options, "backend": settings.backend})
    trained = replace(stored, device=settings.device, mixer=mixer)
    _check_machine(trained)
    return settings, trained


def stored_settings(folder: Path) -> RunSettings:
    """The settings that a run's config.yaml holds, checked like a command line's.

    Raises:
        UserError: it cannot be read, or is no such file.
    """
    path = folder / "config.yaml"
    try:
        content = parse_yaml(read_bounded(path, MOST_YAML_BYTES))
        # Dates, bytes and sets, which yaml has, and numbers that are not finite are no settings.
        json.dumps(content, allow_nan=False)
        del content["resolved"], content["evaluations"]
        closed = {group: _closed(cls, group, content.pop(group)) for group, cls in CLOSED_GROUPS.items()}
        check_options(RunSettings, content, given=(*closed, "evaluations"), group="")
        check_options(MixerSettings, content["mixer"], group="mixer")
        content["mixer"] = MixerSettings(**content["mixer"])
        settings = RunSettings(**content, **closed, evaluations=[])
        check(settings)
        check_names(settings)
        return settings
    except OSError as error:
        raise UserError(
            f"run={folder}: {path.name} cannot be read ({error.strerror}); give the folder of a run"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise UserError(f"{path}: not the config of a run ({str(error).partition(chr(10))[0]})") from None


def _plain(config: DictConfig, hydra_config: Any) -> dict[str, Any]:
    """The configuration without Hydra's own part, resolved, nothing deleted from it and nothing missing; the classes
    that the command line's --config-dir names may be built from here on."""
    trust(_outside_classes(hydra_config))
    for override in hydra_config.overrides.task:
        if override.startswith("~"):
            raise UserError(f"{override}: a setting cannot be deleted; null or another value turns it off")
    # The hydra node is left out before resolving: some of its values exist only inside a job.
    names = [str(name) for name in config if name != "hydra"]
    values: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, names), resolve=True, throw_on_missing=True)
    return values


def _refuse_unknown(values: dict[str, Any], known: Collection[str], but: Collection[str] = ()) -> None:
    """Refuses a name at the top level that is neither of `known`, which the message lists, nor one of `but`."""
    for name in values:
        if name not in known and name not in but:
            # A group that was added with a plus is a mapping.
            given = name if isinstance(values[name], dict) else f"{name}={values[name]}"
            scripts = " and ".join(scripts_with(name))
            others = f"; {scripts} has it" if scripts else ""
            near = did_you_mean(name, known)
            raise UserError(f"{given}: unknown setting{near}; there is {', '.join(known)}{others}")


def _give_way(train: dict[str, Any], words: Sequence[str]) -> None:
    """Set to null whichever of num_epochs and num_steps only a yaml gives, where the command line gives the other."""
    lengths = ("num_epochs", "num_steps")
    named = [name for name in lengths if any(setting_of(word) == f"train.{name}" for word in words)]
    if len(named) == 1 and train.get(named[0]) is not None:
        train |= {name: None for name in lengths if name not in named}


def _named_options(hydra_config: Any) -> list[str]:
    """Options of the mixer that words of the command line name, or a yaml of experiment/ that one of them chooses."""
    words = [setting_of(word).split(".") for word in hydra_config.overrides.task]
    named = {parts[1] for parts in words if parts[0] == "attn" and len(parts) > 1}
    folders = [Path(source.path, "experiment") for source in hydra_config.runtime.config_sources]
    todo = [str(hydra_config.runtime.choices.get("experiment"))]
    for name in todo:
        for path in (folder / f"{name}.yaml" for folder in folders):
            content = OmegaConf.load(path) if path.is_file() else OmegaConf.create()
            named |= {str(option) for option in OmegaConf.select(content, "attn") or ()}
            # Experiments that this one begins with; what it chooses of other groups is a mapping.
            begun = [own for own in OmegaConf.select(content, "defaults") or () if isinstance(own, str)]
            todo += [own for own in begun if own not in todo]
    return sorted(named)


def _closed(cls: type, group: str, values: dict[str, Any]) -> Any:
    """A dataclass of settings from a yaml of a closed group."""
    check_options(cls, values, group=group)
    # A whole number is a fine float; a file that says 2 and one that says 2.0 are one configuration.
    numbers = {}
    for entry in fields(cls):
        if _is_float(entry, values):
            try:
                numbers[entry.name] = float(values[entry.name])
            except OverflowError:
                raise UserError(f"{group}.{entry.name}={values[entry.name]}: must be finite") from None
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


def _experiment(hydra_config: Any) -> str:
    """The recipe of experiment/ that was chosen or, where none has the name, a study of the user's own.

    Raises:
        UserError: a name so near to a recipe's that it may be meant, or several.
    """
    several = next((word for word in hydra_config.overrides.task if word.startswith("experiment=[")), None)
    if several is not None:
        raise UserError(f"{several}: must be one name, of a recipe or of a study of your own")
    chosen = hydra_config.runtime.choices.get("experiment")
    if chosen is None:
        return "default"
    folders = [source.path for source in hydra_config.runtime.config_sources if source.schema == "file"]
    recipes = [path for folder in folders for path in Path(folder, "experiment").rglob("*.yaml")]
    if any(path == Path(folder, "experiment", f"{chosen}.yaml") for folder in folders for path in recipes):
        return Path(chosen).name
    check_name("experiment", chosen)
    near = did_you_mean(chosen, [path.stem for path in recipes])
    if near:
        raise UserError(f"experiment={chosen}: no recipe has this name{near}; a study of your own needs another name")
    log.info(
        f"experiment={chosen}: no recipe (there is {', '.join(sorted(path.stem for path in recipes))}): it changes no "
        "setting, and names the folder that the runs of this study share"
    )
    return chosen


def _evaluation(name: str, values: Any) -> EvaluationSettings:
    if not isinstance(values, dict):
        raise UserError(f"eval.{name}={values}: unknown setting; eval=[NAME, ...] chooses evaluations")
    return EvaluationSettings(name=name, **_open(f"eval.{name}", values))


def _checked(values: dict[str, Any]) -> RunSettings:
    """What stands at the top level, and what only fits or fails together; torch is imported last."""
    others = {entry.name for entry in fields(RunSettings)} - set(TOP_LEVEL)
    check_options(RunSettings, {name: values[name] for name in TOP_LEVEL if name in values}, given=others, group="")
    settings = RunSettings(**values)
    check(settings)
    check_run(settings)
    _check_machine(settings)
    return settings


def _check_machine(settings: RunSettings) -> None:
    """Refuses a device that is not there, a kernel that cannot run on it, and parts that do not fit together."""
    # Imported here: torch takes longer to load than all the checks before this one.
    from attnbench.evals.base import Evaluation
    from attnbench.machine.device import resolve_device, resolve_precision
    from attnbench.model.language_model import build_meta, resolve_mixer

    device_type = resolve_device(settings.device).type
    precision = resolve_precision(settings.train.precision, device_type)
    mixer = resolve_mixer(settings.mixer, settings.model, device_type=device_type, precision=precision)
    build_meta([mixer] * settings.model.num_layers, settings.model, vocabulary_size=1)
    for evaluation in settings.evaluations:
        cls = resolve(evaluation.target, Evaluation)
        check_options(cls, evaluation.options, group=f"eval.{evaluation.name}")
        # Built once already here: what its constructor refuses should not come to light after hours of training.
        build(evaluation.target, evaluation.options, Evaluation)


def _typed(script: str, hydra_config: Any) -> str:
    """The command line, as a reader would type it again."""
    folders = [f"--config-dir {os.path.relpath(folder)}" for folder in _own_folders(hydra_config)]
    return " ".join([f"python scripts/{script}.py", *folders, *map(shlex.quote, hydra_config.overrides.task)])


def _own_folders(hydra_config: Any) -> list[Path]:
    """The command line's --config-dir, if it has one."""
    sources = hydra_config.runtime.config_sources
    return [Path(source.path) for source in sources if source.provider == "command-line"]


def _outside_classes(hydra_config: Any) -> frozenset[str]:
    """The classes that yamls under the command line's --config-dir name."""
    found = set()
    for folder in _own_folders(hydra_config):
        for group in ("attn", "eval", "bench"):
            for path in folder.glob(f"{group}/*.yaml"):
                target = OmegaConf.select(OmegaConf.load(path), "_target_")
                found |= {target} if isinstance(target, str) else set()
    return frozenset(found)
