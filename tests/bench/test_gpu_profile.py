"""bench=profile on a GPU: kernels are found, and labels tell them apart."""

import pytest
import torch
from small import MIXERS, mixer_settings

from attnbench.bench.base import Conditions
from attnbench.bench.operators.roofline import Ceilings
from attnbench.bench.profiling.attention import GroupedShape, profile_attention
from attnbench.bench.profiling.parts import IDLE, PARTS
from attnbench.bench.profiling.step import CAPTURED, EAGER, StepCase, profile_step
from attnbench.evals.lib.step_cost import Timed
from attnbench.settings.schema import ModelSettings

pytestmark = pytest.mark.gpu
REPETITION = Timed(warmup=2, repeats=5, max_seconds=1)
MODEL = ModelSettings(name="small", dim=256, num_layers=2, head_width=64, feed_forward_width=880)


def subject(folder, precision="bfloat16"):
    def mixers(names):
        found = [mixer_settings(name) for name in names]
        for settings in found:
            settings.options["backend"] = "auto"
        return found

    device = torch.device("cuda", 0)
    return Conditions(
        device=device, precision=precision, ceilings=Ceilings(500.0, 3000.0), mixers=mixers, folder=folder
    )


@pytest.mark.parametrize("name", MIXERS)
def test_a_labelled_step_is_told_apart_and_a_captured_one_has_its_kernels(name, tmp_path):
    case = StepCase(
        mixer=name, length=256, batch_size=32, model=MODEL, vocabulary_size=284, num_steps=3, num_lines=100,
        repetition=REPETITION,
    )  # fmt: skip
    rows = list(profile_step(case, {}, subject(tmp_path)))
    assert {row.status for row in rows} == {"ok"}, [row.reason for row in rows if row.status != "ok"]
    found = {}
    for row in rows:
        place = row.settings.get("part") or row.settings.get("pass") or ""
        if "operator" not in row.settings:
            found.setdefault(row.settings["form"], {})[row.metric, place] = row.value
    own = found[EAGER]
    assert all(own["part_share", part] > 0 for part in PARTS), own
    assert sum(own["part_share", part] for part in (*PARTS, IDLE)) == pytest.approx(1)
    assert own["unplaced_share", ""] < 0.05, own
    assert own["pass_milliseconds", "backward"] > own["pass_milliseconds", "forward"] > 0
    assert found[CAPTURED]["step_milliseconds", ""] < own["step_milliseconds", ""]
    assert 0 <= found[CAPTURED]["part_share", IDLE] < 1
    assert any(row.metric == "operator_milliseconds" and row.settings["form"] == CAPTURED for row in rows)


def test_our_attention_is_one_kernel_beside_the_textbooks_many(tmp_path):
    shape = GroupedShape(
        batch_size=1, sequence_length=1024, num_heads=16, num_key_value_heads=4, head_width=32, causal=False
    )
    given = {"num_calls": 10, "num_lines": 10, "repetition": REPETITION}
    rows = list(profile_attention(shape, ["textbook", "triton"], {}, subject(tmp_path, "float32"), **given))
    assert {row.status for row in rows} == {"ok"}, [row.reason for row in rows if row.status != "ok"]
    own = [row for row in rows if row.settings["implementation"] == "triton"]
    shares = {row.settings["operator"]: row.value for row in own if row.metric == "operator_share"}
    assert shares["attnbench::packed_flash_attention"] > 0.9, shares
    (flops,) = [row for row in own if row.metric == "operator_mflops"]
    assert flops.settings["counted_by"] == "attnbench"
    (ratio,) = [row.value for row in own if row.metric == "speedup"]
    assert ratio > 1
