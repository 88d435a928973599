"""The doctor's table of operators that no setting chooses, through Triton's interpreter or, marked gpu, on a card."""

import pytest
import torch
from kernel_checks import DEVICE

from attnbench.cli.compose import compose
from attnbench.correctness import running
from attnbench.correctness.checks import Error, operator_checks, training_checks
from attnbench.correctness.doctor import diagnose
from attnbench.correctness.operators import OPERATORS
from attnbench.correctness.running import run
from attnbench.ops.layers.triton import swiglu as swiglu_kernel
from attnbench.settings.errors import UserError
from attnbench.settings.schema import DoctorSettings

pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []


class _LosesARow(torch.autograd.Function):
    """The identity, whose gradient is 0 in its largest row: where gates forget all before it, a position has hardly
    a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = gradient.clone().view(-1, gradient.shape[-1])
        rows[rows.float().norm(dim=1).argmax()] = 0
        return rows.view(gradient.shape)


def checks(name):
    found = [check for check in operator_checks(torch.device(DEVICE)) if check.name == name]
    for check in found:
        run(check, torch.device(DEVICE), {})
    return found


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter alone lacks it")
@pytest.mark.parametrize("name", ["flash", "window", "fox"])
def test_what_the_interpreter_cannot_multiply_is_refused_and_not_called_wrong(name):
    mixer = compose([f"attn={name}", "device=cpu"]).mixer
    found = {
        check.precision: check for check in training_checks(mixer, torch.device("cpu")) if check.backend == "triton"
    }
    assert found["float32"].refusal == ""
    assert "no products in bfloat16" in found["bfloat16"].refusal


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_right_here_and_a_wrong_row_of_it_is_found(name, monkeypatch):
    found = checks(name)
    assert found
    assert not any(check.is_wrong for check in found), found
    made = OPERATORS[name]

    def broken(numbers, dtype):
        problem = made(numbers, dtype)
        if problem.inputs[0].requires_grad:
            return problem._replace(operator=lambda x, *rest: problem.operator(_LosesARow.apply(x), *rest))
        return problem._replace(operator=lambda x, *rest: problem.operator(x.roll(1, 0), *rest))

    monkeypatch.setitem(OPERATORS, name, broken)
    assert all(check.is_wrong for check in checks(name))


def test_an_operator_that_raises_is_wrong_and_one_that_is_no_number(monkeypatch):
    def fails(numbers, dtype):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(OPERATORS, "swiglu", fails)
    for check in checks("swiglu"):
        assert check.failure == "RuntimeError: no such kernel"
        assert check.is_wrong
        check.failure, check.errors = "", [Error("output_error", float("nan"), 1.0, {})]
        assert check.is_wrong


def test_a_broken_operator_is_an_error_that_names_it(tmp_path, capsys, monkeypatch):
    right = swiglu_kernel.swiglu
    monkeypatch.setattr(swiglu_kernel, "swiglu", lambda packed: right(packed) * 1.1)
    # In this process, where it is broken.
    monkeypatch.setattr(running, "num_workers", lambda device: 0)
    settings = DoctorSettings(mixers=[], device=DEVICE, outputs_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"^wrong operators: swiglu; see above$"):
        diagnose(settings, lambda _: [])
    said = capsys.readouterr().out
    assert "warning: swiglu is wrong in float32." in said
    assert "What auto chooses is right" not in said
    assert all(f"  {name}" in said for name in OPERATORS)
