"""Settings from composed configurations: names, types and values checked before torch is loaded."""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attnbench.cli.mistakes import PROMPT_AS_IT_IS
from attnbench.cli.mixer import mixer_of, named_options, recipe_of, with_recipe
from attnbench.cli.plain import opened, plain, read_plain, typed
from attnbench.settings.check import check, check_name, check_outputs_dir, check_value, read, setting_of
from attnbench.settings.combinations import LENGTHS, check_launcher, check_names, check_plan, check_run
from attnbench.settings.corners import expand
from attnbench.settings.earlier import current_mixer
from attnbench.settings.errors import UserError, did_you_mean
from attnbench.settings.hybrid import each, layers_of
from attnbench.settings.registry import build, trust
from attnbench.settings.schema import (
    CONF,
    LOOKS,
    BenchSettings,
    ComparisonSettings,
    DoctorSettings,
    EvaluationSettings,
    ExportSettings,
    GenerationSettings,
    PlanSettings,
    RunSettings,
)
from attnbench.settings.untrusted import MAX_YAML_BYTES, parse_yaml, read_bounded

log = logging.getLogger(__name__)


def read_settings(config: DictConfig, hydra_config: Any) -> RunSettings:
    values = plain(config, hydra_config)
    _give_way(values.get("train"), hydra_config.overrides.task)
    values["recipe"] = recipe_of(values.get("recipe"), hydra_config)
    settings = read_plain(
        RunSettings,
        values,
        mixer=mixer_of(values, hydra_config),
        evaluations=_evaluations(values, hydra_config.overrides.task),
        experiment=_experiment(hydra_config),
        named_options=named_options(hydra_config),
    )
    check_run(settings)
    settings = with_recipe(settings)
    _check_machine(settings)
    return settings


def read_comparison(config: DictConfig, hydra_config: Any) -> ComparisonSettings:
    """The command lines of the variants are not checked."""
    values, plan = plain(config, hydra_config), {}
    if isinstance(values.get("plan"), dict):
        name = Path(hydra_config.runtime.choices["plan"]).name
        plan = {"plan": read_plan(name, values.pop("plan"), hydra_config)}
    files = {"exported": values.pop("export", None), "imported": values.pop("import", None)}
    settings = read_plain(ComparisonSettings, values, **plan, **files, command=typed("compare", hydra_config))
    if settings.freeze and (settings.exported is not None or settings.plan.dry_run):
        other = "plan.dry_run=true" if settings.plan.dry_run else f"export={settings.exported}"
        raise UserError(f"freeze=true with {other}: do one after the other")
    check_launcher(settings)
    check_outputs_dir(settings.outputs_dir)
    return settings


def read_plan(name: str, plan: dict[str, Any], hydra_config: Any) -> PlanSettings:
    """The command lines of the variants are not checked."""
    words = hydra_config.overrides.task
    for word in words:
        if re.fullmatch(r"\++plan\.(variants|factors)\.[^=]*=(null)?", word):
            raise UserError(f"{word}: adds nothing; {word.lstrip('+')} takes one out")
    # A command line sets to null what it removes.
    kept = {
        name: {key: words for key, words in plan[name].items() if words is not None}
        for name in ("variants", "factors")
        if isinstance(plan.get(name), dict)
    }
    recipe = plan.pop("recipe", None)
    if recipe is not None and not isinstance(recipe, str):
        raise UserError(f"plan.recipe={recipe}: must be the name of a recipe, or null")
    if recipe is not None and isinstance(plan.get("overrides"), list):
        check_value("plan.overrides", plan["overrides"], kind=list[str])
        # First, as of several words the last counts.
        plan["overrides"] = [f"recipe={recipe}", *plan["overrides"]]
    folders = [Path(source.path) for source in hydra_config.runtime.config_sources if source.schema == "file"]
    listed = {name: _without_lists(plan[name], folders) for name in ("evaluations", "only", "tested") if name in plan}
    values = {"name": name, **plan, **kept, **listed}
    if plan.get("seeds") == "auto":
        if given := [word for word in words if setting_of(word) == "plan.probe_seeds"]:
            raise UserError(f"{given[0]} with plan.seeds=auto: auto gives the seeds of probes too")
        seeds = list(range(max(LOOKS)))
        values |= {"seeds": seeds, "probe_seeds": seeds, "in_looks": True}
    if plan.get("stack") == "auto":
        values["stack"] = None
    settings = read(PlanSettings, values, "plan")
    if settings.factors:
        check_value("plan.variants", settings.variants, distinct=True)
        settings = replace(settings, variants=expand(settings.variants, settings.factors, settings.fraction))
        check(settings, "plan.")
    check_plan(settings)
    return settings


def read_doctor(config: DictConfig, hydra_config: Any) -> DoctorSettings:
    return read_plain(DoctorSettings, plain(config, hydra_config))


def read_bench(config: DictConfig, hydra_config: Any) -> BenchSettings:
    """Check also the bench's constructor."""
    values = plain(config, hydra_config)
    name = Path(hydra_config.runtime.choices["bench"]).name
    target = opened("bench", name, values.pop("bench", None))
    settings = read_plain(BenchSettings, values, name=name, **target, command=typed("bench", hydra_config))
    check_name("bench", settings.name)
    check_outputs_dir(settings.outputs_dir)
    # Loading torch takes longer than the checks before.
    from attnbench.bench.base import Bench

    build(settings.target, settings.options, Bench, group="bench")
    return settings


def read_evaluation(config: DictConfig, hydra_config: Any) -> tuple[Path, RunSettings]:
    """Return the run's folder, and its settings with the new ones."""
    values = plain(config, hydra_config)
    _trust_path(values)
    folder = Path(str(values.pop("run", None))).absolute()
    stored = stored_settings(folder)
    now = ("device", "rerun")
    kept = {entry.name: getattr(stored, entry.name) for entry in fields(stored) if entry.name not in now}
    # A run that was moved keeps its cells beside it.
    kept |= {"experiment": folder.parent.name, "outputs_dir": str(folder.parent.parent)}
    data = values.pop("data", None)
    if not isinstance(data, dict) or set(data) != {"path"}:
        raise UserError("data: a run keeps its text; data.path alone says where it lies now")
    check_value("data.path", data["path"], kind=str)
    kept["data"] = replace(stored.data, path=data["path"] or _path_of_text(stored, folder))
    evaluations = _evaluations(values, hydra_config.overrides.task)
    settings = read_plain(RunSettings, values, **{**kept, "evaluations": evaluations})
    _check_machine(settings)
    return folder, settings


def read_generation(config: DictConfig, hydra_config: Any) -> tuple[GenerationSettings, RunSettings]:
    """Return the command's settings, and the run's with the new device."""
    _check_prompt(config)
    values = plain(config, hydra_config)
    _trust_path(values)
    settings = read_plain(GenerationSettings, values)
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


def _check_prompt(config: DictConfig) -> None:
    if OmegaConf.is_interpolation(config, "prompt"):
        raise UserError(
            f"prompt: has ${{...}}, which names a setting whose value would take its place; {PROMPT_AS_IT_IS}"
        )
    prompt = config.prompt
    if isinstance(prompt, bool | int | float):
        way_out = f"quotes inside of quotes make one, 'prompt=\"{prompt}\"'"
        raise UserError(f"prompt={prompt}: must be a text or null; {way_out}")


def read_export(config: DictConfig, hydra_config: Any) -> tuple[ExportSettings, RunSettings]:
    settings = read_plain(ExportSettings, {**plain(config, hydra_config), "command": typed("export", hydra_config)})
    return settings, stored_settings(Path(settings.run).absolute())


def stored_settings(folder: Path) -> RunSettings:
    """Read the settings in a run's config.yaml, checked like a command line's."""
    path = folder / "config.yaml"
    try:
        content = parse_yaml(read_bounded(path, MAX_YAML_BYTES))
        # Refuses dates, bytes, sets and numbers that are not finite.
        json.dumps(content, allow_nan=False)
        if not isinstance(content, dict) or not {"resolved", "evaluations"} <= content.keys():
            raise UserError("it is empty or cut off, or of something else")
        del content["resolved"], content["evaluations"]
        # A setting of earlier versions.
        if content.get("match_by") == "feed_forward":
            del content["match_by"]
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


def _path_of_text(stored: RunSettings, folder: Path) -> str | None:
    """Return the data.path of a run; a relative one starts where the run was trained, if that is known."""
    outputs, path = Path(stored.outputs_dir).parts, stored.data.path
    trained_in = folder.parent.parent
    if path is not None and trained_in.parts[-len(outputs) :] == outputs:
        there = Path(*trained_in.parts[: -len(outputs)], path)
        return str(there) if there.exists() else path
    return path


def _trust_path(values: dict[str, Any]) -> None:
    """Trust the class of attn.path, given again for a run that was trained with it."""
    given = values.pop("attn", None)
    if not isinstance(given, dict):
        raise UserError(f"attn={given}: unknown setting; attnbench train has it: attnbench train attn={given}")
    others = [name for name in given if name != "path"]
    if others:
        raise UserError(f"attn.{others[0]}: unknown setting; a run keeps its mixer, and attn.path alone is given again")
    path = given.get("path")
    check_value("attn.path", path, kind=str)
    trust([path] if path is not None else [])


def _give_way(train: Any, words: Sequence[str]) -> None:
    named = [name for name in LENGTHS if any(setting_of(word) == f"train.{name}" for word in words)]
    if isinstance(train, dict) and any(train.get(name) is not None for name in named):
        train |= {name: None for name in LENGTHS if name not in named}


def _evaluations(values: dict[str, Any], words: Sequence[str]) -> list[EvaluationSettings]:
    chosen = values.pop("eval", None) or {}
    for name, options in list(chosen.items()):
        if not isinstance(options, dict):
            raise UserError(f"eval.{name}={options}: unknown setting; eval=[NAME, ...] chooses evaluations")
        is_named = any(setting_of(word).startswith(f"eval.{name}.") for word in words)
        if "_target_" not in options and (CONF / "eval" / f"{name}.yaml").exists() and not is_named:
            # From an experiment, for an evaluation that is not chosen.
            del chosen[name]
    return [EvaluationSettings(name=name, **opened("eval", name, options)) for name, options in chosen.items()]


def _without_lists(names: Any, folders: Sequence[Path]) -> Any:
    """Replace a name of eval/ whose yaml lists evaluations, like ladder, by their names."""
    if not isinstance(names, list):
        return names
    found = []
    for name in names:
        paths = [path for folder in folders if (path := folder / "eval" / f"{name}.yaml").is_file()]
        text = read_bounded(paths[0], MAX_YAML_BYTES) if paths else ""
        content = parse_yaml(text) if "_target_" not in text else None
        found += content["defaults"] if isinstance(content, dict) and "defaults" in content else [name]
    return found


def _experiment(hydra_config: Any) -> str:
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
    """Refuse a missing device, a backend that cannot run on it, and parts that do not fit together."""
    # Loading torch takes longer than the checks before.
    from attnbench.evals.base import Evaluation
    from attnbench.machine.device import resolve_device
    from attnbench.machine.precision import resolve_precision
    from attnbench.model.building import build_layers, resolve_mixer

    device_type = resolve_device(settings.device).type
    precision = resolve_precision(settings.train.precision, device_type)
    mixer = resolve_mixer(settings.mixer, settings.model, device_type=device_type, precision=precision)
    build_layers(layers_of(mixer, settings.model.num_layers), settings.model)
    for evaluation in settings.evaluations:
        # An error of its constructor should not appear after hours of training.
        build(evaluation.target, evaluation.options, Evaluation, group=f"eval.{evaluation.name}")
