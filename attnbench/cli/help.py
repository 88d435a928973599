"""Text of --help: every setting with its value and the comment in its yaml."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from attnbench.settings.schema import CONF

Comments = dict[tuple[str, ...], str]
"""Comment of each setting by its path, ("train", "batch_size"); () has the comment at the top of the yaml."""

INDENT = 2
MIN_WIDTH, MAX_WIDTH = 80, 120


def help_text(command: str, values: Mapping[str, Any], hydra_config: Any) -> str:
    """Return the help of a command: the header in its yaml, its groups with their options, its settings, the footer.

    Args:
        values: the composed configuration, without Hydra's node.
    """
    # The first folder has the command's yaml.
    folders = [Path(source.path) for source in hydra_config.runtime.config_sources if source.schema == "file"]
    path = folders[0] / f"{command}.yaml"
    groups = "".join(
        _wrapped(f"{group}: {', '.join(_options(group, folders))}", "  ") + "\n" for group in groups_of(path)
    )
    comments = _comments(values, hydra_config.runtime.choices, path, folders)
    parts = [hydra_config.help.header]
    parts += [f"Groups (group=option):\n\n{groups}"] if groups else []
    parts += ["Settings (group.setting=value) and their values by this command line:\n"]
    parts += ["".join(f"{line}\n" for line in _lines(values, comments, ())) + (hydra_config.help.get("footer") or "")]
    return "\n".join(parts)


def _comments(values: Mapping[str, Any], choices: Mapping[str, Any], path: Path, folders: Sequence[Path]) -> Comments:
    """Return the comments of all settings, from the command's yaml and the chosen options of its groups."""
    comments = {setting: comment for setting, comment in read_comments(path).items() if setting}
    for group in groups_of(path):
        if group == "eval":
            for name in values[group] or {}:
                comments |= _of_option(f"{group}/{name}.yaml", (group, name), folders)
        elif group in values:
            comments |= _of_option(f"{group}/{choices[group]}.yaml", (group,), folders)
    return comments


def _options(group: str, folders: Sequence[Path]) -> list[str]:
    return sorted({path.stem for folder in folders for path in folder.glob(f"{group}/*.yaml")})


def groups_of(path: Path) -> list[str]:
    defaults = yaml.safe_load(path.read_text(encoding="utf-8"))["defaults"]
    names = [name for entry in defaults if isinstance(entry, dict) for name in entry]
    return sorted(name.removeprefix("optional ") for name in names if not name.startswith("override "))


def commands_with(name: str) -> list[str]:
    """Return the commands with a group of this name or, if there are none, with such a setting at the top level."""
    paths = {f"attnbench {path.stem}": path for path in sorted(CONF.glob("*.yaml"))}
    choosing = [command for command, path in paths.items() if name in {*groups_of(path)} - {"hydra"}]
    having = {command: yaml.safe_load(path.read_text(encoding="utf-8")) for command, path in paths.items()}
    return choosing or [command for command, names in having.items() if name in {*names} - {"defaults", "hydra"}]


def read_comments(path: Path) -> Comments:
    """Return the comments of a yaml: behind a setting's value, or in whole lines above it."""
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
        # A value of several lines has its comment behind the key.
        line, column = (key.end_mark.line, key.end_mark.column + 1) if is_block else _end(value)
        behind = lines[line][column:].strip() if line < len(lines) else ""
        # The comment above the line of a flow mapping explains the whole of it.
        above = "" if node.flow_style else _block(lines, key.start_mark.line - 1, -1)
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
    """Return the comment in whole lines from `start`, down or up; upwards not one at the top of the file."""
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
    """Return an option's comments, with those of the options that it extends for settings that it leaves alone."""
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if path is None:
        return {}
    comments: Comments = {}
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")).get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            comments |= _of_option(f"{Path(name).parent}/{entry}.yaml", prefix, folders)
    return comments | {(*prefix, *setting): comment for setting, comment in read_comments(path).items()}


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
