"""plan.seeds=auto: looks at 5, 10 and 20 seeds, more of them for undecided pairs alone."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hydra import compose as compose_hydra
from hydra import initialize_config_dir
from made_rows import row
from probe_settings import smoke_words
from simulate_verdicts import ACCURACY, NATS
from small import TINY_RUN, comparison_settings, compose_once, in_this_process, little_plan

from attnbench.cli.compose import CONF
from attnbench.cli.reading import read_comparison
from attnbench.comparison import compare, workers
from attnbench.evals.runners.probe import ProbeJob
from attnbench.report.inputs import read_inputs
from attnbench.results.rows import is_search
from attnbench.settings.errors import UserError
from attnbench.settings.schema import LOOKS
from attnbench.verdict.family import Pair
from attnbench.verdict.ranking import judge_in_looks, next_look
from attnbench.verdict.seeds import figures
from attnbench.verdict.summary import verdicts_of


def pair(differences, primary=ACCURACY, **others):
    seeds = tuple(range(len(differences)))
    given = {"evaluation": "copy", "primary": primary, "settings": {}, "first": "a", "second": "b", "seeds": seeds}
    return Pair(**{**given, **others}, differences=tuple(map(float, differences)))


def test_what_a_look_decided_stays_decided_whatever_comes_later():
    rng = np.random.default_rng(0)
    first = rng.normal(0.05, 0.0005, 5)
    later = [*first, *rng.normal(-0.5, 0.1, 15)]
    [early], [late] = judge_in_looks([pair(first, NATS)]), judge_in_looks([pair(later, NATS)])
    assert (early.outcome, early.num_seeds) == (late.outcome, late.num_seeds) == ("worse", 5)
    assert (early.p_value, next_look(late)) == (late.p_value, None)


def test_a_pair_gets_more_seeds_until_it_is_decided_or_has_had_all_looks():
    # Five seeds of an accuracy have no p-value that the first look could reject by.
    solved = [0.9 + 0.001 * seed for seed in range(20)]
    [at_five], [at_ten] = (judge_in_looks([pair(solved[:num])]) for num in (5, 10))
    assert (at_five.outcome, next_look(at_five)) == ("undecided", 10)
    assert (at_ten.outcome, at_ten.num_seeds, next_look(at_ten)) == ("better", 10, None)
    [unclear] = judge_in_looks([pair(np.random.default_rng(1).normal(0, 0.2, 20))])
    assert (unclear.outcome, unclear.num_seeds, next_look(unclear)) == ("undecided", 20, None)
    # A look that is not complete decides nothing.
    [cut_off] = judge_in_looks([pair(solved[:9])])
    assert (cut_off.outcome, cut_off.num_seeds, next_look(cut_off)) == ("undecided", 5, 10)
    [begun] = judge_in_looks([pair(solved[:3])])
    assert (begun.outcome, begun.reason) == ("none", "an interim test takes 5 common seeds, and there are 3")


def test_the_looks_spend_the_error_of_the_family():
    assert sum(LOOKS.values()) == pytest.approx(0.05)
    assert list(LOOKS) == [5, 10, 20]


@pytest.fixture
def made(monkeypatch):
    """Scores of copy that are made up, so that a pair is decided at the first, the second look or at none."""
    offsets = {"softmax": 0.0, "far": -0.5, "near": 0.0}

    def rows(job):
        seed, name = job.settings.seed, job.settings.mixer.name
        noise = np.random.default_rng([seed, len(name)]).normal(0, 0.05)
        value = float(np.clip(0.9 + offsets[name] + noise if name != "softmax" else 0.9, 0, 1))
        settings = {"length": 5, "beyond_training": False, "split": "test", "chance": 1 / 26}
        yield row("x", value=value, settings=settings).measurement

    monkeypatch.setattr(ProbeJob, "rows", rows)
    monkeypatch.setattr(workers, "run_in_processes", in_this_process)


@pytest.mark.usefixtures("made", "one_thread")
def test_undecided_pairs_alone_get_more_seeds(text, tmp_path):
    folder = compare.compare(plan_in_looks(text, tmp_path), compose_once)
    seeds = Counter(
        entry.parents[1].name.split("-")[1] for entry in folder.glob("cells/*/results/*.jsonl")
        if not is_search(int(entry.parents[1].name.split("-seed")[1].split("-")[0]))
    )  # fmt: skip
    # `far` is decided with ten; `near` never is, and takes softmax and its control along.
    assert seeds == {"softmax": 40, "far": 10, "near": 20}
    inputs = read_inputs(folder)
    assert inputs.protocol.in_looks
    over_seeds = figures(inputs.rows, inputs.protocol.shared)
    verdicts = verdicts_of(
        over_seeds, rank=inputs.protocol.rank, reference="softmax", in_looks=True,
        primaries=inputs.primaries,
    )  # fmt: skip
    assert {it.pair.first: (it.outcome, it.num_seeds) for it in verdicts} == {
        "far": ("worse", 10),
        "near": ("undecided", 20),
    }
    files = json.loads((folder / "comparison.json").read_text())["files"]
    assert len(files) == 70
    # The same command again runs nothing, and comes to the same.
    before = sorted(path.stat().st_mtime_ns for path in folder.glob("cells/*/results/*.jsonl"))
    compare.compare(plan_in_looks(text, tmp_path), compose_once)
    assert sorted(path.stat().st_mtime_ns for path in folder.glob("cells/*/results/*.jsonl")) == before


def plan_in_looks(text: Path, outputs: Path, **changed):
    seeds = list(range(20))
    variants = {"softmax": ["attn=softmax"], "far": ["attn=linear"], "near": ["attn=linear", "attn.qk_norm=true"]}
    given = {"variants": variants, "seeds": seeds, "probe_seeds": seeds, "in_looks": True, "reference": "softmax"}
    plan = little_plan([*TINY_RUN, f"data.path={text}", *smoke_words("copy")], **given)
    return comparison_settings(plan, outputs, **changed)


def test_looks_are_not_frozen(text, tmp_path):
    with pytest.raises(UserError, match=r"^plan\.seeds=auto: the scores decide how many seeds there are"):
        compare.compare(plan_in_looks(text, tmp_path, freeze=True), compose_once)


def read(*words):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose_hydra("compare", list(words), return_hydra_config=True)
        return read_comparison(config, config.hydra)


def test_auto_stands_for_twenty_seeds_that_come_in_looks():
    plan = read("plan=compare", "plan.seeds=auto").plan
    assert (plan.seeds, plan.probe_seeds, plan.in_looks) == ([*range(20)], [*range(20)], True)
    for words, message in (
        (["plan.seeds=auto", "plan.probe_seeds=[0,1]"], r"plan\.probe_seeds=\[0,1\] with plan\.seeds=auto"),
        (["+plan.in_looks=true"], r"plan\.in_looks=true: is set by plan\.seeds=auto"),
        (["plan.seeds=auto", "plan.rank=[]"], r"plan\.seeds=auto: with plan\.rank=\[\] nothing is tested"),
    ):
        with pytest.raises(UserError, match=message):
            read("plan=compare", *words)
