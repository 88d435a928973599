import json
import math

import pytest

from attnbench.settings.errors import UserError
from attnbench.training.log import MetricsLog, read_metrics


def rows(*steps):
    return [{"step": step, "tokens": step * 256, "split": "train", "loss": 1 / step} for step in steps]


def written(path, *steps):
    log = MetricsLog(path, None)
    for row in rows(*steps):
        log.write(row)
    log.close()


def test_rows_are_on_disk_at_once_and_come_back(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path, None)
    log.write({"step": 1, "tokens": 256, "split": "train", "loss": 0.1 + 0.2})
    assert read_metrics(path) == [{"step": 1, "tokens": 256, "split": "train", "loss": 0.1 + 0.2}]
    log.close()


def test_what_is_not_finite_is_valid_json_and_comes_back(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl", None)
    log.write({"step": 1, "loss": math.nan, "high": math.inf, "low": -math.inf})
    log.close()

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    row = read_metrics(tmp_path / "m.jsonl")[0]
    assert math.isnan(row["loss"])
    assert (row["high"], row["low"]) == (math.inf, -math.inf)


def test_resuming_cuts_what_lies_past_the_checkpoint_and_a_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    written(path, 10, 20, 30)
    with open(path, "a") as file:
        file.write('{"step": 20, "tokens": 51')
    log = MetricsLog(path, resume_step=20)
    assert read_metrics(path) == rows(10, 20)
    log.write(rows(30)[0])
    log.close()
    assert read_metrics(path) == rows(10, 20, 30)
    assert list(tmp_path.iterdir()) == [path]


def test_starting_afresh_replaces_and_resuming_without_a_file_starts_one(tmp_path):
    written(tmp_path / "m.jsonl", 10, 20)
    MetricsLog(tmp_path / "m.jsonl", None).close()
    MetricsLog(tmp_path / "n.jsonl", 20).close()
    assert read_metrics(tmp_path / "m.jsonl") == read_metrics(tmp_path / "n.jsonl") == []


def test_an_altered_log_is_refused_by_name_and_line(tmp_path):
    path = tmp_path / "m.jsonl"
    written(path, 10, 20, 30)
    path.write_text(path.read_text().replace('{"step": 20', '{"step": '))
    for read in (read_metrics, lambda path: MetricsLog(path, 30)):
        with pytest.raises(UserError, match=r"m\.jsonl:2: not a JSON object"):
            read(path)
    path.write_text('{"step": 1}\n{"stop": 2}\n')
    with pytest.raises(UserError, match=r"m\.jsonl:2: a row of metrics needs a whole number as its step"):
        read_metrics(path)


def resumed_at_30(path):
    MetricsLog(path, 30, num_rows=3).close()


def test_a_file_cut_anywhere_is_refused_by_the_count_and_a_new_one_goes_on(tmp_path, caplog):
    path = tmp_path / "m.jsonl"
    written(path, 10, 20, 30)
    whole = path.read_bytes()
    # All but the last line end.
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        assert read_metrics(path) == rows(10, 20, 30)[: whole[: length + 1].count(b"\n")]
        with pytest.raises(UserError, match=r"m\.jsonl: has \d rows up to step 30, .* counts 3; rename it"):
            resumed_at_30(path)
        assert path.read_bytes() == whole[:length]
    path.rename(tmp_path / "old.jsonl")
    log = MetricsLog(path, 30, num_rows=3)
    assert "is gone" in caplog.text
    assert log.num_rows == 0
    log.close()
