"""The doctor's table of operators that no setting chooses, through Triton's interpreter or, marked gpu, on a card."""

import pytest
import torch
from kernel_checks import DEVICE

from attnbench.correctness import operators as shared_operators
from attnbench.correctness.doctor import diagnose
from attnbench.correctness.operators import OPERATORS, check_operators
from attnbench.kernels import swiglu as swiglu_kernel
from attnbench.results.rows import read_csv
from attnbench.settings.errors import UserError
from attnbench.settings.schema import DoctorSettings

pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []


class _LosesARow(torch.autograd.Function):
    """The identity, whose gradient is 0 in a row."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = gradient.clone().view(-1, gradient.shape[-1])
        rows[len(rows) * 2 // 3] = 0
        return rows.view(gradient.shape)


def checks(name):
    return list(check_operators(torch.device(DEVICE), [name]))


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_right_here_and_a_wrong_row_of_it_is_found(name, monkeypatch):
    found = checks(name)
    assert found
    assert all(check.is_right for check in found), found
    made = OPERATORS[name]

    def broken(numbers, dtype):
        problem = made(numbers, dtype)
        if problem.inputs[0].requires_grad:
            return problem._replace(operator=lambda x, *rest: problem.operator(_LosesARow.apply(x), *rest))
        return problem._replace(operator=lambda x, *rest: problem.operator(x.roll(1, 0), *rest))

    monkeypatch.setitem(OPERATORS, name, broken)
    assert not any(check.is_right for check in checks(name))


def test_an_operator_that_raises_is_wrong_and_one_that_is_no_number(monkeypatch):
    def fails(numbers, dtype):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(OPERATORS, "swiglu", fails)
    assert {check.failure for check in checks("swiglu")} == {"RuntimeError: no such kernel"}
    assert not any(check.is_right for check in checks("swiglu"))
    no_number = shared_operators.Check(name="swiglu", precision="float32", output=float("nan"))
    assert not no_number.is_right


def test_a_broken_operator_is_an_error_that_names_it(tmp_path, capsys, monkeypatch):
    right = swiglu_kernel.swiglu
    monkeypatch.setattr(swiglu_kernel, "swiglu", lambda packed: right(packed) * 1.1)
    settings = DoctorSettings(mixers=[], lift_guards=False, device=DEVICE, outputs_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"^swiglu in float32: wrong"):
        diagnose(settings, [])
    said = capsys.readouterr().out
    assert "warning: swiglu is wrong in float32." in said
    assert "What auto chooses is right" not in said
    rows = read_csv(tmp_path / "doctor" / "results.csv")
    assert {row.measurement.settings["checked"] for row in rows} == set(OPERATORS)
