"""Findings at smoke size: controls first, carried out as plans, decided, written down, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pytest
from claims import contrast, finding
from probe_settings import smoke_words
from small import comparison_settings, compose_once, in_this_process

from attnbench.cli.compose import CONF
from attnbench.cli.reading_names import named_words, read_findings
from attnbench.comparison import workers
from attnbench.comparison.findings import run_findings
from attnbench.comparison.plan import Comparison
from attnbench.comparison.publish import publish_findings
from attnbench.comparison.transfer import read_cells
from attnbench.results.row_tables import read_csv
from attnbench.settings.errors import UserError
from attnbench.settings.schema import SELECTION_SEED, ComparisonSettings, PlanSettings
from attnbench.verdict.claims import NOT_REACHED, NOT_RUN, REPRODUCED, UNDECIDED

OVERRIDES = [
    *("experiment=demo", "model.dim=32", "model.head_width=16", "model.feed_forward_width=24", "seq_len=32"),
    *("match=none", "data=text"),
]

pytestmark = pytest.mark.usefixtures("one_thread")

HOLDS = {"variant": "linear", "threshold": 1e-3, "seeds": 2, "least": 1}
"""A control that any accuracy but 0 holds."""
FAILS = {**HOLDS, "threshold": 1.0, "least": 2}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Runs are made in this process: processes have tests of their own."""
    monkeypatch.setattr(workers, "run_in_processes", in_this_process)


def little(text: Path, *contrasts: dict[str, Any], num_seeds: int = 2, plan=(), **claim: Any) -> PlanSettings:
    """Claim of strings of five symbols, of models that train for ten steps."""
    given = {
        "overrides": [*OVERRIDES, f"data.path={text}", *smoke_words("copy")],
        "variants": {"softmax": ["attn=softmax"], **({"linear": ["attn=linear"]} if claim.get("controls") else {})},
        "seeds": [*range(num_seeds)],
        "probe_seeds": [*range(num_seeds)],
        **dict(plan),
    }
    return finding(*(contrasts or [reaches()]), plan=given, **claim)


def reaches(**changed: Any) -> dict[str, Any]:
    return contrast("existence", "softmax", **{"settings": {"length": 5}, "threshold": 0.95, **changed})


def settings(outputs: Path, *plans: PlanSettings, **changed: Any) -> list[ComparisonSettings]:
    given = {"command": "attnbench findings little", **changed}
    return [comparison_settings(plan, outputs / "findings", **given) for plan in plans]


def decided(*given: ComparisonSettings) -> list[dict]:
    folder = run_findings(given, compose_once)
    return json.loads((folder / "findings.json").read_text())["findings"]


def results(outputs: Path) -> list[Path]:
    return sorted((outputs / "findings").glob("little/cells/*/results/*.jsonl"))


def seeds_of(outputs: Path, variant: str) -> list[int]:
    names = (path.parents[1].name for path in results(outputs) if f"-{variant}-" in path.parents[1].name)
    return sorted(int(name.partition("-seed")[2].split("-")[0]) for name in names)


def test_a_failed_control_is_not_reached_and_nothing_is_scored(text, tmp_path, capsys):
    [found] = decided(*settings(tmp_path, little(text, controls=[FAILS]), report=True))
    assert (found["word"], found["contrasts"]) == (NOT_REACHED, [])
    assert "control copy linear at rate 0.01: validation accuracy 0." in found["reason"]
    assert "0 of 2 reach 1, 2 asked" in found["reason"]
    assert capsys.readouterr().out.splitlines()[-1] == f"little: not reached: {found['reason']}"
    assert (seeds_of(tmp_path, "linear"), seeds_of(tmp_path, "softmax")) == ([SELECTION_SEED, SELECTION_SEED + 1], [])
    page = (tmp_path / "findings" / "index.html").read_text()
    assert "not reached" in page
    assert "finding-little" not in page
    # The same command knows it, and trains nothing.
    before = {path: path.stat().st_mtime_ns for path in results(tmp_path)}
    assert decided(*settings(tmp_path, little(text, controls=[FAILS]))) == [found]
    assert {path: path.stat().st_mtime_ns for path in results(tmp_path)} == before


def test_a_control_comes_first_and_is_not_scored(text, tmp_path, monkeypatch):
    order, execute = [], workers.execute
    monkeypatch.setattr(workers, "execute", lambda stack, *a, **k: (order.append(stack), execute(stack, *a, **k))[1])
    [found] = decided(*settings(tmp_path, little(text, controls=[HOLDS])))
    assert found["word"] == UNDECIDED
    assert found["reason"].startswith(
        "10 seeds needed: share of seeds of softmax with symbol accuracy >= 0.95, length 5"
    )
    assert (seeds_of(tmp_path, "linear"), seeds_of(tmp_path, "softmax")) == (
        [SELECTION_SEED, SELECTION_SEED + 1],
        [0, 1],
    )
    assert len(order) == 4
    [figure] = found["contrasts"]
    assert (figure["value"], figure["words"], figure["outcome"]) == (0.0, "0 of 2 seeds", "undecided")


def test_a_dry_run_counts_controls_and_what_may_follow(text, tmp_path, caplog):
    plan = little(text, controls=[HOLDS])
    with caplog.at_level("INFO"):
        run_findings(settings(tmp_path, replace(plan, dry_run=True)), compose_once)
    assert "4 runs (4 copy)" in caplog.text
    assert "to do  copy linear, lr 0.01, search 2" in caplog.text
    assert not results(tmp_path)
    comparison = Comparison(settings(tmp_path, plan)[0], compose_once)
    comparison.settle()
    assert [job.label for job in comparison.searched] == [
        "copy linear, lr 0.01, search",
        "copy linear, lr 0.01, search 2",
    ]
    assert len(comparison.scored) == 2
    assert comparison.samples == 80


def test_nothing_runs_twice_and_the_page_has_each_interval(text, tmp_path):
    given = settings(tmp_path, little(text))
    folder = run_findings(given, compose_once)
    before = {path: path.stat().st_mtime_ns for path in results(tmp_path)}
    assert len(before) == 2
    run_findings([replace(one, report=True) for one in given], compose_once)
    assert before == {path: path.stat().st_mtime_ns for path in results(tmp_path)}
    page = (folder / "index.html").read_text()
    for words in ("Softmax copies", "finding-little", "nobody", "0 [0, 0.842]", "cpu 1.5", "attnbench findings little"):
        assert words in page
    # Words beside a figure stand whole, in lines.
    picture = (folder / "figures" / "finding-little.svg").read_text()
    assert "<tspan" in picture
    assert "…" not in picture
    assert len((folder / "results.csv").read_text().splitlines()) > 2


def test_a_finding_goes_on_elsewhere_from_its_runs(text, tmp_path):
    plan, carried = little(text, controls=[HOLDS]), tmp_path / "carried"
    [found] = decided(*settings(tmp_path / "here", plan))
    run_findings(settings(tmp_path / "here", plan, exported=str(carried)), compose_once)
    [again] = decided(*settings(tmp_path / "there", plan, imported=str(carried)))
    assert again == found
    files = [results(tmp_path / place) for place in ("here", "there")]
    assert len(files[0]) == 4
    assert [path.read_text().splitlines()[:-1] for path in files[0]] == [
        path.read_text().splitlines()[:-1] for path in files[1]
    ]


def test_what_was_cut_off_is_exported_and_where_nothing_is_that_is_said(text, tmp_path):
    plan, carried = little(text), tmp_path / "carried"
    with pytest.raises(UserError, match=r"none of these findings has results in .*: little"):
        run_findings(settings(tmp_path, plan, exported=str(carried)), compose_once)
    decided(*settings(tmp_path, plan))
    results(tmp_path)[0].unlink()
    run_findings(settings(tmp_path, plan, exported=str(carried)), compose_once)
    assert len(read_cells(carried / "little" / "cells.jsonl.gz").folders) == 1


def test_a_folder_without_runs_of_these_findings_is_refused(text, tmp_path):
    (tmp_path / "carried" / "other").mkdir(parents=True)
    with pytest.raises(UserError, match=r"import=.*carried: has the runs of none of these findings: little"):
        run_findings(settings(tmp_path, little(text), imported=str(tmp_path / "carried")), compose_once)


@pytest.mark.parametrize("controls", [[], [HOLDS]])
def test_a_training_that_failed_is_named_with_its_reason(controls, text, tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise UserError("the device went away")

    monkeypatch.setattr(workers, "execute", broken)
    [found] = decided(*settings(tmp_path, little(text, controls=controls)))
    assert found["word"] == NOT_RUN
    first = "linear, lr 0.01, search" if controls else "softmax, lr 0.01, seed 0"
    assert found["reason"].startswith(f"copy {first}: the device went away")
    assert found["reason"].endswith("the same command tries it again")
    assert f"little: not run: copy {first}" in capsys.readouterr().out


def test_a_true_finding_is_reproduced(text, tmp_path):
    sizes = {"num_steps": 60, "max_length": 1, "test_lengths": [1], "batch_size": 32}
    learns = [*smoke_words("copy"), *(f"eval.copy.{name}={value}" for name, value in sizes.items())]
    plan = {"overrides": [*OVERRIDES, f"data.path={text}", *learns]}
    [found] = decided(*settings(tmp_path, little(text, reaches(settings={"length": 1}, threshold=0.5), plan=plan)))
    assert found["word"] == REPRODUCED, found


def test_frozen_it_may_not_be_changed(text, tmp_path):
    run_findings(settings(tmp_path, little(text, controls=[HOLDS]), freeze=True), compose_once)
    assert not results(tmp_path)
    with pytest.raises(UserError, match=r"claim\.contrasts\[0\]\.threshold was frozen as 0\.95 and is 0\.9 now"):
        run_findings(settings(tmp_path, little(text, reaches(threshold=0.9), controls=[HOLDS])), compose_once)
    with pytest.raises(UserError, match=r"claim\.controls\[0\]\.least was frozen as 1 and is 2 now"):
        run_findings(settings(tmp_path, little(text, controls=[{**HOLDS, "least": 2}])), compose_once)
    # Minutes are measured afterwards.
    run_findings(settings(tmp_path, little(text, controls=[HOLDS], minutes={"cpu": 9.0})), compose_once)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"minutes": {"cuda": 1.0}}, "device=cpu: too slow to decide it; it takes cuda"),
     ({"plan": {"evaluations": ["strings"], "overrides": []}}, "strings"),
     ({"needs": ["a probe of that"]}, "needs a probe of that"),
     ({"plan": {"variants": {"softmax": ["attn=softmaxx"]}}}, "softmaxx")],
    ids=["device", "probe", "lack", "mixer"],
)  # fmt: skip
def test_what_cannot_run_is_said_in_one_line(changed, reason, text, tmp_path):
    claim = little(text, **changed)
    with pytest.raises(UserError, match=f"^little: .*{reason}") as refused:
        run_findings(settings(tmp_path, claim), compose_once)
    assert "\n" not in str(refused.value)
    # Beside one that runs it is a row.
    found = decided(*settings(tmp_path, claim, replace(little(text, num_seeds=1), name="other")))
    assert [it["word"] for it in found] == [NOT_RUN, UNDECIDED]
    assert reason in found[0]["reason"]


def test_plain_words_are_names():
    assert named_words(["a", "device=cpu", "b"]) == ["device=cpu", "names=[a,b]"]
    assert named_words(["--config-dir", "mine", "full=true"]) == ["--config-dir", "mine", "full=true"]
    # Of options that take no word, and of those that take one under a shorter name.
    assert named_words(["-m", "a", "--multirun", "b"], "of") == ["-m", "--multirun", "of=[a,b]"]
    options = ["-cd", "mine", "--config-p", "there"]
    # The folder of an option may be called as a name is.
    assert named_words([*options, "mine"]) == [*options, "names=[mine]"]


def read_words(*words: str) -> list[ComparisonSettings]:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        config = hydra.compose("findings", [*words, "names=[nope_copy]"], return_hydra_config=True)
        return read_findings(config, config.hydra)


def test_a_command_line_has_the_settings_of_a_plan():
    [found] = read_words("plan.stack=auto", "plan.devices=all", "plan.probe_seeds=[7,8,9,10,11]", "outputs_dir=there")
    assert (found.plan.stack, found.plan.devices, found.plan.probe_seeds) == (None, "all", [7, 8, 9, 10, 11])
    assert (found.plan.name, found.plan.ranked, found.outputs_dir) == ("nope_copy", [], "there/findings")
    assert found.plan.seeds == [*range(400, 410)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import=nowhere"], "import=nowhere: no such folder"),
        (["export=''"], "export='': name a folder"),
        (["freeze=true", "export=there"], "freeze=true with export=there: do one after the other"),
        (["freeze=true", "import=docs"], "freeze=true with import=docs: do one after the other"),
        (["export=there", "import=docs"], "export=there with import=docs: do one after the other"),
        (["+plan.claim.tire=exact"], "claim.tire=exact: unknown setting"),
        (["plan.num_workers=0"], "plan.num_workers=0: must be at least 1"),
    ],
)
def test_words_that_cannot_be_meant(words, message):
    with pytest.raises(UserError, match=message):
        read_words(*words)


def test_published_findings_have_their_words_figures_runs_and_what_was_frozen(text, tmp_path):
    seeds = {"seeds": [400, 401], "probe_seeds": [400, 401]}
    claims = [
        little(text, controls=[HOLDS], plan=seeds),
        replace(little(text, minutes={"cuda": 1.0}), name="other"),
        replace(little(text, controls=[FAILS], plan=seeds), name="third"),
    ]
    run_findings(settings(tmp_path, claims[0], freeze=True), compose_once)
    folder = run_findings(settings(tmp_path, *claims, report=True), compose_once)
    target = tmp_path / "page"
    publish_findings(folder, target, claims, title="Findings here", note="Of a test.")
    page = (target / "README.md").read_text()
    for words in (
        "# Findings here",
        "| little | undecided | Softmax copies | 1.0 | softmax 0 [0, 0.842]",
        "| cpu 1.5 | attnbench findings little |",
        "## little: undecided",
        "before the first score",
        "(little/finding-little.svg)",
        "- softmax, symbol accuracy",
        "## other: not run",
        "device=cpu: too slow to decide it",
        "## third: not reached",
        "    attnbench findings little",
    ):
        assert words in page, words
    assert len(read_cells(target / "little" / "cells.jsonl.gz").folders) == 4
    assert len(read_cells(target / "third" / "cells.jsonl.gz").folders) == 2
    assert (target / "little" / "freeze.json").exists()
    assert len(read_csv(target / "results.csv.gz")) > 2
    assert list(target.glob("environment-*.json"))
    # Of findings.json nothing is believed: word, figures and claim are decided from the runs again.
    record = json.loads((folder / "findings.json").read_text())
    for entry in record["findings"]:
        entry |= {"word": "reproduced", "statement": "Softmax wins", "contrasts": [{"text": "share 1.0"}]}
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
    record["findings"] = record["findings"][1:2]
    (folder / "findings.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"nothing to publish"):
        publish_findings(folder, target, claims, title="None")
