"""plan.corpora: language models on each corpus, all else once; verdicts of each and over all; mistakes in one line."""

import contextlib
import io
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from probe_settings import smoke_words
from small import comparison_settings, compose_once, in_this_process, little_plan

from attnbench.cli.compose import CONF, compose
from attnbench.comparison import compare, workers
from attnbench.comparison.plan import Comparison
from attnbench.comparison.progress import kind_of
from attnbench.comparison.publish import publish_comparison
from attnbench.report.inputs import read_inputs
from attnbench.report.page import write_report
from attnbench.results.row_tables import read_csv
from attnbench.results.rows import is_search
from attnbench.settings.check import check
from attnbench.settings.combinations import check_plan
from attnbench.settings.errors import UserError
from attnbench.settings.schema import ComparisonSettings, PlanSettings, RunSettings
from attnbench.verdict.over_corpora import over_corpora
from attnbench.verdict.seeds import figures
from attnbench.verdict.summary import verdicts_of

OVERRIDES = [
    *("experiment=demo", "model.dim=16", "model.head_width=8", "model.feed_forward_width=8", "match=none"),
    *("seq_len=16", "train.num_epochs=null", "train.num_steps=3", "train.batch_size=2", "train.warmup_steps=1"),
    "train.validation_characters=200",
]
CORPORA = ["embedded", "cats", "dogs"]
WORDS = {"cats": ["cat", "runs", "over", "green", "tree"], "dogs": ["dog", "sees", "blue", "house", "under", "it"]}

pytestmark = pytest.mark.usefixtures("one_thread", "without_charts")


@pytest.fixture(scope="module")
def my_conf(tmp_path_factory) -> Path:
    """A --config-dir with two corpora of one class, a third that is one of them, and one whose file is missing."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "data").mkdir()
    usual = yaml.safe_load((CONF / "data" / "text.yaml").read_text())
    for name, words in WORDS.items():
        (folder / f"{name}.txt").write_text(" ".join(random.Random(name).choices(words, k=4000)) + "\n")
    for name, text in {"cats": "cats", "dogs": "dogs", "felines": "cats", "gone": "gone"}.items():
        (folder / "data" / f"{name}.yaml").write_text(yaml.safe_dump({**usual, "path": str(folder / f"{text}.txt")}))
    return folder


def plan(evaluations: Sequence[str] = ("perplexity",), words: Sequence[str] = (), **changed: Any) -> PlanSettings:
    overrides = [*OVERRIDES, *smoke_words(*evaluations, perplexity_characters=200), *words]
    given = {"overrides": overrides, "evaluations": [*evaluations], "tested": ["perplexity"], "corpora": CORPORA}
    return little_plan(**{**given, "probe_seeds": [0], "reference": "softmax", **changed})


def settings(outputs: Path, **changed: Any) -> ComparisonSettings:
    of_command = {name: changed.pop(name) for name in ("freeze", "exported", "imported") if name in changed}
    return comparison_settings(plan(**changed), outputs, **of_command)


def carried_out(given: ComparisonSettings, my_conf: Path) -> Path:
    """Carry out a plan in this process; what Hydra composed for it once is not composed again."""

    def composed(words: Sequence[str]) -> RunSettings:
        return compose_once(words, config_dir=my_conf)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "run_in_processes", in_this_process)
        return compare.compare(given, composed)


@pytest.fixture(scope="module")
def compared(my_conf, tmp_path_factory) -> tuple[Path, str]:
    """A finished comparison, which tests only read, and what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        changed = {"evaluations": ("copy", "perplexity"), "reference": None}
        folder = carried_out(settings(tmp_path_factory.mktemp("outputs"), **changed), my_conf)
    return folder, said.getvalue()


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "comparison.json").read_text())


def test_language_models_are_trained_on_each_corpus_and_probes_once(compared):
    folder, _ = compared
    trained = Counter(re.sub(r"-seed.*", "", path.name) for path in folder.glob("*-T16-*"))
    # Two seeds of each variant, on three corpora.
    assert trained == {"softmax-tiny-T16": 6, "plain-tiny-T16": 6}
    assert Counter(path.name.split("-seed")[0] for path in (folder / "cells").iterdir()) == {
        "copy-softmax-lr0.01": 1,
        "copy-plain-lr0.01": 1,
    }
    known = record(folder)
    assert list(known["corpora"]["names"].values()) == CORPORA
    assert [label.partition("@")[0] for label in known["corpora"]["names"]] == ["embedded", "text:cats", "text:dogs"]
    assert known["failures"] == known["missing"] == []
    assert {rate["evaluation"] for rate in known["rates"]} == {"copy", *(f"training on {name}" for name in CORPORA)}


def test_what_is_to_be_scored_is_counted_as_what_is_scored(compared, my_conf):
    given = settings(compared[0].parent, evaluations=("copy", "perplexity"), reference=None)
    comparison = Comparison(given, lambda words: compose_once(words, config_dir=my_conf))
    comparison.settle()
    assert Counter(map(kind_of, comparison.to_score())) == Counter(map(kind_of, comparison.scored))


def test_a_verdict_of_each_corpus_and_their_count(compared):
    folder, said = compared
    inputs = read_inputs(folder)
    over_seeds = figures(inputs.rows)
    known = inputs.primaries
    assert list(known) == [f"perplexity on {name}" for name in CORPORA]
    verdicts = verdicts_of(over_seeds, rank=["softmax", "plain"], reference=None, primaries=known)
    assert [(it.pair.evaluation, it.pair.first, it.num_seeds) for it in verdicts] == [
        (f"perplexity on {name}", "softmax", 2) for name in CORPORA
    ]
    (total,) = over_corpora(verdicts)
    assert sorted(name for names in total.outcomes.values() for name in names) == sorted(CORPORA)
    text = " ".join(said.split())
    assert re.search(r"Over corpora: (plain|softmax) (is better than|and) (softmax|plain).* in \d of 3 corpora", text)
    assert all(f"perplexity on {name}" in text for name in CORPORA)


def test_rows_stand_under_their_own_evaluation_and_corpus_and_are_read_again(compared, my_conf, tmp_path):
    folder, _ = compared
    page = write_report(folder, target=tmp_path / "report").read_text()
    assert "Over corpora</h2>" in page
    assert all(f"Perplexity on {name}</h2>" in page for name in CORPORA)
    rows = read_csv(tmp_path / "report" / "results.csv")
    assert {row.identity.evaluation for row in rows} == {"copy", "training", "perplexity"}
    assert {row.identity.corpus for row in rows if row.identity.evaluation == "perplexity"} == set(
        record(folder)["corpora"]["names"]
    )
    publish_comparison(folder, tmp_path / "published", title="little")
    published = (tmp_path / "published" / "README.md").read_text()
    assert "of 3 corpora" in published
    again = read_inputs(tmp_path / "published")
    names = {row.identity.evaluation for row in again.rows}
    assert names == {"copy", *(f"{it} on {name}" for it in ("training", "perplexity") for name in CORPORA)}
    source = tmp_path / "published" / "cells.jsonl.gz"
    carried = {"evaluations": ("copy", "perplexity"), "reference": None, "imported": str(source)}
    taken = carried_out(settings(tmp_path / "elsewhere", **carried), my_conf)
    assert len([*taken.glob("**/results/*.jsonl")]) == 2 + 2 * 12
    assert record(taken)["imported"]["cells"] == 2 + 2 * 12


def test_cells_are_those_of_a_plan_on_one_corpus_alone(compared, my_conf, tmp_path):
    folder, _ = compared
    alone = carried_out(settings(tmp_path, corpora=None, words=["data=cats"], reference=None), my_conf)
    there = {path.name for path in alone.glob("*-T16-*")}
    assert there
    assert there < {path.name for path in folder.glob("*-T16-*")}
    known = record(alone)
    assert "corpora" not in known
    assert list(known["protocols"]) == ["training", "perplexity"]
    # And one corpus under plan.corpora is as before, not one of several.
    one = carried_out(settings(tmp_path, corpora=["cats"], reference=None), my_conf)
    assert one == alone
    assert {path.name for path in one.glob("*-T16-*")} == there
    assert {name: value for name, value in record(one).items() if name != "seconds"} == {
        name: value for name, value in known.items() if name != "seconds"
    }


def test_a_frozen_plan_names_its_corpora(my_conf, tmp_path):
    folder = carried_out(settings(tmp_path, freeze=True, seeds=[900, 901, 902]), my_conf)
    frozen = json.loads((folder / "freeze.json").read_text())
    assert list(frozen["corpora"]["names"].values()) == CORPORA
    assert [entry["evaluation"] for entry in frozen["family"]] == [f"perplexity on {name}" for name in CORPORA]
    assert {*frozen["protocols"]} == {f"{it} on {name}" for it in ("training", "perplexity") for name in CORPORA}
    hashes = [tuple(cell["hashes"]) for cell in frozen["cells"]]
    assert len(hashes) == len(set(hashes)) == 27
    assert "training plain on dogs, seed 902" in {cell["label"] for cell in frozen["cells"]}
    with pytest.raises(UserError, match=r"freeze.json: family was frozen as .*|freeze.json: .*was frozen"):
        carried_out(settings(tmp_path, corpora=["embedded", "cats"], seeds=[900, 901, 902]), my_conf)


def test_what_trains_in_a_system_evaluation_is_repeated_and_what_is_timed_alone_is_not(my_conf, tmp_path):
    scaling = [*smoke_words("scaling"), "eval.scaling.names=[tiny]"]
    on_each = [f"scaling softmax on {name}" for name in CORPORA]
    for train_tokens, labels in ((1000, on_each), ("null", ["scaling softmax"])):
        words = [*OVERRIDES, *scaling, f"eval.scaling.train_tokens={train_tokens}"]
        given = {"overrides": words, "variants": {"softmax": ["attn=softmax"]}, "tested": None}
        comparison = Comparison(
            settings(tmp_path, evaluations=("scaling", "perplexity"), **given),
            lambda words: compose(words, config_dir=my_conf),
        )
        assert [cell.label for cell in comparison.timed] == labels
        assert len({cell.folder for cell in comparison.timed}) == len(labels)


MISTAKES = {
    "named_twice": ({"corpora": ["cats", "cats"]}, "plan.corpora=['cats', 'cats']: names something twice"),
    "no_yaml": (
        {"corpora": ["cats", "cast"]},
        "data=cast: unknown (did you mean cats?); there is ",
    ),
    "no_file": ({"corpora": ["cats", "gone"]}, "gone.txt"),
    "one_text": ({"corpora": ["cats", "felines"]}, "plan.corpora: cats and felines are one text, text:cats@"),
    "none": ({"corpora": []}, "plan.corpora=[]: must name at least one"),
    "a_path": ({"corpora": ["../cats"]}, "plan.corpora=../cats: must be letters"),
    "beside_data": (
        {"variants": {"softmax": ["attn=softmax", "data=dogs"]}, "reference": None},
        "softmax: data=dogs beside plan.corpora: a corpus is a yaml of data/",
    ),
    "its_path": ({"words": ["data.path=x.txt"]}, "plan.overrides: data.path=x.txt beside plan.corpora"),
    "factorial": ({"factors": {"conv": ["attn.conv_size=0", "attn.conv_size=4"]}}, "a factorial has one corpus"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line_before_anything_is_trained(my_conf, tmp_path, mistake):
    changed, message = MISTAKES[mistake]
    given = settings(tmp_path, **changed)

    def checked() -> None:
        check(given.plan, "plan.")
        check_plan(given.plan)
        carried_out(given, my_conf)

    with pytest.raises(UserError) as caught:
        checked()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("little/*-T16-*"))


@pytest.mark.slow
def test_only_searches_of_each_corpus_choose_its_rate(my_conf, tmp_path, capsys):
    given = settings(tmp_path, learning_rates=[1e-3, 4e-3], num_search_seeds=1, corpora=["cats", "dogs"])
    folder = carried_out(given, my_conf)
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Control: softmax against itself .*in perplexity on cats, perplexity on dogs", said)
    rates = record(folder)["rates"]
    assert [(rate["variant"], rate["evaluation"]) for rate in rates] == [
        (variant, f"training on {corpus}") for variant in ("softmax", "plain") for corpus in ("cats", "dogs")
    ]
    scores = [tuple(rate["scores"].values()) for rate in rates]
    assert len(set(scores)) == 4
    searched = [path for path in folder.glob("*-T16-*") if is_search(int(re.search(r"seed(\d+)", path.name)[1]))]  # pyright: ignore[reportOptionalSubscript]
    assert len(searched) == 8
    inputs = read_inputs(folder)
    text = write_report(folder, target=tmp_path / "report").read_text()
    assert "Language model on dogs: nats per character by learning rate" in text
    assert inputs.protocol.corpora is not None
