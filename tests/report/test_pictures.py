"""The pictures that carry a report's answer: costs of scores, learning rates, learning curves, positions, samples."""

import dataclasses
import html
import json
import shutil

import pytest
from made_rows import IDENTITY, row
from report_rows import SKILL, write_experiment

from attnbench.report.blocks import MAX_FILE_NAME, Note, Picture, Pictures, Samples, file_name
from attnbench.report.charts import pictures
from attnbench.report.charts.marks import Axis, Drawing, placed
from attnbench.report.charts.plots import plots_of
from attnbench.report.charts.style import _engine, runtime, to_svg
from attnbench.report.charts.vega import LINE_END, draw, draw_bars, draw_bounds
from attnbench.report.inputs import read_inputs
from attnbench.report.page import write_report
from attnbench.report.sections.evaluations import evaluation_section
from attnbench.report.sections.learning import MAX_POINTS, MAX_TEXT, curve_section, rate_section, sample_section
from attnbench.report.sections.tradeoffs import STEPS, tradeoffs
from attnbench.results.metrics import DEFINITIONS, Primary
from attnbench.results.row_tables import read_csv
from attnbench.results.rows import MIXER_OPTIONS
from attnbench.results.tables import Table
from attnbench.settings.errors import UserError
from attnbench.verdict.seeds import figures

RECALL = Primary(metric="accuracy", kind="accuracy", margin=0.01, hardest=["num_pairs"])


@pytest.fixture(scope="module")
def known(inputs):
    return inputs.primaries


def drawn(section) -> dict:
    """Pictures of a section by their names."""
    return {it.name: it for block in section.blocks if isinstance(block, Pictures) for it in block.shown}


def measured(variant, metric, value, settings=(), **options):
    """Row of recall."""
    identity = dataclasses.replace(row().identity, variant=variant, mixer="Softmax", evaluation="recall")
    settings = {"num_pairs": 4, **dict(settings), MIXER_OPTIONS: options}
    return dataclasses.replace(row(metric=metric, settings=settings, value=value), identity=identity)


def sized(variant, accuracy, num_bytes, **options):
    test = {"split": "test"}
    return [
        measured(variant, "accuracy", accuracy, test, **options),
        measured(variant, "state_bytes", num_bytes, **options),
    ]


def test_a_score_stands_over_its_own_cost(inputs, summed, known):
    found = drawn(tradeoffs(inputs.rows, summed, known, list(SKILL)))
    assert list(found) == ["copy-state_bytes", "recall-state_bytes", "perplexity-step_milliseconds"]
    points = {point["variant"]: point for point in found["recall-state_bytes"].spec["datasets"]["points"]}
    assert {name: point["x"] for name, point in points.items()} == {n: 65_536.0 * skill for n, skill in SKILL.items()}
    assert points["softmax"]["value"] == 1.0
    # Of the training's own length, at which a step of softmax takes this long.
    points = {p["variant"]: p for p in found["perplexity-step_milliseconds"].spec["datasets"]["points"]}
    (step,) = [
        f.mean
        for f in summed
        if (f.variant, f.metric, f.evaluation) == ("softmax", "step_milliseconds", "throughput")
        and f.settings["sequence_length"] == f.identity.seq_len
    ]
    assert points["softmax"]["x"] == step


def test_variants_that_differ_in_their_window_alone_are_one_curve():
    rows = [
        *sized("short", 0.2, 100, window=16, conv_size=4),
        *sized("long", 0.6, 400, window=64, conv_size=4),
        *sized("bare", 0.1, 400, window=64, conv_size=0),
    ]
    (picture,) = drawn(tradeoffs(rows, figures(rows), {"recall": RECALL}, ["short", "long", "bare"])).values()
    assert [(d["x"], d["line"]) for d in picture.spec["datasets"]["lines"]] == [
        (100, "windows of short"),
        (400, "windows of short"),
    ]
    assert len(picture.spec["datasets"]["points"]) == 3
    assert "joined" in picture.legend
    assert [it["variant"] for it in picture.spec["datasets"]["best"]] == ["short", "long"]
    svg = to_svg(picture, ["short", "long", "bare"])
    # Where it lies; a legend would say it again.
    assert [svg.count(f">{name}<") for name in ("short", "long", "bare")] == [1, 1, 1]


def test_a_name_stands_where_it_hides_no_point_and_no_other_name():
    x, y = Axis(domain=(0, 100)), Axis(domain=(0, 1))
    points = [{"name": f"variant {n}", "x": 90.0, "value": 0.5 + n / 20} for n in range(3)]
    names = placed(points, x, y)
    assert names[0]["align"] == "right"
    assert len({(it["align"], it["dx"], it["dy"]) for it in names}) == len(names) == 3
    # With too many in one place some have none, and the legend names them.
    crowd = [{"name": f"variant {n}", "x": 50.0, "value": 0.5} for n in range(40)]
    assert len(placed(crowd, x, y)) < 12
    rows = [row for n in range(40) for row in sized(f"v{n}", 0.5, 100 + n % 2, window=16, conv_size=n)]
    (picture,) = drawn(tradeoffs(rows, figures(rows), {"recall": RECALL}, [f"v{n}" for n in range(40)])).values()
    legends = [it["encoding"]["color"].get("legend") for it in picture.spec["layer"] if "color" in it["encoding"]]
    assert any(legends)


def test_models_of_several_widths_are_one_curve_a_variant_and_a_picture_a_setting():
    rows = []
    for num_pairs, width, one, two in ((4, 64, 0.5, 0.9), (4, 128, 0.8, 1.0), (8, 64, 0.1, 0.3)):
        for variant, accuracy, num_bytes in (("one", one, width), ("two", two, width * width)):
            place = {"num_pairs": num_pairs, "width": width}
            rows.append(measured(variant, "accuracy", accuracy, {**place, "split": "test"}, window=width))
            rows.append(measured(variant, "state_bytes", num_bytes, place, window=width))
    found = drawn(tradeoffs(rows, figures(rows), {"recall": RECALL}, ["one", "two"]))
    assert list(found) == ["recall-state_bytes-pairs_4", "recall-state_bytes-pairs_8_width_64"]
    easy, hard = found.values()
    assert [(d["x"], d["value"], d["line"], d["width"]) for d in easy.spec["datasets"]["lines"]] == [
        (64, 0.5, "one", "64"),
        (4096, 0.9, "two", "64"),
        (128, 0.8, "one", "128"),
        (16384, 1.0, "two", "128"),
    ]
    assert easy.legend == f"pairs 4; joined: one variant at widths 64 and 128; {STEPS}; upper left is better"
    # In the order of the points; each has more than all that cost less.
    assert [(it["variant"], it["width"]) for it in easy.spec["datasets"]["best"]] == [
        ("one", "64"),
        ("two", "64"),
        ("one", "128"),
        ("two", "128"),
    ]
    assert {it["name"] for it in easy.spec["datasets"]["names"]} == {"one, 64", "two, 64", "one, 128", "two, 128"}
    assert "one at width 128 0.8 at 128" in easy.description
    assert len(hard.spec["datasets"]["points"]) == 2
    assert "joined" not in hard.legend


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize("name", ["recall\0x", "recall" * 50])
def test_an_evaluation_of_any_name_has_pictures_whose_files_can_be_written(name, tmp_path, monkeypatch):
    renamed = dataclasses.replace(IDENTITY, evaluation=name)
    monkeypatch.setattr(
        "report_rows._identity",
        lambda experiment, run, variant, evaluation, seed, stamp: dataclasses.replace(
            renamed, experiment=experiment, run=run, variant=variant, seed=seed
        ),
    )
    folder = write_experiment(tmp_path / "demo", evaluations=["recall"])
    record = json.loads((folder / "comparison.json").read_text().replace('"recall"', json.dumps(name)))
    of_it = {"purpose": "", "plots": [["accuracy", "num_pairs"]], "primary": dataclasses.asdict(RECALL)}
    record |= {"reference": "softmax", "evaluations": {name: of_it}}
    (folder / "comparison.json").write_text(json.dumps(record))
    write_report(folder)
    pictures = {path.stem for path in (folder / "report" / "figures").glob("*.svg")}
    of_copy = {"rates-copy-width_64"}
    if len(name) > MAX_FILE_NAME:
        assert all(len(it) == MAX_FILE_NAME for it in pictures - of_copy)
        assert len(pictures - of_copy) == 5
    else:
        named = {"differences-recall_x", "recall_x-state_bytes", "rates-recall_x-width_64", "curves-recall_x"}
        assert pictures == of_copy | named | {"recall_x-accuracy-num_pairs"}


def test_names_that_are_cut_differ_where_the_rest_does():
    assert file_name("recall", "state_bytes", settings={"pairs": 4}) == "recall-state_bytes-pairs_4"
    assert file_name("../a b", "é") == "_a_b-_"
    assert file_name("x" * MAX_FILE_NAME) == "x" * MAX_FILE_NAME
    cut = {file_name("x" * 300, ending) for ending in ("a", "b")}
    assert [len(it) for it in cut] == [MAX_FILE_NAME] * 2


def test_scores_that_cost_the_same_have_no_picture():
    rows = [*sized("one", 0.9, 100), *sized("two", 0.8, 100)]
    assert tradeoffs(rows, figures(rows), {"recall": RECALL}, ["one", "two"]) is None


def test_rates_have_a_dot_a_seed_a_ring_and_their_window(inputs, known):
    section = rate_section(inputs, known, list(SKILL))
    picture = drawn(section)["rates-copy-width_64"]
    data = picture.spec["datasets"]
    assert len([d for d in data["dots"] if d["variant"] == "softmax"]) == 6
    assert {"variant": "softmax", "x": 0.01, "value": 0.9} in data["rings"]
    assert len(data["lines"]) == 4 * len(SKILL) - 1
    assert picture.missing == "every seed diverged: linear at 0.1"
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    found = {(line[0], line[1]): list(line[2:]) for line in table.lines}
    assert found["softmax", "Copy, width 64"] == [
        *("0.01", "the best of 0.003: 0.61, 0.01: 0.9, 0.03: 0.88, 0.1: 0.2", "0.77", "0.031")
    ]
    found_by = {key: line[1] for key, line in found.items()}
    assert found_by["linear", "Copy, width 64"].endswith(", 0.1: diverged; at the edge of those tried")
    assert found_by["linear", "Recall, width 64"] == found_by["linear", "Copy, width 64"]


def test_curves_have_a_line_a_seed_and_no_more_points_than_can_be_seen(inputs, summed, known):
    found = drawn(curve_section(inputs, summed, known, list(SKILL)))
    assert list(found) == ["curves-training", "curves-copy", "curves-recall"]
    for name, picture in found.items():
        lines: dict[str, list] = {}
        for datum in picture.spec["datasets"]["lines"]:
            lines.setdefault(datum["line"], []).append(datum)
        assert len(lines) == 3 * len(SKILL)
        assert max(map(len, lines.values())) == (10 if name == "curves-training" else MAX_POINTS)
        # From the first to the last.
        ends = {(line[0]["x"], line[-1]["x"]) for line in lines.values()}
        assert ends == {(200, 2000) if name == "curves-training" else (10, 2000)}


def test_without_metrics_there_are_no_curves(experiment, summed, known, tmp_path):
    folder = shutil.copytree(experiment, tmp_path / "demo")
    for path in folder.rglob("metrics.jsonl"):
        path.unlink()
    assert curve_section(read_inputs(folder), summed, known, []) is None


def test_positions_are_drawn_where_their_bucket_ends(inputs, summed):
    of_it = [figure for figure in summed if figure.evaluation == "perplexity"]
    found = drawn(evaluation_section(of_it, [], inputs.protocol, list(SKILL)))
    picture = found["perplexity-nats_per_character-position_bucket"]
    points = [d["x"] for d in picture.spec["datasets"]["points"] if d["variant"] == "linear"]
    assert points == [1, 2, 4, 8, 16, 32, 64, 128, 256]


@pytest.mark.usefixtures("without_charts")
def test_upright_lines_and_dots_of_a_plot_have_words(summed):
    def shown(evaluation, metric, axis):
        plots = plots_of([it for it in summed if it.evaluation == evaluation], [(metric, axis)])
        (at, words) = {(plot.trained, pictures.picture(plot, list(SKILL)).legend) for plot in plots}.pop()
        return at, words

    longer = "right of the dashed upright line: longer than trained"
    assert shown("copy", "symbol_accuracy", "length") == (50, f"dashed: chance 0.03846; {longer}; small dots: seeds")
    at, told = shown("throughput", "tokens_per_second", "sequence_length")
    assert (at, told) == (None, "upright lines: 20th and 80th percentile of repetitions")
    (plot, *_) = plots_of([it for it in summed if it.evaluation == "copy"], [("symbol_accuracy", "length")])
    assert pictures.picture(plot, list(SKILL)).spec["datasets"]["trained"] == [{"x": 50}]


def test_a_page_says_of_what_validation_data_are_and_defines_only_what_it_shows(inputs, summed):
    def section(name):
        of_it = [it for it in summed if it.evaluation == name]
        return evaluation_section(of_it, [], inputs.protocol, list(SKILL)).blocks

    folded = {name: section(name)[-1] for name in ("copy", "perplexity", "throughput")}
    assert folded["copy"].block["Chance"] == "score of guessing"
    assert "characters’ frequencies" in folded["perplexity"].block["Chance"]
    assert "data.tokenizer" not in folded["perplexity"].block["Perplexity"]
    assert folded["throughput"].block["Tokens/s"] == "positions a second"
    curves = drawn(curve_section(inputs, summed, inputs.primaries, list(SKILL)))
    assert curves["curves-copy"].legend == "all trained lengths mixed"
    assert "mixed" not in curves["curves-recall"].legend


@pytest.mark.parametrize(("evaluation", "data"), [("recall", ""), ("copy", ", all trained lengths mixed")])
def test_validation_accuracies_of_several_settings_have_a_line_each(evaluation, data, inputs):
    rows = [
        measured(variant, "selection", value, {"split": "validation", "num_pairs": number})
        for variant, values in (("one", (0.5, 0.25)), ("two", (1.0, 0.75)))
        for number, value in zip((16, 32), values, strict=True)
    ]
    rows = [replaced(row, evaluation=evaluation) for row in rows]
    section = evaluation_section(figures(rows), [], inputs.protocol, ["one", "two"])
    (table,) = [it.block for it in section.blocks if getattr(it, "title", "") == "Validation accuracy"]
    lines = [[str(cell) for cell in line] for line in table.lines]
    assert [line[0] for line in lines] == [f"pairs 16{data}", f"pairs 32{data}"]
    assert [line[1].startswith(text) for line, text in zip(lines, ("0.5", "0.25"), strict=True)] == [True, True]


def test_shares_of_unlike_peaks_are_said_to_be(inputs):
    def of(variant, tflops, share):
        place = {"sequence_length": 256, "batch_size": 4}
        return [
            measured(variant, "achieved_tflops", tflops, place),
            measured(variant, "ceiling_fraction", share, place),
        ]

    def told(*rows):
        rows = [replaced(row, evaluation="throughput") for pair in rows for row in pair]
        (section,) = [evaluation_section(figures(rows), [], inputs.protocol, ["one", "two"])]
        return [it.text for it in section.blocks if isinstance(it, Note) and "unlike peaks" in it.text]

    assert told(of("one", 2.0, 0.5), of("two", 2.0, 0.4)) == [
        "Shares of the device’s peak are of unlike peaks, as each run timed its own: 4 (one) to 5 (two) TFLOP/s."
    ]
    assert told(of("one", 2.0, 0.5), of("two", 2.0, 0.49)) == []


def replaced(row, **identity):
    return dataclasses.replace(row, identity=dataclasses.replace(row.identity, **identity))


def test_a_sample_a_variant_is_shown_bounded_and_escaped(inputs, experiment, tmp_path):
    (samples,) = [block for block in sample_section(inputs).blocks if isinstance(block, Samples)]
    assert [sample.label for sample in samples.shown] == [f"{name}, seed 0" for name in SKILL]
    assert {len(sample.text) for sample in samples.shown} == {MAX_TEXT}
    page = write_report(experiment, target=tmp_path).read_text()
    assert "<b>ran" not in page
    assert "\x1b" not in page
    assert "river \\x1b[2J&lt;/script&gt;&lt;b&gt;ran" in page


def test_a_sample_that_is_none_is_named(experiment, tmp_path):
    folder = shutil.copytree(experiment, tmp_path / "demo")
    for path in folder.rglob("sample.json"):
        path.write_text(json.dumps({"prompt": 3, "text": "x"}))
    with pytest.raises(UserError, match=r"sample\.json: is not a sample of text; you may remove the file"):
        sample_section(read_inputs(folder))
    samples = list(folder.rglob("sample.json"))
    samples[0].write_text('{"prompt": "cut o')
    for path in samples[1:]:
        path.unlink()
    with pytest.raises(UserError, match=r"sample\.json: cannot be read as JSON .*; you may remove the file"):
        sample_section(read_inputs(folder))
    samples[0].unlink()
    assert sample_section(read_inputs(folder)) is None


def test_an_environment_that_is_torn_is_named_and_may_go(experiment, tmp_path):
    folder = shutil.copytree(experiment, tmp_path / "demo")
    [*paths] = folder.rglob("environment.json")
    paths[0].write_text('{"torch": ')
    with pytest.raises(UserError, match=r"environment\.json: cannot be read as JSON .*; you may remove the file"):
        read_inputs(folder)
    paths[0].unlink()
    assert read_inputs(folder).rows == read_inputs(experiment).rows


@pytest.mark.usefixtures("without_charts")
def test_what_came_out_of_the_control_and_of_freezing_stands_under_the_answer(experiment, tmp_path):
    folder = shutil.copytree(experiment, tmp_path / "demo", ignore=shutil.ignore_patterns("report"))
    record = json.loads((folder / "comparison.json").read_text())
    record |= {"reference": "softmax", "control_seeds": [2]}
    record["files"] = [name for name in record["files"] if "seed2" not in name or "0-" in name]
    (folder / "comparison.json").write_text(json.dumps(record))
    page = write_report(folder).read_text()
    assert "Control: softmax against itself under other seeds" in page
    sentence = read_inputs(folder).frozen
    assert sentence
    assert html.escape(sentence, quote=False) in page


def test_every_metric_that_was_ever_published_of_a_mixer_has_a_definition(root):
    metrics = {
        found.measurement.metric
        for name in ("battery-h100/results.csv.gz", "published-h100/results.csv.gz", "language_model-h200/results.csv")
        for found in read_csv(root / "docs" / "results" / name)
    }
    golden = json.loads((root / "tests" / "stored" / "golden.json").read_text())
    metrics |= {name for name in json.dumps(golden).split('"') if name in DEFINITIONS}
    assert metrics > {"selection", "ceiling_fraction", "steps_to_95"}
    assert metrics <= DEFINITIONS.keys()


def test_long_names_stand_whole_in_the_legend_of_a_picture_without_a_browser(inputs, known):
    long = {name: f"{name}+positions+convolution+gate+output_norm" for name in SKILL}
    rows = [
        dataclasses.replace(row, identity=dataclasses.replace(row.identity, variant=long[row.identity.variant]))
        for row in inputs.rows
    ]
    shown = drawn(tradeoffs(rows, figures(rows), known, [*long.values()]))
    svg = to_svg(next(iter(shown.values())), [*long.values()])
    assert all(f">{name}<" in svg for name in long.values() if "<" not in name)


def test_names_that_every_object_of_javascript_has_are_drawn():
    names = ["softmax", "constructor", "toString", "__proto__", "hasOwnProperty"]
    data = [{"variant": name, "x": x, "value": 1.0, "low": 0.5, "high": 2.0} for name in names for x in (1, 2)]
    labels, words = dict(zip(names, names, strict=True)), {"variant": "variant"}
    given = {"labels": labels, "words": words, "x": Axis(), "y": Axis(), "description": "constructor"}
    lines = draw(Drawing(points=data, lines=data, missing={"toString": data[:2]}, **given), names)
    parts = [{"variant": name, "x": it, "order": 0, "value": 0.2, "share": "20 %"} for name in names for it in names]
    bounds = [{"variant": name, "value": 1, "low": 0, "high": 2, "text": ""} for name in names]
    for spec in (lines, draw_bars(parts, names, names, "valueOf"), draw_bounds(bounds, "bounds")):
        svg = to_svg(Picture(name="a", title="constructor", spec=spec, description=""), names)
        assert all(f">{name}" in svg for name in names)


def test_words_of_a_bound_have_room_in_a_wide_font_too():
    words = "nats per character of mamba2 less"
    spec = draw_bounds([{"variant": f"{words}{LINE_END}two", "value": 1, "low": 0, "high": 2, "text": ""}], "bounds")
    extents = {layer["encoding"]["y"]["axis"]["minExtent"] for layer in spec["layer"]}
    # 13 pixels high, DejaVu Sans takes 6.5 a character.
    assert min(extents) >= 6.5 * len(words)
    assert max(extents) < 6.5 * (len(words) + len("two"))


def test_a_chart_engine_that_ends_is_one_line_and_the_next_picture_has_another():
    spec = draw_bounds([{"variant": "a", "value": 1, "low": 0, "high": 2, "text": ""}], "bounds")
    picture = Picture(name="a", title="a", spec=spec, description="")
    _engine().kill()
    with pytest.raises(UserError, match=r"the chart engine .* ended with code -9"):
        to_svg(picture, ["a"])
    assert to_svg(picture, ["a"]).startswith("<svg")


def test_the_pages_script_is_made_once_and_again_where_it_cannot_be_kept(tmp_path, monkeypatch):
    made = []

    def draw(name: str, **arguments: str) -> bytes:
        made.append(name)
        return b"script of https://github.com/vega"

    monkeypatch.setattr("attnbench.report.charts.style._draw", draw)
    kept, refused = tmp_path / "cache", tmp_path / "file"
    refused.touch()
    for cache, number in ((kept, 1), (kept, 1), (refused, 2), (refused, 3)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        # Without what this process remembers.
        assert runtime.__wrapped__() == "script of /vega"
        assert len(made) == number
