"""What the doctor finds: right kernels right, each broken one wrong, and an exit code for what auto chooses."""

import math
import re
import sys
from dataclasses import replace
from importlib import metadata

import broken_mixers
import pytest
import torch
import yaml
from mixer_building import mixer_names
from scripts_here import run_here

from attnbench.cli.compose import CONF
from attnbench.correctness import doctor
from attnbench.correctness.backends import build_mixer, choice, examine, examine_shapes, guards_lifted
from attnbench.correctness.doctor import diagnose
from attnbench.mixers import fla_support, gated_deltanet
from attnbench.mixers.contract import PROMISES
from attnbench.mixers.definition import (
    LENGTHS,
    OTHER_SHAPES,
    TOLERANCES,
    Deviation,
    by_backend,
    by_definition,
    compare,
    parameter_error,
    relative_error,
    worst,
)
from attnbench.mixers.softmax import Softmax
from attnbench.results.rows import read_csv
from attnbench.settings.errors import UserError
from attnbench.settings.registry import trust
from attnbench.settings.schema import DoctorSettings, MixerSettings

CPU = torch.device("cpu")
SETTINGS = {"mixers": None, "lift_guards": False, "device": "cpu"}


def from_yaml(name: str) -> MixerSettings:
    content = yaml.safe_load((CONF / "attn" / f"{name}.yaml").read_text())
    return MixerSettings(name=name, target=content.pop("_target_"), options=content)


def broken(name: str) -> MixerSettings:
    target = f"broken_mixers.{name}"
    trust([target])
    return MixerSettings(name=name.lower(), target=target, options={"backend": "auto"})


def test_what_auto_chooses_is_right_here_and_the_page_says_so(tmp_path, capsys):
    folder = diagnose(DoctorSettings(**SETTINGS, outputs_dir=str(tmp_path)), [from_yaml(n) for n in mixer_names()])
    said = capsys.readouterr().out
    kept = (folder / "doctor.txt").read_text()
    assert kept in said
    assert all(len(line) < 80 for line in kept.splitlines())
    assert not any(control in said for control in ("\x1b", "\r"))
    assert "What auto chooses is right." in kept
    assert torch.__version__ in kept
    rows = read_csv(folder / "results.csv")
    own = [row for row in rows if row.identity.variant == "gated_deltanet" and row.identity.backend == "torch"]
    of_output = [row.measurement.settings for row in own if row.measurement.metric == "output_error"]
    assert [own["sequence_length"] for own in of_output if not own.keys() & {"shape", "checked"}] == [*LENGTHS] * 2
    # A window and TF32 are for a GPU; what its yaml has anyway is not looked at twice.
    assert {settings.get("shape") for settings in of_output if "checked" not in settings} == {
        *(None, "heads of 16 channels", "heads of 32 channels", "heads of 128 channels", "values of 48 channels"),
        *("keys of 256 channels", "so long that few heads go over their chunks side by side"),
    }
    assert [settings["checked"] for settings in of_output if "checked" in settings] == ["gated_deltanet, torch"] * 2
    assert "swiglu" in kept.partition("Torch's own form is all there is on this device")[2]
    assert sum(row.measurement.metric == "first_step_seconds" for row in rows) == len(mixer_names())
    refused = [row for row in rows if row.identity.backend == "fla"]
    assert refused
    assert all(row.measurement.status == "unsupported" and "CUDA" in row.measurement.reason for row in refused)


@pytest.mark.parametrize("name", mixer_names())
def test_the_reason_is_the_mixer_s_own_rule(name):
    chosen = choice(from_yaml(name), "float32", CPU)
    assert chosen.backend
    assert chosen.reason
    assert chosen.reason != "the first of its backends"


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("name", ["BrokenSoftmax", "BrokenLinear"])
def test_a_gradient_that_is_wrong_at_the_ragged_end_is_found(name, part, monkeypatch):
    """Of query, key and value, which share one matrix; in bfloat16 too, where much is allowed."""
    monkeypatch.setattr(getattr(broken_mixers, name), "part", part)
    settings = broken(name)
    for finding in examine(settings, CPU, lengths=(63, 64, 65, 133)):
        assert finding.verdict == "wrong"
        assert finding.is_chosen
        # Of a single position at the end, whose key one query alone sees, nothing shows there.
        wrong = [63, 65, 133] if finding.precision == "float32" else [63, 133]
        assert set(wrong) <= set(finding.wrong_lengths) <= {63, 65, 133}, finding.deviations


@pytest.mark.parametrize("precision", TOLERANCES)
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


def test_a_wrong_gradient_of_a_query_with_a_projection_of_its_own_is_found():
    target = "outside_mixers.LosesTheQuery"
    trust([target])
    settings = MixerSettings(name="mine", target=target, options={"backend": "auto"})
    for finding in examine(settings, CPU, lengths=(63, 64, 65)):
        assert finding.wrong_lengths == [63, 65], finding.deviations


@pytest.mark.parametrize("part", range(5))
def test_a_wrong_gradient_of_decay_or_beta_is_found(part, monkeypatch):
    right = gated_deltanet.chunked_gated_delta_rule
    wrong = lambda *inputs: right(*broken_mixers.lose_the_tail(inputs[:5], part), *inputs[5:])  # noqa: E731
    monkeypatch.setattr(gated_deltanet, "chunked_gated_delta_rule", wrong)
    for finding in examine(from_yaml("gated_deltanet"), CPU, lengths=(63, 133)):
        if finding.backend == "torch":
            assert finding.wrong_lengths == [63, 133], finding.deviations


def test_a_kernel_that_is_wrong_in_narrow_heads_alone_is_found_and_named(tmp_path, capsys, monkeypatch):
    right = gated_deltanet.chunked_gated_delta_rule
    in_narrow = lambda query, *rest: right(query if query.shape[-1] > 16 else query.flip(-1), *rest)  # noqa: E731
    monkeypatch.setattr(gated_deltanet, "chunked_gated_delta_rule", in_narrow)
    named = "attn=gated_deltanet backend=torch in {} at heads of 16 channels: wrong"
    with pytest.raises(UserError, match=f"^{named.format('float32')}; {named.format('bfloat16')}$"):
        diagnose(DoctorSettings(**SETTINGS, outputs_dir=str(tmp_path)), [from_yaml("gated_deltanet")])
    assert "What auto chooses is right" not in capsys.readouterr().out


def test_what_raises_or_is_no_number_is_wrong_and_the_others_are_still_looked_at():
    settings = broken("HalfBroken")
    found = {(own.backend, own.precision): own for own in examine(settings, CPU, lengths=(1, 65))}
    assert len(found) == 6
    for precision in ("float32", "bfloat16"):
        assert found["torch", precision].verdict == "right"
        assert found["torch", precision].is_chosen
        assert found["nan", precision].wrong_lengths == [1, 65]
        assert math.isnan(found["nan", precision].deviations[65].output)
        assert found["raises", precision].verdict == "wrong"
        assert found["raises", precision].failure == "RuntimeError: no such kernel"


def test_what_auto_does_not_choose_is_a_warning(tmp_path, capsys):
    settings = broken("HalfBroken")
    folder = diagnose(DoctorSettings(**SETTINGS, outputs_dir=str(tmp_path)), [settings])
    said = capsys.readouterr().out
    # In training, and where it decodes.
    assert said.count("warning: ") == 8
    assert "warning: halfbroken, nan is wrong in float32; auto does not choose it." in said
    assert "What auto chooses is right." in said
    statuses = {row.identity.backend: row.measurement.status for row in read_csv(folder / "results.csv")}
    assert statuses == {"torch": "ok", "nan": "failed", "raises": "failed"}


@pytest.mark.parametrize("shape", OTHER_SHAPES, ids=lambda shape: shape.name)
def test_every_other_shape_is_one_of_some_mixer(shape):
    assert any(shape.options.keys() <= from_yaml(name).options.keys() for name in mixer_names())
    # TF32 is for a GPU.
    found = list(examine_shapes(from_yaml("softmax"), CPU, shapes=[replace(shape, lengths=(5,))]))
    assert bool(found) == (shape.precisions != ("tf32",) and not shape.options.keys() & {"window", "value_expansion"})


def test_a_first_step_that_fails_is_an_error_and_is_kept(tmp_path, capsys, monkeypatch):
    def first_step(mixer, device):
        if mixer.name == "softmax":
            raise RuntimeError("no such graph\nand a second line")
        return 1.0

    monkeypatch.setattr(doctor, "first_step_seconds", first_step)
    monkeypatch.setattr(doctor, "OTHER_SHAPES", ())
    failed = "^attn=softmax backend=torch: its first training step failed: RuntimeError: no such graph$"
    with pytest.raises(UserError, match=failed):
        diagnose(DoctorSettings(**SETTINGS, outputs_dir=str(tmp_path)), [from_yaml("softmax"), from_yaml("linear")])
    assert "What auto chooses is right" not in capsys.readouterr().out
    rows = read_csv(tmp_path / "doctor" / "results.csv")
    steps = [row for row in rows if row.measurement.metric == "first_step_seconds"]
    assert [(row.identity.variant, row.measurement.status) for row in steps] == [
        ("softmax", "failed"),
        ("linear", "ok"),
    ]


@pytest.mark.parametrize("part", ["mix", "mix_newest"])
def test_a_wrong_way_of_reading_on_from_a_state_is_found(part, tmp_path, monkeypatch):
    """Which training, that has no state, does not see: of a second piece, or of steps, slightly."""
    right = getattr(Softmax, part)

    def wrong(self, query_BTHK, *rest):
        reads_on = part == "mix_newest" or query_BTHK.shape[1] != rest[0].shape[1]
        return right(self, query_BTHK, *rest) * (1.05 if reads_on else 1.0)

    monkeypatch.setattr(Softmax, part, wrong)
    monkeypatch.setattr(doctor, "OTHER_SHAPES", ())
    named = "softmax, torch in {}: wrong"
    with pytest.raises(UserError, match=f"^{named.format('float32')}; {named.format('bfloat16')}$"):
        diagnose(DoctorSettings(**SETTINGS, outputs_dir=str(tmp_path)), [from_yaml("softmax")])


@pytest.mark.parametrize("error", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["output", "input_gradient", "position", "parameter_gradient"])
def test_what_is_not_finite_is_never_within(place, error):
    zeros = {"output": 0.0, "input_gradient": 0.0, "position": 0.0, "parameter_gradient": 0.0, "parameter": "weight"}
    assert Deviation(**zeros).is_within(TOLERANCES["float32"])
    assert not Deviation(**{**zeros, place: error}).is_within(TOLERANCES["bfloat16"])


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
    found = compare(changed, expected)
    assert found.parameter == name
    assert found.parameter_gradient > 2 * relative_error(altered, gradient)


def test_the_command_s_exit_code_tells_of_a_user_s_broken_mixer(tmp_path):
    (tmp_path / "attn").mkdir()
    (tmp_path / "attn" / "mine.yaml").write_text("_target_: broken_mixers.BrokenLinear\nbackend: auto\n")
    words = ("--config-dir", str(tmp_path), f"outputs_dir={tmp_path}")
    code, output, errors = run_here("doctor.py", *words, "mixers=[mine,softmax]", "device=cpu")
    assert code == 1, errors
    assert "error: attn=mine backend=torch in float32: wrong; no other backend of it is right here" in errors
    assert "Traceback" not in errors
    assert "at length 133" in output
    assert "attn=softmax" not in errors
    # What was found is kept.
    assert read_csv(tmp_path / "doctor" / "results.csv")
    # Of one from outside attnbench, the contract too.
    promises = dict(re.findall(r"^  (\S.*?) {2,}(kept|broken)$", output, re.MULTILINE))
    assert promises.keys() == {promise.words for promise in PROMISES}
    assert [words for words, verdict in promises.items() if verdict == "broken"] == ["equals its definition"]
    assert "The contract that mine, from outside attnbench" in output
    assert "The contract that softmax" not in output
    assert "attn=mine breaks a promise: equals its definition: at length 63 forward differs from reference" in errors


def test_a_contract_s_rows_say_which_promise_is_broken(tmp_path, capsys):
    target = "outside_mixers.CheapOnPaper"
    trust([target])
    settings = MixerSettings(name="mine", target=target, options={"backend": "auto"})
    with pytest.raises(UserError, match=r"^attn=mine breaks a promise: states the FLOPs of its mixing: mixing_flops"):
        diagnose(DoctorSettings(**SETTINGS, outputs_dir=str(tmp_path)), [settings])
    rows = read_csv(tmp_path / "doctor" / "results.csv")
    found = {row.measurement.settings["promise"]: row for row in rows if row.measurement.metric == "promise_kept"}
    assert found.keys() == {promise.words for promise in PROMISES}
    (broken,) = (row.measurement for row in found.values() if row.measurement.status != "ok")
    assert broken.status == "failed"
    assert broken.reason.startswith(
        "states the FLOPs of its mixing: mixing_flops(127) is 889, and the definition does "
    )
    said = " ".join(capsys.readouterr().out.split())
    assert broken.reason.partition(": ")[2] in said


def test_lifted_guards_are_both_guards_and_come_down_again(tmp_path, monkeypatch):
    package = tmp_path / "fla" / "ops" / "common"
    package.mkdir(parents=True)
    (package / "chunk_o.py").write_text("TRITON_ABOVE_3_7_1 = False\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    with guards_lifted():
        fla_support.refuse_miscompiled_gates("attn.backend=fla", (9, 0), "3.6.0")
        assert sys.modules["fla.ops.common.chunk_o"].TRITON_ABOVE_3_7_1 is True
    with pytest.raises(UserError, match="miscompiles"):
        fla_support.refuse_miscompiled_gates("attn.backend=fla", (9, 0), "3.6.0")
    assert sys.modules["fla.ops.common.chunk_o"].TRITON_ABOVE_3_7_1 is False
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.gpu
def test_lifted_guards_let_the_doctor_look_at_what_is_refused():
    pytest.importorskip("fla")
    device = torch.device("cuda", 0)
    try:
        fla_support.refuse_miscompiled_gates("", torch.cuda.get_device_capability(), metadata.version("triton"))
    except UserError:
        pass
    else:
        pytest.skip("this compiler is not known to get it wrong on this device")
    with guards_lifted():
        found = [own for own in examine(from_yaml("gated_deltanet"), device) if own.backend == "fla"]
    assert [list(own.deviations) for own in found] == [list(LENGTHS)] * 2
    assert not any(own.is_chosen for own in found)
