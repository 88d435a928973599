"""Findings at smoke size: carried out through a plan's cells, decided, written down, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import find_rates
import hydra
import pytest
import torch
from probe_settings import smoke_words
from small import compose_once, in_this_process

from attnbench.cli.compose import CONF
from attnbench.cli.reading_names import named_words, read_findings
from attnbench.comparison import workers
from attnbench.comparison.findings import plan_of, run_findings
from attnbench.comparison.publish import publish_findings
from attnbench.comparison.transfer import read_cells
from attnbench.evals.copy_task import Copy
from attnbench.results.folder import holding
from attnbench.results.row_tables import read_csv
from attnbench.settings.errors import UserError
from attnbench.settings.finding import FindingsSettings, read_finding
from attnbench.settings.schema import SELECTION_SEED
from attnbench.verdict.bounds import FAIL, NOT_RUN, PASS, UNDECIDED

OVERRIDES = [
    *("experiment=demo", "model.dim=32", "model.head_width=16", "model.feed_forward_width=24", "seq_len=32"),
    *("match=none", "data=text"),
]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Cells run in this process: processes have tests of their own."""

    def run(function, items, **_):
        yield from in_this_process(function, items)

    monkeypatch.setattr(workers, "run_in_processes", run)


def finding(text: Path, **changed):
    """Claim that a model of softmax without a convolution copies strings after ten steps, which it does not."""
    values = {
        "statement": "Softmax copies after ten steps",
        "source": "nobody",
        "setting": "smoke",
        "otherwise": "It would have to learn faster",
        "core": True,
        "minutes": {"cpu": 1.0},
        "evaluations": ["copy"],
        "overrides": [*OVERRIDES, f"data.path={text}", *smoke_words("copy")],
        "variants": {
            "plain": {"words": ["attn=softmax", "attn.conv_size=0"], "rates": {"copy": [1e-2]}},
        },
        "contrasts": [contrast()],
    } | changed
    return read_finding("little", values)


def contrast(**changed) -> dict:
    values = {"kind": "reaches", "variants": ["plain"], "metric": "symbol_accuracy", "settings": {"length": 5}}
    return {**values, "threshold": 0.95, **changed}


def settings(outputs: Path, num_seeds: int = 3, **changed) -> FindingsSettings:
    given = FindingsSettings(
        names=None, full=False, freeze=False, seeds=[*range(num_seeds)], device="cpu", outputs_dir=str(outputs),
        report=False, rerun=False, command="attnbench findings little",
    )  # fmt: skip
    return replace(given, **changed)


def decided(given: FindingsSettings, *findings) -> list[dict]:
    folder = run_findings(given, findings, compose_once)
    return json.loads((folder / "findings.json").read_text())["findings"]


def test_a_false_finding_fails_with_its_figures(text, tmp_path, capsys):
    [found] = decided(settings(tmp_path), finding(text))
    assert found["verdict"] == FAIL
    [figure] = found["contrasts"]
    assert (figure["value"], figure["num_seeds"], figure["asked"]) == (0.0, 3, ">= 0.7")
    assert figure["high"] == pytest.approx(0.632, abs=1e-3)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("FAIL      little: share of seeds of plain with symbol accuracy >= 0.95")
    assert "[0, 0.632]" in line
    # Of one that fails the other answer is PASS, for which each figure would have to be as it was asked.
    share = "share of seeds of plain with symbol accuracy >= 0.95, length 5"
    assert found["other_answer"] == [PASS, f"{share} would have to be >= 0.7"]


def test_nothing_runs_twice_and_the_page_has_each_interval(text, tmp_path):
    given = settings(tmp_path, 2)
    folder = run_findings(given, [finding(text)], compose_once)
    results = {path: path.stat().st_mtime_ns for path in folder.glob("little/cells/*/results/*.jsonl")}
    assert len(results) == 2
    run_findings(replace(given, report=True), [finding(text)], compose_once)
    assert results == {path: path.stat().st_mtime_ns for path in folder.glob("little/cells/*/results/*.jsonl")}
    page = (folder / "index.html").read_text()
    for words in (
        "Softmax copies after ten steps",
        "It would have to learn faster",
        "finding-little",
        "asked &gt;= 0.7",
    ):
        assert words in page
    # Words beside a figure stand whole, in lines.
    picture = (folder / "figures" / "finding-little.svg").read_text()
    assert "<tspan" in picture
    assert "…" not in picture
    assert len((folder / "results.csv").read_text().splitlines()) > 2


def test_a_finding_goes_on_elsewhere_from_its_cells(text, tmp_path):
    given, carried = settings(tmp_path / "here", 2), tmp_path / "carried"
    [found] = decided(given, finding(text))
    run_findings(replace(given, exported=str(carried)), [finding(text)], compose_once)
    there = replace(given, outputs_dir=str(tmp_path / "there"), imported=str(carried))
    [again] = decided(there, finding(text))
    assert again == found
    files = [sorted((tmp_path / place).glob("findings/little/cells/*/results/*.jsonl")) for place in ("here", "there")]
    assert len(files[0]) == 2
    assert [path.read_text().splitlines()[:-1] for path in files[0]] == [
        path.read_text().splitlines()[:-1] for path in files[1]
    ]


def test_what_was_cut_off_is_exported_and_where_nothing_is_that_is_said(text, tmp_path):
    given, carried = settings(tmp_path, 2), tmp_path / "carried"
    with pytest.raises(UserError, match=r"none of these findings has results in .*: little"):
        run_findings(replace(given, exported=str(carried)), [finding(text)], compose_once)
    decided(given, finding(text))
    missing = next((tmp_path / "findings").glob("little/cells/*seed1-*/results/*.jsonl"))
    missing.unlink()
    run_findings(replace(given, exported=str(carried)), [finding(text)], compose_once)
    assert len(read_cells(carried / "little" / "cells.jsonl.gz").folders) == 1
    for whole in (tmp_path / "findings").glob("little/cells/*/results/*.jsonl"):
        whole.unlink()
    with pytest.raises(UserError, match=r"none of these findings has results in .*: little"):
        run_findings(replace(given, exported=str(carried)), [finding(text)], compose_once)


def test_a_folder_without_cells_of_these_findings_is_refused(text, tmp_path):
    (tmp_path / "carried" / "other").mkdir(parents=True)
    given = settings(tmp_path, imported=str(tmp_path / "carried"))
    with pytest.raises(UserError, match=r"import=.*carried: has the runs of none of these findings: little"):
        run_findings(given, [finding(text)], compose_once)


def test_a_training_that_failed_is_named_with_its_reason(text, tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise UserError("the device went away")

    monkeypatch.setattr(workers, "execute", broken)
    [found] = decided(settings(tmp_path, 2), finding(text))
    assert found["verdict"] == "not run"
    assert found["reason"].startswith("copy plain, lr 0.01, seed 0: the device went away")
    assert found["reason"].endswith("the same command tries it again")
    assert "not run   little: copy plain, lr 0.01, seed 0" in capsys.readouterr().out


def test_one_without_power_is_undecided_and_says_how_many_seeds_more(text, tmp_path, capsys):
    [found] = decided(settings(tmp_path, 2), finding(text, contrasts=[contrast(kind="misses")]))
    assert found["verdict"] == UNDECIDED
    assert found["contrasts"][0]["seeds_needed"] > 2
    assert "seeds more would decide" in capsys.readouterr().out


@pytest.mark.parametrize("labels", ["right", "shuffled"])
def test_a_true_finding_passes_and_with_shuffled_labels_it_does_not(labels, text, tmp_path, monkeypatch):
    def shuffled(self, split, seed, start, count, device):
        batch = sequences(self, split, seed, start, count, device)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + start))
        return batch._replace(targets_BT=batch.targets_BT[order])

    sequences = Copy.sequences
    if labels == "shuffled":
        monkeypatch.setattr(Copy, "sequences", shuffled)
    sizes = {"num_steps": 60, "max_length": 1, "test_lengths": [1], "batch_size": 32}
    learns = [*smoke_words("copy"), *(f"eval.copy.{name}={value}" for name, value in sizes.items())]
    claim = contrast(settings={"length": 1}, threshold=0.5, at_least=0.3)
    overrides = [*OVERRIDES, f"data.path={text}", *learns]
    [found] = decided(settings(tmp_path), finding(text, overrides=overrides, contrasts=[claim]))
    assert (found["verdict"] == PASS) == (labels == "right"), found


def test_frozen_it_may_not_be_changed(text, tmp_path):
    given = settings(tmp_path, 2)
    run_findings(replace(given, freeze=True), [finding(text)], compose_once)
    assert not [*(tmp_path / "findings" / "little").glob("cells/*")]
    with pytest.raises(UserError, match=r"claim\.contrasts\[0\]\.threshold was frozen as 0\.95 and is 0\.9 now"):
        run_findings(given, [finding(text, contrasts=[contrast(threshold=0.9)])], compose_once)


def test_seeds_that_another_table_has_booked_are_not_frozen(text, tmp_path):
    run_findings(settings(tmp_path, freeze=True, seeds=[200]), [finding(text)], compose_once)
    with pytest.raises(UserError, match="100 is booked"):
        run_findings(settings(tmp_path / "other", freeze=True, seeds=[100]), [finding(text)], compose_once)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"minutes": {"cuda": 1.0}}, "device=cpu: too slow to decide it; it takes cuda"),
     ({"evaluations": ["strings"], "overrides": []}, "strings"),
     ({"variants": {"plain": {"words": ["attn=softmax"], "rates": None}}}, "no learning rate was searched for plain"),
     ({"needs": ["a probe of that"]}, "needs a probe of that"),
     ({"variants": {"plain": {"words": ["attn=softmaxx"], "rates": {"copy": [1e-2]}}}}, "softmaxx")],
    ids=["device", "probe", "rate", "lack", "mixer"],
)  # fmt: skip
def test_what_cannot_run_is_said_in_one_line(changed, reason, text, tmp_path):
    claim = finding(text, **changed)
    [found] = decided(settings(tmp_path), claim)
    assert found["verdict"] == NOT_RUN
    assert reason in found["reason"]
    with pytest.raises(UserError, match=f"^little: .*{reason}") as refused:
        run_findings(settings(tmp_path, names=["little"]), [claim], compose_once)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"threshold": 1.5}, r"threshold=1\.5: symbol_accuracy lies in 0 to 1$"),
     ({"at_least": 1.5}, r"at_least=1\.5: must lie inside 0 to 1"),
     ({"variants": ["other"]}, "other must be one of plain, conv"),
     ({"kind": "difference", "variants": ["plain", "conv"], "threshold": None}, "takes at_least, at_most, or both"),
     ({"kind": "difference"}, r"variants=\['plain'\]: kind=difference takes 2"),
     ({"kind": "window", "at_least": 1.0}, r"plain has rates={'copy': \[0\.01\]}; a window alone takes several"),
     ({"kind": "beats"}, "kind=beats: must be one of reaches, misses")],
)  # fmt: skip
def test_a_contrast_that_cannot_be_tested_is_one_line(changed, message, text):
    variants = {name: {"words": ["attn=softmax"], "rates": {"copy": [1e-2]}} for name in ("plain", "conv")}
    with pytest.raises(UserError, match=message) as refused:
        finding(text, variants=variants, contrasts=[contrast(**changed)])
    assert "\n" not in str(refused.value)


def test_plain_words_are_names():
    assert named_words(["a", "device=cpu", "b"]) == ["device=cpu", "names=[a,b]"]
    assert named_words(["--config-dir", "mine", "full=true"]) == ["--config-dir", "mine", "full=true"]
    # Of options that take no word, and of those that take one under a shorter name.
    assert named_words(["-m", "a", "--multirun", "b"], "of") == ["-m", "--multirun", "of=[a,b]"]
    options = ["-cd", "mine", "--config-p", "there"]
    # The folder of an option may be called as a name is.
    assert named_words([*options, "mine"]) == [*options, "names=[mine]"]


def read_words(*words: str):
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose("findings", [*words, "names=[nope_copy]"], return_hydra_config=True)
        return read_findings(config, config.hydra)


def test_a_command_line_names_devices_and_a_stack_as_a_plans_does():
    given, [found] = read_words("stack=auto", "devices=all")
    plan = plan_of(given, found).plan
    assert (plan.stack, plan.devices) == (None, "all")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import=nowhere"], "import=nowhere: no such folder"),
        (["export=''"], "export='': name a folder"),
        (["freeze=true", "export=there"], "freeze=true with export=there: do one after the other"),
        (["freeze=true", "import=docs"], "freeze=true with import=docs: do one after the other"),
        (["full=true"], r"full=true with names=\['nope_copy'\]: full runs all there are"),
        (["export=there", "import=docs"], "export=there with import=docs: do one after the other"),
    ],
)
def test_words_about_carried_cells_that_cannot_be_meant(words, message):
    with pytest.raises(UserError, match=message):
        read_words(*words)


def test_rates_are_searched_on_seeds_that_are_not_scored_and_printed_for_the_yaml(text, tmp_path, capsys):
    unsearched = finding(text, variants={"plain": {"words": ["attn=softmax", "attn.conv_size=0"], "rates": None}})
    plan = find_rates.searching(unsearched, settings(tmp_path), {"copy": [1e-2, 3e-2]}, num_seeds=1)
    # Its folder is there before a size of stacks is written into it, and nobody else's meanwhile.
    with holding(tmp_path / "findings" / "little", waits=False), pytest.raises(UserError, match="in use by"):
        find_rates.search(unsearched, plan)
    find_rates.search(unsearched, plan)
    told = capsys.readouterr().out.splitlines()[-1]
    assert told in {f"little: plain: rates: {{'copy': [{rate}]}}" for rate in (0.01, 0.03)}
    seeds = {path.parents[1].name.split("-")[-2] for path in tmp_path.glob("findings/little/cells/*/results/*.jsonl")}
    assert seeds == {f"seed{SELECTION_SEED}"}


def test_a_finding_of_a_probe_and_a_language_model_has_a_rate_for_each(text, tmp_path):
    words = [*OVERRIDES, f"data.path={text}", *smoke_words("copy", "perplexity"), "train.num_epochs=null"]
    several = {
        "evaluations": ["copy", "perplexity"],
        "overrides": [*words, "train.num_steps=2", "train.warmup_steps=1"],
        "contrasts": [
            contrast(evaluation="copy"),
            {
                **{"kind": "misses", "variants": ["plain"], "evaluation": "perplexity"},
                **{"metric": "nats_per_character", "threshold": 1.0},
                "settings": {"split": "test", "checkpoint": "best", "context": "full", "sequence_length": 32},
            },
        ],
    }
    plain = {"words": ["attn=softmax", "attn.conv_size=0"], "rates": {"copy": [1e-2], "training": [3e-3]}}
    run_findings(settings(tmp_path, 1), [finding(text, **several, variants={"plain": plain})], compose_once)
    folder = tmp_path / "findings" / "little"
    [model] = folder.glob("*/config.yaml")
    [probe] = folder.glob("cells/*/config.yaml")
    assert "learning_rate: 0.003" in model.read_text()
    assert "learning_rate: 0.01" in probe.read_text()
    half = {"plain": {**plain, "rates": {"copy": [1e-2]}}}
    [found] = decided(settings(tmp_path, 1), finding(text, **several, variants=half))
    assert found["reason"] == "no learning rate was searched for training plain yet"
    with pytest.raises(UserError, match=r"contrasts\[0\]\.evaluation: must be one of copy, perplexity"):
        finding(text, **several | {"contrasts": [contrast()]}, variants=half)


def test_published_findings_have_their_verdicts_figures_cells_and_what_was_frozen(text, tmp_path):
    claims = [finding(text), replace(finding(text, minutes={"cuda": 1.0}), name="other")]
    run_findings(settings(tmp_path, 2, seeds=[200, 201], freeze=True), claims[:1], compose_once)
    folder = run_findings(settings(tmp_path, 2, seeds=[200, 201], report=True), claims, compose_once)
    target = tmp_path / "page"
    publish_findings(folder, target, claims, title="Findings here", note="Of a test.")
    page = (target / "README.md").read_text()
    for words in (
        "# Findings here",
        "| little | Softmax copies after ten steps | nobody | UNDECIDED |",
        "## little: UNDECIDED",
        "before the first score",
        "(little/finding-little.svg)",
        "## other: not run",
        "Not run: device=cpu: too slow to decide it",
        "For FAIL: It would have to learn faster.",
        "    attnbench findings little",
    ):
        assert words in page
    assert len(read_cells(target / "little" / "cells.jsonl.gz").folders) == 2
    assert (target / "little" / "freeze.json").exists()
    assert len(read_csv(target / "results.csv.gz")) > 2
    assert list(target.glob("environment-*.json"))
    # Of findings.json nothing is believed: verdict, figures and claim are decided from the cells again.
    record = json.loads((folder / "findings.json").read_text())
    for entry in record["findings"]:
        entry |= {"verdict": "PASS", "statement": "Softmax wins", "contrasts": [{"text": "share 1.0"}]}
    (folder / "findings.json").write_text(json.dumps(record))
    publish_findings(folder, target, claims, title="Findings here", note="Of a test.")
    assert (target / "README.md").read_text() == page
    record["findings"][0]["name"] = "../../elsewhere"
    (folder / "findings.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"elsewhere is no finding of conf/finding"):
        publish_findings(folder, target, claims, title="Findings here")
    record["findings"][0]["name"] = "little"
    (folder / "findings.json").write_text(json.dumps(record))
    # What the page says of the order is checked, not taken for granted.
    freeze = folder / "little" / "freeze.json"
    freeze.write_text(json.dumps({**json.loads(freeze.read_text()), "frozen": "2999-01-01T00:00:00+00:00"}))
    publish_findings(folder, target, claims, title="Findings here")
    assert "before the first score" not in (page := (target / "README.md").read_text())
    assert "but its first score is of" in page
    with pytest.raises(UserError, match=r"nothing to publish"):
        publish_findings(
            run_findings(settings(tmp_path / "none"), claims[1:], compose_once), target, claims, title="None"
        )
