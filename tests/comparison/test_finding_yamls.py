"""The yamls of conf/finding: what they say fits together, and their runs can be built."""

import json

import pytest
from small import MIXERS, comparison_settings

from attnbench.cli.compose import CONF, compose
from attnbench.cli.reading_names import every_finding
from attnbench.comparison.plan import Comparison
from attnbench.verdict.claims import NOT_REACHED, WORDS

FINDINGS = {plan.name: plan for plan in every_finding()}


def test_a_cpu_decides_what_the_makefile_runs(root):
    assert {name for name, plan in FINDINGS.items() if "cpu" in plan.claim.minutes} == {"conv_recall", "nope_copy"}
    assert "attnbench findings conv_recall nope_copy " in (root / "Makefile").read_text()


@pytest.mark.parametrize("name", FINDINGS)
def test_a_yaml_names_mixers_that_there_are_and_its_claim_in_a_sentence(name):
    plan = FINDINGS[name]
    words = [word for variant in plan.variants.values() for word in variant if word.startswith("attn=")]
    assert {word.removeprefix("attn=") for word in words} <= {*MIXERS, "hybrid"}
    assert plan.claim.statement[0].isupper()
    assert not plan.claim.statement.endswith(".")
    assert plan.claim.controls
    assert plan.seeds == [*range(400, 410)]
    assert {*plan.probe_seeds} <= {*range(400, 460)}
    assert (len({*plan.probe_seeds}) in (5, 10), plan.ranked) == (True, [])
    assert (CONF / "finding" / f"{name}.yaml").read_text().startswith("# @package plan\n# ")


def test_the_page_lists_every_finding(root):
    page = (root / "docs" / "findings.md").read_text()
    listed = page[page.index("## What there is") : page.index("## A claim")]
    rows = [line.split("|")[1] for line in listed.splitlines() if line.startswith("| ") and "---" not in line]
    assert sorted(name for row in rows[1:] for name in row.strip().split(", ")) == sorted(FINDINGS)


def test_published_findings_have_one_of_nine_words_and_after_a_failed_control_no_figures(root):
    for path in root.glob("docs/results/findings-*/findings.json"):
        for found in json.loads(path.read_text())["findings"]:
            assert found["word"] in WORDS, path
            held = [sum((it or 0) >= control["threshold"] for it in control["scores"]) >= control["least"]
                    for control in found["controls"]]  # fmt: skip
            assert all(held) or (found["word"], found["contrasts"]) == (NOT_REACHED, []), path


@pytest.mark.slow
@pytest.mark.parametrize("name", FINDINGS)
def test_the_runs_of_every_finding_can_be_built(name, tmp_path):
    comparison = Comparison(comparison_settings(FINDINGS[name], tmp_path), compose)
    assert not comparison.failures
    assert all(score.prepared.matched is not None for score in comparison.scores)
