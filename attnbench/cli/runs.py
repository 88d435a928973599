"""Runs from a command line: which are listed, compared or removed."""

from collections.abc import Sequence
from typing import Any

from attnbench.cli.findings import named_words
from attnbench.cli.plain import plain
from attnbench.settings.check import check_outputs_dir, read
from attnbench.settings.runs import RunsSettings, check_runs


def names_as_texts(words: Sequence[str]) -> list[str]:
    """Return a command line whose plain words are experiments, and whose names of runs and experiments are texts.

    `demo`, and `experiment=demo`, which Hydra takes for a choice among the yamls of experiment/, become
    `experiments=['demo']`; of a hash that is a number, compare=[1234,1e10], every digit stays.
    """
    words = [f"experiments={word.partition('=')[2]}" if word.startswith("experiment=") else word for word in words]
    return [_as_texts(word) for word in named_words(words, "experiments")]


def _as_texts(word: str) -> str:
    name, _, value = word.partition("=")
    if name not in ("experiments", "compare") or value in ("", "null") or "'" in value or '"' in value:
        return word
    texts = ",".join(f"'{text.strip()}'" for text in value.removeprefix("[").removesuffix("]").split(","))
    return f"{name}=[{texts}]"


def read_runs(config: Any, hydra_config: Any) -> RunsSettings:
    """Check the configuration of attnbench runs.

    Raises:
        UserError: as read_settings.
    """
    settings = read(RunsSettings, plain(config, hydra_config))
    check_outputs_dir(settings.outputs_dir)
    check_runs(settings)
    return settings
