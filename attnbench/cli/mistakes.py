"""Errors of Hydra, OmegaConf and our readers as one line: the setting, its value, and what is allowed."""

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from attnbench.cli.help import commands_with
from attnbench.cli.sweeps import SUBMITIT
from attnbench.settings.check import setting_of
from attnbench.settings.errors import did_you_mean, mendable
from attnbench.settings.escape import printable
from attnbench.settings.schema import CONF

EXPECTED = (HydraException, OmegaConfBaseException)
"""Further errors that the user can mend, besides `mendable`."""

PROMPT_AS_IT_IS = "such a prompt goes to standard input, or into a file that prompt_file= names"

EXAMPLES = {
    "attn.layers": "'attn.layers=[gated_deltanet,window]'",
    "attn.path": "attn.path=my_package.layers:Layer",
    "attn.layer": "attn.layer=GatedDeltaProduct",
    "run": "run=outputs/default/RUN",
}
"""Examples of settings that must be given."""


def explain(error: BaseException, overrides: Sequence[str] = ()) -> str:
    """Return one line about an error. The overrides are needed because an error may not know the given value."""
    if isinstance(error, MissingMandatoryValue):
        example = EXAMPLES.get(str(error.full_key))
        return f"{error.full_key}: must be given{f', for example {example}' if example else ''}"
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if group == "hydra/launcher" and name in SUBMITIT:
            return f"{group}={name}: not installed; pip install 'hydra-submitit-launcher==1.2.0'"
        if name and not group:
            known = sorted(path.stem for path in CONF.glob("*.yaml"))
            return (
                f"--config-name {name}: unknown in the folder that was searched; attnbench's own has {', '.join(known)}"
            )
        for word in overrides:
            # A value can be a path.
            if f"{setting_of(word)}/{word.partition('=')[2]}" == error.missing_cfg_file:
                group, _, name = word.lstrip("+~").partition("=")
        known = sorted(error.options or _options(group, str(error)))
        return f"{group}={name}: unknown{did_you_mean(name, known)}; there is {', '.join(known)}"
    text = mendable(error)
    if text is not None:
        return text
    if type(error).__module__.startswith("submitit."):
        # Its second line has the reason.
        return f"{' '.join(str(error).splitlines()[:2])}; its log lies there, and jobs that still run go on"
    unread = _unread(error, overrides)
    if unread is not None:
        return unread
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return (
            f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: no yaml ({getattr(error, 'problem', error)})"
        )
    return (_unknown(error, overrides) if isinstance(error, ConfigCompositionException) else "") or _first_line(error)


def _unknown(error: ConfigCompositionException, overrides: Sequence[str]) -> str:
    """Return one line about a word that names no setting or group; empty for another error."""
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        known = [key for key in map(str, cause.parent_node or ()) if key not in ("_target_", "hydra")]
        key = str(cause.full_key)
        given = next((word for word in overrides if f"{setting_of(word)}.".startswith(f"{key}.")), key)
        if known:
            near = did_you_mean(key.rpartition(".")[2], known)
            others = "" if "." in key else _elsewhere(given, overrides)
            return f"{given}: unknown setting{near}; there is {', '.join(known)}{others}"
        return _first_line(cause)
    group = re.match(r"Could not override '([^'@]+)", str(error))
    if group is None:
        return ""
    given = next((word for word in overrides if setting_of(word) == group[1]), group[1])
    return f"{given}: unknown setting{_elsewhere(given, overrides)}"


def _elsewhere(word: str, overrides: Sequence[str]) -> str:
    """Tell which other commands take this word."""
    train = "attnbench train"
    # Most words are for a training.
    commands = sorted(commands_with(setting_of(word).partition(".")[0]), key=lambda command: command != train)
    if not commands:
        return ""
    has = "has" if len(commands) == 1 else "have"
    of_a_plan = commands[0] == train and any(setting_of(it) == "plan" for it in overrides)
    told = "; in a plan it is a word of its overrides, see docs/protocol.md" if of_a_plan else ""
    return f"; {' and '.join(commands)} {has} it: {commands[0]} {word}{told}"


def _unread(error: BaseException, overrides: Sequence[str]) -> str | None:
    """Return one line about a word that Hydra cannot parse or takes for a sweep."""
    line = _first_line(error)
    if isinstance(error, OverrideParseException):
        word, reason = error.override, "Hydra's grammar has no such value"
    elif line.startswith("Ambiguous value for argument"):
        word, reason = next((word for word in overrides if word in line), line), "commas make several values of it"
    elif "eval=null" in overrides:
        return "eval=null: must be a list of names; eval=[] is none"
    elif line.startswith("Config group override must be a string"):
        groups = {path.name for path in CONF.iterdir() if path.is_dir()}
        words = [word for word in overrides if setting_of(word) in groups and re.search(r"=[^a-z]*$", word)]
        word = words[0] if words else line
        quoted = word.replace("=", '="', 1) + '"'
        return f"{printable(word)}: a number where a name is expected; quotes inside of quotes make it one, '{quoted}'"
    else:
        return None
    quotes = "quotes inside of quotes keep a value whole, -m makes a sweep of several"
    way_out = PROMPT_AS_IT_IS if word.startswith("prompt=") else quotes
    return f"{printable(word)}: {reason}; {way_out}"


def _options(group: str, message: str) -> set[str]:
    folders = re.findall(r"path=file://(.+)", message)
    return {path.stem for folder in folders for path in Path(folder).glob(f"{group}/*.yaml")}


def _first_line(error: BaseException) -> str:
    lines = [printable(line.strip()) for line in str(error).splitlines() if line.strip()]
    setting = getattr(error, "full_key", None)
    line = lines[0] if lines else type(error).__name__
    return f"{setting}: {line}" if setting and setting not in line else line
