"""Numbers that are not finite, clocks that jump, and runs that must be equal to the bit; see docs/reliability.md."""

import ast
import subprocess
import sys

import pytest
import torch
from small import MIXERS, TRAIN, batch_of, fresh_state, python_path, record

from attnbench.training import checkpoint
from attnbench.training.divergence import first_not_finite, located
from attnbench.training.hooks import DivergedError

WALL_CLOCKS = {"time.time", "datetime.now", "datetime.utcnow", "datetime.today", "time.time_ns"}
STAMPS = {"compare": 1, "locks": 1, "freeze": 1, "imports": 2, "row_files": 2, "run_list": 1}
"""Where a wall clock is read: for a date, never for a duration."""


def test_what_is_finite_has_no_place():
    assert first_not_finite(fresh_state().model, batch_of(0), TRAIN, "float32") is None


def test_a_weight_that_is_not_finite_is_named():
    state = fresh_state()
    with torch.no_grad():
        state.model.blocks[1].mixer.query_key_value.projection.weight[3, 4] = torch.nan
    place = first_not_finite(state.model, batch_of(0), TRAIN, "float32")
    assert place == "the weight blocks.1.mixer.query_key_value.projection.weight"


def test_the_module_whose_output_is_first_not_finite_is_named():
    state = fresh_state()
    with torch.no_grad():
        state.model.blocks[1].mixer.query_key_value.projection.weight.fill_(3e38)
    place = first_not_finite(state.model, batch_of(0), TRAIN, "float32")
    assert place == "the output of blocks.1.mixer.query_key_value.projection"


def test_the_weight_whose_gradient_is_first_not_finite_is_named():
    state = fresh_state()
    weight = state.model.blocks[0].mixer.query_key_value.projection.weight
    # Forward is finite; what flows back through it is not.
    handle = weight.register_hook(lambda gradient: gradient * torch.inf)
    place = first_not_finite(state.model, batch_of(0), TRAIN, "float32")
    handle.remove()
    assert place == "the gradient of blocks.0.mixer.query_key_value.projection.weight"
    assert weight.grad is None


def test_the_error_names_step_layer_and_last_good_checkpoint(tmp_path):
    state = fresh_state()
    checkpoint.save_step(tmp_path, state, record())
    good = batch_of(0)

    def batches(step):
        # One batch of nothing but absent labels: a mean over none of them.
        return good if step != 6 else good._replace(weight_BT=torch.zeros_like(good.targets_BT, dtype=torch.float32))

    error = located(DivergedError("diverged by step 8", range(4, 8)), state, batches, TRAIN, "float32", tmp_path)
    assert str(error).startswith("diverged by step 8; first in step 7, in the ")
    assert str(error).endswith(f"last good checkpoint {tmp_path / 'step-00000000'}")


def test_no_wall_clock_is_in_a_duration(root):
    found = {}
    for path in (root / "attnbench").rglob("*.py"):
        calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        count = sum(call in WALL_CLOCKS for call in calls)
        found |= {path.stem: count} if count else {}
    assert found == STAMPS


@pytest.mark.slow
def test_two_processes_train_the_same_models_to_the_bit(root, tmp_path):
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        command = [sys.executable, root / "tests" / "support" / "train_twice.py", "cpu", tmp_path / name]
        done = subprocess.run(command, env=python_path(root), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert {name.partition("-")[0] for name in found[0]} == set(MIXERS)
    assert found[0] == found[1]
