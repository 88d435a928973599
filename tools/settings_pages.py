"""Reference of the settings: each setting of conf/ with its type, its default in every yaml, and its comment."""

import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml

from attnbench.cli.help import groups_of, read_comments
from attnbench.settings import schema
from attnbench.settings.registry import resolve
from attnbench.settings.schema import CONF

COMMANDS = {
    "train": schema.RunSettings,
    "compare": schema.ComparisonSettings,
    "findings": schema.ComparisonSettings,
    "bench": schema.BenchSettings,
    "generate": schema.GenerationSettings,
    "export": schema.ExportSettings,
    "runs": schema.RunsSettings,
    "doctor": schema.DoctorSettings,
    "evaluate": schema.RunSettings,
}
GROUPS = {
    "model": schema.ModelSettings,
    "data": schema.DataSettings,
    "train": schema.TrainSettings,
    "recipe": schema.RecipeSettings,
    "logger": schema.LoggerSettings,
}
"""Groups with the same settings in each yaml."""

SCHEMA = "attnbench.settings.schema"
LISTS = {
    "experiment": [],
    "plan": [f"{SCHEMA}.PlanSettings"],
    "finding": [f"{SCHEMA}.{name}" for name in ("ClaimSettings", "ControlSettings", "ContrastSettings")],
}
"""Groups whose yamls give other settings their values, and the classes of what they say beside."""

KINDS = {bool: "true or false", int: "integer", float: "number", str: "text", list: "list", dict: "mapping"}
LIMITS = {"minimum": "≥ {}", "above": "> {}", "maximum": "≤ {}", "below": "< {}", "besides": "or {}"}


class Setting(NamedTuple):
    name: str
    default: Any
    comment: str


def pages() -> Iterator[tuple[str, str]]:
    """Return the pages of the reference but those of mixers, by their names."""
    yield "commands.md", _page("Settings of the commands", COMMANDS_INTRODUCTION, map(_command, COMMANDS))
    yield "groups.md", _page("Models, data, training", GROUPS_INTRODUCTION, map(_group, GROUPS))
    for group, title in (("eval", "Evaluations"), ("bench", "Operator tables")):
        paths = sorted((CONF / group).glob("*.yaml"))
        yield f"{group}.md", _page(title, CLASSES_INTRODUCTION, (class_section(path) for path in paths))
    yield "plans.md", _page("Experiments, plans and findings", LISTS_INTRODUCTION, map(_list, LISTS))


COMMANDS_INTRODUCTION = """
Each command has a yaml in conf/, named like the command. `setting=value` on the command line changes a value; `--help`
shows every setting with the value that the rest of the command line gives it. `???` must be given.
"""
GROUPS_INTRODUCTION = """
`model=1m` takes all settings of conf/model/1m.yaml; `model.dim=128` changes one of them. A setting that only some of a
group's yamls have is shown with their names. [Mixers](../../mixers.md), [evaluations](eval.md) and [operator
tables](bench.md) are groups too.
"""
CLASSES_INTRODUCTION = """
Each yaml names a class; the settings are the fields of this class. On the command line their names begin with the
heading of their section.
"""
LISTS_INTRODUCTION = """
These yamls choose values of settings that stand elsewhere. A plan or finding of your own is a yaml of the same form, in
a folder `conf/plan` beside your command or in that of `--config-dir`.
"""


def _page(title: str, introduction: str, sections: Iterator[str]) -> str:
    return f"# {title}\n{introduction}\n" + "\n".join(sections)


def _command(name: str) -> str:
    path = CONF / f"{name}.yaml"
    groups = [f"`{group}=`" for group in groups_of(path)]
    chosen = f"It also has the groups {', '.join(groups)}.\n\n" if groups else ""
    skipped = ("defaults", "hydra")
    settings = [it for it in settings_of(path) if it.name.split(".")[0] not in skipped]
    text = _table([[(name, it)] for it in settings], COMMANDS[name])
    return f"## attnbench {name}\n\n`conf/{name}.yaml`. {chosen}\n\n{text}"


def _group(group: str) -> str:
    paths = sorted((CONF / group).glob("*.yaml"))
    rows: dict[str, list[tuple[str, Setting]]] = {}
    for path in paths:
        for setting in settings_of(path):
            rows.setdefault(setting.name, []).append((path.stem, setting))
    names = ", ".join(f"`{group}={path.stem}`" for path in paths)
    return f"## {group}\n\n`conf/{group}/`: {names}\n\n{_table(list(rows.values()), GROUPS[group], len(paths))}"


def class_section(path: Path, heading: str = "##") -> str:
    """Return the section of a yaml that names a class, or that combines others."""
    target = yaml.safe_load(path.read_text(encoding="utf-8")).get("_target_")
    comment = read_comments(path).get((), "")
    about = f"{heading} {path.parent.name}.{path.stem}\n\n{cell(comment)} `conf/{path.parent.name}/{path.name}`"
    if target is None:
        return f"{about}\n\n{_code(path)}"
    return f"{about}, `{target}`\n\n{options_table(path)}"


def options_table(path: Path) -> str:
    """Return the table of the options of a yaml that names a class."""
    settings = {it.name: it for it in settings_of(path)}
    cls = resolve(settings.pop("_target_").default, object)
    return _table([[(path.stem, it)] for it in settings.values()], cls)


def _list(group: str) -> str:
    sections = [f"### {group}={path.stem}\n\n{_code(path)}" for path in sorted((CONF / group).glob("*.yaml"))]
    return f"## {group}\n\n" + "".join([*(described(name, everything=True) for name in LISTS[group]), *sections])


def described(name: str, *, everything: bool = False) -> str:
    """Return the directive of mkdocstrings that describes an object, members without docstring only on request."""
    return f"::: {name}\n    options: {{heading_level: 3, show_if_no_docstring: {str(everything).lower()}}}\n\n"


def _code(path: Path) -> str:
    return f"```yaml\n{path.read_text(encoding='utf-8')}```\n\n"


def settings_of(path: Path) -> list[Setting]:
    """Return the settings of a yaml, with dots in the names of nested ones."""
    comments = read_comments(path)
    found = []

    def walk(values: dict[str, Any], above: tuple[str, ...]) -> None:
        for name, value in values.items():
            here = (*above, str(name))
            nested = isinstance(value, dict) and any((*here, str(inner)) in comments for inner in value)
            if nested and here != ("hydra",):
                walk(value, here)
            else:
                found.append(Setting(".".join(here), value, comments.get(here, "")))

    walk(yaml.safe_load(path.read_text(encoding="utf-8")) or {}, ())
    return found


def _table(rows: Sequence[Sequence[tuple[str, Setting]]], cls: type, count: int = 1) -> str:
    """Return one line a setting, from the setting in each yaml that has it, of `count` yamls."""
    lines = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for found in rows:
        default = _of_yamls([(name, f"`{_written(setting.default)}`") for name, setting in found], count)
        comments = [(name, cell(setting.comment)) for name, setting in found if setting.comment]
        setting = found[0][1]
        meaning = _of_yamls(comments, len(comments))
        lines.append(f"| `{setting.name}` | {_type(cls, setting)} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _of_yamls(texts: Sequence[tuple[str, str]], count: int) -> str:
    """Return the text that all yamls have, or each text behind the names of the yamls with it."""
    by_text: dict[str, list[str]] = {}
    for name, text in texts:
        by_text.setdefault(text, []).append(name)
    if len(by_text) == 1 and len(texts) == count:
        return texts[0][1]
    return "<br>".join(f"{', '.join(names)}: {text}" for text, names in by_text.items())


def _written(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _type(cls: type, setting: Setting) -> str:
    entry, hint = _field(cls, setting.name.split("."))
    if hint is None:
        return KINDS.get(type(setting.default), "")
    limits = {} if entry is None else dict(entry.metadata)
    choices = limits.get("choices") or (get_args(hint) if get_origin(hint) is Literal else ())
    if choices:
        words = [_word(choice) for choice in choices]
        return " ".join([", ".join(words), *(["or null"] if type(None) in get_args(hint) else [])])
    shown = [LIMITS[name].format(limit) for name, limit in limits.items() if name in LIMITS]
    return " ".join([_kind(hint, shown), *([] if type(None) not in get_args(hint) else ["or null"])])


def _word(value: Any) -> str:
    return "null" if value is None else f"`{value}`"


def _kind(hint: Any, limits: Sequence[str] = ()) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = dict.fromkeys(_kind(part, limits) for part in get_args(hint) if part is not type(None))
        return " or ".join(kinds)
    if get_origin(hint) is list:
        return f"list of {_kind(get_args(hint)[0], limits)}"
    if get_origin(hint) is Literal:
        return ", ".join(map(_word, get_args(hint)))
    return ", ".join([" ".join([KINDS.get(get_origin(hint) or hint, "text"), *limits[:1]]), *limits[1:]])


def _field(cls: type, names: Sequence[str]) -> tuple["Field[Any] | None", Any]:
    """Return the field of a class, or of the class of one of its fields, and its type; None where there is none."""
    if not is_dataclass(cls):
        return None, None
    entries, hints = {entry.name: entry for entry in fields(cls)}, get_type_hints(cls)
    first = {"export": "exported", "import": "imported"}.get(names[0], names[0])
    if first not in entries:
        return None, None
    if len(names) > 1:
        return _field(hints[first], names[1:])
    return entries[first], hints[first]


def cell(text: str) -> str:
    """Escape a comment for a cell of a table, but not what it has between backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    escaped = (
        part if part.startswith("`") else re.sub(r"([|*_\[])", r"\\\1", part).replace("<", "&lt;") for part in parts
    )
    return "".join(escaped)
