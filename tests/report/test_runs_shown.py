"""Runs as runs.py shows them: within 80 columns on a terminal, without what one would obey, in full for a program."""

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import yaml
from rich.console import Console
from scripts_here import run_here
from small import identity_of

from attnbench.report.run_list import list_tables, overview
from attnbench.report.run_pair import comparison_tables
from attnbench.results.row_files import ResultsWriter, read_results
from attnbench.results.rows import Measurement
from attnbench.results.runs import find_runs, select
from attnbench.results.tables import Table, print_table
from attnbench.settings.errors import UserError

HOSTILE = "\x1b[31mred\x1b[0m\u202e\n| a |"
CONFIGS = {
    "11110000": {"mixer": {"name": "softmax", "options": {"rotary_theta": 10000.0}}, "seed": 0},
    "22220000": {"mixer": {"name": "linear", "options": {"rotary_theta": None}}, "seed": 0},
    "33330000": {"mixer": {"name": "linear", "options": {"rotary_theta": None}}, "seed": 1},
}


@pytest.fixture
def outputs(tmp_path):
    """Three language models, the last on another corpus, and one that failed with a hostile reason."""
    for (digits, config), value in zip(CONFIGS.items(), (2.5, 2.25, 2.0), strict=True):
        name = config["mixer"]["name"]
        folder = tmp_path / "demo" / f"{name}-4m-T256-seed{config['seed']}-{digits}"
        (folder / "results").mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump({**config, "resolved": {"config_hash": digits}}))
        corpus = "text:other@1" if digits == "33330000" else "text:a@0"
        identity = identity_of(variant=name, corpus=corpus, evaluation="perplexity", config_hash=digits)
        with ResultsWriter(folder / "results" / f"perplexity-{digits}.jsonl", identity) as writer:
            for length in (256, 512):
                settings = {"split": "test", "checkpoint": "best", "sequence_length": length, "context": "full"}
                writer.write(Measurement(metric="nats_per_character", value=value, unit="nat", settings=settings))
    failed = tmp_path / "demo" / "linear-4m-T256-seed2-44440000"
    failed.mkdir()
    (failed / "config.yaml").write_text("config_hash: '44440000'\n")
    (failed / "failed.txt").write_text(f"UserError: {HOSTILE}\n")
    return tmp_path


def on_terminal(tables: Sequence[Table]) -> str:
    """Output at 80 columns, checked for its width and for what it would obey."""
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    for table in tables:
        print_table(table, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "\u202e" not in text
    return text


def test_a_terminal_shows_a_line_an_experiment(outputs):
    text = on_terminal([overview(find_runs(outputs))])
    header, line = (text.splitlines()[index].split() for index in (1, 3))
    assert header == ["experiment", "language", "models", "other", "runs", "failed", "last", "change", "MiB"]
    assert line[:4] == ["demo", "4", "0", "1"]


def test_runs_of_different_layers_of_a_user_name_their_classes(tmp_path):
    for digits, path in (("11110000", "my_layer:Mine"), ("22220000", "my_layer:Other")):
        folder = tmp_path / "demo" / f"module-4m-T256-seed0-{digits}"
        (folder / "results").mkdir(parents=True)
        (folder / "config.yaml").touch()
        identity = identity_of(variant="module", evaluation="perplexity", config_hash=digits)
        with ResultsWriter(folder / "results" / f"perplexity-{digits}.jsonl", identity) as writer:
            settings = {"split": "test", "mixer_options": {"path": path, "options": {}}}
            writer.write(Measurement(metric="nats_per_character", value=2.5, unit="nat", settings=settings))
    text = " ".join(on_terminal(list_tables(find_runs(tmp_path))).split())
    assert "(my_layer:Mine)" in text
    assert "(my_layer:Other)" in text


def test_a_terminal_shows_a_line_a_run_with_its_score_and_reason(outputs):
    text = on_terminal(list_tables(find_runs(outputs)))
    lines = {line.split()[0]: line for line in text.splitlines() if line[1:9] in (*CONFIGS, "44440000")}
    assert lines.keys() == {*CONFIGS, "44440000"}
    assert lines["11110000"].split()[1:3] == ["softmax-4m-T256", "0"]
    assert lines["11110000"].rstrip().endswith("2.5")
    assert " failed " in lines["44440000"]
    assert r"44440000 failed: UserError: \x1b[31mred\x1b[0m\u202e" in " ".join(text.split())


def test_another_corpus_is_another_table(outputs):
    titles = [table.title for table in list_tables(find_runs(outputs))]
    assert titles == ["demo: perplexity, text:a@0", "demo: perplexity, text:other@1", "demo: language models"]


def test_long_names_stay_within_the_terminal(outputs):
    long = outputs / "demo" / "cells" / f"{'recall-' + 'x' * 60}-num_pairs16-lr0.03-seed1000001-55550000"
    (long / "results").mkdir(parents=True)
    (long / "train.log").touch()
    text = on_terminal([*list_tables(find_runs(outputs)), overview(find_runs(outputs))])
    assert " s1 " in text
    assert "seeds of a search" in text


def test_runs_are_sorted_by_a_column_or_a_metric(outputs):
    def digits(sort):
        code, said, errors = run_here("runs.py", f"outputs_dir={outputs}", f"sort={sort}")
        assert code == 0, errors
        return [line.split("\t")[0][-8:] for line in said.splitlines()[1:]]

    # A run without the metric is last.
    assert digits("nats_per_character") == ["33330000", "22220000", "11110000", "44440000"]
    assert digits("-nats_per_character") == ["11110000", "22220000", "33330000", "44440000"]
    assert digits("what")[-1] == "11110000"
    code, _, errors = run_here("runs.py", f"outputs_dir={outputs}", "sort=nats_per_charactr")
    assert code == 1
    assert "did you mean nats_per_character?" in errors


def test_a_program_gets_every_run_in_full(outputs):
    code, said, _ = run_here("runs.py", "experiment=demo", f"outputs_dir={outputs}")
    lines = list(csv.DictReader(io.StringIO(said), delimiter="\t"))
    assert code == 0
    assert [line["status"] for line in lines].count("finished") == 3
    by_path = {line["path"]: line for line in lines}
    first = by_path[str(outputs / "demo" / "softmax-4m-T256-seed0-11110000")]
    assert first["corpus"] == "text:a@0"
    assert first["scores"] == "perplexity.nats_per_character=2.5"
    assert all(os.path.isdir(path) for path in by_path)
    code, said, errors = run_here("runs.py", "compare=[1111,2222]", f"outputs_dir={outputs}")
    assert "mixer.name\tsoftmax\tlinear\n" in said
    assert "2.5\t2.25\t-0.25\n" in said
    assert "1 of 3 settings are equal." in errors


def test_two_runs_beside_each_other(outputs):
    runs = find_runs(outputs)
    scores, configuration = comparison_tables([select(runs, "1111"), select(runs, "2222")])
    assert [list(map(str, line)) for line in configuration.lines] == [
        ["mixer.name", "softmax", "linear"],
        ["mixer.options.rotary_theta", "10000.0", "null"],
    ]
    assert configuration.notes[0] == "1 of 3 settings are equal."
    assert [line[1:] for line in scores.lines] == [["2.5", "2.25", "-0.25"]] * 2
    assert "sequence length 512" in str(scores.lines[1][0])
    on_terminal([scores, configuration])


def test_three_runs_beside_each_other_within_80_columns(outputs):
    runs = find_runs(outputs)
    scores, configuration = comparison_tables([select(runs, digits) for digits in CONFIGS])
    assert scores.headers == ["score", *CONFIGS]
    assert [line[1:] for line in scores.lines] == [["2.5", "2.25", "2"]] * 2
    assert ["seed", "0", "0", "1"] in [list(map(str, line)) for line in configuration.lines]
    on_terminal([scores, configuration])


def test_the_primary_score_is_first_and_only_five_are_shown(outputs):
    [results] = (select(find_runs(outputs), "1111").folder / "results").glob("*.jsonl")
    row = read_results(results)[0]
    with ResultsWriter(results, row.identity) as writer:
        for length in (512, 1024, 2048, 4096, 8192, 256):
            settings = {**row.measurement.settings, "sequence_length": length}
            writer.write(replace(row.measurement, settings=settings))
        writer.write(replace(row.measurement, metric="perplexity", unit="1"))
    both = [select(find_runs(outputs), digits) for digits in ("1111", "2222")]
    scores, _ = comparison_tables(both)
    every, _ = comparison_tables(both, show_all=True)
    assert len(scores.lines) == 5
    assert len(every.lines) == 7
    assert scores.lines == every.lines[:5]
    assert str(scores.lines[0][0]).startswith("Perplexity, ")
    assert any("2 scores more: all=true" in note for note in scores.notes)


def test_settings_that_one_run_lacks_are_shown_with_all(outputs):
    (select(find_runs(outputs), "1111").folder / "config.yaml").write_text(yaml.safe_dump({"seed": 5, "more": 1}))
    both = [select(find_runs(outputs), digits) for digits in ("1111", "3333")]
    _, configuration = comparison_tables(both)
    _, everything = comparison_tables(both, show_all=True)
    assert [line[0] for line in configuration.lines] == ["seed"]
    assert {"seed", "more", "mixer.name"} <= {line[0] for line in everything.lines}
    assert any("all=true" in note for note in configuration.notes)


def test_scores_on_different_corpora_have_no_difference(outputs):
    runs = find_runs(outputs)
    scores, _ = comparison_tables([select(runs, "1111"), select(runs, "3333")])
    assert any("different corpora" in note for note in scores.notes)
    assert [line[1:] for line in scores.lines] == [["2.5", "2", "–"]] * 2


@pytest.mark.parametrize("content", ["a: &b [1]\nc: *b\n", "a: [", "- " * 9999, "x" * 2**19])
def test_a_config_that_cannot_be_read_is_one_line(outputs, content):
    runs = find_runs(outputs)
    (select(runs, "1111").folder / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config\.yaml") as caught:
        comparison_tables([select(runs, "1111"), select(runs, "2222")])
    assert "\n" not in str(caught.value)


def test_a_program_gets_one_line_a_setting_whatever_is_in_it(outputs):
    (select(find_runs(outputs), "1111").folder / "config.yaml").write_text(yaml.safe_dump({"note": HOSTILE + "\t|"}))
    _, said, _ = run_here("runs.py", "compare=[1111,2222]", f"outputs_dir={outputs}")
    (line,) = [line for line in said.splitlines() if line.startswith("note\t")]
    assert line.split("\t") == ["note", r"\x1b[31mred\x1b[0m\u202e\n| a |\t|", "–"]
