"""The yamls of conf/attn, built from the fields of the mixers' classes.

python tools/mixer_yamls.py writes the present ones.
"""

import importlib
import re
import sys
from pathlib import Path
from textwrap import wrap

from attnbench.mixers.base import Mixer
from attnbench.mixers.options import Options, options_of
from attnbench.settings.options import LINE

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from mixer_building import CONF, mixer_names, read

WORDS = {None: "null", True: "true", False: "false"}


def generated() -> list[str]:
    """Name the yamls whose class declares its options as fields."""
    return [name for name in mixer_names() if issubclass(read(name)[0], Options)]


def yaml_of(cls: type[Mixer]) -> str:
    """Return the yaml of a class: the first line of its file, with its paper, its name, and each option with its
    comment."""
    name, _, words = (importlib.import_module(cls.__module__).__doc__ or "").partition("\n")[0].partition(":")
    paper = re.search(r"arXiv \d{4}\.\d{5}", cls.__doc__ or "")
    named = f"{name} ({paper.group()})" if paper and words else name
    title = f"{named}:{words}" if words else named
    entries = {
        f"{name}: {WORDS[entry.default] if isinstance(entry.default, bool | None) else entry.default}": (
            entry.metadata["help"] or _backends(cls)
        )
        for name, entry in options_of(cls).items()
    }
    width = max(map(len, entries))
    lines = []
    for entry, comment in entries.items():
        beside = f"{entry:{width}} # {comment}"
        lines += [beside] if len(beside) <= LINE else [*(f"# {part}" for part in wrap(comment, LINE - 2)), entry]
    return "\n".join([f"# {title}", f"_target_: {cls.__module__}.{cls.__name__}", *lines]) + "\n"


def _backends(cls: type[Mixer]) -> str:
    return " | ".join(cls.backends) if len(cls.backends) == 1 else f"{' | '.join(cls.backends)}; auto: {cls.auto_rule}"


if __name__ == "__main__":
    for name in generated():
        (CONF / f"{name}.yaml").write_text(yaml_of(read(name)[0]), encoding="utf-8")
