"""Plain settings from a composed configuration: every name, type and value checked before torch is loaded."""

import json
import logging
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from attnbench.cli.help import scripts_with
from attnbench.settings.check import (
    LENGTHS,
    check,
    check_launcher,
    check_name,
    check_names,
    check_outputs_dir,
    check_plan,
    check_run,
    check_value,
    read,
    setting_of,
)
from attnbench.settings.earlier import current_mixer
from attnbench.settings.errors import UserError, did_you_mean
from attnbench.settings.factorial import expand
from attnbench.settings.hybrid import each, is_hybrid, layers_of, parts_of, with_parts
from attnbench.settings.registry import MODULE, build, class_named, trust
from attnbench.settings.schema import (
    LOOKS,
    BenchSettings,
    ComparisonSettings,
    DoctorSettings,
    EvaluationSettings,
    ExportSettings,
    GenerationSettings,
    MixerSettings,
    RunSettings,
)
from attnbench.settings.text import MAX_YAML_BYTES, parse_yaml, read_bounded

log = logging.getLogger(__name__)

Settings = TypeVar("Settings")


def read_settings(config: DictConfig, hydra_config: Any) -> RunSettings:
    """Check a composed configuration and turn it into plain settings.

    Raises:
        UserError: an unknown, deleted, missing or impossible setting, named with its value and what is allowed.
    """
    values = plain(config, hydra_config)
    _give_way(values.get("train"), hydra_config.overrides.task)
    values["recipe"] = _recipe(values.get("recipe"), hydra_config)
    settings = _read(
        RunSettings,
        values,
        mixer=_mixer(values, hydra_config),
        evaluations=_evaluations(values),
        experiment=_experiment(hydra_config),
        named_options=_named_options(hydra_config),
    )
    check_run(settings)
    settings = _with_recipe(settings)
    _check_machine(settings)
    return settings


def read_comparison(config: DictConfig, hydra_config: Any) -> ComparisonSettings:
    """Check the configuration of compare.py; its variants are checked when the plan is carried out.

    Raises:
        UserError: as read_settings.
    """
    values = plain(config, hydra_config)
    plan = values.get("plan")
    if isinstance(plan, dict):
        # Nothing can be deleted on a command line.
        kept = {
            name: {key: words for key, words in plan[name].items() if words is not None}
            for name in ("variants", "factors")
            if isinstance(plan.get(name), dict)
        }
        recipe = plan.pop("recipe", None)
        if recipe is not None and not isinstance(recipe, str):
            raise UserError(f"plan.recipe={recipe}: must be the name of a recipe, or null")
        if recipe is not None and isinstance(plan.get("overrides"), list):
            # First, so that the recipe that a variant names is the one that counts.
            plan["overrides"] = [f"recipe={recipe}", *plan["overrides"]]
        values["plan"] = {"name": Path(hydra_config.runtime.choices["plan"]).name, **plan, **kept}
        if plan.get("seeds") == "auto":
            values["plan"] |= _seeds_of_looks(hydra_config)
        if plan.get("stack") == "auto":
            values["plan"]["stack"] = None
    files = {"exported": values.pop("export", None), "imported": values.pop("import", None)}
    settings = _read(ComparisonSettings, values, **files, command=typed("compare", hydra_config))
    plan = settings.plan
    if plan.factors:
        check_value("plan.variants", plan.variants, distinct=True)
        settings.plan = replace(plan, variants=expand(plan.variants, plan.factors, plan.fraction))
        check(settings.plan, "plan.")
    check_plan(settings.plan)
    if settings.freeze and (settings.exported is not None or settings.plan.dry_run):
        other = "plan.dry_run=true" if settings.plan.dry_run else f"export={settings.exported}"
        raise UserError(f"freeze=true with {other}: do one after the other")
    check_launcher(settings)
    check_outputs_dir(settings.outputs_dir)
    return settings


def _seeds_of_looks(hydra_config: Any) -> dict[str, Any]:
    """Return the settings that plan.seeds=auto stands for."""
    words = [word for word in hydra_config.overrides.task if setting_of(word) == "plan.probe_seeds"]
    if words:
        raise UserError(f"{words[0]} with plan.seeds=auto: auto gives the seeds of probes too")
    seeds = list(range(max(LOOKS)))
    return {"seeds": seeds, "probe_seeds": seeds, "in_looks": True}


def read_doctor(config: DictConfig, hydra_config: Any) -> DoctorSettings:
    """Check the configuration of doctor.py.

    Raises:
        UserError: as read_settings.
    """
    return _read(DoctorSettings, plain(config, hydra_config))


def read_bench(config: DictConfig, hydra_config: Any) -> BenchSettings:
    """Check the configuration of benchmark.py and the bench's constructor.

    Raises:
        UserError: as read_settings.
    """
    values = plain(config, hydra_config)
    target = _open("bench", values.pop("bench", None))
    name = Path(hydra_config.runtime.choices["bench"]).name
    settings = _read(BenchSettings, values, name=name, **target, command=typed("benchmark", hydra_config))
    check_name("bench", settings.name)
    check_outputs_dir(settings.outputs_dir)
    # Imported here: torch takes longer to load than all the checks before this one.
    from attnbench.bench.base import Bench

    build(settings.target, settings.options, Bench, group="bench")
    return settings


def read_mixer(config: DictConfig, hydra_config: Any) -> MixerSettings:
    """Read the mixer of a training's configuration, whether or not it can run here."""
    return _mixer(plain(config, hydra_config), hydra_config)


def read_evaluation(config: DictConfig, hydra_config: Any) -> tuple[Path, RunSettings]:
    """Check the configuration of evaluate.py; return the run's folder and settings, with what is wanted now.

    Raises:
        UserError: as read_settings; or the folder holds no run.
    """
    values = plain(config, hydra_config)
    _trust_path(values)
    folder = Path(str(values.pop("run", None))).absolute()
    stored = stored_settings(folder)
    now = ("device", "rerun")
    kept = {entry.name: getattr(stored, entry.name) for entry in fields(stored) if entry.name not in now}
    # A run that was moved has its cells beside it, where it lies now.
    kept |= {"experiment": folder.parent.name, "outputs_dir": str(folder.parent.parent)}
    settings = _read(RunSettings, values, **{**kept, "evaluations": _evaluations(values)})
    _check_machine(settings)
    return folder, settings


def read_generation(config: DictConfig, hydra_config: Any) -> tuple[GenerationSettings, RunSettings]:
    """Check the configuration of generate.py; return its settings, and those of the run, on the device wanted now.

    Raises:
        UserError: as read_settings; two prompts, or the folder holds no run.
    """
    values = plain(config, hydra_config)
    _trust_path(values)
    settings = _read(GenerationSettings, values)
    if settings.prompt is not None and settings.prompt_file is not None:
        raise UserError(f"prompt={settings.prompt} and prompt_file={settings.prompt_file}: give one of them")
    stored = stored_settings(Path(settings.run).absolute())
    mixer = stored.mixer
    if settings.backend is not None:
        backend = {"backend": settings.backend}
        mixer = each(mixer, lambda part, _: replace(part, options={**part.options, **backend}))
    trained = replace(stored, device=settings.device, mixer=mixer)
    _check_machine(trained)
    return settings, trained


def read_export(config: DictConfig, hydra_config: Any) -> tuple[ExportSettings, RunSettings]:
    """Check the configuration of export.py; return its settings, and those of the run.

    Raises:
        UserError: as read_settings; or the folder holds no run.
    """
    settings = _read(ExportSettings, {**plain(config, hydra_config), "command": typed("export", hydra_config)})
    return settings, stored_settings(Path(settings.run).absolute())


def stored_settings(folder: Path) -> RunSettings:
    """Read the settings in a run's config.yaml, checked like a command line's.

    Raises:
        UserError: it cannot be read, or is no such file.
    """
    path = folder / "config.yaml"
    try:
        content = parse_yaml(read_bounded(path, MAX_YAML_BYTES))
        # Dates, bytes and sets, which yaml has, and numbers that are not finite are no settings.
        json.dumps(content, allow_nan=False)
        del content["resolved"], content["evaluations"]
        settings = read(RunSettings, content, given={"evaluations": []})
        settings.mixer = current_mixer(settings.mixer)
        check_names(settings)
        return settings
    except OSError as error:
        raise UserError(
            f"run={folder}: {path.name} cannot be read ({error.strerror}); give the folder of a run"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise UserError(f"{path}: not the config of a run ({str(error).partition(chr(10))[0]})") from None


def plain(config: DictConfig, hydra_config: Any) -> dict[str, Any]:
    """Return the configuration without Hydra's part, resolved, with nothing deleted or missing.

    The classes that the command line's --config-dir names may be built from here on.
    """
    for override in hydra_config.overrides.task:
        if override.startswith("~"):
            raise UserError(f"{override}: a setting cannot be deleted; null or another value turns it off")
    trust(_outside_classes(hydra_config))
    # The hydra node is left out before resolving: some of its values exist only inside a job.
    names = [str(name) for name in config if name != "hydra"]
    values: Any = OmegaConf.to_container(OmegaConf.masked_copy(config, names), resolve=True, throw_on_missing=True)
    return values


def _trust_path(values: dict[str, Any]) -> None:
    """Trust the class that attn.path names again, for a run that was trained with it."""
    given = values.pop("attn", None)
    if not isinstance(given, dict):
        raise UserError(f"attn={given}: unknown setting; train.py has it: python scripts/train.py attn={given}")
    others = [name for name in given if name != "path"]
    if others:
        raise UserError(f"attn.{others[0]}: unknown setting; a run keeps its mixer, and attn.path alone is given again")
    path = given.get("path")
    check_value("attn.path", path, kind=str)
    trust([path] if path is not None else [])


def _read(cls: type[Settings], values: Mapping[str, Any], **given: Any) -> Settings:
    """Call `read`; the message about an unknown setting names the scripts that have it."""

    def hint(name: str) -> str:
        scripts = scripts_with(name)
        return f"; {' and '.join(scripts)} has it" if scripts else ""

    return read(cls, values, given=given, hint=hint)


def _give_way(train: Any, words: Sequence[str]) -> None:
    """Set to null whichever of LENGTHS only a yaml gives, where the command line gives another."""
    named = [name for name in LENGTHS if any(setting_of(word) == f"train.{name}" for word in words)]
    if isinstance(train, dict) and any(train.get(name) is not None for name in named):
        train |= {name: None for name in LENGTHS if name not in named}


def _named_options(hydra_config: Any) -> list[str]:
    """Return the mixer's options that the command line names, or the yaml of experiment/ that it chooses."""
    words = [setting_of(word).split(".", 1) for word in hydra_config.overrides.task]
    named = {parts[1] for parts in words if parts[0] == "attn" and len(parts) > 1}
    folders = [Path(source.path, "experiment") for source in hydra_config.runtime.config_sources]
    todo = [str(hydra_config.runtime.choices.get("experiment"))]
    for name in todo:
        for path in (folder / f"{name}.yaml" for folder in folders):
            content = OmegaConf.load(path) if path.is_file() else OmegaConf.create()
            chosen = OmegaConf.select(content, "attn") or {}
            named |= set(_dotted(OmegaConf.to_container(chosen) if OmegaConf.is_dict(chosen) else {}))
            # Experiments that this one begins with; a choice in another group is a mapping.
            begun = [entry for entry in OmegaConf.select(content, "defaults") or () if isinstance(entry, str)]
            todo += [entry for entry in begun if entry not in todo]
    return sorted(named)


def _dotted(options: Any) -> Iterator[str]:
    """Yield the names of a mixer's options, those of a hybrid's mixers as options.NAME.OPTION."""
    for name, value in options.items():
        if name == "options" and isinstance(value, dict):
            yield from (f"{name}.{part}.{option}" for part, given in value.items() for option in given or ())
        else:
            yield str(name)


def _recipe(values: Any, hydra_config: Any) -> dict[str, Any] | None:
    """Return the chosen yaml of recipe/ with its name."""
    for word in hydra_config.overrides.task:
        if setting_of(word).startswith("recipe."):
            raise UserError(
                f"{word}: a recipe stands as its yaml has it; attn.NAME=VALUE names an option of the mixer, which wins"
            )
    chosen = hydra_config.runtime.choices.get("recipe")
    return None if chosen is None or values is None else {"name": Path(chosen).name, **values}


def _with_recipe(settings: RunSettings) -> RunSettings:
    """Give the mixer the parts of its recipe, as if the command line had named them, where it names others."""
    if settings.recipe is None:
        return settings
    # Imported here: torch takes longer to load than all the checks before this one.
    from attnbench.mixers.recipe import recipe_options

    recipe, named = settings.recipe, set(settings.named_options)

    def equip(mixer: MixerSettings, prefix: str) -> MixerSettings:
        given = recipe_options(mixer, recipe)
        options = {name: value for name, value in given.items() if prefix + name not in settings.named_options}
        named.update(prefix + name for name in options)
        return replace(mixer, options={**mixer.options, **options})

    return replace(settings, mixer=each(settings.mixer, equip), named_options=sorted(named))


def _mixer(values: dict[str, Any], hydra_config: Any) -> MixerSettings:
    chosen = _open("attn", values.pop("attn", None))
    mixer = MixerSettings(name=hydra_config.runtime.choices.get("attn"), **chosen)
    mixer = with_parts(mixer, _yaml_of) if is_hybrid(mixer) else mixer
    # Named here and now, by the command line or a yaml that it chooses.
    trust(class_named(part) for part in parts_of(mixer).values() if part.target == MODULE)
    return mixer


def _yaml_of(name: str) -> dict[str, Any]:
    # Imported here: it reads through this file.
    from attnbench.cli.compose import yaml_of_mixer

    return yaml_of_mixer(name)


def _evaluations(values: dict[str, Any]) -> list[EvaluationSettings]:
    chosen = values.pop("eval", None) or {}
    for name, options in chosen.items():
        if not isinstance(options, dict):
            raise UserError(f"eval.{name}={options}: unknown setting; eval=[NAME, ...] chooses evaluations")
    return [EvaluationSettings(name=name, **_open(f"eval.{name}", options)) for name, options in chosen.items()]


def _open(group: str, values: Any) -> dict[str, Any]:
    """Split a `_target_` yaml of an open group into target and options."""
    if not isinstance(values, dict):
        raise UserError(f"{group}={values}: must name a yaml of {group}/")
    options = dict(values)
    target = options.pop("_target_", None)
    if not isinstance(target, str):
        raise UserError(f"{group}: its yaml names no class under _target_")
    return {"target": target, "options": options}


def _experiment(hydra_config: Any) -> str:
    """Return the yaml of experiment/ that was chosen or, where none has the name, a study of the user's.

    Raises:
        UserError: a name so near to a yaml's that it may be meant, or several.
    """
    several = next((word for word in hydra_config.overrides.task if word.startswith("experiment=[")), None)
    if several is not None:
        raise UserError(f"{several}: must be one name, of a yaml of experiment/ or of a study of your own")
    chosen = hydra_config.runtime.choices.get("experiment")
    if chosen is None:
        return "default"
    folders = [source.path for source in hydra_config.runtime.config_sources if source.schema == "file"]
    yamls = [path for folder in folders for path in Path(folder, "experiment").rglob("*.yaml")]
    if any(path == Path(folder, "experiment", f"{chosen}.yaml") for folder in folders for path in yamls):
        return Path(chosen).name
    check_name("experiment", chosen)
    near = did_you_mean(chosen, [path.stem for path in yamls])
    if near:
        raise UserError(
            f"experiment={chosen}: no yaml of experiment/ has this name{near}; a study of your own needs another name"
        )
    log.info(
        f"experiment={chosen}: no yaml of experiment/ (there is {', '.join(sorted(path.stem for path in yamls))}): it "
        "changes no setting, and names the folder that the runs of this study share"
    )
    return chosen


def _check_machine(settings: RunSettings) -> None:
    """Refuse a device that is not there, a kernel that cannot run on it, and parts that do not fit together."""
    # Imported here: torch takes longer to load than all the checks before this one.
    from attnbench.evals.base import Evaluation
    from attnbench.machine.device import resolve_device
    from attnbench.machine.precision import resolve_precision
    from attnbench.model.language_model import build_meta, resolve_mixer

    device_type = resolve_device(settings.device).type
    precision = resolve_precision(settings.train.precision, device_type)
    mixer = resolve_mixer(settings.mixer, settings.model, device_type=device_type, precision=precision)
    build_meta(layers_of(mixer, settings.model.num_layers), settings.model, vocabulary_size=1)
    for evaluation in settings.evaluations:
        # Built once already here: an error of its constructor should not come to light after hours of training.
        build(evaluation.target, evaluation.options, Evaluation, group=f"eval.{evaluation.name}")


def typed(script: str, hydra_config: Any) -> str:
    """Return the command line as a reader would type it again."""
    folders = [f"--config-dir {os.path.relpath(folder)}" for folder in _config_dirs(hydra_config)]
    return " ".join([f"python scripts/{script}.py", *folders, *map(shlex.quote, hydra_config.overrides.task)])


def _config_dirs(hydra_config: Any) -> list[Path]:
    """Return the command line's --config-dir, if it has one."""
    sources = hydra_config.runtime.config_sources
    return [Path(source.path) for source in sources if source.provider == "command-line"]


def _outside_classes(hydra_config: Any) -> Iterator[str]:
    """Yield the classes that yamls under the command line's --config-dir name."""
    paths = [path for folder in _config_dirs(hydra_config) for path in folder.glob("*/*.yaml")]
    for path in (path for path in paths if path.parent.name in ("attn", "eval", "bench")):
        target = OmegaConf.select(OmegaConf.load(path), "_target_")
        if isinstance(target, str):
            yield target
