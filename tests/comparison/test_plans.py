"""Every plan of conf/plan: its variants are command lines that train.py would take."""

import pytest
import yaml

from attnbench.cli.compose import CONF, compose
from attnbench.model.language_model import build_meta, resolve_mixer
from attnbench.settings.check import check_plan
from attnbench.settings.schema import PlanSettings

PLANS = sorted(path.stem for path in (CONF / "plan").glob("*.yaml"))


def plan(name):
    return PlanSettings(name=name, **yaml.safe_load((CONF / "plan" / f"{name}.yaml").read_text()))


@pytest.mark.parametrize("name", PLANS)
def test_every_variant_of_a_plan_composes_with_all_its_evaluations(name):
    own = plan(name)
    # What yaml reads 1e-3 as is a text.
    own.learning_rates = [float(rate) for rate in own.learning_rates]
    check_plan(own)
    for words in own.variants.values():
        settings = compose([f"eval=[{','.join(own.evaluations)}]", "device=cpu", *own.overrides, *words])
        assert [evaluation.name for evaluation in settings.evaluations] == own.evaluations


@pytest.mark.parametrize(
    ("variant", "parameters"), [("softmax", 3.77e6), ("flash", 3.77e6), ("linear", 3.83e6), ("gated_deltanet", 5.1e6)]
)
def test_the_published_sizes_are_those_of_the_published_table(variant, parameters):
    own = plan("published")
    evaluations = f"eval=[{','.join(own.evaluations)}]"
    settings = compose([evaluations, "device=cpu", *own.overrides, *own.variants[variant]])
    mixer = resolve_mixer(settings.mixer, settings.model, device_type="cpu", precision="float32")
    assert settings.data.vocabulary_size is not None
    mixers = [mixer] * settings.model.num_layers
    built = build_meta(mixers, settings.model, vocabulary_size=settings.data.vocabulary_size)
    assert built.num_parameters() == pytest.approx(parameters, rel=0.01)
