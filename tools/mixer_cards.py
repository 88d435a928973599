"""A page for each mixer: definition, differences from the paper, size, backends, published verdicts and options."""

import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import mixer_table
import yaml
from settings_pages import cell, options_table
from small import MIXERS

from attnbench.cli.help import read_comments
from attnbench.mixers.base import Mixer
from attnbench.ops.attention import softmax_attention
from attnbench.settings.registry import resolve
from attnbench.settings.schema import CONF

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "docs/results"
REFERENCE = "softmax"
FIGURES = (
    "parameters, with softmax's feed-forward",
    "feed-forward width at softmax's parameters",
    "forward MFLOPs a token, with softmax's feed-forward",
    "decoding state of a sequence, in bytes",
    "half-lives at the beginning, in positions",
)
"""Names of the columns of the table of mixers behind the paper."""
DIFFERENCES = ("The paper", "The options are the paper's")
"""Beginnings of a docstring's paragraphs on how the mixer differs from its paper."""


def names() -> list[str]:
    return sorted(path.stem for path in (CONF / "attn").glob("*.yaml"))


def pages() -> Iterator[tuple[str, str]]:
    """Return each card by the name of its yaml."""
    return ((name, _card(name)) for name in names())


def _card(name: str) -> str:
    path = CONF / "attn" / f"{name}.yaml"
    cls = resolve(yaml.safe_load(path.read_text(encoding="utf-8"))["_target_"], object)
    is_mixer = issubclass(cls, Mixer)
    sections = {
        "Definition": _definition(cls) if is_mixer else "",
        "Differences from the paper": _differences(cls) if is_mixer else "",
        "Size": _size(name) if name in MIXERS else "",
        "Backends": _backends(cls) if is_mixer else "",
        "Published verdicts": _verdicts(name, cls),
        "Options": options_table(path),
    }
    text = "".join(f"## {title}\n\n{content}\n" for title, content in sections.items() if content)
    return f"# {name}\n\n{cell(read_comments(path).get((), ''))} `attn={name}`\n\n{text}"


def _definition(cls: type[Mixer]) -> str:
    said = "\n\n".join(it for it in _paragraphs(cls) if not it.startswith(DIFFERENCES))
    step = _step(cls)
    where = f"Class `{cls.__name__}` in {_file(cls)}."
    if step is None:
        return f"{said}\n\n{where}\n"
    code = dedent(inspect.getsource(step))
    computed = "One position is computed" if hasattr(cls, "operator") else "The mixing is defined"
    helpers = " `outer(k, v)` is k v^T, `read(M, q)` is M^T q." if "outer(" in code else ""
    return f"{said}\n\n{where} {computed} by `{step.__name__}` in {_file(step)}.{helpers}\n\n```python\n{code}```\n"


def _differences(cls: type[Mixer]) -> str:
    values = [f"`{name}: {str(value).lower()}`" for name, value in cls.paper_options.items()]
    options = [f"The paper has {', '.join(values)}."] if values else []
    found = [*(it for it in _paragraphs(cls) if it.startswith(DIFFERENCES)), *options]
    return "\n\n".join(found) + "\n" if found else ""


def _paragraphs(cls: type[Mixer]) -> list[str]:
    """Return the paragraphs of the class's docstring, without its options, which have a section."""
    said = (inspect.getdoc(cls) or "").partition("\n\nArgs:")[0]
    said = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", said)
    said = re.sub(r"github\.com/[\w/-]+", r"[\g<0>](https://\g<0>)", said)
    return said.split("\n\n")


def _step(cls: type[Mixer]) -> Any:
    """Return the function that defines the mixing: of one position where there is one."""
    operator = getattr(cls, "operator", None)
    if operator is not None:
        return operator.step
    if "definition" in cls.reference.__code__.co_names:
        return softmax_attention.definition
    if "forward" in cls.reference.__code__.co_names:
        return cls.forward
    return None if cls.defines_itself else cls.reference


def _file(item: Any) -> str:
    return f"`{Path(inspect.getfile(item)).relative_to(ROOT)}`"


def _size(name: str) -> str:
    figures = zip(FIGURES, mixer_table.cells(name)[1:], strict=True)
    shown = (f"| {title} | {value} |" for title, value in figures if value != mixer_table.NO_DECAY)
    lines = ["| at `model=4m` | |", "| --- | --- |", *shown]
    return "\n".join(lines) + "\n\n[Mixers](../../mixers.md) explains the figures and has those of all mixers.\n"


def _backends(cls: type[Mixer]) -> str:
    names = ", ".join(f"`{name}`" for name in cls.backends)
    rule = f"; `auto`: {cell(cls.auto_rule)}" if len(cls.backends) > 1 else " alone"
    return f"`attn.backend`: {names}{rule}.\n"


def _verdicts(name: str, cls: type) -> str:
    """Quote the verdicts on this mixer under its own name."""
    if name == REFERENCE:
        return "The reference of all [published comparisons](../../results/README.md).\n"
    if vars(cls).get("same_function"):
        return f"Verdicts of [{REFERENCE}]({REFERENCE}.md), whose function it computes.\n"
    parts = []
    for page, lines in published().items():
        about = [line for line in lines if re.search(rf"(?<!\w){name}(?!\w)", line.partition(" in ")[0])]
        if about:
            listed = "".join(f"- {cell(line)}\n" for line in about)
            parts.append(f"[{page}](../../results/{page}/README.md):\n\n{listed}")
    return "\n".join(parts)


@cache
def published() -> dict[str, list[str]]:
    """Return the verdicts of the published comparisons, by the names of their folders."""
    found = {}
    for path in sorted((ROOT / RESULTS).glob("*/README.md")):
        _, _, rest = path.read_text(encoding="utf-8").partition("The verdicts in full:\n\n")
        if rest:
            found[path.parent.name] = [line.removeprefix("- ") for line in rest.partition("\n\n")[0].splitlines()]
    return found
