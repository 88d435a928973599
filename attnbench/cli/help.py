"""Text of --help: each setting with its value and the comment in its yaml."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from attnbench.settings.schema import CONF

Comments = dict[tuple[str, ...], str]
"""Comments by the path of a setting, ("train", "batch_size"); at () the first lines of a yaml, about itself."""

INDENT = 2
MIN_WIDTH, MAX_WIDTH = 80, 120


def list_groups(command: str, folders: Sequence[Path]) -> str:
    """Return one line for each group that a command takes, with its options.

    Args:
        command: name of the command; its yaml lies in the first of the folders, beside the groups.
        folders: searched for yamls; the first that has one counts.
    """
    lines = []
    for group in groups_of(folders[0] / f"{command}.yaml"):
        lines.append(_wrapped(f"{group}: {', '.join(_options(group, folders))}", " " * INDENT) + "\n")
    return "".join(lines)


def list_settings(values: Mapping[str, Any], choices: Mapping[str, Any], command: str, folders: Sequence[Path]) -> str:
    """Return the settings as yaml, each with its comment.

    Args:
        values: the configuration that the command line composes.
        choices: the chosen option of each group; the evaluations' are the names of `values["eval"]`.
        command, folders: as list_groups.
    """
    path = folders[0] / f"{command}.yaml"
    top_level = {setting: comment for setting, comment in read_comments(path).items() if setting}
    siblings: Comments = {}
    chosen: Comments = {}
    for group in groups_of(path):
        if group == "eval":
            for name in values[group] or {}:
                chosen |= _of_option(f"{group}/{name}.yaml", (group, name), folders)
        elif group in values:
            chosen |= _of_option(f"{group}/{choices[group]}.yaml", (group,), folders)
            # A setting that an option takes over from another of its group is explained there.
            for name in _options(group, folders):
                comments = _of_option(f"{group}/{name}.yaml", (group,), folders)
                siblings |= {setting: comment for setting, comment in comments.items() if len(setting) == 2}
    return "".join(f"{line}\n" for line in _lines(values, siblings | top_level | chosen, ()))


def _options(group: str, folders: Sequence[Path]) -> list[str]:
    return sorted({path.stem for folder in folders for path in folder.glob(f"{group}/*.yaml")})


def groups_of(path: Path) -> list[str]:
    """Return the groups in the defaults list of a command's yaml."""
    defaults = yaml.safe_load(path.read_text(encoding="utf-8"))["defaults"]
    names = [name for entry in defaults if isinstance(entry, dict) for name in entry]
    return sorted(name.removeprefix("optional ") for name in names if not name.startswith("override "))


def commands_with(name: str) -> list[str]:
    """Return the commands that have a setting: those that choose a yaml of a group of this name or, where there are
    none, those that have the setting at the top level."""
    paths = {f"attnbench {path.stem}": path for path in sorted(CONF.glob("*.yaml"))}
    choosing = [command for command, path in paths.items() if name in {*groups_of(path)} - {"hydra"}]
    having = {command: yaml.safe_load(path.read_text(encoding="utf-8")) for command, path in paths.items()}
    return choosing or [command for command, names in having.items() if name in {*names} - {"defaults", "hydra"}]


def read_comments(path: Path) -> Comments:
    """Return the comments of a yaml: of a setting behind its value, or in whole lines above it."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    comments = dict(_of_mapping(node, lines, ())) if isinstance(node, yaml.MappingNode) else {}
    header = _block(lines, 0, 1)
    if header:
        comments[()] = header
    return comments


def _of_mapping(node: yaml.MappingNode, lines: Sequence[str], path: tuple[str, ...]) -> Iterator[tuple[Any, str]]:
    for key, value in node.value:
        here = (*path, str(key.value))
        is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        # What is written over several lines has its comment behind the key.
        line, column = (key.end_mark.line, key.end_mark.column + 1) if is_block else _end(value)
        behind = lines[line][column:].strip() if line < len(lines) else ""
        above = _block(lines, key.start_mark.line - 1, -1)
        comment = behind.lstrip("# ") if behind.startswith("#") else above
        if comment:
            yield here, comment
        if isinstance(value, yaml.MappingNode):
            yield from _of_mapping(value, lines, here)


def _end(node: yaml.Node) -> tuple[int, int]:
    mark = node.end_mark
    assert mark is not None
    return mark.line, mark.column


def _block(lines: Sequence[str], start: int, step: int) -> str:
    """Return the comment in whole lines from `start`, down or up; upwards without one that begins the file."""
    comment = []
    index = start
    while 0 <= index < len(lines) and lines[index].lstrip().startswith("#"):
        if not lines[index].startswith("# @package"):
            comment.append(lines[index].strip().lstrip("# "))
        index += step
    if step < 0 and index < 0:
        return ""
    return " ".join(comment[::step])


def _of_option(name: str, prefix: tuple[str, ...], folders: Sequence[Path]) -> Comments:
    """Return the comments of a group's yaml, the paths of its settings behind `prefix`."""
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    comments = read_comments(path) if path is not None else {}
    return {(*prefix, *setting): comment for setting, comment in comments.items()}


def _lines(values: Mapping[str, Any], comments: Comments, path: tuple[str, ...]) -> Iterator[str]:
    indent = " " * INDENT * len(path)
    for name, value in values.items():
        here = (*path, str(name))
        comment = comments.get(here, "")
        nested = isinstance(value, dict) and bool(value)
        written = f"{indent}{name}:" if nested else f"{indent}{name}: {_written(value)}"
        if comment and len(written) + len(comment) + 4 > _width():
            yield _wrapped(comment, f"{indent}# ", f"{indent}# ")
            comment = ""
        if not nested and len(written) > _width() and isinstance(value, list):
            yield f"{indent}{name}:" + (f"  # {comment}" if comment else "")
            yield from (f"{indent}  - {_written(entry)}" for entry in value)
        else:
            yield written + (f"  # {comment}" if comment else "")
        if isinstance(value, dict):
            yield from _lines(value, comments, here)


def _written(value: Any) -> str:
    """Return a value as yaml writes it, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _wrapped(text: str, later: str, first: str = "") -> str:
    return textwrap.fill(
        text,
        _width(),
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, MIN_WIDTH), MAX_WIDTH)
