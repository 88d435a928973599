"""A factorial plan carried out, with a corner that no model can be built of."""

import json

import pytest
from probe_settings import smoke_words
from small import TINY_RUN, comparison_settings, compose_once, in_this_process, little_plan

from attnbench.comparison import compare, workers
from attnbench.comparison.publish import publish_comparison
from attnbench.results.job import Job
from attnbench.settings.corners import expand
from attnbench.settings.errors import UserError

FACTORS = {
    "positions": ["attn.rotary_theta=null", "attn.rotary_theta=10000"],
    "gate": ["attn.output_gate=none", "attn.output_gate=silu"],
}
VARIANTS = {"softmax": ["attn=softmax"], "odd": ["attn=linear"]}

FEW, FEW_VALIDATED = {"perplexity_characters": 200}, "train.validation_characters=200"
"""Characters that are scored: all of them take longer than the trainings."""

pytestmark = pytest.mark.usefixtures("one_thread", "without_charts")


@pytest.mark.slow
def test_a_factorial_is_run_and_shown_by_its_effects_and_says_what_it_lacks(text, tmp_path, monkeypatch, capsys):
    def dying(job: Job) -> None:
        if " odd" in job.label:
            raise RuntimeError("its process was ended by SIGKILL")
        whole(job)

    whole = workers.execute
    monkeypatch.setattr(workers, "execute", dying)
    monkeypatch.setattr(workers, "run_in_processes", in_this_process)
    monkeypatch.setenv("COLUMNS", "80")
    plan = little_plan(
        [*TINY_RUN, f"data.path={text}", *smoke_words("recall", "perplexity", **FEW), FEW_VALIDATED],
        name="parts",
        variants=expand(VARIANTS, FACTORS, "full"),
        factors=FACTORS,
        rank=[],
        evaluations=["recall", "perplexity"],
    )
    with pytest.raises(UserError, match="failed"):
        compare.compare(comparison_settings(plan, tmp_path, report=True), compose_once)
    printed = capsys.readouterr().out
    assert "odd+positions+gate: was not measured." in printed
    assert "every effect with odd; means over mixers are of softmax." in " ".join(printed.split())
    assert "positions × gate" in printed
    assert "positions, gate" in printed
    folder = tmp_path / "parts"
    assert json.loads((folder / "comparison.json").read_text())["factors"] == ["positions", "gate"]
    page = (folder / "report" / "index.html").read_text()
    assert "Effects of parts on nats a character" in page
    assert "odd+positions+gate: was not measured." in page
    # Its answer is the effects, not lines of every corner.
    assert "Nothing is tested in this plan" in page
    assert "the variants differ in" not in page
    publish_comparison(folder, tmp_path / "published", title="Parts")
    published = (tmp_path / "published" / "README.md").read_text()
    assert "\n- Nothing is tested in this plan" in published
    assert "\n## Effects of parts on nats a character\n" in published
    assert "\n| positions, gate | 0 of 2, " in published
    assert "odd+positions+gate: was not measured." in published
    # Its pictures would be of corners.
    assert "![" not in published
    # Effects have brackets of another kind.
    assert "Clopper" not in published
