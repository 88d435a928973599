"""A report on this machine: what it has, which backend `auto` chooses on it and why, whether each backend that runs is
right, and whether mixers from outside attnbench keep the contract."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from attnbench.correctness.backends import (
    LENGTH_IN_PIECES,
    Choice,
    Finding,
    build_mixer,
    choice,
    examine,
    examine_pieces,
    examine_shapes,
    first_step_seconds,
    guards_lifted,
    with_backend,
)
from attnbench.correctness.operators import OPERATORS, Check, check_operators, have_kernels
from attnbench.machine.device import KERNEL_LIBRARIES, environment, resolve_device, resolve_precision
from attnbench.machine.locks import device_lock
from attnbench.mixers.base import Mixer
from attnbench.mixers.contract import PROMISES, breach
from attnbench.mixers.definition import (
    ALLOWED,
    LENGTHS,
    OTHER_SHAPES,
    PART_FACTOR,
    TOLERANCES,
    USUAL,
    Deviation,
    worst,
)
from attnbench.results.files import replace_file
from attnbench.results.folder import ROOT
from attnbench.results.rows import Identity, Measurement, ResultRow, write_csv
from attnbench.settings.errors import UserError, one_line
from attnbench.settings.escaping import printable
from attnbench.settings.registry import is_own, resolve
from attnbench.settings.schema import DoctorSettings, MixerSettings
from attnbench.training.prepare import measured_by

WIDTH = 79
STYLES = {"wrong": "bold red", "broken": "bold red", "refused": "dim"}
ERRORS = ("output", "input_gradient", "position", "parameter_gradient")
"""What is compared, as fields of a Deviation are called."""


class Spoken:
    """Says lines on standard output, within 80 columns, and keeps them."""

    def __init__(self) -> None:
        self.console, self.lines = Console(), []

    def __call__(self, text: str = "", *, indent: int = 0, style: str | None = None) -> None:
        """One paragraph; its lines after the first are indented by two more."""
        first, later = " " * indent, " " * (indent + 2)
        wrapped = textwrap.wrap(printable(text), WIDTH, initial_indent=first, subsequent_indent=later) or [""]
        for line in wrapped:
            self.lines.append(line)
            self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def diagnose(settings: DoctorSettings, mixers: Sequence[MixerSettings]) -> Path:
    """Says all of it as it comes, and leaves it in a folder: doctor.txt, results.csv, environment.json.

    Args:
        mixers: those to look at, as their yamls have them.

    Raises:
        UserError: a backend that `auto` chooses here is wrong or cannot train, a mixer from outside attnbench breaks
            its contract, or an operator that all mixers share is wrong.
    """
    device, say = resolve_device(settings.device), Spoken()
    stamp = environment(device, ROOT)
    _say_machine(say, stamp)
    # Before the guards are lifted, which is no part of what auto does here.
    precision = resolve_precision("auto", device.type)
    choices = {mixer.name: choice(mixer, precision, device) for mixer in mixers}
    _say_choices(say, choices, precision)
    with device_lock(device, shared=False):
        _say_head(say, settings.lift_guards)
        findings = []
        with guards_lifted() if settings.lift_guards else nullcontext():
            for finding in (finding for mixer in mixers for finding in examine(mixer, device)):
                _say_finding(say, finding)
                findings.append(finding)
        findings += _other_shapes(say, mixers, device)
        checks = _operators(say, device) + _pieces(say, mixers, device)
        promises = _contracts(say, [mixer for mixer in mixers if not is_own(mixer.target)], device)
        resolved = [with_backend(mixer, name) for mixer in mixers if (name := choices[mixer.name].backend)]
        steps = list(zip(resolved, _first_steps(say, resolved, device), strict=True))
    wrong = [finding for finding in findings if finding.verdict == "wrong"]
    problems = [
        *_advice([finding for finding in wrong if finding.is_chosen], findings),
        *(f"{check.name} in {check.precision}: wrong" for _, check in checks if check.is_chosen and not check.is_right),
        *(f"attn={mixer.name} breaks a promise: {own.reason}" for mixer, own in promises if own.status == "failed"),
        *(
            f"attn={mixer.name} backend={mixer.options['backend']}: its first training step failed: {step.reason}"
            for mixer, step in steps
            if step.status != "ok"
        ),
    ]
    _say_end(say, wrong, [check for _, check in checks if not check.is_right])
    if not problems:
        say("What auto chooses is right.")
    rows = [_row(finding.mixer, finding.precision, stamp, own) for finding in findings for own in _errors(finding)]
    rows += [_row(mixer, check.precision, stamp, own) for mixer, check in checks for own in _check_errors(check)]
    rows += [_row(mixer, "float32", stamp, own) for mixer, own in promises]
    rows += [_row(mixer, precision, stamp, step) for mixer, step in steps]
    folder = _leave(Path(settings.outputs_dir) / "doctor", say, rows, stamp)
    if problems:
        raise UserError("; ".join(problems))
    return folder


def _leave(folder: Path, say: Spoken, rows: Sequence[ResultRow], stamp: dict[str, Any]) -> Path:
    write_csv(rows, folder / "results.csv")
    replace_file(folder / "environment.json", json.dumps(stamp, indent=2) + "\n")
    replace_file(folder / "doctor.txt", "\n".join(say.lines) + "\n")
    print(f"  {folder}/")
    return folder


def _say_machine(say: Spoken, stamp: dict[str, Any]) -> None:
    say("This machine", style="bold")
    for name, value in stamp.items():
        unknown = "not installed" if name in KERNEL_LIBRARIES else "unknown"
        say(f"{name:23}{unknown if value is None else value}", indent=2)


def _say_choices(say: Spoken, choices: dict[str, Choice], precision: str) -> None:
    say()
    say(f"What backend=auto is here, in {precision}, and why", style="bold")
    for name, (backend, reason) in choices.items():
        say(f"{name:15} {backend or 'nothing':11} {reason}", indent=2)


def _say_head(say: Spoken, is_lifted: bool) -> None:
    say()
    say("Backends against the mixer's definition in float64", style="bold")
    allowed = [f"{TOLERANCES[name]:g} and {PART_FACTOR * TOLERANCES[name]:g} in {name}" for name in TOLERANCES]
    say(
        "Relative errors |a-b|/|b|, the worst of lengths "
        f"{', '.join(map(str, LENGTHS))}: of the output, of the input's gradient, of either at a single position, of "
        f"the parameters' gradients. Allowed for the first two and the others: {'; '.join(allowed)}. * is what auto "
        "chooses."
    )
    if is_lifted:
        say("lift_guards=true: fla's gated kernels run although attnbench and fla refuse them here.", style="bold red")
    say(
        f"{'mixer':15} {'backend':11} {'precision':9} {'':7}{'output':>8}{'input':>8}{'positn':>8}{'params':>8}",
        indent=2,
    )


def _say_finding(say: Spoken, finding: Finding) -> None:
    name = printable(finding.backend) + "*" * finding.is_chosen
    columns = f"{finding.mixer.name:15} {name:11} {finding.precision:9} {finding.verdict:7}"
    if finding.deviations:
        largest = [worst(getattr(own, error) for own in finding.deviations.values()) for error in ERRORS]
        columns += "".join(f"{value:8.1e}" for value in largest)
    say(columns, indent=2, style=STYLES.get(finding.verdict))
    if finding.refusal or finding.failure:
        say(finding.refusal or finding.failure, indent=6, style=STYLES.get(finding.verdict))
    for length in finding.wrong_lengths:
        own = finding.deviations[length]
        errors = ", ".join(f"{getattr(own, error):.1e}" for error in ERRORS)
        say(f"at length {length}: {errors} of {own.parameter}", indent=6, style=STYLES["wrong"])


def _other_shapes(say: Spoken, mixers: Sequence[MixerSettings], device: torch.device) -> list[Finding]:
    say()
    say("What auto chooses, at other shapes", style="bold")
    findings = []
    for shape in OTHER_SHAPES:
        title = f"{shape.name}; lengths {', '.join(map(str, shape.lengths))}"
        if shape.slack > 1:
            title += f"; {shape.slack:.2g} times as much allowed"
        for finding in (own for mixer in mixers for own in examine_shapes(mixer, device, [shape])):
            if title:
                say(title, indent=2)
            title = ""
            _say_finding(say, finding)
            findings.append(finding)
    return findings


def _operators(say: Spoken, device: torch.device) -> list[tuple[MixerSettings, Check]]:
    """A line for each, and with it the settings that its rows are of."""
    say()
    say("Operators that no setting chooses, and those of decoding, against float64", style="bold")
    if not have_kernels(device):
        names = ", ".join(name for name in OPERATORS if not name.startswith("the same"))
        say(f"Torch's own form is all there is on this device, and no kernel to hold against it: {names}.", indent=2)
        return []
    _say_allowed(say)
    checks = []
    for check in check_operators(device):
        _say_check(say, check)
        options = {"backend": "triton"}
        checks.append((MixerSettings(name=check.name, target="attnbench.kernels", options=options), check))
    return checks


def _pieces(say: Spoken, mixers: Sequence[MixerSettings], device: torch.device) -> list[tuple[MixerSettings, Check]]:
    say()
    say(f"{LENGTH_IN_PIECES} positions, read in two pieces and then decoded, against float64", style="bold")
    _say_allowed(say)
    checks = []
    for mixer in mixers:
        for own, check in examine_pieces(mixer, device):
            _say_check(say, check)
            checks.append((own, check))
    return checks


def _say_allowed(say: Spoken) -> None:
    allowed = ", ".join(f"{tolerance:g} in {name}" for name, tolerance in ALLOWED.items())
    say(f"Relative errors of output and, where it has one, gradient. Allowed: {allowed}.", indent=2)


def _say_check(say: Spoken, check: Check) -> None:
    verdict = "right" if check.is_right else "wrong"
    name = printable(check.name) + "*" * check.is_chosen
    errors = "".join(f"{error:8.1e}" for error in (check.output, check.gradient) if error is not None)
    say(f"{name:38} {check.precision:9} {verdict:7}{errors}", indent=2, style=STYLES.get(verdict))
    if check.failure:
        say(check.failure, indent=6, style=STYLES[verdict])


def _check_errors(check: Check) -> Iterator[Measurement]:
    """A row an error, with the name of what was checked; where nothing ran, one that says why."""
    settings = {"is_chosen": check.is_chosen, "checked": check.name}
    for metric, value in (("output_error", check.output), ("gradient_error", check.gradient)):
        if value is not None:
            yield _number(metric, value, settings)
    if check.failure:
        lost: dict[str, Any] = {"value": None, "status": "failed", "reason": check.failure}
        yield Measurement(metric="output_error", unit="", settings=settings, **lost)


def _contracts(
    say: Spoken, mixers: Sequence[MixerSettings], device: torch.device
) -> list[tuple[MixerSettings, Measurement]]:
    """A line and a row for each promise of each mixer, with the backend that `auto` is in float32."""
    found: list[tuple[MixerSettings, Measurement]] = []
    for mixer in mixers:
        say()
        say(f"The contract that {mixer.name}, from outside attnbench, has to keep; in float32", style="bold")
        backend, reason = choice(mixer, "float32", device)
        if backend is None:
            say(f"Not looked at: {reason}", indent=2, style=STYLES["refused"])
            continue
        own = with_backend(mixer, backend)
        only_trains = backend in resolve(mixer.target, Mixer).trains_only
        build = partial(build_mixer, own, device)
        for promise in (one for one in PROMISES if not (one.needs_state and only_trains)):
            broken = breach(promise, build, USUAL)
            verdict = "broken" if broken else "kept"
            say(f"{promise.words:38} {verdict}", indent=2, style=STYLES.get(verdict))
            if broken:
                say(broken, indent=6, style=STYLES[verdict])
            found.append((own, _promise_row(promise.words, broken)))
    return found


def _promise_row(promise: str, broken: str) -> Measurement:
    settings = {"promise": promise}
    if not broken:
        return Measurement(metric="promise_kept", value=1, unit="", settings=settings)
    lost: dict[str, Any] = {"value": None, "status": "failed", "reason": f"{promise}: {broken}"}
    return Measurement(metric="promise_kept", unit="", settings=settings, **lost)


def _first_steps(say: Spoken, mixers: Sequence[MixerSettings], device: torch.device) -> list[Measurement]:
    say()
    say("First step of a small training, with what the compilers have kept", style="bold")
    steps = []
    for mixer in mixers:
        columns = f"{mixer.name:15} {mixer.options['backend']:11}"
        # As in an examination: what it raises is told, and the other mixers still have their turn.
        try:
            seconds = first_step_seconds(mixer, device)
        except Exception as error:
            say(f"{columns} {one_line(error)}", indent=2, style=STYLES["wrong"])
            failure: dict[str, Any] = {"value": None, "status": "failed", "reason": one_line(error)}
            steps.append(Measurement(metric="first_step_seconds", unit="s", **failure))
        else:
            say(f"{columns} {seconds:8.2f} s", indent=2)
            steps.append(Measurement(metric="first_step_seconds", value=seconds, unit="s", num_samples=1))
    say()
    return steps


def _say_end(say: Spoken, wrong: Sequence[Finding], wrong_checks: Sequence[Check]) -> None:
    for finding in wrong:
        chosen = "auto chooses it" if finding.is_chosen else "auto does not choose it"
        words = (
            f"warning: {finding.mixer.name} is wrong with backend={finding.backend} in {finding.precision}"
            f"{_at(finding)}; {chosen}."
        )
        say(words, style=STYLES["wrong"])
    for check in wrong_checks:
        chosen = "" if check.is_chosen else "; auto does not choose it"
        say(f"warning: {check.name} is wrong in {check.precision}{chosen}.", style=STYLES["wrong"])


def _advice(wrong: Sequence[Finding], findings: Sequence[Finding]) -> list[str]:
    """What is wrong, each by name, and what is right in its place."""
    parts = []
    for finding in wrong:
        rest = [
            f"attn.backend={other.backend}"
            for other in findings
            if other.mixer.name == finding.mixer.name
            and other.precision == finding.precision
            and other.shape == finding.shape
            and other.verdict == "right"
        ]
        way_out = f"{' or '.join(rest)} is right" if rest else "no other backend of it is right here"
        wrong_one = f"attn={finding.mixer.name} backend={finding.backend} in {finding.precision}{_at(finding)}: wrong"
        parts.append(wrong_one if finding.shape.name else f"{wrong_one}; {way_out}")
    return parts


def _at(finding: Finding) -> str:
    return f" at {finding.shape.name}" if finding.shape.name else ""


def _errors(finding: Finding) -> Iterator[Measurement]:
    """A row an error and length; where nothing ran, a row an error that says why."""
    chosen = {"is_chosen": finding.is_chosen} | ({"shape": finding.shape.name} if finding.shape.name else {})
    status = "unsupported" if finding.refusal else "failed"
    if finding.refusal or finding.failure:
        for error in ERRORS:
            yield Measurement(
                metric=f"{error}_error",
                value=None,
                unit="",
                settings=chosen,
                status=status,
                reason=finding.refusal or finding.failure,
            )
    for length, deviation in finding.deviations.items():
        for error in ERRORS:
            yield _error_row(deviation, error, chosen | {"sequence_length": length})


def _error_row(deviation: Deviation, error: str, settings: dict[str, Any]) -> Measurement:
    value = getattr(deviation, error)
    if error == "parameter_gradient":
        settings = settings | {"parameter": deviation.parameter}
    return _number(f"{error}_error", value, settings)


def _number(metric: str, value: float, settings: dict[str, Any]) -> Measurement:
    is_finite = value < float("inf")
    return Measurement(
        metric=metric,
        value=value if is_finite else None,
        unit="",
        settings=settings,
        status="ok" if is_finite else "failed",
        reason="" if is_finite else f"an error of {value}",
    )


def _row(mixer: MixerSettings, precision: str, stamp: dict[str, Any], measurement: Measurement) -> ResultRow:
    identity = Identity(
        experiment="doctor",
        run="doctor",
        mixer=mixer.target.rpartition(".")[2],
        variant=mixer.name,
        backend=mixer.options["backend"],
        model="one layer" if measurement.metric != "first_step_seconds" else "small",
        parameters=None,
        seq_len=None,
        evaluation="doctor",
        seed=0,
        precision=precision,
        corpus=None,
        config_hash="",
        **measured_by(stamp),
    )
    return ResultRow(identity=identity, measurement=measurement)
