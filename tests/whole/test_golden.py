"""Numbers and hashes are those of stored/golden.json: a refactoring changes none, and what changes some says so."""

import json

import golden
import pytest
from small import in_this_process

from attnbench.comparison import workers


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, list[dict]]:
    quick = [part for part in golden.PARTS if part != "mixers"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "run_in_processes", in_this_process)
        return json.loads(json.dumps(golden.measure(tmp_path_factory.mktemp("golden"), quick)))


@pytest.fixture(scope="module")
def stored() -> dict[str, list[dict]]:
    return json.loads(golden.GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["training", "probe", "plan", "bench"])
def test_rows_are_the_golden_ones(name, measured, stored):
    lines = golden.differences({name: stored[name]}, {name: measured[name]})
    assert stored[name]
    assert not lines, "\n".join([golden.MEANING, *lines])


@pytest.mark.slow
def test_trainings_of_all_mixers_are_the_golden_ones(tmp_path, stored):
    measured = json.loads(json.dumps(golden.measure(tmp_path, ["mixers"])))
    # A mixer that has been added has no golden row yet.
    names = {row["run"].partition("-")[0] for row in stored["mixers"]}
    known = [row for row in measured["mixers"] if row["run"].partition("-")[0] in names]
    lines = golden.differences({"mixers": stored["mixers"]}, {"mixers": known})
    assert not lines, "\n".join([golden.MEANING, *lines])


def test_a_changed_number_hash_or_row_is_seen(stored):
    number = next(index for index, row in enumerate(stored["plan"]) if isinstance(row.get("value"), float))
    for change in ({"value": stored["plan"][number]["value"] * 1.0001}, {"config_hash": "00000000"}, {"extra": 1}):
        changed = [dict(row) for row in stored["plan"]]
        changed[number] |= change
        (line,) = golden.differences({"plan": stored["plan"]}, {"plan": changed})
        assert f"row {number}: {next(iter(change))} was" in line
    assert golden.differences(stored, {**stored, "bench": stored["bench"][1:]})
    nearly = [dict(row) for row in stored["plan"]]
    nearly[number]["value"] *= 1 + 1e-6
    assert not golden.differences({"plan": stored["plan"]}, {"plan": nearly})
