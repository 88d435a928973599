import csv
import dataclasses
import gzip
import hashlib
import json
import math
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console
from small import identity_of

from attnbench.results.numbers import format_interval, format_number, format_within
from attnbench.results.row_files import ResultsWriter, read_results
from attnbench.results.row_tables import read_csv, table_of, write_csv
from attnbench.results.rows import Measurement, ResultRow, same_corpus
from attnbench.results.tables import Table, print_table
from attnbench.settings.errors import UserError

IDENTITY = identity_of()
HEADER = (
    "schema,experiment,run,mixer,variant,backend,model,parameters,seq_len,evaluation,metric,value,unit,low,high,"
    "num_samples,status,reason,seed,precision,device,num_devices,environment,commit,corpus,config_hash,settings"
)


def perplexity(value=3.25, **settings):
    return Measurement(metric="perplexity", value=value, unit="", settings=settings or {"split": "test"})


def row(measurement=None, **identity):
    return ResultRow(identity=dataclasses.replace(IDENTITY, **identity), measurement=measurement or perplexity())


@pytest.fixture
def results(tmp_path):
    """A complete file of three rows, and its lines."""
    path = tmp_path / "results" / "perplexity.jsonl"
    with ResultsWriter(path, IDENTITY) as writer:
        writer.write(perplexity(3.5))
        writer.write(Measurement(metric="loss", value=1, unit="nats", low=0.5, high=2.0, num_samples=5))
        writer.write(Measurement(metric="steps", value=None, unit="", status="not_reached", reason="\x1b[2J × 1500"))
    return path, path.read_text().splitlines()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": math.nan}, "not finite"),
        ({"high": math.inf}, "not finite"),
        ({"value": -1e308}, "beyond 1e"),
        ({"high": 10**400}, "beyond 1e"),
        ({"settings": {"chance": None}}, r"settings\.chance=null: must be a number"),
        ({"settings": {"chance_among_pairs": "0.5"}}, r'settings\.chance_among_pairs="0\.5": must be a number'),
        ({"settings": {"length": [50]}}, r"settings\.length=\[50\]: must be a number"),
        ({"settings": {"sequence_length": True}}, r"settings\.sequence_length=true: must be a number"),
        ({"settings": {"reference_milliseconds": 5}}, r"settings\.reference_milliseconds: must be a list of numbers"),
        (
            {"settings": {"reference_milliseconds": [None]}},
            r"must be a list of numbers above 0",
        ),
        ({"settings": {"reference_ratio": "x"}}, r"settings\.reference_ratio=.*must be a number"),
        ({"settings": {"budget": 1e308}}, r"settings\.budget=1e\+308: must be a number, at most 1e\+100"),
        ({"value": "3"}, "must be a number"),
        ({"value": True}, "must be a number"),
        ({"value": None}, "needs a value"),
        ({"status": "oom"}, "must be one of ok, out_of_memory"),
        ({"status": "failed", "reason": "x"}, "beside status failed"),
        ({"status": "failed", "value": None}, "needs a reason"),
    ],
)
def test_measurement_refuses_contradictions(changes, message):
    with pytest.raises(ValueError, match=message):
        Measurement(**{"metric": "loss", "value": 1.0, "unit": "nats", **changes})


def test_a_row_with_a_setting_of_another_type_is_one_line(results):
    path, lines = results
    path.write_text("\n".join([lines[0].replace('"settings": {', '"settings": {"chance": null, '), *lines[1:]]) + "\n")
    with pytest.raises(UserError, match=r"perplexity\.jsonl:1: perplexity: settings\.chance=null: must be a number"):
        read_results(path)


def test_rows_come_back_as_written(results):
    path, lines = results
    digest = hashlib.sha256("".join(f"{line}\n" for line in lines[:-1]).encode()).hexdigest()
    ending = json.loads(lines[-1])
    assert timedelta() <= datetime.now(UTC) - datetime.fromisoformat(ending.pop("started")) < timedelta(minutes=10)
    assert {row.sitting for row in read_results(path)} == {ending.pop("sitting")}
    assert ending == {"schema": 1, "complete": True, "num_rows": 3, "sha256": digest}
    rows = read_results(path)
    assert [r.measurement.value for r in rows] == [3.5, 1, None]
    assert rows[2].measurement.reason == "\x1b[2J × 1500"
    assert all(r.identity == IDENTITY for r in rows)


def test_a_results_file_has_its_name_once_it_is_complete(tmp_path):
    path = tmp_path / "r.jsonl"

    def written(error=None):
        with ResultsWriter(path, IDENTITY) as writer:
            writer.write(perplexity())
            assert not path.exists()
            if error is not None:
                raise error

    written()
    assert [*tmp_path.iterdir()] == [path]
    # What is measured again is gone once that has begun.
    with pytest.raises(RuntimeError):
        written(RuntimeError())
    assert not [*tmp_path.iterdir()]


def test_a_file_that_is_missing_or_cut_off_is_named(results, tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl: cannot be read"):
        read_results(tmp_path / "none.jsonl")
    path, lines = results
    damages = {":3: the end is torn": "\n".join([*lines[:2], lines[2][:40]]), ":2: the end lacks": lines[0]}
    for where, text in damages.items():
        path.write_text(text)
        with pytest.raises(UserError, match=f"perplexity.jsonl{where}.*once it is removed, .* makes it again"):
            read_results(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [lines[0], "{]", *lines[2:]], ":2: not a JSON object"),
        (lambda lines: [lines[0], *lines[2:]], ":3: the file has 2 rows, and its last record counts 3"),
        (lambda lines: [*lines, lines[0]], ":5: something follows the record"),
        (lambda lines: [lines[0].replace('"schema": 1', '"schema": 2'), *lines[1:]], ":1: schema 2"),
        (lambda lines: [lines[0], lines[1].replace('"unit"', '"units"'), *lines[2:]], r":2: columns -unit, \+units"),
        (lambda lines: [lines[0], lines[1].replace('"ok"', '"fine"'), *lines[2:]], ":2: loss: status 'fine'"),
        (lambda lines: [lines[0].replace('"value": 3.5', '"value": NaN'), *lines[1:]], ":1: .*not finite"),
    ],
)
def test_an_altered_file_is_refused_by_name_and_line(results, damage, message):
    path, lines = results
    path.write_text("\n".join(damage(lines)) + "\n")
    with pytest.raises(UserError, match=r"perplexity\.jsonl" + message):
        read_results(path)


def test_csv_has_the_columns_of_the_specification_in_order(results, tmp_path):
    write_csv(read_results(results[0]), tmp_path / "report" / "results.csv")
    with open(tmp_path / "report" / "results.csv", newline="", encoding="utf-8") as file:
        header, *rows = list(csv.reader(file))
    assert ",".join(header) == HEADER
    first, last = dict(zip(header, rows[0], strict=True)), dict(zip(header, rows[2], strict=True))
    assert json.loads(first["settings"]) == {"split": "test"}
    assert (first["value"], last["value"], last["status"]) == ("3.5", "", "not_reached")
    assert last["reason"] == "\\x1b[2J × 1500"
    assert list((tmp_path / "report").iterdir()) == [tmp_path / "report" / "results.csv"]


def test_settings_keep_their_order_in_a_table(tmp_path):
    settings = {"sequence_length": 512, "width": 64, "num_pairs": 64}
    given = Measurement(metric="accuracy", value=0.5, unit="1", settings=settings)
    write_csv([row(given)], tmp_path / "results.csv")
    [read] = read_csv(tmp_path / "results.csv")
    assert [*read.measurement.settings.items()] == [*settings.items()]


def test_a_compressed_table_has_the_same_rows_and_a_cut_one_is_refused(results, tmp_path):
    rows, path = read_results(results[0]), tmp_path / "results.csv.gz"
    assert table_of(tmp_path) == tmp_path / "results.csv"
    write_csv(rows, path)
    assert table_of(tmp_path) == path
    write_csv(read_csv(path), tmp_path / "again.csv")
    assert gzip.decompress(path.read_bytes()) == (tmp_path / "again.csv").read_bytes()
    content = path.read_bytes()
    for damaged in (content[:-20], content[:40] + bytes(20) + content[60:], b"schema,experiment"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"results\.csv\.gz: cannot be read as CSV"):
            read_csv(path)


def test_rows_of_different_corpora_are_never_compared():
    assert same_corpus([row(), row()]) == "wikitext2-v1"
    assert same_corpus([]) is None
    mixed = [row(), row(corpus="embedded"), row(corpus=None)]
    with pytest.raises(UserError, match=r"\(none\), embedded, wikitext2-v1"):
        same_corpus(mixed)


def shown(table, width=80):
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        print_table(table, console)
    return capture.get()


def test_a_header_that_is_too_wide_is_broken_between_the_words_of_its_name():
    names = ["softmax", "softmax_nope", "linear", "gated_deltanet", "gated_deltanet_window"]
    table = Table(headers=["", *names], lines=[["recall at 512, 64", *("1,000,000" for _ in names)]])
    lines = shown(table).splitlines()
    words = " ".join(lines).partition("─")[0].split()
    assert {*words} == {"softmax", "linear", "softmax_", "nope", "gated_", "deltanet", "deltanet_", "window"}
    assert max(map(len, lines)) <= 80
    assert {*names} <= {*shown(table, width=160).split()}


def test_the_name_of_a_line_is_not_broken_to_spare_the_headers_a_second_line():
    names = ["gated_deltanet_window", "softmax"]
    headers = ["variant", "recall at 32, 4", "copy at 8", "copy at 16", "test PPL", "test bits/byte"]
    lines = shown(Table(headers=headers, lines=[[name, *["0.9999"] * 5] for name in names])).splitlines()
    assert [line.split() for line in lines if "0.9999" in line] == [[name, *["0.9999"] * 5] for name in names]
    # One that would leave the numbers no room is broken.
    lines = shown(Table(headers=headers, lines=[["n" * 70, *["0.9999"] * 5]])).splitlines()
    assert sum(line.count("n") for line in lines[3:]) == 70
    assert " ".join(lines).count("0.9999") == 5


def test_numbers_have_four_digits_or_thousands_separated():
    shown = {999.96: "1000", 1000: "1,000", -1234.5: "-1,234", 0.123456: "0.1235", 1e-7: "1e-07"}
    assert {value: format_number(value) for value in shown} == shown


@pytest.mark.parametrize(
    ("value", "low", "high", "shown"),
    [
        (0.80012, 0.2452, 1.0, "0.8 [0.2, 1.0]"),
        (2.7711, 2.7382, 2.8034, "2.771 [2.738, 2.803]"),
        (208_499, 208_386, 208_726, "208,500 [208,390, 208,730]"),
        (0.99981, 0.99950, 1.0, "0.9998 [0.9995, 1.0000]"),
        # More digits than four say nothing, however narrow the interval.
        (3.14159, 3.141589, 3.141591, "3.142 [3.142, 3.142]"),
        (5, None, None, "5"),
    ],
)
def test_no_digit_is_beyond_what_its_interval_supports(value, low, high, shown):
    assert f"{format_within(value, low, high)} {format_interval(low, high)}".rstrip() == shown


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0.0013, 0.13, "[+0.001, +0.13]"),
        (-0.13, -0.0013, "[-0.13, -0.001]"),
        (-0.0004, 0.1, "[-0.0004, +0.10]"),
        (0.0, 0.1, "[+0.00, +0.10]"),
    ],
)
def test_an_end_of_a_difference_is_shown_as_0_only_where_it_is(low, high, shown):
    assert format_interval(low, high, "+", is_of_difference=True) == shown


def test_names_cannot_command_the_terminal_or_the_markup():
    text = shown(Table(title="a\x1b[2J\nb", headers=["", "score"], lines=[["[red]x", "1"]]))
    assert "[red]x" in text
    assert "\x1b" not in text
    assert r"a\x1b[2J\nb" in text


@pytest.mark.parametrize("num_scores", [2, 12])
def test_no_word_of_a_wide_table_is_broken(num_scores):
    """Many variants become lines, and columns that do not fit stand below."""
    variants = [f"mixer{index}" for index in range(12)]
    scores = [f"perplexity of text{index}" for index in range(num_scores)]
    lines = [[score, *[f"{index}.125" for index in range(12)]] for score in scores]
    text = shown(Table(headers=["", *variants], lines=lines, notes=["Below."]))
    assert max(map(len, text.splitlines())) <= 80
    assert {*variants, "perplexity", *(score.split()[-1] for score in scores)} <= {*text.split()}
    assert text.count("11.125") == num_scores
    assert text.count("Below.") == 1
