"""Many variants beside one reference: their sentences in the answer, and the pictures of their differences."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from report_rows import SKILL, write_experiment
from simulate_verdicts import ACCURACY, NATS

from attnbench.comparison.publish import publish_comparison
from attnbench.report.blocks import Pictures
from attnbench.report.sections.differences import difference_section
from attnbench.report.sections.verdicts import FEW, MANY, MOST, first_sentences, verdict_lines
from attnbench.verdict.family import Pair
from attnbench.verdict.ranking import Verdict, common_reference, judge

RECALL = dataclasses.replace(ACCURACY, metric="accuracy", margin=0.01)
TEXT = dataclasses.replace(NATS, metric="nats_per_character", margin=math.log(1.01))


def verdicts(**means: tuple[float, float]) -> list[Verdict]:
    """Judge variants beside softmax, by how much better each is in recall and how many nats above it on text."""
    noise = np.random.default_rng(0).normal(0, 1e-3, 12)
    pairs = [
        Pair(
            evaluation=evaluation,
            primary=primary,
            settings={"split": "test", "sequence_length": 256},
            first=name,
            second="softmax",
            differences=tuple(mean + noise - noise.mean()),
            seeds=tuple(range(12)),
        )
        for evaluation, primary, index in (("recall", RECALL, 0), ("perplexity", TEXT, 1))
        for name, mean in ((name, both[index]) for name, both in means.items())
    ]
    return judge(pairs)


MEANS = {
    "far": (-0.5, 0.2),
    "near": (-0.05, 0.005),
    "alike": (0.0, 0.0),
    "ahead": (0.02, -0.005),
    "beyond": (0.03, -0.05),
    "lost": (-0.9, 0.1),
    "same": (0.0001, 0.0),
}


def test_many_variants_stand_in_a_sentence_an_evaluation_the_largest_difference_first():
    assert len(MEANS) > MANY
    lines = verdict_lines(verdicts(**MEANS))
    assert list(lines) == ["Better", "Equivalent"]
    assert len(lines["Better"]) == 6
    worse, *_ = lines["Better"]
    assert re.match(
        r"softmax recalls 90\.0\d* \[[^]]+\] more of 100 pairs than lost, 50\S* \[[^]]+\] than far, ", worse
    )
    assert worse.endswith(" than near, more than 0.01 in accuracy.")
    (ahead,) = [it for it in lines["Better"] if it.startswith("beyond recalls")]
    assert re.fullmatch(
        r"beyond recalls 3\S* \[[^]]+\] more of 100 pairs than softmax; also ahead 2\S* \[[^]]+\], more than .*", ahead
    )
    (only,) = [it for it in lines["Better"] if it.startswith("ahead has")]
    assert only == "ahead has 0.50 % [0.42, 0.57] lower perplexity than softmax, less than matters."
    assert [it.partition(": as good as softmax are ")[0] for it in lines["Equivalent"]] == [
        "Recall (seeds like these), within 0.01 in accuracy",
        "Perplexity, within 1 % of perplexity",
    ]
    assert all("same +0.0" in it and "alike " in it for it in lines["Equivalent"])


def test_few_variants_have_a_sentence_each():
    few = dict(list(MEANS.items())[:MANY])
    lines = verdict_lines(verdicts(**few))
    # 0.2 nats below are 18 % of far's perplexity.
    (text,) = [it for it in lines["Better"] if it.startswith("softmax has") and "than far" in it]
    assert re.match(r"softmax has 18\.1\d* % \[18\.\d+, 18\.\d+\] lower perplexity than far, 9", text)
    assert lines["Equivalent"] == [next(it for it in lines["Equivalent"] if it.startswith("alike and softmax: recall"))]


def test_what_several_variants_lack_is_said_once():
    def without(verdict, reason):
        return dataclasses.replace(verdict, outcome="none", reason=reason, difference=None, low=None, high=None)

    some = [
        without(it, f"{it.pair.first} was not measured") if it.pair.first in ("far", "near") else it
        for it in verdicts(**MEANS)
    ]
    assert verdict_lines(some)["No verdict"] == ["Was not measured: recall of far, near; perplexity of far, near."]
    one, *rest = verdicts(**MEANS)
    lost = without(one, "far ran out of memory at 1 of 1 seeds")
    alone = "Far ran out of memory at 1 of 1 seeds: far and softmax in recall."
    assert verdict_lines([lost, *rest])["No verdict"] == [alone]
    seeds = [without(it, "a test needs two common seeds, and there is 1") for it in verdicts(**MEANS)]
    assert verdict_lines(seeds)["No verdict"] == ["A test needs two common seeds, and there is 1: all 14 pairs."]


def test_a_variant_that_was_not_measured_is_named_once_whichever_side_of_a_pair_it_is_on():
    pairs = [("a", "b"), ("a", "flash"), ("flash", "c"), ("flash", "d")]
    one = verdicts(far=(-0.5, 0.2))[0]
    lost = [
        dataclasses.replace(
            one,
            pair=dataclasses.replace(one.pair, first=first, second=second),
            outcome="none" if "flash" in (first, second) else "better",
            reason="flash was not measured" if "flash" in (first, second) else "",
        )
        for first, second in pairs
    ]
    assert verdict_lines(lost)["No verdict"] == ["Was not measured: recall of flash."]


def test_undecided_pairs_stand_with_their_own_seeds_and_a_failed_winner_with_its_reason():
    first, second, third = (
        dataclasses.replace(it, outcome="undecided", is_equivalent=False)
        for it in verdicts(far=(-0.5, 0.2), near=(-0.05, 0.1), lost=(-0.9, 0.1))[:3]
    )
    lines = verdict_lines(
        [
            first,
            dataclasses.replace(second, num_seeds=5),
            dataclasses.replace(third, reason="softmax would be better, but some of its seeds diverged"),
        ]
    )["Undecided"]
    assert [it.partition("; ")[0] for it in lines] == [
        "recall at 12 seeds",
        "recall at 5 seeds",
        "recall: lost and softmax, softmax would be better, but some of its seeds diverged.",
    ]


def test_the_reference_is_what_all_others_were_compared_with():
    assert common_reference(verdicts(**MEANS)) == "softmax"
    assert common_reference([]) is None
    one, *rest = verdicts(**MEANS)
    among = [dataclasses.replace(one, pair=dataclasses.replace(one.pair, second="far")), *rest]
    assert common_reference(among) is None
    section = difference_section(among)
    assert section is not None
    assert section.title == "Differences from the best"


def test_differences_are_drawn_the_best_first_between_their_margins():
    section = difference_section(verdicts(**MEANS))
    assert section is not None
    assert section.title == "Differences from softmax"
    (pictures,) = [block for block in section.blocks if isinstance(block, Pictures)]
    recall, text = pictures.shown
    assert (recall.title, text.title) == ("Recall: accuracy less softmax’s", "Perplexity less softmax’s, %")
    marks = "sequence length 256; dashed: no difference; orange ticks: the margin,"
    assert recall.legend == f"{marks} 0.01 in accuracy; better →"
    assert text.legend == f"{marks} 1 % of perplexity; ← better"
    drawn = {it.name: it.spec["datasets"]["figures"] for it in pictures.shown}
    assert [it["variant"] for it in drawn["differences-recall"]] == [
        "beyond", "ahead", "same", "alike", "near", "far", "lost"
    ]  # fmt: skip
    best, *_, worst = drawn["differences-perplexity"]
    assert (best["variant"], worst["variant"]) == ("beyond", "far")
    assert worst["value"] == pytest.approx(100 * math.expm1(0.2))
    assert worst["low"] < worst["value"] < worst["high"]
    assert worst["text"].startswith("softmax has 18.1")
    limits = {it["limit"] for it in text.spec["datasets"]["limits"] if it["variant"] == "far"}
    assert sorted(limits) == [pytest.approx(100 * (1 / 1.01 - 1)), pytest.approx(1.0)]
    assert text.spec["datasets"]["levels"] == [{"level": 0.0}]
    assert "softmax recalls 90" in recall.description


def test_a_picture_needs_a_variant_that_has_a_difference():
    assert difference_section(verdicts()) is None
    enough = verdicts(**dict(list(MEANS.items())[:1]))
    assert difference_section(enough) is not None
    without = [dataclasses.replace(it, difference=None, low=None, high=None, outcome="none") for it in enough]
    assert difference_section(without) is None
    assert difference_section([*enough[:1], *without[1:]]).blocks[1].shown[0].name == "differences-recall"


def test_the_first_screen_has_five_sentences_at_most_each_winner_first():
    said = first_sentences(verdicts(**MEANS))
    assert len(said) == MOST
    assert [it.split()[0] for it in said[:4]] == ["softmax", "softmax", "beyond", "beyond"]
    assert said[4] == "Equivalent to softmax: alike and same in recall; alike and same in perplexity."
    many = verdicts(**{f"v{number}": (-0.1 - number / 100, 0.0) for number in range(9)})
    (text, alike) = first_sentences(many)
    assert text.count(" than ") == FEW + 1
    assert text.endswith(", and than 6 others.")
    assert alike.endswith("v0, v1, v2 and 6 others in perplexity.")
    assert first_sentences([]) == []


@pytest.mark.usefixtures("without_charts")
def test_a_published_page_has_the_pictures_that_carry_its_answer(tmp_path, monkeypatch):
    # Made-up cells are no cells of a plan.
    monkeypatch.setattr("attnbench.comparison.publish.export_cells", lambda folder, target: 0)
    folder = write_experiment(tmp_path / "demo", seeds=10)
    record = json.loads((folder / "comparison.json").read_text())
    (folder / "comparison.json").write_text(json.dumps(record | {"reference": "softmax", "rank": list(SKILL)}))
    publish_comparison(folder, tmp_path / "published", title="Demo")
    page = (tmp_path / "published" / "README.md").read_text()
    named = re.findall(r"^!\[(.+)\]\((.+)\)$", page, re.MULTILINE)
    assert [name for _, name in named] == [
        *(f"differences-{evaluation}.svg" for evaluation in ("copy", "recall", "perplexity")),
        *("copy-state_bytes.svg", "recall-state_bytes.svg", "perplexity-step_milliseconds.svg"),
    ]
    assert named[1][0].startswith("Recall: accuracy less softmax’s; sequence length 512, pairs 64; dashed: no differ")
    assert all((tmp_path / "published" / name).exists() for _, name in named)
    # Words on how to read them stand before them.
    places = [page.index(it) for it in ("\n| ", "The upright ticks are the margin", "\n![", "The verdicts in full:")]
    assert places == sorted(places)
