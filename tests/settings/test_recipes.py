"""Recipes: parts around a mixer that win over a probe's wishes, and give way to what the command line names."""

from pathlib import Path

import pytest
import yaml
from outside_mixers import settings_of
from pages import read as read_page
from recipe_table import PARTS, RECIPES, recipe, recipe_tables

from attnbench.cli.compose import compose
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.mixers.recipe import not_applicable, recipe_options, warnings_of
from attnbench.settings.errors import UserError
from attnbench.settings.schema import CONF, RecipeSettings
from attnbench.training.job import recipe_settings
from attnbench.training.prepare import prepare

DEMO = ["experiment=demo", "device=cpu", "eval=[recall]", "eval.recall.preset=small", "eval.recall.cells=null"]


def test_the_protocol_has_the_table_of_the_classes_and_yamls():
    assert recipe_tables() in read_page("docs/protocol.md"), "python tools/recipe_table.py prints the present ones"


@pytest.mark.parametrize("path", sorted((Path(CONF) / "recipe").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_names_no_mixer_and_speaks_of_every_part(path):
    assert path.stem in RECIPES
    assert set(yaml.safe_load(path.read_text())) == set(PARTS)
    assert not [
        stem for stem in (entry.stem for entry in (Path(CONF) / "attn").glob("*.yaml")) if stem in path.read_text()
    ]


def options(*words: str) -> tuple[dict, dict]:
    """A run's options of the mixer, and those of its probe."""
    settings = compose([*DEMO, *words])
    _, jobs = prepare_probe(settings, settings.evaluations[0])
    return settings.mixer.options, jobs[0].mixers[0].options


def test_without_a_recipe_a_probe_wishes_and_the_yaml_stands():
    of_run, of_probe = options("attn=softmax")
    assert (of_run["conv_size"], of_probe["conv_size"]) == (0, 4)


def test_a_recipe_wins_over_a_probe_s_wishes():
    of_run, of_probe = options("attn=softmax", "recipe=bare")
    assert (of_run["conv_size"], of_probe["conv_size"]) == (0, 0)
    assert (of_run["rotary_theta"], of_probe["rotary_theta"]) == (None, None)
    of_run, of_probe = options("attn=gated_deltanet", "recipe=own")
    assert of_run["output_gate"] == of_probe["output_gate"] == "silu"


def test_what_the_command_line_names_wins_over_its_recipe():
    of_run, of_probe = options("attn=linear", "recipe=equipped", "attn.conv_size=0")
    assert (of_run["conv_size"], of_probe["conv_size"]) == (0, 0)
    assert of_run["output_gate"] == of_probe["output_gate"] == "silu"


def test_null_in_a_recipe_leaves_the_wish():
    mixer = compose([*DEMO, "attn=softmax"]).mixer
    assert recipe_options(mixer, RecipeSettings(name="mine", qk_norm=True)) == {"qk_norm": True}


def test_a_recipe_is_no_part_of_a_run_s_identity():
    equipped = prepare(compose([*DEMO, "attn=softmax", "recipe=equipped"]))
    words = ["conv_size=4", "qk_norm=true", "output_norm=true", "output_gate=silu"]
    named = prepare(compose([*DEMO, "attn=softmax", *(f"attn.{word}" for word in words)]))
    assert equipped.config_hash == named.config_hash
    assert equipped.row_settings()["recipe"] == "equipped"
    assert "recipe" not in named.row_settings()


def test_parts_that_a_mixer_cannot_have_are_listed_in_its_rows():
    mixer = settings_of("SeparateProjections")["mixer"]
    assert not_applicable(mixer, recipe("equipped")) == [
        "conv_size",
        "output_gate",
        "output_norm",
        "qk_norm",
        "rotary_theta",
    ]
    assert not_applicable(mixer, recipe("bare")) == []
    assert not_applicable(mixer, None) == []


UNDONE = [("efla", "qk_norm", "true"), ("hgrn2", "qk_norm", "true"), ("mamba3", "conv_size", "4")]
"""Mixers with a part that undoes them, and its value."""


@pytest.mark.parametrize(("mixer", "part", "value"), UNDONE)
def test_a_recipe_leaves_out_a_part_that_undoes_the_mixer_and_its_rows_say_so(mixer, part, value):
    settings = compose([*DEMO, f"attn={mixer}", "recipe=equipped"])
    _, [job, *_] = prepare_probe(settings, settings.evaluations[0])
    for built in (settings.mixer, job.mixers[0]):
        assert not built.options[part]
    assert prepare(settings).row_settings()["not_applicable"] == [part]
    assert recipe_settings(job.settings, job.not_applicable)["not_applicable"] == [part]
    assert warnings_of(settings.mixer) == []


@pytest.mark.parametrize(("mixer", "part", "value"), UNDONE)
def test_who_names_a_part_that_undoes_the_mixer_gets_it_and_is_told(mixer, part, value):
    settings = compose([*DEMO, f"attn={mixer}", "recipe=equipped", f"attn.{part}={value}"])
    _, [job, *_] = prepare_probe(settings, settings.evaluations[0])
    assert settings.mixer.options[part] == job.mixers[0].options[part] == yaml.safe_load(value)
    assert "not_applicable" not in prepare(settings).row_settings()
    [line] = warnings_of(settings.mixer)
    assert line.startswith(f"attn.{part}={yaml.safe_load(value)}: undoes ")


def test_a_probe_does_not_wish_for_a_convolution_that_undoes_the_mixer():
    of_run, of_probe = options("attn=mamba3")
    assert (of_run["conv_size"], of_probe["conv_size"]) == (0, 0)
    _, named = options("attn=mamba3", "attn.conv_size=4")
    assert named["conv_size"] == 4


def test_plan_mixers_names_the_parts_that_undo_a_mixer_as_its_published_page_has_them():
    variants = yaml.safe_load((Path(CONF) / "plan" / "mixers.yaml").read_text())["variants"]
    assert all(f"attn.{part}={value}" in variants[mixer] for mixer, part, value in UNDONE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=equiped"], "recipe=equiped: unknown (did you mean equipped?)"),
        (["recipe=own", "recipe.conv_size=0"], "recipe.conv_size=0: a recipe stands as its yaml has it"),
    ],
)
def test_a_mistake_is_one_line(words, message):
    with pytest.raises(UserError) as error:
        compose([*DEMO, *words])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_needed_is_of_parts_that_classes_speak_of():
    mixer = compose([*DEMO, "attn=softmax"]).mixer
    with pytest.raises(UserError, match=r"recipe\.conv_size=needed: must be a value or own"):
        recipe_options(mixer, RecipeSettings(name="mine", conv_size="needed"))
