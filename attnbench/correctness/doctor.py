"""Page of the doctor: the machine, which backend `auto` chooses and why, and a line for every check."""

import itertools
import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from attnbench.correctness.checks import (
    CASES,
    LENGTH_IN_PIECES,
    Check,
    build_mixer,
    case_checks,
    decoding_checks,
    operator_checks,
    promise_checks,
    resolved,
    training_checks,
)
from attnbench.correctness.operators import OPERATORS
from attnbench.correctness.running import run_all
from attnbench.machine.device import resolve_device
from attnbench.machine.environment import KERNEL_LIBRARIES, environment
from attnbench.machine.locks import device_lock
from attnbench.machine.precision import resolve_precision
from attnbench.mixers.base import Mixer, ReturnError, checked_return
from attnbench.mixers.causality import input_of
from attnbench.mixers.definition import LENGTHS, PART_FACTOR, TOLERANCES, USUAL, limits
from attnbench.mixers.relative_errors import ROUNDING_FACTOR, worst
from attnbench.results.files import replace_file
from attnbench.results.folder import ROOT
from attnbench.settings.errors import UserError, line_beside, one_line
from attnbench.settings.escape import printable
from attnbench.settings.registry import class_named, is_own, resolve
from attnbench.settings.schema import DoctorSettings, MixerSettings

PARTS = tuple(limits(1.0))
"""Errors of a backend, by column of the page."""
WIDTH = 79
RETURN_LENGTH = 8
"""Length of the input for the first look at an output's type and shape."""
STYLES = {"wrong": "bold red", "broken": "bold red", "refused": "dim"}


class PageSection(NamedTuple):
    """Paragraphs, as arguments of a Printer, and the checks below them."""

    paragraphs: list[dict[str, Any]]
    checks: list[Check]


class Printer:
    """Print paragraphs within 80 columns, and keep their lines."""

    def __init__(self) -> None:
        self.console, self.lines = Console(), []

    def __call__(self, text: str = "", *, indent: int = 0, style: str | None = None) -> None:
        """Print one paragraph with a hanging indent of two."""
        first, later = " " * indent, " " * (indent + 2)
        wrapped = textwrap.wrap(printable(text), WIDTH, initial_indent=first, subsequent_indent=later) or [""]
        for line in wrapped:
            self.lines.append(line)
            self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def diagnose(
    settings: DoctorSettings, compose_mixers: Callable[[Sequence[str] | None], Sequence[MixerSettings]]
) -> Path:
    """Print the page as it comes, and leave doctor.txt and environment.json in a folder."""
    mixers = compose_mixers(settings.mixers)
    device, say = resolve_device(settings.device), Printer()
    stamp, precision = environment(device, ROOT), resolve_precision("auto", device.type)
    for mixer in mixers:
        _require_built(mixer, device)
    _say_machine(say, stamp)
    _say_choices(say, mixers, precision, device)
    checks = []
    with device_lock(device, shared=False):
        sections = list(_sections(settings, mixers, device))
        # So that no worker outlives an interruption.
        with closing(run_all([check for section in sections for check in section.checks], device)) as done:
            for section in sections:
                for paragraph in section.paragraphs:
                    say(**paragraph)
                for check in itertools.islice(done, len(section.checks)):
                    _say_check(say, check)
                    checks.append(check)
        say()
    _say_wrong(say, checks)
    # Once: a line of a mixer can fail many checks.
    for where, failure in {check.where: check.failure for check in checks if check.where}.items():
        say(f"failed at {where}: {failure}", style=STYLES["wrong"])
    problems = list(_problems(checks))
    if not problems:
        say("What auto chooses is right.")
    folder = _save(Path(settings.outputs_dir) / "doctor", say, stamp)
    if problems:
        raise UserError(f"{'; '.join(problems)}; see above")
    return folder


def _require_built(settings: MixerSettings, device: torch.device) -> None:
    """Raise UserError for a mixer from outside attnbench that cannot be built or does not return (y, state)."""
    if is_own(class_named(settings)):
        return
    resolve(settings.target, Mixer)
    try:
        mixer = resolved(settings, "auto", "float32", device)
    except UserError:
        # The page says why it does not run here.
        return
    try:
        built = build_mixer(mixer, device)
    except UserError:
        raise
    except Exception as error:
        where = line_beside(error, class_named(settings).rpartition(".")[0])
        raise UserError(f"attn={settings.name}: {one_line(error)}{where and f', at {where}'}") from error
    if built.defines_itself:
        # Its adapter checks what the layer returns.
        return
    x_BTD = input_of(built, RETURN_LENGTH, USUAL.model.dim)
    try:
        checked_return(built(x_BTD), x_BTD)
    except ReturnError as error:
        raise UserError(f"attn={settings.name}: {error}") from error
    except Exception:
        # The page reports errors of the forward pass.
        return


def _save(folder: Path, say: Printer, stamp: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "environment.json", json.dumps(stamp, indent=2) + "\n")
    replace_file(folder / "doctor.txt", "\n".join(say.lines) + "\n")
    print(f"  {folder}/")
    return folder


def _say_machine(say: Printer, stamp: dict[str, Any]) -> None:
    say("This machine", style="bold")
    for name, value in stamp.items():
        unknown = "not installed" if name in KERNEL_LIBRARIES else "unknown"
        say(f"{name:23}{unknown if value is None else value}", indent=2)


def _say_choices(say: Printer, mixers: Sequence[MixerSettings], precision: str, device: torch.device) -> None:
    say()
    say(f"What backend=auto is here, in {precision}, and why", style="bold")
    for mixer in mixers:
        try:
            backend = resolved(mixer, "auto", precision, device).options["backend"]
            reason = resolve(mixer.target, Mixer).auto_rule
        except UserError as refusal:
            backend, reason = "nothing", str(refusal)
        say(f"{mixer.name:15} {backend:11} {reason}", indent=2)


def _sections(settings: DoctorSettings, mixers: Sequence[MixerSettings], device: torch.device) -> Iterator[PageSection]:
    for mixer in mixers:
        if not is_own(class_named(mixer)):
            title = f"The contract that {mixer.name}, from outside attnbench, has to keep; in float32"
            try:
                yield PageSection(_title(title), list(promise_checks(mixer, device)))
            except UserError as refusal:
                reason = {"text": f"Not looked at: {refusal}", "indent": 2, "style": STYLES["refused"]}
                yield PageSection([*_title(title), reason], [])
    checks = [check for mixer in mixers for check in training_checks(mixer, device)]
    if settings.quick:
        yield PageSection(_head(), [check for check in checks if check.is_chosen and check.precision == "float32"])
    else:
        yield PageSection(_head(), checks)
        yield from _further_sections(mixers, device)


def _further_sections(mixers: Sequence[MixerSettings], device: torch.device) -> Iterator[PageSection]:
    yield PageSection(_title("What auto chooses, at other shapes"), [])
    for case in CASES:
        checks = [check for mixer in mixers for check in case_checks(mixer, case, device)]
        title = f"{case.name}; lengths {', '.join(map(str, case.lengths))}"
        if case.slack > 1:
            title += f"; {case.slack:.2g} times as much allowed"
        yield PageSection([{"text": title, "indent": 2}] if checks else [], checks)
    checks = list(operator_checks(device))
    names = ", ".join(name for name in OPERATORS if not name.startswith("the same"))
    torch_alone = f"Torch's own form is all there is on this device, and no kernel to hold against it: {names}."
    allowed = ", ".join(f"{TOLERANCES[name]:g} in {name}" for name in ("float32", "bfloat16", "tf32"))
    errors = f"Relative errors of output and, where it has one, gradient. Allowed: {allowed}."
    title = "Operators that no setting chooses, and those of decoding, against float64"
    yield PageSection(_title(title, errors if checks else torch_alone), checks)
    title = f"{LENGTH_IN_PIECES} positions, read in two pieces and then decoded, against float64"
    yield PageSection(_title(title, errors), [check for mixer in mixers for check in decoding_checks(mixer, device)])


def _title(text: str, *notes: str) -> list[dict[str, Any]]:
    return [{}, {"text": text, "style": "bold"}, *({"text": note, "indent": 2} for note in notes)]


def _head() -> list[dict[str, Any]]:
    allowed = "; ".join(
        f"{TOLERANCES[name]:g} and {PART_FACTOR * TOLERANCES[name]:g} in {name}" for name in ("float32", "bfloat16")
    )
    note = (
        "Relative errors |a-b|/|b|, the worst of lengths "
        f"{', '.join(map(str, LENGTHS))}: of the output, of the input's gradient, of either at a single position, of "
        f"the parameters' gradients. Allowed for the first two and the others: {allowed}. Where there is more, an "
        f"error of up to {ROUNDING_FACTOR:g} times what the same rounding does to the definition is left out, and the "
        "length is named. * is what auto chooses."
    )
    columns = f"{'mixer':15} {'backend':11} {'precision':9} {'':7}{'output':>8}{'input':>8}{'positn':>8}{'params':>8}"
    return [
        *_title("Backends against the mixer's definition in float64"),
        {"text": note},
        {"text": columns, "indent": 2},
    ]


def _say_check(say: Printer, check: Check) -> None:
    star, verdict = "*" * check.is_chosen, _verdict(check)
    reason = check.refusal or check.failure
    if check.kind == "training":
        columns = f"{check.name:15} {printable(check.backend) + star:11} {check.precision:9} {verdict:7}"
        parts = [[error.value for error in check.errors if error.metric == f"{part}_error"] for part in PARTS]
        columns += "".join(f"{worst(values):8.1e}" for values in parts if values)
    elif check.kind == "promise":
        columns = f"{check.name:38} {verdict}"
    else:
        columns = f"{printable(check.name) + star:38} {check.precision:9} {verdict:7}"
        columns += "".join(f"{error.value:8.1e}" for error in check.errors)
    say(columns, indent=2, style=STYLES.get(verdict))
    if reason:
        say(reason, indent=6, style=STYLES.get(verdict))
    lengths = dict.fromkeys(
        error.settings["sequence_length"] for error in check.errors if error.settings.get("beyond_rounding")
    )
    if lengths:
        say(f"without what rounding does to the definition, at {', '.join(map(str, lengths))}", indent=6)
    for length, errors in check.wrong_lengths().items() if check.kind == "training" else ():
        values = ", ".join(f"{error.value:.1e}" for error in errors)
        say(f"at length {length}: {values} of {errors[-1].settings['parameter']}", indent=6, style=STYLES["wrong"])


def _verdict(check: Check) -> str:
    if check.refusal:
        return "refused"
    if check.kind == "promise":
        return "broken" if check.is_wrong else "kept"
    return "wrong" if check.is_wrong else "right"


def _say_wrong(say: Printer, checks: Sequence[Check]) -> None:
    for check in checks:
        if not check.is_wrong or check.kind not in ("training", "operator", "decoding"):
            continue
        if check.kind == "training":
            chosen = f"auto chooses it{_right_instead(check, checks)}" if check.is_chosen else "auto does not choose it"
            words = f"{check.name} is wrong with backend={check.backend} in {check.precision}{_at(check)}; {chosen}."
        else:
            chosen = "" if check.is_chosen else "; auto does not choose it"
            words = f"{check.name} is wrong in {check.precision}{chosen}."
        say(f"warning: {words}", style=STYLES["wrong"])


def _at(check: Check) -> str:
    return f" at {check.case.name}" if check.case.name else ""


def _right_instead(wrong: Check, checks: Sequence[Check]) -> str:
    if wrong.case.name:
        return ""
    right = [
        f"attn.backend={check.backend}"
        for check in checks
        if (check.kind, check.name, check.precision, check.case)
        == ("training", wrong.name, wrong.precision, wrong.case)
        and _verdict(check) == "right"
    ]
    return f"; {' or '.join(right) + ' is right' if right else 'no other backend of it is right here'}"


def _problems(checks: Sequence[Check]) -> Iterator[str]:
    wrong = [check for check in checks if check.is_chosen and check.is_wrong]
    operators = dict.fromkeys(check.name for check in wrong if check.kind == "operator")
    for name in dict.fromkeys(check.mixer.name for check in wrong if check.kind != "operator"):
        broken = [check for check in wrong if check.mixer.name == name and check.kind != "operator"]
        num_broken = sum(check.kind == "promise" for check in broken)
        num_promises = sum(check.kind == "promise" and check.mixer.name == name for check in checks)
        backends = dict.fromkeys(check.backend for check in broken if check.kind in ("training", "decoding"))
        words = [f"breaks {num_broken} of {num_promises} promises"] if num_broken else []
        words += [f"is wrong with {' and '.join(backends)}"] if backends else []
        yield f"attn={name} {' and '.join(words)}"
    if operators:
        yield f"wrong operators: {', '.join(operators)}"
