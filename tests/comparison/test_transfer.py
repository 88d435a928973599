"""Results carried from one machine to another: what is taken over, and what is refused whole."""

import gzip
import hashlib
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from probe_settings import probe_settings
from small import comparison_settings, identity_of

from attnbench.comparison import imports, transfer
from attnbench.comparison.imports import check_together, check_value, import_cells
from attnbench.comparison.program import ask_for
from attnbench.comparison.search import scores_of_probe
from attnbench.comparison.transfer import export_cells, with_ending
from attnbench.comparison.workers import execute
from attnbench.results.files import MAX_LINE_BYTES
from attnbench.results.job import Job
from attnbench.results.row_files import read_results
from attnbench.results.row_tables import read_csv, write_csv
from attnbench.results.rows import IMPORTED, Measurement, ResultRow
from attnbench.settings.errors import UserError
from attnbench.settings.schema import PlanSettings


def plan_in(outputs: Path) -> Any:
    """A plan of two cells, as far as an import asks one."""
    settings = probe_settings(outputs, copy_learning_rates=[1e-2, 3e-2])
    [score] = scores_of_probe(settings, settings.evaluations[0])
    folder = score.prepared.folder.parents[1]
    plan = PlanSettings(
        name="demo", overrides=[], variants={}, evaluations=[], seeds=[], probe_seeds=[], learning_rates=None
    )
    given = comparison_settings(plan, outputs)
    cells = [score.at(rate, seed, None) for rate in score.grid for seed in score.search_seeds]
    return SimpleNamespace(
        folder=folder, scores=[score], seeds_of=lambda score: [], timed=[], settings=given, cells=cells,
        carry_out=lambda driver, found: driver.run([ask_for(cells)]),
    )  # fmt: skip


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> list[Job]:
    """Two finished cells of one experiment; tests only read them."""
    found = plan_in(tmp_path_factory.mktemp("outputs")).cells
    for cell in found:
        execute(cell)
    return found


@pytest.fixture(scope="module")
def experiment(cells) -> Path:
    return cells[0].results.parents[3]


@pytest.fixture
def exported(experiment, tmp_path) -> Path:
    assert export_cells(experiment, tmp_path / "carried" / "rows.jsonl") == 2
    return tmp_path / "carried" / "rows.jsonl"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def numbers(folder: Path) -> dict[str, list[bytes]]:
    """The same without the last line of results, which says where they are from."""
    split = {name: content.splitlines() for name, content in files(folder).items()}
    return {name: lines[:-1] if name.endswith(".jsonl") else lines for name, lines in split.items()}


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(experiment, tmp_path):
    with pytest.raises(UserError, match=f"^export={tmp_path}: Is a directory"):
        export_cells(experiment, tmp_path)


def test_rows_settings_and_environments_are_carried_and_nothing_else(cells, experiment, exported, tmp_path):
    assert import_cells(exported, tmp_path / "other", plan_in) == 2
    taken, own = numbers(tmp_path / "other"), numbers(experiment)
    assert taken == {name: own[name] for name in taken}
    assert {Path(name).suffix for name in taken} == {".jsonl", ".json", ".yaml"}
    assert not any("checkpoint" in name or "metrics" in name for name in taken)
    for cell in cells:
        assert read_results(tmp_path / "other" / cell.results.relative_to(experiment))


def test_results_that_are_here_are_kept_and_missing_ones_taken(cells, experiment, exported, tmp_path):
    shutil.copytree(experiment, tmp_path / "here")
    first, second = (tmp_path / "here" / cell.results.relative_to(experiment) for cell in cells)
    second.unlink()
    before = first.stat().st_mtime_ns
    assert import_cells(exported, tmp_path / "here", plan_in) == 1
    assert first.stat().st_mtime_ns == before
    assert [row.identity for row in read_results(second)] == [row.identity for row in read_results(cells[1].results)]
    assert import_cells(exported, tmp_path / "here", plan_in) == 0


def test_results_that_are_there_are_exported(cells, experiment, tmp_path):
    shutil.copytree(experiment, tmp_path / "here")
    path = tmp_path / "here" / cells[0].results.relative_to(experiment)
    path.unlink()
    assert export_cells(tmp_path / "here", tmp_path / "rows.jsonl") == 1
    with pytest.raises(UserError, match="no complete results"):
        export_cells(tmp_path / "nothing", tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    "path",
    [
        "../x/environment.json",
        "cells/../environment.json",
        "cells/../../config.yaml",
        "../config.yaml",
        "./results/copy-0123abcd.jsonl",
        "/tmp/x/config.yaml",
        "//x/config.yaml",
        "cells/x/checkpoint/weights.safetensors",
        "cells/x/train.py",
        "cells/x/y/config.yaml",
        "cells/comparison.json",
        "cells/x\0/config.yaml",
        "cells/x\n/config.yaml",
        "cells/\ud800/config.yaml",
        f"cells/{'x' * 300}/config.yaml",
        "cells/x/environment.json/../config.yaml",
        *(f"{folder}/config.yaml" for folder in ("comparison.json", "freeze.json", "report", "cells", "cells/x")),
        "copy-softmax-0123abcd/cells/a-0123abcd/config.yaml",
        3,
        None,
    ],
)
def test_a_path_that_is_no_cell_s_is_refused_and_nothing_written(path, exported, tmp_path):
    # In the middle, so that lines before it are in order.
    lines = exported.read_text().splitlines()
    lines.insert(2, json.dumps({"path": path, "text": "{}"}))
    refused(lines, tmp_path, r"rows\.jsonl:3: not a line that export= writes")


def refused(lines: list[str], tmp_path: Path, message: str, experiment: str = "outputs/other") -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(lines))
    (tmp_path / experiment).mkdir(parents=True, exist_ok=True)
    before = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    with pytest.raises(UserError, match=message):
        import_cells(source, tmp_path / experiment, plan_in)
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*")} == before


def carried(exported: Path, name: str) -> tuple[list[dict[str, str]], dict[str, str]]:
    """The lines of a file of cells, and the first of them whose path ends so."""
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    return lines, next(line for line in lines if line["path"].endswith(name))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("environment.json", "no json", "cannot be read"),
        ("environment.json", "[1, 2]", "cannot be read .no names and values"),
        ("environment.json", " " * 2**20, "longer than the 16384 characters"),
        (".jsonl", "no json\n", "not a JSON object"),
        (".jsonl", '{"schema": "\ud800"}\n', "not a line that export= writes"),
        (".jsonl", '{"schema": 1, "complete": true, "num_rows": 0}\n', "has no rows"),
        (".jsonl", '{"schema": 1, "complete": true, "num_rows": 3}\n', "its last record counts 3"),
        (".jsonl", "", "the end lacks the record"),
    ],
)
def test_content_that_is_not_what_its_name_says_is_refused(name, text, message, exported, tmp_path):
    lines, line = carried(exported, name)
    line["text"] = text
    refused([json.dumps(line) for line in lines], tmp_path, rf"rows\.jsonl:\d+: (cells/.*)?{message}")


@pytest.mark.parametrize("date", ["last week", "2026-01-01T00:00:00", 5, None])
def test_a_freeze_without_a_date_is_refused_before_its_plan_runs(date, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "changed_since", lambda *_: None)
    freeze = json.dumps({"frozen": date} if date is not None else {})
    lines = [*exported.read_text().splitlines(), json.dumps({"path": "freeze.json", "text": freeze})]
    refused(lines, tmp_path, r"freeze\.json: not what freeze=true writes")


def test_an_environment_here_that_is_no_text_stays_beside_that_of_the_file(cells, experiment, exported, tmp_path):
    here = tmp_path / "other" / cells[0].folder.relative_to(experiment) / "environment.json"
    here.parent.mkdir(parents=True)
    here.write_bytes(b"\xff\xfe")
    assert import_cells(exported, tmp_path / "other", plan_in) == 2
    assert here.read_bytes() == b"\xff\xfe"
    [beside] = here.parent.glob("environment-*.json")
    assert beside.read_bytes() == (cells[0].folder / "environment.json").read_bytes()


def test_cells_of_no_plan_are_left_out_and_counted(cells, experiment, exported, tmp_path, caplog):
    lines, _ = carried(exported, ".jsonl")
    many = [
        {"path": line["path"].replace("copy-softmax", f"copy-softmax{index}"), "text": line["text"]}
        for index in range(100)
        for line in lines
    ]
    exported.write_text("".join(json.dumps(line) + "\n" for line in [*many, *lines]))
    with caplog.at_level("INFO", logger="attnbench"):
        assert import_cells(exported, tmp_path / "other", plan_in) == 2
    assert f"{200} of its {202} runs are not in this plan, and are left out" in caplog.text
    assert len([*(tmp_path / "other" / "cells").iterdir()]) == 2


def altered_row(text: str, **changed: Any) -> str:
    """Rows of a results file with another value of a column, or of the one metric that `of` names, and a checksum that
    holds."""
    *rows, ending = map(json.loads, text.splitlines())
    metric = changed.pop("of", None)
    for row in rows:
        if metric in (None, row["metric"]):
            row |= {name: value for name, value in changed.items() if name != "settings"}
            row["settings"] |= changed.get("settings", {})
    return with_ending("".join(json.dumps(row) + "\n" for row in rows), ending)


FORGERIES = {
    "seed": {"seed": 7},
    "variant": {"variant": "linear"},
    "mixer": {"mixer": "LinearAttention"},
    "backend": {"backend": "triton"},
    "model": {"model": "other"},
    "parameters": {"parameters": 12},
    "seq_len": {"seq_len": 5},
    "precision": {"precision": "bfloat16"},
    "corpus": {"corpus": "embedded@000000000000"},
    "evaluation": {"evaluation": "recall"},
    "config_hash": {"config_hash": "01234567"},
    "run": {"run": "another"},
    "environment": {"environment": "01234567"},
    "device": {"device": "NVIDIA H100"},
    "commit": {"commit": "0123456789ab"},
    "settings.learning_rate": {"settings": {"learning_rate": 0.5}},
    "settings.mixer_options.conv_size": {"settings": {"mixer_options": {"conv_size": 9}}},
    "settings.evaluation_options": {"settings": {"evaluation_options": {"num_steps": 9}}},
    "selection: value 1.5 is no share": {"of": "selection", "value": 1.5},
    "selection: value 0.5 lies outside": {"of": "selection", "value": 0.5, "low": 0.6, "high": 0.7},
    "steps_trained: there are two rows": {"of": "parameters", "metric": "steps_trained"},
    "steps_trained: value -3 is below 0": {"of": "steps_trained", "value": -3},
    "selection: num_samples=-5 is below 1": {"of": "selection", "num_samples": -5},
    "nested too deeply": {"settings": {"depth": json.loads("[" * 100 + "]" * 100)}},
}


@pytest.mark.parametrize("field", FORGERIES)
def test_a_forged_field_of_a_row_is_refused_by_its_name(field, exported, tmp_path):
    lines, line = carried(exported, ".jsonl")
    line["text"] = altered_row(line["text"], **FORGERIES[field])
    refused([json.dumps(line) for line in lines], tmp_path, rf"rows\.jsonl:\d+: cells/.*{re.escape(field)}")


@pytest.mark.parametrize(("before", "after"), [('"torch": "', '"torch": "9'), ('"dirty": ', '"clean": 1, "dirty": ')])
def test_a_forged_environment_is_refused_by_its_name(before, after, exported, tmp_path):
    lines, line = carried(exported, "environment.json")
    assert before in line["text"]
    line["text"] = line["text"].replace(before, after, 1)
    refused([json.dumps(line) for line in lines], tmp_path, "row 1: environment: ")


def test_a_cell_in_the_folder_of_another_is_refused(cells, exported, tmp_path):
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    one, other = (cell.folder.name for cell in cells)
    for line in lines:
        name = other if one in line["path"] else one
        line["path"] = f"cells/{name}/{line['path'].split('/', 2)[2]}".replace(
            *((one, other) if name == other else (other, one))
        )
        line["path"] = re.sub(r"copy-[0-9a-f]{8}\.jsonl", f"copy-{name[-8:]}.jsonl", line["path"])
    refused([json.dumps(line) for line in lines], tmp_path, "row 1: run: ")


def test_a_config_is_the_plan_s_own_whatever_the_file_says(exported, tmp_path):
    lines, line = carried(exported, "config.yaml")
    before = line["text"]
    line["text"] = "seed: 3"
    exported.write_text("".join(json.dumps(line) + "\n" for line in lines))
    import_cells(exported, tmp_path / "outputs" / "other", plan_in)
    assert (tmp_path / "outputs" / "other" / line["path"]).read_text() == before


def measured(**values: float | tuple[float, str]) -> list[ResultRow]:
    """Rows of one place, each beside its own level of guessing."""

    def row(metric: str, value: Any) -> ResultRow:
        settings = {"split": "test", "checkpoint": "best", "chance": float(len(metric))}
        return ResultRow(
            identity=identity_of(), measurement=Measurement(metric=metric, value=value, unit="nat", settings=settings)
        )

    return [row(metric, value) for metric, value in values.items()]


def test_a_perplexity_and_bits_are_those_of_their_nats():
    nats = 1.3
    true = {"nats_per_character": nats, "perplexity": math.exp(nats), "bits_per_character": nats / math.log(2)}
    check_together(measured(**true), is_of_characters=True)
    for metric in ("perplexity", "bits_per_character"):
        with pytest.raises(ValueError, match=f"^{metric}: value .* is not that of its nats"):
            check_together(measured(**true | {metric: true[metric] * 0.999}), is_of_characters=True)
        with pytest.raises(ValueError, match=f"^{metric}: value .* stands without its nats"):
            check_together(measured(**{metric: true[metric]}), is_of_characters=True)
    # A number may not be left out beside its nats either, which says how it came out.
    [lost] = measured(perplexity=1.0)
    lost = replace(lost, measurement=replace(lost.measurement, value=None, status="failed", reason="lost"))
    with pytest.raises(ValueError, match=r"^perplexity: value None is not that of its nats"):
        check_together([*measured(nats_per_character=nats), lost], is_of_characters=True)
    # Of tokens that are longer it is of other nats.
    check_together(measured(**true | {"perplexity": 30.0}), is_of_characters=False)
    with pytest.raises(ValueError, match=r"^nats_per_character: value -0\.1 is below 0"):
        check_value(measured(nats_per_character=-0.1)[0].measurement)


def test_a_task_is_solved_or_not_and_never_before_its_threshold():
    def row(metric: str, value: float | None) -> ResultRow:
        given: dict[str, Any] = {} if value is not None else {"status": "not_reached", "reason": "too few steps"}
        return ResultRow(identity=identity_of(), measurement=Measurement(metric=metric, value=value, unit="", **given))

    check_together([row("solved", 1), row("steps_to_95", 40)], is_of_characters=False)
    check_together([row("solved", 0), row("steps_to_95", None)], is_of_characters=False)
    with pytest.raises(ValueError, match=r"^solved: value 1 stands beside a steps_to_95 that was not reached"):
        check_together([row("solved", 1), row("steps_to_95", None)], is_of_characters=False)
    with pytest.raises(ValueError, match=r"^solved: value 0\.5 is neither 0 nor 1"):
        check_value(row("solved", 0.5).measurement)


def test_a_cell_has_as_many_marks_as_it_may_have_been_carried(exported, tmp_path):
    lines, line = carried(exported, ".jsonl")
    rows, _, ending = line["text"].rstrip("\n").rpartition("\n")
    line["text"] = with_ending(rows + "\n", json.loads(ending) | {IMPORTED: [{"sha256": "0", "when": "1"}] * 1000})
    refused([json.dumps(line) for line in lines], tmp_path, "imported is no list of marks")


def test_an_imported_cell_says_so_in_every_row_and_goes_on_saying_so(exported, cells, experiment, tmp_path):
    import_cells(exported, tmp_path / "other", plan_in)
    path = tmp_path / "other" / cells[0].results.relative_to(experiment)
    [mark] = read_results(path)[0].measurement.settings[IMPORTED]
    assert mark["sha256"] == hashlib.sha256(exported.read_bytes()).hexdigest()
    assert all(row.measurement.settings[IMPORTED] == [mark] for row in read_results(path))
    write_csv(read_results(path), tmp_path / "results.csv")
    assert read_csv(tmp_path / "results.csv") == read_results(path)
    export_cells(tmp_path / "other", tmp_path / "again.jsonl")
    import_cells(tmp_path / "again.jsonl", tmp_path / "third", plan_in)
    marks = read_results(tmp_path / "third" / path.relative_to(tmp_path / "other"))[0].measurement.settings[IMPORTED]
    assert (marks[0], len(marks)) == (mark, 2)


def test_what_is_exported_is_imported_long_results_too_and_beside_files_of_the_user(cells, experiment, tmp_path):
    shutil.copytree(experiment, tmp_path / "here")
    path = tmp_path / "here" / cells[0].results.relative_to(experiment)
    *rows, ending = path.read_text().splitlines()
    more = [
        json.dumps(row | {"settings": row["settings"] | {"position": index}})
        for index in range(1000)
        for row in [json.loads(rows[0])]
    ]
    path.write_text(with_ending("\n".join([*rows, *more]) + "\n", json.loads(ending) | {"num_rows": len(rows) + 1000}))
    assert path.stat().st_size > MAX_LINE_BYTES
    for name in ("my copy.jsonl", "notes-12.jsonl"):
        shutil.copy(path, path.with_name(name))
    (path.parents[1] / "environment of mine.json").write_text("{}")
    assert export_cells(tmp_path / "here", tmp_path / "rows.jsonl") == 2
    assert import_cells(tmp_path / "rows.jsonl", tmp_path / "other", plan_in) == 2
    (path.parents[1] / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"config\.yaml is missing, and import= takes no run without"):
        export_cells(tmp_path / "here", tmp_path / "rows.jsonl")


def test_no_absolute_path_is_exported(experiment, tmp_path):
    shutil.copytree(experiment, tmp_path / "here")
    path = next((tmp_path / "here").glob("cells/*/results/*.jsonl"))
    *rows, ending = path.read_text().splitlines()
    row = json.loads(rows[0]) | {"value": None, "status": "failed", "reason": "/home/alice/outputs/x: disk is full"}
    path.write_text(with_ending("\n".join([json.dumps(row), *rows[1:]]) + "\n", json.loads(ending)))
    config = path.parents[1] / "config.yaml"
    config.write_text(
        config.read_text() + "outputs_dir: /home/alice b/outputs\ndata:\n  path: ../../alice/my text.txt\n"
    )
    freeze = {"command": "python scripts/compare.py 'data.path=/home/alice b/t.txt' outputs_dir=~/x", "frozen": "now"}
    (tmp_path / "here" / "freeze.json").write_text(json.dumps(freeze))
    export_cells(tmp_path / "here", tmp_path / "rows.jsonl")
    text = (tmp_path / "rows.jsonl").read_text()
    assert "alice" not in text
    assert "outputs_dir: outputs" in text
    assert "path: my text.txt" in text
    assert "'data.path=t.txt' outputs_dir=x" in text
    # The checksum is that of the rows as they are carried.
    _, line = carried(tmp_path / "rows.jsonl", f"{path.parents[1].name}/results/{path.name}")
    (tmp_path / "copy.jsonl").write_text(line["text"])
    assert read_results(tmp_path / "copy.jsonl")[0].measurement.reason == "x: disk is full"


def test_a_torn_an_altered_and_an_empty_file_are_refused(exported, tmp_path):
    lines = exported.read_text().splitlines()
    refused([*lines[:-1], lines[-1][:50]], tmp_path, "its last line is torn")
    refused([lines[0][:50], *lines[1:]], tmp_path, "not a JSON object")
    refused([], tmp_path, "is empty")
    refused(["{}"], tmp_path, "not a line that export= writes")
    with pytest.raises(UserError, match="cannot be read"):
        import_cells(tmp_path / "nothing.jsonl", tmp_path / "other", plan_in)


def test_a_packed_file_has_the_same_cells_and_equal_bytes_each_time(experiment, exported, tmp_path):
    packed = [tmp_path / name for name in ("one.jsonl.gz", "two.jsonl.gz")]
    for path in packed:
        assert export_cells(experiment, path) == 2
    assert gzip.decompress(packed[0].read_bytes()) == exported.read_bytes()
    # Names differ; times, the header's bytes 4 to 7, would in another second.
    assert packed[0].read_bytes() == packed[1].read_bytes()
    assert packed[0].read_bytes()[4:8] == bytes(4)
    assert import_cells(packed[0], tmp_path / "packed", plan_in) == 2
    assert import_cells(exported, tmp_path / "plain", plan_in) == 2
    assert numbers(tmp_path / "packed") == numbers(tmp_path / "plain")


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (lambda content: gzip.decompress(content), "cannot be read .Not a gzipped file"),
        (lambda content: content[:-20], "cannot be read .Compressed file ended before"),
        (lambda content: content[:40] + bytes(20) + content[60:], "cannot be read .Error -3 while decompressing"),
        (lambda content: gzip.compress(bytes(2**19 + 1)), "longer than the 524288 bytes that such a file"),
    ],
)
def test_a_packed_file_that_is_none_or_unpacks_to_too_much_is_refused(
    damaged, message, experiment, tmp_path, monkeypatch
):
    path = tmp_path / "cells.jsonl.gz"
    export_cells(experiment, path)
    path.write_bytes(damaged(path.read_bytes()))
    monkeypatch.setattr(transfer, "MAX_CELLS_BYTES", 2**19)
    with pytest.raises(UserError, match=message):
        import_cells(path, tmp_path / "other", plan_in)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_nothing_is_written_over_a_symbolic_link(depth, cells, experiment, exported, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    parts = cells[0].results.relative_to(experiment).parts[:depth]
    link = (tmp_path / "outputs" / "other").joinpath(*parts)
    link.parent.mkdir(parents=True)
    link.symlink_to(outside if depth < 4 else outside / "file")
    refused(exported.read_text().splitlines(), tmp_path, "is a symbolic link")
    assert not any(outside.iterdir())
