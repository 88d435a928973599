"""Rules of settings: names, types and ranges of single values, and combinations that are impossible.

One reader, `read`, turns a plain mapping into a dataclass of schema.py. Open groups (attn, eval, bench) have the
signature of their class in place of a dataclass; `check_options` and `check_value` hold both to the same rules.
"""

import functools
import inspect
import math
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from attnbench.settings.errors import UserError, did_you_mean
from attnbench.settings.schema import (
    CONTROL_SHIFT,
    CORPORA,
    LOOKS,
    MAX_PAIRED,
    SELECTION_SEED,
    ComparisonSettings,
    PlanSettings,
    RunSettings,
)

Settings = TypeVar("Settings")

MAX_NAME_CHARACTERS = 80

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

GIVEN_BY_MODEL = ("dim", "layer", "layer_index", "num_layers")
"""Parameters of a mixer that no yaml sets."""

LENGTHS = ("num_epochs", "num_steps", "num_tokens")
"""Settings of train that say how long it is, of which one is given."""

GIVEN_BY_PLANS = {
    "train.learning_rate": "its rates from plan.learning_rates",
    "seed": "its seeds from plan.seeds and plan.probe_seeds",
    "eval": "what it measures from plan.evaluations",
    "device": "device= beside plan=",
    "outputs_dir": "outputs_dir= beside plan=",
    "rerun": "rerun= beside plan=",
    "logger": "logger= beside plan=",
}
"""Settings of a training that a plan's overrides may not name, and where a comparison takes them from."""


def read(
    cls: type[Settings],
    values: Mapping[str, Any],
    group: str = "",
    given: Mapping[str, Any] | None = None,
    hint: Callable[[str], str] = lambda name: "",
) -> Settings:
    """Build a dataclass of settings from a plain mapping, by the types and ranges of its fields.

    Args:
        values: by field, as yaml and JSON have them; for a field that is a dataclass itself, a mapping.
        group: stands before the names in messages: "train" for train.batch_size.
        given: fields that the program fills in; `values` may not name them.
        hint: end of the message about an unknown name.

    Raises:
        UserError: an unknown or missing name, a wrong type, or a value out of its range.
    """
    given, prefix = given or {}, f"{group}." if group else ""
    known = [name for name in _signature(cls)[0] if name not in given]
    for name, value in values.items():
        if name not in known:
            raise UserError(unknown_setting(_word(f"{prefix}{name}", value), name, known, hint(name)))
    check_options(cls, {**values, **given}, group=group)
    built = {name: _built(_signature(cls)[1][name], value, prefix + name) for name, value in values.items()}
    settings = cls(**built, **given)
    check(settings, prefix)
    return settings


def _built(annotation: Any, value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        # A group that may be null is a union.
        group = next(filter(is_dataclass, (annotation, *get_args(annotation))), None)
        return read(group, value, name) if isinstance(group, type) else value
    if annotation is not float:
        return value
    # A whole number is a fine float; a file that says 2 and one that says 2.0 are one configuration.
    try:
        return float(value)
    except OverflowError:
        raise UserError(f"{name}={value}: must be finite") from None


def check_options(cls: type, options: Mapping[str, Any], *, given: Collection[str] = (), group: str = "attn") -> None:
    """Raise UserError for an option that a constructor does not name, of a wrong type, or missing.

    Args:
        given: names that the caller passes besides.
    """
    parameters, hints = _signature(cls)
    # What a class from elsewhere takes by **kwargs has no name, and is refused.
    parameters = {name: parameter for name, parameter in parameters.items() if parameter.kind not in VARIABLE}
    prefix = f"{group}." if group else ""
    for name, value in options.items():
        if name not in parameters:
            known = [known for known in parameters if known not in GIVEN_BY_MODEL]
            raise UserError(unknown_setting(_word(f"{prefix}{name}", value), name, known))
        if name in hints and not _matches(value, hints[name]):
            raise UserError(f"{prefix}{name}={'null' if value is None else value}: must be {_described(hints[name])}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options and name not in given:
            raise UserError(f"{prefix}{name}: must be given")


def unknown_setting(word: str, name: str, known: Iterable[str], hint: str = "") -> str:
    """Return the message for a setting that does not exist, with those that do.

    Args:
        word: the override as given, train.num_step=5.
        hint: end of the message.
    """
    known = list(known)
    there = f"; there is {', '.join(known)}" if known else ""
    return f"{word}: unknown setting{did_you_mean(str(name), known)}{there}{hint}"


def _word(name: str, value: Any) -> str:
    """Return NAME=VALUE, or the name of a group alone."""
    return name if isinstance(value, Mapping) else f"{name}={value}"


@functools.cache
def _signature(cls: type) -> tuple[Mapping[str, inspect.Parameter], dict[str, Any]]:
    return inspect.signature(cls).parameters, get_type_hints(cls.__init__)


def _matches(value: Any, annotation: Any) -> bool:
    """Return whether a yaml value fits an annotation; one that is not of plain types fits every value."""
    # Plain types first: rows of results are read by the ten thousand.
    if annotation in (bool, str, list, dict):
        return isinstance(value, annotation)
    if annotation in (int, float):
        return isinstance(value, (int, float) if annotation is float else int) and not isinstance(value, bool)
    if annotation in (None, type(None)):
        return value is None
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_matches(value, option) for option in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if is_dataclass(annotation) and isinstance(annotation, type):
        return isinstance(value, (Mapping, annotation))
    if origin is list:
        return isinstance(value, list) and all(_matches(entry, arguments[0]) for entry in value)
    if origin is dict:
        names, values = arguments
        return isinstance(value, dict) and all(_matches(k, names) and _matches(v, values) for k, v in value.items())
    return True


def _described(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_described(option) for option in get_args(annotation))
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(get_args(annotation))}"
    if get_origin(annotation) is list:
        return f"a list, each entry {_described(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return f"a mapping, each entry {_described(get_args(annotation)[1])}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    names |= {list: "a list", dict: "a mapping"}
    return names.get(annotation, "the name of a yaml of its group" if is_dataclass(annotation) else str(annotation))


def check(settings: Any, prefix: str = "") -> None:
    """Raise UserError for the first value outside what its field allows, naming setting, value and what is allowed."""
    for entry in fields(settings):
        value, name = getattr(settings, entry.name), prefix + entry.name
        if is_dataclass(value):
            check(value, name + ".")
        else:
            check_value(name, value, **entry.metadata)


def check_value(
    name: str, value: Any, *, kind: Any = Any, distinct: bool = False, most: int | None = None, **allowed: Any
) -> None:
    """Raise UserError for a value that is not allowed; null passes, and of a list every entry must be allowed.

    Args:
        kind: the type that it must have, such as list[int].
        distinct: entries of a list or mapping: at least one, and none twice.
        most: entries at most.
        allowed: `choices`, or bounds of a number: `minimum`, `above`, `below`, `maximum`.
    """
    if value is None:
        return
    if not _matches(value, kind):
        raise UserError(f"{name}={value}: must be {_described(kind)}")
    if distinct and not value:
        raise UserError(f"{name}={value}: must name at least one")
    if distinct and len(set(value)) < len(value):
        raise UserError(f"{name}={value}: names something twice")
    if most is not None and len(value) > most:
        raise UserError(f"{name}: names {len(value)}, and may have {most}")
    for entry in value if isinstance(value, list) else [value]:
        problem = _problem(entry, **allowed)
        if problem:
            raise UserError(f"{name}={value}: must be {problem}")


def _problem(
    value: Any,
    *,
    choices: Collection[Any] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    maximum: float | None = None,
) -> str:
    """Return the rule that a value breaks, empty for none."""
    if choices is not None and value not in choices:
        return f"one of {', '.join(map(str, choices))}"
    # Written as "not inside" so that NaN is refused too.
    if minimum is not None and not value >= minimum:
        return f"at least {minimum}"
    if above is not None and not value > above:
        return f"above {above}"
    if below is not None and not value < below:
        return f"below {below}"
    if isinstance(value, float) and not math.isfinite(value):
        return "finite"
    return f"at most {maximum}" if maximum is not None and not value <= maximum else ""


def check_counts(group: str, minimum: int = 1, **values: Any) -> None:
    """Raise UserError for whole numbers, or lists of them, below `minimum`."""
    for name, value in values.items():
        check_value(f"{group}.{name}", value, kind=list[int] if isinstance(value, list) else int, minimum=minimum)


def check_name(setting_name: str, name: str) -> None:
    """Raise UserError for a name that cannot be part of a folder's name."""
    if not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", name) or len(name) > MAX_NAME_CHARACTERS:
        raise UserError(
            f"{setting_name}={name}: must be letters, digits and _ . + -, at most {MAX_NAME_CHARACTERS}; folders are "
            "called so"
        )


def check_names(settings: RunSettings) -> None:
    """Raise UserError for names that would lead a run's files somewhere else."""
    check_name("experiment", settings.experiment)
    check_name("attn", settings.mixer.name)
    check_name("model.name", settings.model.name)
    for evaluation in settings.evaluations:
        check_name("eval", evaluation.name)


def check_outputs_dir(name: str) -> None:
    """Raise UserError for an empty name."""
    if not name:
        raise UserError("outputs_dir=: must name a folder; outputs is the usual one")


def check_run(settings: RunSettings) -> None:
    """Raise UserError for settings that are each allowed but impossible together."""
    check_names(settings)
    check_outputs_dir(settings.outputs_dir)
    train, data = settings.train, settings.data
    lengths = {name: getattr(train, name) for name in LENGTHS}
    if sum(length is not None for length in lengths.values()) != 1:
        named = ", ".join(f"train.{name}={'null' if length is None else length}" for name, length in lengths.items())
        raise UserError(f"{named}: set one, the others null")
    if train.patience_validations is not None and train.decay_fraction is None:
        raise UserError(
            f"train.patience_validations={train.patience_validations}: ends a constant rate, and "
            "train.decay_fraction=null is a cosine over all steps; give the fraction, 0.2 say"
        )
    if train.micro_batch_size is not None and train.batch_size % train.micro_batch_size:
        raise UserError(
            f"train.micro_batch_size={train.micro_batch_size}: must divide train.batch_size={train.batch_size}"
        )
    if settings.seed >= SELECTION_SEED:
        raise UserError(
            f"seed={settings.seed}: those from {SELECTION_SEED} on are for searches of learning rates, and never scored"
        )
    is_hub = "/" in data.name
    if data.name not in CORPORA and not is_hub:
        raise UserError(
            f"data.name={data.name}: must be one of {', '.join(CORPORA)}, or, with data=hub, OWNER/NAME of a data set "
            "on the Hugging Face Hub"
        )
    if is_hub and data.path is not None:
        raise UserError(f"data.path={data.path}: data=hub reads data.name={data.name}; leave it out, or use data=text")
    for name, usual in (("config", None), ("files", None), ("column", "text")):
        if not is_hub and getattr(data, name) != usual:
            raise UserError(f"data.{name}={getattr(data, name)}: data.name={data.name} has none; only data=hub has")
    if data.name == "text" and data.path is None:
        raise UserError("data.path=null: data=text needs a .txt or parquet file, or a folder of them")
    if data.tokenizer == "bpe" and data.vocabulary_size is None:
        raise UserError("data.vocabulary_size=null: with data.tokenizer=bpe give the number of tokens, 8192 say")
    if data.tokenizer != "characters" and data.vocabulary_size is not None and data.vocabulary_size < 256:
        raise UserError(
            f"data.vocabulary_size={data.vocabulary_size}: data.tokenizer={data.tokenizer} has 256 at least"
        )
    if data.validation_fraction + data.test_fraction > 0.9:
        raise UserError(
            f"data.validation_fraction={data.validation_fraction} and data.test_fraction={data.test_fraction}: "
            "together at most 0.9, so that something is left to train on"
        )


def setting_of(word: str) -> str:
    """Return the name in an override, `+GROUP.NAME=VALUE`."""
    return word.lstrip("+~").partition("=")[0]


def check_launcher(settings: ComparisonSettings) -> None:
    """Raise UserError for a launcher's settings that do not fit together."""
    if settings.launcher == "local":
        if not settings.wait:
            raise UserError("wait=false: needs launcher=slurm; what runs on this host ends with the command")
        return
    if settings.device == "auto":
        raise UserError("device=auto: with launcher=slurm name it, device=cpu or device=cuda: this host may be another")
    if settings.device != "cpu" and settings.slurm.gpus == 0:
        raise UserError(f"slurm.gpus=0: with device={settings.device} a task needs one; slurm.gpus=1")
    if settings.rerun and not settings.wait:
        raise UserError("wait=false: with rerun=true nothing says which cells are this time's; wait for them")


def _check_corpora(plan: PlanSettings) -> None:
    if plan.corpora is None:
        return
    for corpus in plan.corpora:
        check_name("plan.corpora", corpus)
    for where, words in (("plan.overrides", plan.overrides), *plan.variants.items()):
        for word in words:
            if setting_of(word).split(".")[0] == "data":
                raise UserError(f"{where}: {word} beside plan.corpora: a corpus is a yaml of data/, named there alone")
    if plan.factors and len(plan.corpora) > 1:
        raise UserError(f"plan.corpora={plan.corpora}: a factorial has one corpus; give it a plan for each")


def check_plan(plan: PlanSettings) -> None:
    """Raise UserError for a plan whose parts do not fit together."""
    check_name("plan.name", plan.name)
    for variant, words in plan.variants.items():
        check_name("plan.variants", variant)
        if not any(word.startswith("attn=") for word in words):
            raise UserError(f"plan.variants.{variant}={words}: must be a list of overrides with attn=NAME among them")
    for where, words in (("plan.overrides", plan.overrides), *plan.variants.items()):
        for word in words:
            source = GIVEN_BY_PLANS.get(setting_of(word))
            is_own_rate = setting_of(word) == "train.learning_rate" and plan.learning_rates is None
            if source is not None and not is_own_rate:
                raise UserError(f"{where}: {word} would count for nothing; a comparison takes {source}")
    check_value("plan.only", plan.only, choices=plan.evaluations)
    _check_corpora(plan)
    check_value("plan.rank", plan.rank, choices=plan.variants)
    check_value("plan.reference", plan.reference, choices=plan.variants)
    if not set(plan.tested or []) <= set(plan.evaluations):
        raise UserError(
            f"plan.tested={plan.tested}: must be among plan.evaluations={plan.evaluations}; plan.tested=null tests all"
        )
    if plan.reference is not None and plan.rank and plan.reference not in plan.rank:
        raise UserError(f"plan.reference={plan.reference}: must be one of plan.rank={plan.rank}, or null")
    if plan.in_looks:
        most = list(range(max(LOOKS)))
        if plan.seeds != most or plan.probe_seeds != most:
            raise UserError("plan.in_looks=true: is set by plan.seeds=auto, which also gives the seeds")
        if not plan.ranked:
            raise UserError("plan.seeds=auto: with plan.rank=[] nothing is tested, and no pair asks for more seeds")
    seeds = {*plan.seeds, *plan.probe_seeds}
    both = sorted(seeds & {*plan.control_seeds(plan.seeds), *plan.control_seeds(plan.probe_seeds)})
    if both:
        raise UserError(
            f"plan.seeds: {both[0]} is seed {both[0] - CONTROL_SHIFT} of the control, whose seeds are shifted by "
            f"{CONTROL_SHIFT}; take seeds within a range of {CONTROL_SHIFT}"
        )
    if len(plan.ranked) > MAX_PAIRED and plan.reference is None:
        raise UserError(
            f"plan.reference=null: with more than {MAX_PAIRED} variants under plan.rank name the one to compare with"
        )
