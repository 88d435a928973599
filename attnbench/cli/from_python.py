"""attnbench from Python: `compare`, `run` and `load`, with the words of a command line."""

import importlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from attnbench.cli.compose import compose, own_conf, read_words, split_words
from attnbench.cli.reading import read_comparison
from attnbench.comparison import execute
from attnbench.comparison.compare import compare as carry_out
from attnbench.machine.bars import AboveTheBar
from attnbench.report.results import Results
from attnbench.results.identity import sources_of
from attnbench.results.row_files import begin_sitting
from attnbench.settings.check import check_argument, check_name
from attnbench.settings.errors import Interrupted, UserError, did_you_mean
from attnbench.settings.escape import OneLine
from attnbench.settings.registry import TRUSTED, is_own
from attnbench.settings.schema import ComparisonSettings, PlanSettings, RunSettings

Words = str | type[nn.Module] | Sequence[str | type[nn.Module]]
"""Words of an attnbench train command line: "attn=softmax", "attn=linear attn.conv_size=4", or a list of words. A class
of an nn.Module stands for attn=module with its path."""

PLAN_SETTINGS = {"recipe", *(field.name for field in fields(PlanSettings))} - {"name", "variants"}


def compare(
    variants: Mapping[str, Words], *words: str, config_dir: Path | str | None = None, **settings: Any
) -> Results:
    """Compare variants by a plan, as attnbench compare does: train, evaluate, judge, write a report.

        compare({"softmax": "attn=softmax", "mine": MyLayer}, plan="demo", only=["recall"], logger="none")

    Finished runs are not made again, so that the same call resumes, and a further variant is the only one that runs.

    Args:
        variants: name to words, in place of the plan's own variants.
        words: further words of an attnbench compare command line: "plan.seeds=[0,1]".
        config_dir: folder of yamls, as --config-dir; None: conf/ of this folder, if there is one.
        settings: the same as keywords: plan="demo", device="cpu"; the plan's own need no prefix: only=["recall"].

    Raises:
        UserError: a word or a variant is wrong; or runs failed, once all others are done and reported.
        Interrupted: a signal asked to stop; what is finished is kept.
    """
    config_dir = own_conf() if config_dir is None else config_dir
    if not isinstance(variants, Mapping):
        raise UserError(f'variants={variants}: must be a dictionary of names, {{"softmax": "attn=softmax"}}')
    for name in variants:
        check_argument("variants: name", name, str, "a text")
        check_name("variants", name)
    known = {*PLAN_SETTINGS, *(entry.name for entry in fields(ComparisonSettings)), "export", "import"}
    for name in settings.keys() - known:
        if near := did_you_mean(name, PLAN_SETTINGS):
            raise UserError(f"{name}={settings[name]}: unknown setting{near}")
    lists = {name: _listed(given, f"variants: {name}") for name, given in variants.items()}
    named = [_word(f"plan.{name}" if name in PLAN_SETTINGS else name, value) for name, value in settings.items()]
    with _working(*(word for listed in lists.values() for word in listed)):
        known = read_words(_variants_of_plan, [*words, *named], "compare", config_dir)
        chosen = [f"plan.variants.{name}=null" for name in known if name not in lists]
        chosen += [_word(f"plan.variants.{name}", it) for name, it in lists.items()]
        read: Any = read_comparison
        comparison: ComparisonSettings = read_words(read, [*words, *named, *chosen], "compare", config_dir)
        return Results(carry_out(comparison, partial(compose, config_dir=config_dir), prints=False))


def run(words: Words | RunSettings, *more: Words, config_dir: Path | str | None = None, **settings: Any) -> Results:
    """Train one model and evaluate it, as attnbench train does, or find that it was done.

        run("attn=softmax", "experiment=demo", logger="none")

    Args:
        words: of an attnbench train command line; or the settings that `compose` made of them, alone.
        more: further words.
        config_dir: folder of yamls, as --config-dir; None: conf/ of this folder, if there is one.
        settings: the same as keywords: seq_len=256, device="cpu".

    Raises:
        UserError: a word is wrong, a corpus unreadable, a training diverged, a checkpoint is damaged.
        Interrupted: a signal asked to stop; the same call resumes.
    """
    given = [] if isinstance(words, RunSettings) else [word for it in (words, *more) for word in _listed(it)]
    given += [_word(name, value) for name, value in settings.items()]
    with _working(*given):
        if isinstance(words, RunSettings):
            if given or more:
                raise UserError("run: settings that were composed take no further words; give them to compose")
            return Results(execute.run(words))
        config_dir = own_conf() if config_dir is None else config_dir
        return Results(execute.run(compose(given, config_dir=config_dir)))


def load(folder: Path | str) -> Results:
    """Return the results of an experiment of outputs/, of a run, or of a folder with a results.csv or results.csv.gz.

    Raises:
        UserError: no such folder, no results, or an altered file.
    """
    check_argument("folder", folder, Path | str, "the folder of an experiment or of a run")
    results = Results(Path(folder))
    # Read now, so that an error is here.
    _ = results.inputs
    return results


def _variants_of_plan(config: Any, _: Any) -> list[str]:
    return [str(name) for name in config.plan.variants]


def _listed(words: Words, where: str = "words") -> list[str]:
    """Return words one by one, with a class as the words that name it; messages begin with `where`."""
    if isinstance(words, str):
        return split_words(words)
    listed = words if isinstance(words, Sequence) else [words]
    return [word for it in listed for word in ((it,) if isinstance(it, str) else _words_of_class(it, where))]


def _words_of_class(cls: Any, where: str) -> tuple[str, str]:
    """Training processes import the class by these words."""
    if isinstance(cls, nn.Module):
        name = type(cls).__name__
        raise UserError(
            f"{where}: {name} is an instance, and every model builds its own; give the class, {name}, and arguments of "
            f"its constructor as words: [{name}, 'attn.options.num_heads=4']"
        )
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise UserError(f'{where}: {cls!r} must be words, "attn=linear", or a class of an nn.Module')
    name, module = cls.__qualname__, cls.__module__
    if module == "__main__" or "." in name:
        where = "inside of another definition" if "." in name else "in this notebook or program"
        raise UserError(
            f"{name}: is defined {where}, where training processes cannot import it; write it into a file, my_layer.py "
            f"(in a notebook by %%writefile my_layer.py), and import it: from my_layer import {cls.__name__}"
        )
    return "attn=module", f"attn.path={module}:{name}"


def _word(name: str, value: Any) -> str:
    return f"{name}={_text(value)}"


def _text(value: Any) -> str:
    """Write a value as Hydra reads it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    text = str(value)
    is_plain = re.fullmatch(r"[\w./+:-]*", text)
    if is_plain:
        return text
    # Backslashes are doubled before a quote alone.
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + "\\'" * bool(found[2]), text) + "'"


@contextmanager
def _working(*words: str) -> Iterator[None]:
    """Show log lines inside, as a command does, and find modules of the working directory."""
    begin_sitting()
    logger, before = logging.getLogger("attnbench"), logging.getLogger("attnbench").level
    handler = AboveTheBar()
    handler.setFormatter(OneLine("%(message)s"))
    folder = os.getcwd()
    is_new = folder not in sys.path
    sys.path += [folder] if is_new else []
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        importlib.invalidate_caches()
        _import_edited(words)
        yield
    except Interrupted as error:
        # A new one, without the tens of lines of where the signal came.
        raise Interrupted(str(error), error.exit_code) from None
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        if is_new:
            sys.path.remove(folder)


IMPORTED: dict[str, tuple[ModuleType, dict[str, str]]] = {}
"""Modules that an interactive session named, and their sources when they were imported for it."""


def _import_edited(words: Sequence[str]) -> None:
    """Import the modules of named classes again, in an interactive session, unless they are as their files are now:
    training processes import the files, and the identity of a result is that of the files."""
    if not hasattr(sys, "ps1"):
        return
    named = {path.replace(":", ".") for word in words for path in re.findall(r"attn\.path=([\w.:]+)", word)}
    for name in {target.rpartition(".")[0] for target in TRUSTED | named}:
        module = sys.modules.get(name)
        if module is None or is_own(f"{name}.") or "site-packages" in Path(module.__file__ or "").parts:
            continue
        if IMPORTED.get(name) == (module, sources_of(module)):
            continue
        sources = sources_of(module)
        for part in sources:
            sys.modules.pop(part, None)
        # What reads the settings names the error of an import.
        with suppress(Exception):
            IMPORTED[name] = importlib.import_module(name), sources
