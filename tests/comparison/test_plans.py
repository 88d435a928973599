"""Every plan of conf/plan: its variants are command lines that train.py would take."""

from dataclasses import replace

import pytest
import yaml
from hydra import compose as compose_hydra
from hydra import initialize_config_dir
from mixer_table import listed

from attnbench.cli.compose import CONF, compose
from attnbench.cli.reading import read_comparison
from attnbench.comparison.plan import Comparison
from attnbench.model.building import build_meta, resolve_mixer
from attnbench.model.matching import TOLERANCE, match_mixer
from attnbench.settings.combinations import check_plan
from attnbench.settings.errors import UserError
from attnbench.settings.schema import FEW_SEEDS

PLANS = sorted(path.stem for path in (CONF / "plan").glob("*.yaml"))


def plan(*words):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose_hydra("compare", list(words), return_hydra_config=True)
        return read_comparison(config, config.hydra).plan


MANY = ("mixers", "mixers_small", "speed", *(name for name in PLANS if "factorial" in name))
"""Plans of dozens of variants."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in MANY else name for name in PLANS]
)
def test_every_variant_of_a_plan_composes_with_all_its_evaluations(name):
    own = plan(f"plan={name}")
    for words in own.variants.values():
        settings = compose([f"eval=[{','.join(own.evaluations)}]", "device=cpu", *own.overrides, *words])
        assert [evaluation.name for evaluation in settings.evaluations] == own.evaluations


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_a_few_seeds_has_no_verdicts(name):
    own = plan(f"plan={name}")
    if max(len(own.seeds), len(own.probe_seeds)) <= FEW_SEEDS:
        assert own.ranked == []


def test_plans_of_language_models_take_other_corpora():
    def takes_them(name: str) -> bool:
        try:
            check_plan(plan(f"plan={name}", "plan.corpora=[wikitext2,embedded]"))
        except UserError:
            return False
        return True

    # One has a vocabulary of its own, four train no language model, and a factorial has one corpus.
    others = {
        "published",
        "frontier",
        "grid_cost",
        "state_first",
        "ar_hits",
        "speed",
        "speed_lengths",
        *(name for name in PLANS if "factorial" in name),
    }
    assert {name for name in PLANS if takes_them(name)} == {*PLANS} - others


def test_a_plan_names_its_recipe_once_and_a_variant_may_name_another():
    bare = plan("plan=small_bare", "+plan.variants.paper=['attn=gated_deltanet','recipe=own']")
    evaluations = f"eval=[{','.join(bare.evaluations)}]"
    read = [
        compose([evaluations, "device=cpu", *bare.overrides, *bare.variants[name]]).recipe
        for name in ("softmax", "paper")
    ]
    assert [recipe.name for recipe in read if recipe is not None] == ["bare", "own"]
    assert plan("plan=small_bare", "plan.recipe=equipped").overrides == plan("plan=small").overrides
    named = plan("plan=small_bare", "plan.overrides=['recipe=own']")
    recipe = compose(["device=cpu", *named.overrides, *named.variants["softmax"]]).recipe
    assert recipe is not None
    assert recipe.name == "own"
    with pytest.raises(UserError, match=r"^plan\.recipe=3: must be the name of a recipe, or null$"):
        plan("plan=small", "plan.recipe=3")


@pytest.mark.parametrize(
    ("variant", "parameters"), [("softmax", 3.77e6), ("flash", 3.77e6), ("linear", 3.83e6), ("gated_deltanet", 5.1e6)]
)
def test_the_published_sizes_are_those_of_the_published_table(variant, parameters):
    own = plan("plan=published")
    evaluations = f"eval=[{','.join(own.evaluations)}]"
    settings = compose([evaluations, "device=cpu", *own.overrides, *own.variants[variant]])
    mixer = resolve_mixer(settings.mixer, settings.model, device_type="cpu", precision="float32")
    assert settings.data.vocabulary_size is not None
    mixers = [mixer] * settings.model.num_layers
    built = build_meta(mixers, settings.model, vocabulary_size=settings.data.vocabulary_size)
    assert built.num_parameters() == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize(
    "name", [name if name == "published" else pytest.param(name, marks=pytest.mark.slow) for name in PLANS]
)
def test_every_variant_of_a_plan_can_be_trained_and_measured(name, tmp_path):
    """In particular its models are built and matched, the probes' too."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        words = [f"plan={name}", "device=cpu", "logger=none", f"outputs_dir={tmp_path}"]
        config = compose_hydra("compare", words, return_hydra_config=True)
    settings = read_comparison(config, config.hydra)
    own = replace(settings.plan, overrides=[*settings.plan.overrides, "data=embedded"])
    comparison = Comparison(replace(settings, plan=own), compose)
    assert not comparison.failures
    assert list(comparison.variants) == list(own.variants)


@pytest.mark.slow
@pytest.mark.parametrize(("fraction", "num_variants"), [("half", 24), ("full", 48)])
def test_the_factorial_is_so_many_different_models_of_equal_size(fraction, num_variants):
    own = plan("plan=factorial", f"plan.fraction={fraction}")
    assert len(own.variants) == num_variants
    models = set()
    for words in own.variants.values():
        settings = compose(["eval=[recall,perplexity]", "device=cpu", *own.overrides, *words])
        matched = match_mixer(
            settings.mixer,
            settings.model,
            device_type="cpu",
            precision="float32",
            match="params",
            seq_len=256,
            vocabulary_size=284,
        )
        assert abs(matched.parameters / matched.reference_parameters - 1) <= TOLERANCE
        # Every part is named, so that a probe's wishes are the same for all.
        assert {"rotary_theta", "conv_size", "output_gate", "output_norm"} <= set(settings.named_options)
        models.add(repr(sorted((settings.mixer.target, *map(repr, settings.mixer.options.items())))))
    assert len(models) == num_variants


def test_a_part_and_a_mixer_can_be_left_out_of_a_factorial():
    own = plan("plan=factorial", "plan.fraction=full", "plan.variants.linear=null", "plan.factors.gate=null")
    assert list(own.factors) == ["positions", "convolution", "output_norm"]
    assert len(own.variants) == 16
    assert not any("linear" in name or "gate" in name.split("+") for name in own.variants)


@pytest.mark.parametrize("word", ["+plan.variants.linaer=null", "++plan.factors.gate=null", "++plan.variants.linear="])
def test_what_adds_a_variant_or_a_factor_takes_none_out(word):
    with pytest.raises(UserError, match=r"adds nothing; plan\.[a-z.]*=(null)? takes one out"):
        plan("plan=factorial", word)


@pytest.mark.parametrize("name", ["mixers", "mixers_small"])
def test_the_plans_of_every_mixer_have_every_mixer(name):
    plan = yaml.safe_load((CONF / "plan" / f"{name}.yaml").read_text())
    named = {word.removeprefix("attn=") for words in plan["variants"].values() for word in words}
    assert set(listed()) <= named


def test_a_list_of_evaluations_stands_for_its_evaluations():
    four = ["ladder_recall", "ladder_copy", "ladder_state", "ladder_range"]
    own = plan("plan=ladder", "plan.evaluations=[perplexity,ladder]", "plan.only=[ladder]")
    assert (own.evaluations, own.only) == (["perplexity", *four], four)
