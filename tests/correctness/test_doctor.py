"""The doctor: right kernels are right, each broken one is wrong, and the exit code tells of what auto chooses."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import broken_mixers
import outside_mixers
import pytest
import torch
from scripts_here import run_here
from small import MIXERS, from_yaml

from attnbench.correctness import checks, doctor, running
from attnbench.correctness.checks import CASES, Check, build_mixer, case_checks, training_checks, with_backend
from attnbench.correctness.doctor import diagnose
from attnbench.correctness.running import run, run_all
from attnbench.mixers.contract import PROMISES
from attnbench.mixers.definition import (
    LENGTHS,
    TOLERANCES,
    Case,
    Deviation,
    by_backend,
    by_definition,
    compare,
    deviation,
)
from attnbench.mixers.relative_errors import parameter_error, relative_error, worst
from attnbench.mixers.softmax import Softmax
from attnbench.ops.delta import delta_rule
from attnbench.ops.diagonal import diagonal_decay
from attnbench.ops.scalar import scalar_decay
from attnbench.settings.errors import UserError
from attnbench.settings.registry import trust
from attnbench.settings.schema import DoctorSettings, MixerSettings

CPU = torch.device("cpu")


def outside(target: str) -> MixerSettings:
    trust([target])
    return MixerSettings(name="mine", target=target, options={"backend": "auto"})


def examine(settings: MixerSettings, lengths=LENGTHS, precisions=("float32", "bfloat16")) -> list[checks.Check]:
    found = [check for check in training_checks(settings, CPU, lengths) if not check.refusal]
    found = [check for check in found if check.precision in precisions]
    expected = {}
    for check in found:
        run(check, CPU, expected)
    return found


@pytest.fixture
def diagnosed(tmp_path, capsys, monkeypatch):
    """A function that runs the doctor at the usual case alone; gives its page, its checks and its error, if any."""

    def diagnosed(mixers, cases=(), *, quick=False):
        done = []

        def kept(checks, device, run_all=run_all):
            for check in run_all(checks, device):
                done.append(check)
                yield check

        monkeypatch.setattr(doctor, "CASES", cases)
        monkeypatch.setattr(doctor, "run_all", kept)
        names = [mixer.name for mixer in mixers]
        try:
            diagnose(
                DoctorSettings(mixers=names, device="cpu", outputs_dir=str(tmp_path), quick=quick), lambda _: mixers
            )
        except UserError as error:
            message = str(error)
        else:
            message = None
        said = capsys.readouterr().out
        assert ("What auto chooses is right." in said) == (message is None)
        return said, done, message

    return diagnosed


def test_what_auto_chooses_is_right_here_and_the_page_says_so(tmp_path, diagnosed):
    said, done, message = diagnosed([from_yaml("gated_deltanet")], cases=CASES)
    assert message is None
    kept = (tmp_path / "doctor" / "doctor.txt").read_text()
    assert kept in said
    assert all(len(line) < 80 for line in kept.splitlines())
    assert not any(control in said for control in ("\x1b", "\r"))
    assert torch.__version__ in kept
    ran = [check for check in done if check.backend == "torch" and not check.refusal]
    usual = [check for check in ran if check.kind == "training" and not check.case.name]
    assert [{error.settings["sequence_length"] for error in check.errors} for check in usual] == [{*LENGTHS}] * 2
    # A window and TF32 are for a GPU; what its yaml has anyway is not looked at twice.
    assert {check.case.name for check in ran if check.kind == "training"} == {
        *("", "heads of 16 channels", "heads of 32 channels", "heads of 128 channels", "values of 48 channels"),
        *("keys of 256 channels", "so long that few heads go over their chunks side by side"),
        *("rotary positions", "outputs normed and gated by a sigmoid"),
    }
    assert [check.name for check in ran if check.kind == "decoding"] == ["gated_deltanet, torch"] * 2
    assert "swiglu" in kept.partition("Torch's own form is all there is on this device")[2]
    refused = [check for check in done if check.backend == "fla"]
    assert refused
    assert all("CUDA" in check.refusal for check in refused)


def test_what_takes_longest_runs_first_and_kernels_are_compiled_once():
    def check(name, backend="triton", **changes):
        mixer = with_backend(from_yaml(name), backend)
        return replace(Check(kind="training", name=name, mixer=mixer, precision="float32"), **changes)

    planned = [
        *(check("deltanet", "torch"), check("deltanet"), check("deltanet", case=Case(name="narrow", head_width=16))),
        *(check("efla"), check("efla", precision="bfloat16"), check("linear", "fla")),
    ]
    places = running._urgency(planned)
    # The kernels of efla are those of deltanet at one width and precision: they are in the cache by then.
    assert [index for index, _ in sorted(enumerate(places), key=lambda pair: pair[1])] == [5, 1, 2, 4, 3, 0]


@pytest.mark.slow
def test_workers_run_the_checks_and_the_order_stays(monkeypatch):
    monkeypatch.setattr(running, "num_workers", lambda device: 2)
    planned = list(training_checks(from_yaml("linear"), CPU, lengths=(5,)))
    planned[0].mixer = replace(planned[0].mixer, target="nowhere.Missing")
    broken, *right = run_all(planned, CPU)
    assert "nowhere.Missing" in broken.failure
    for check, plan in zip(right, planned[1:], strict=True):
        assert (check.backend, check.precision, check.refusal) == (plan.backend, plan.precision, plan.refusal)
        assert not check.is_wrong
        assert bool(check.errors) != bool(check.refusal)


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("name", ["BrokenSoftmax", "BrokenLinear"])
def test_a_gradient_that_is_wrong_at_the_ragged_end_is_found(name, part, monkeypatch):
    """Of query, key and value, which share one matrix; in bfloat16 too, where much is allowed."""
    monkeypatch.setattr(getattr(broken_mixers, name), "part", part)
    for check in examine(outside(f"broken_mixers.{name}"), lengths=(63, 64, 65)):
        assert check.is_wrong
        assert check.is_chosen
        # Of a single position at the end, whose key one query alone sees, nothing shows there.
        wrong = {63, 65} if check.precision == "float32" else {63}
        assert wrong <= set(check.wrong_lengths()) <= {63, 65}, check.errors


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "settings",
    [
        MixerSettings(name="mine", target="outside_mixers.SeparateProjections", options={"backend": "torch"}),
        # Whose gains of query and key do nothing at a single position.
        replace(from_yaml("linear"), options={**from_yaml("linear").options, "backend": "torch", "qk_norm": True}),
    ],
    ids=["separate-projections", "qk-norm"],
)
def test_rounding_of_a_gradient_that_is_nothing_at_one_position_is_no_error(settings, precision):
    trust([settings.target])
    mixer = build_mixer(settings, CPU)
    expected = by_definition(mixer, 1)
    norms = [float(gradient.norm()) for gradient in expected.parameter_gradients.values()]
    assert min(norms) < 1e-8 * max(norms)
    assert compare(by_backend(mixer, 1, precision), expected).is_within(TOLERANCES[precision])


VANISHING = Case(name="narrow", head_width=16, lengths=(65,))
"""Case in which q . k of a first position is nearly 0, and the output's norm makes much of the rounding of q and k."""


@pytest.mark.parametrize("name", ["retnet", "gla"])
def test_rounding_that_a_norm_makes_much_of_is_no_error(name):
    mixer, allowed = build_mixer(from_yaml(name), CPU, VANISHING), TOLERANCES["bfloat16"] * VANISHING.slack
    plain = compare(by_backend(mixer, 65, "bfloat16", VANISHING), by_definition(mixer, 65, VANISHING), VANISHING)
    assert plain.position > 10 * allowed
    assert not plain.is_beyond_rounding
    held = deviation(mixer, 65, "bfloat16", VANISHING)
    assert held.is_beyond_rounding
    assert held.is_within(allowed), held


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", ["retnet", "gla"])
def test_rounding_there_excuses_no_wrong_gradient_elsewhere(name, part, monkeypatch):
    """Lose those of query, key, value and, where it is no constant, decay, at the last 25 of 65 positions."""
    if name == "retnet":
        right: Any = scalar_decay.chunked_scalar_decay
        wrong = lambda *inputs: right(*broken_mixers.lose_the_tail(inputs[:4], part, 40), *inputs[4:])  # noqa: E731
        monkeypatch.setattr(scalar_decay, "chunked_scalar_decay", wrong)
    else:
        of_channels = diagonal_decay.chunked_diagonal_decay

        def wrong_of_channels(inputs, *rest):
            parts = broken_mixers.lose_the_tail(inputs[:4], part, 40)
            return of_channels(diagonal_decay.DiagonalInputs(*parts, *inputs[4:]), *rest)

        monkeypatch.setattr(diagonal_decay, "chunked_diagonal_decay", wrong_of_channels)
    mixer = build_mixer(from_yaml(name), CPU, VANISHING)
    held = deviation(mixer, 65, "bfloat16", VANISHING)
    is_constant = (name, part) == ("retnet", 3)
    assert held.is_within(TOLERANCES["bfloat16"] * VANISHING.slack) == is_constant, held


def test_rounding_that_is_no_number_excuses_nothing():
    zero, one = torch.zeros(4), torch.ones(4)
    for rounded in (torch.nan * one, torch.inf * one):
        assert relative_error(2 * one, one, rounded=rounded) == 1
    assert relative_error(2 * one, one, rounded=1.25 * one) == 1
    assert relative_error(1.7 * one, one, rounded=1.25 * one) == 0
    assert math.isnan(relative_error(torch.nan * one, one, rounded=zero))


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_is_right_in_bfloat16(name):
    for check in examine(from_yaml(name), precisions=("bfloat16",)):
        assert not check.is_wrong, check


def test_a_wrong_gradient_of_a_query_with_a_projection_of_its_own_is_found():
    for check in examine(outside("outside_mixers.LosesTheQuery"), lengths=(63, 64, 65)):
        assert list(check.wrong_lengths()) == [63, 65], check.errors


@pytest.mark.parametrize("part", range(5))
def test_a_wrong_gradient_of_decay_or_beta_is_found(part, monkeypatch):
    right: Any = delta_rule.chunked_gated_delta_rule
    wrong = lambda *inputs: right(*broken_mixers.lose_the_tail(inputs[:5], part), *inputs[5:])  # noqa: E731
    monkeypatch.setattr(delta_rule, "chunked_gated_delta_rule", wrong)
    for check in examine(from_yaml("gated_deltanet"), lengths=(63, 64)):
        assert list(check.wrong_lengths()) == [63], check.errors


def test_a_kernel_that_is_wrong_in_narrow_heads_alone_is_found_and_named(diagnosed, monkeypatch):
    right = delta_rule.chunked_gated_delta_rule
    in_narrow = lambda query, *rest: right(query if query.shape[-1] > 16 else query.flip(-1), *rest)  # noqa: E731
    monkeypatch.setattr(delta_rule, "chunked_gated_delta_rule", in_narrow)
    named = "warning: gated_deltanet is wrong with backend=torch in {} at heads of 16 channels; auto chooses it."
    said, _, message = diagnosed([from_yaml("gated_deltanet")], cases=CASES[:2])
    assert message == "attn=gated_deltanet is wrong with torch; see above"
    assert all(named.format(precision) in " ".join(said.split()) for precision in ("float32", "bfloat16"))


def test_what_raises_or_is_no_number_is_wrong_and_a_warning_where_auto_does_not_choose_it(diagnosed):
    settings = outside("broken_mixers.HalfBroken")
    found = {(check.backend, check.precision): check for check in examine(settings, lengths=(1, 65))}
    assert len(found) == 6
    for precision in ("float32", "bfloat16"):
        assert found["torch", precision].is_chosen
        assert not found["torch", precision].is_wrong
        assert list(found["nan", precision].wrong_lengths()) == [1, 65]
        assert any(math.isnan(error.value) for error in found["nan", precision].errors)
        assert found["raises", precision].failure == "RuntimeError: no such kernel"
        assert found["raises", precision].is_wrong
    said, done, message = diagnosed([settings])
    assert message is None
    # In training, and where it decodes.
    assert said.count("warning: ") == 8
    assert "warning: mine, nan is wrong in float32; auto does not choose it." in said
    assert {check.backend: check.is_wrong for check in done} == {"torch": False, "nan": True, "raises": True}


def test_the_line_of_a_user_s_mixer_that_raises_is_said_once(diagnosed):
    said, *_ = diagnosed([outside("outside_mixers.RaisesAtOddLengths")])
    lines = Path(outside_mixers.__file__).read_text().splitlines()
    number = 1 + next(index for index, line in enumerate(lines) if "unflatten(1" in line)
    words = "".join(said.split())
    assert words.count(f"failedat{outside_mixers.__file__}:{number}:RuntimeError:") == 1
    assert words.count(outside_mixers.__file__) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_one_of_some_mixer(case):
    assert any(case.options.keys() <= from_yaml(name).options.keys() for name in MIXERS)
    # TF32 is for a GPU; its yaml has positions anyway.
    found = list(case_checks(from_yaml("softmax"), case, CPU))
    without = case.options.keys() & {"window", "value_expansion", "rotary_theta"}
    assert bool(found) == (case.precisions != ("tf32",) and not without)


def test_a_value_that_the_mixer_refuses_is_no_wrong_kernel():
    half = Case(name="half a tap", lengths=(5,), options={"conv_size": 0.5})
    found = list(case_checks(from_yaml("linear"), half, CPU))
    assert found
    for check in found:
        run(check, CPU, {})
        assert check.refusal == "attn.conv_size=0.5: must be an integer"
        assert not check.is_wrong


@pytest.mark.parametrize("part", ["mix", "mix_newest"])
def test_a_wrong_way_of_reading_on_from_a_state_is_found(part, diagnosed, monkeypatch):
    """Which training, that has no state, does not see: of a second piece, or of steps, slightly."""
    right = getattr(Softmax, part)

    def wrong(self, query_BTHK, *rest):
        reads_on = part == "mix_newest" or query_BTHK.shape[1] != rest[0].shape[1]
        return right(self, query_BTHK, *rest) * (1.05 if reads_on else 1.0)

    monkeypatch.setattr(Softmax, part, wrong)
    said, _, message = diagnosed([from_yaml("softmax")])
    assert message == "attn=softmax is wrong with torch; see above"
    assert all(f"softmax, torch is wrong in {precision}." in said for precision in ("float32", "bfloat16"))


@pytest.mark.parametrize("error", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["output", "input_gradient", "position", "parameter_gradient"])
def test_what_is_not_finite_is_never_within(part, error):
    zeros = {"output": 0.0, "input_gradient": 0.0, "position": 0.0, "parameter_gradient": 0.0, "parameter": "weight"}
    assert Deviation(**zeros).is_within(TOLERANCES["float32"])
    assert not Deviation(**{**zeros, part: error}).is_within(TOLERANCES["bfloat16"])


def test_errors_are_relative_and_nothing_from_nothing_is_none():
    zero, one = torch.zeros(4), torch.ones(4)
    assert relative_error(1.5 * one, one) == 0.5
    assert relative_error(zero, zero) == 0
    assert relative_error(one, zero) == math.inf
    assert math.isnan(relative_error(torch.nan * one, zero))
    assert relative_error(one, zero, smallest=4.0) == 0.5
    assert math.isnan(worst([1.0, math.nan, 2.0]))
    # Two sequences of 8 and -7.99, of which the sum is rounding: no error of a whole is made of that.
    assert parameter_error(torch.tensor([0.02]), torch.tensor([0.01]), 11.3, 100.0, 64) < 1e-3
    assert parameter_error(torch.tensor([4.0]), torch.tensor([8.0]), 8.0, 100.0, 64) == 0.5
    # One head's rows are wrong, and small beside the other's.
    mixer = build_mixer(from_yaml("softmax"), CPU)
    expected = by_definition(mixer, 5)
    name = "query_key_value.projection.weight"
    gradient = expected.parameter_gradients[name]
    altered = gradient.clone()
    altered[:64] = 0
    changed = expected._replace(parameter_gradients={**expected.parameter_gradients, name: altered})
    errors = compare(changed, expected)
    assert errors.parameter == name
    assert errors.parameter_gradient > 2 * relative_error(altered, gradient)


def test_the_command_s_exit_code_tells_of_a_user_s_broken_mixer(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "CASES", ())
    (tmp_path / "attn").mkdir()
    (tmp_path / "attn" / "mine.yaml").write_text("_target_: broken_mixers.BrokenLinear\nbackend: auto\n")
    words = ("--config-dir", str(tmp_path), f"outputs_dir={tmp_path}")
    code, output, errors = run_here("doctor.py", *words, "mixers=[mine,softmax]", "device=cpu")
    assert code == 1, errors
    assert errors == f"error: attn=mine breaks 1 of {len(PROMISES)} promises and is wrong with torch; see above\n"
    wrong = "mine is wrong with backend=torch in float32; auto chooses it; no other backend of it is right here."
    assert wrong in " ".join(output.split())
    assert "at length 133" in output
    promises = dict(re.findall(r"^  (\S.*?) {2,}(kept|broken)$", output, re.MULTILINE))
    assert promises.keys() == {promise.words for promise in PROMISES}
    assert [words for words, verdict in promises.items() if verdict == "broken"] == ["equals its definition"]
    assert "The contract that mine, from outside attnbench" in output
    assert "The contract that softmax" not in output
    assert "at length 63 forward differs from reference" in output


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("StatesNoFlops", "StatesNoFlops cannot be built without mixing_flops, which Mixer has"),
        ("KeepsTensors", "attn=mine: outside_mixers.KeepsTensors keeps a tensor that is no parameter (decays, norm.s"),
        ("FailsToBuild", f"attn=mine: ZeroDivisionError: division by zero, at {outside_mixers.__file__}:"),
        ("ReturnsNoState", "attn=mine: forward returns one Tensor; return (y, state), with y of the input's shape ("),
        ("TakesNoBackend", "the constructor of TakesNoBackend takes no backend; give it backend: str"),
        ("LosesAPosition", "attn=mine: forward returns y of shape (2, 7, 128); it must be a tensor of the input's"),
    ],
)
def test_a_mixer_that_cannot_be_built_is_one_error_and_no_page(kind, message, capsys, tmp_path):
    settings = DoctorSettings(mixers=["mine"], device="cpu", outputs_dir=str(tmp_path))
    with pytest.raises(UserError) as raised:
        diagnose(settings, lambda _: [outside(f"outside_mixers.{kind}")])
    assert str(raised.value).removeprefix(f"_target_=outside_mixers.{kind}: ").startswith(message)
    assert capsys.readouterr().out == ""


def test_the_contract_stands_first_and_quick_leaves_out_the_rest(diagnosed):
    said, done, message = diagnosed([outside("outside_mixers.CheapOnPaper")], CASES[:1], quick=True)
    assert said.index("The contract that mine") < said.index("Backends against the mixer's definition")
    assert message == f"attn=mine breaks 1 of {len(PROMISES)} promises; see above"
    assert "at other shapes" not in said
    assert "then decoded" not in said
    assert {check.precision for check in done} == {"float32"}
    promises = {check.name: check for check in done if check.kind == "promise"}
    assert promises.keys() == {promise.words for promise in PROMISES}
    (broken,) = (check for check in promises.values() if check.failure)
    assert "mixing_flops(127) is 889" in broken.failure
    assert " ".join(broken.failure.split()) in " ".join(said.split())
