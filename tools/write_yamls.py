"""Write the yamls of conf/attn, conf/eval and conf/bench from the options of their classes.

python tools/write_yamls.py
"""

import importlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml

from attnbench.mixers.base import Mixer
from attnbench.mixers.options import options_of
from attnbench.settings.options import Options
from attnbench.settings.registry import resolve
from attnbench.settings.schema import CONF

GROUPS = ("attn", "eval", "bench")
LINE = 120
"""Longest line that has its help behind the value."""


def yamls() -> Iterator[tuple[Path, str]]:
    """Each yaml of a class that declares options, and its content."""
    for group in GROUPS:
        for path in sorted((CONF / group).glob("*.yaml")):
            target = yaml.safe_load(path.read_text(encoding="utf-8")).get("_target_")
            if target is not None and issubclass(cls := resolve(target, object), Options):
                yield path, as_yaml(cls, target, f"eval.{path.stem}" if group == "eval" else "")


def as_yaml(cls: type, target: str, package: str = "") -> str:
    """Write the complete yaml of a class: a title, and its options, each with its help."""
    is_mixer = issubclass(cls, Mixer)
    title = _mixer_title(cls) if is_mixer else (cls.__doc__ or "").partition("\n")[0]
    entries = list(options_of(cls).values()) if is_mixer else own_first(cls)
    lines = [f"# @package {package}"] if package else []
    lines += [f"# {title}"]
    for entry in entries:
        lines += _defaults(entry)
    lines.append(f"_target_: {target}")
    for entry in entries:
        if "yamls" not in entry.metadata:
            help = _backends(cls) if is_mixer and entry.name == "backend" else entry.metadata.get("help", "")
            lines += _lines(entry, help)
    return "".join(f"{line}\n" for line in lines)


def own_first(cls: type) -> list["Field[Any]"]:
    """Return the options of a class, then those that it inherits."""
    of_bases = [{entry.name for entry in fields(base)} if is_dataclass(base) else () for base in cls.__mro__]

    def depth(entry: "Field[Any]") -> int:
        return max(n for n, names in enumerate(of_bases) if entry.name in names)

    return sorted(fields(cls), key=depth)  # pyright: ignore[reportArgumentType]


def _mixer_title(cls: type) -> str:
    """Return the first line of a mixer's file, with its paper."""
    name, _, words = (importlib.import_module(cls.__module__).__doc__ or "").partition("\n")[0].partition(":")
    paper = re.search(r"arXiv \d{4}\.\d{5}", cls.__doc__ or "")
    named = f"{name} ({paper.group()})" if paper and words else name
    return f"{named}:{words}" if words else named


def _backends(cls: type[Mixer]) -> str:
    return " | ".join(cls.backends) if len(cls.backends) == 1 else f"{' | '.join(cls.backends)}; auto: {cls.auto_rule}"


def _defaults(entry: "Field[Any]") -> list[str]:
    """Write the defaults list of an option that has several yamls of another group by name."""
    if "yamls" not in entry.metadata:
        return []
    group, *names = entry.metadata["yamls"]
    lines = [f"  - /{group}@{entry.name}.{name}: {name}" for name in names]
    return [f"defaults: # {entry.metadata['help']}", *lines, ""]


def _lines(entry: "Field[Any]", help: str) -> Iterable[str]:
    """Write one option, its help behind it or, where that makes a long line, above it."""
    default = entry.default if entry.default_factory is MISSING else entry.default_factory()
    value = "???" if default is MISSING else default
    text = _written(value, block=False)
    is_block = len(text) > LINE - len(entry.name) and isinstance(value, list | dict)
    text = _written(value, block=is_block)
    line = f"{entry.name}:\n{text}" if is_block else f"{entry.name}: {text}"
    if not help:
        return [line]
    if is_block or len(line) + len(help) + 3 > LINE:
        return [*(f"# {part}" for part in wrap(help, LINE - 2)), line]
    return [f"{line} # {help}"]


def _written(value: Any, *, block: bool) -> str:
    is_flat = isinstance(value, list) and not any(isinstance(item, list) for item in value)
    style = (False if is_flat else None) if block else True
    text = yaml.safe_dump(value, width=10**6, allow_unicode=True, sort_keys=False, default_flow_style=style)
    text = text.removesuffix("\n").removesuffix("\n...")
    return "\n".join(f"  {line}" for line in text.splitlines()) if block else text


if __name__ == "__main__":
    for path, content in yamls():
        path.write_text(content, encoding="utf-8")
