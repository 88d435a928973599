"""The report from made-up rows, without a browser: what it says, and that names cannot leave their place."""

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import altair
import pytest
from jinja2 import UndefinedError
from made_rows import inputs_of, row, rows_of
from pages import ROOT
from report_rows import CORPUS, EVALUATIONS, HOSTILE, PARTS, SKILL, write_experiment
from rich.console import Console
from scripts_here import run_here
from small import identity_of

from attnbench.mixers.mamba3 import Mamba3
from attnbench.report.blocks import (
    Example,
    Examples,
    Folded,
    Lines,
    Note,
    Picture,
    Pictures,
    Sample,
    Samples,
    Scores,
    Section,
    Sentences,
)
from attnbench.report.charts.looks import KNOWN, looks
from attnbench.report.charts.pictures import picture
from attnbench.report.charts.plots import chance_text, describe, missing_text, plots_of
from attnbench.report.charts.style import to_png, to_svg
from attnbench.report.inputs import about, read_inputs
from attnbench.report.page import pictures_of, write_report, write_sections
from attnbench.report.sections.answer import (
    NO_PRIMARY,
    NO_REFERENCE,
    NOT_SCORED,
    NOT_TESTED,
    UNFINISHED,
    answer,
    sentences,
)
from attnbench.report.sections.differences import difference_section
from attnbench.report.sections.scores import score_table
from attnbench.report.sections.surroundings import ACTIVATION, equal_parts, surroundings, surroundings_table
from attnbench.report.sections.words import (
    chances,
    devices,
    listed,
    plain_answer,
    unbroken,
    without_addresses,
)
from attnbench.report.template import render
from attnbench.report.terminal import print_comparison
from attnbench.results.row_files import ResultsWriter, read_results
from attnbench.results.row_tables import read_csv, write_csv
from attnbench.results.rows import DEVICE, MIXER_OPTIONS, Measurement
from attnbench.results.tables import Table, TableCell, print_table
from attnbench.settings.errors import UserError
from attnbench.settings.schema import SELECTION_SEED
from attnbench.verdict.rates import Choice
from attnbench.verdict.seeds import RATIO_NOTE, figures
from attnbench.verdict.summary import headline_columns, summary

VOID = ("meta", "wbr")
ADDRESS = re.compile(r"\b(?:https?|wss?)://(?!www\.w3\.org/)[^\s\"'`<>]*")


class Page(HTMLParser):
    """The elements of a page and its text, script and style apart."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.data = ""
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)
        elif self.open and self.elements[-1][1].get("type") == "application/json":
            self.data += data

    @property
    def text(self) -> str:
        """No-break spaces as plain ones, so that a sentence is found as `sentences` has it."""
        return " ".join(self.texts).replace("\N{NO-BREAK SPACE}", " ")


@pytest.fixture(scope="module")
def report(experiment) -> Path:
    return write_report(experiment)


@pytest.fixture(scope="module")
def page(report) -> Page:
    return Page(report)


def test_many_variants_without_a_reference_are_not_compared_and_the_answer_says_why():
    rows = [it for number in range(7) for it in rows_of(f"v{number}", 0.5, 0.6)]
    said = answer(inputs_of(rows, [f"v{number}" for number in range(7)]))
    assert said["No verdict"] == [NO_REFERENCE.format(6)]
    assert answer(inputs_of(rows[:2], ["v0"]))["No verdict"] == [NOT_SCORED]


@pytest.mark.parametrize("lengths", [[50], [50, 100]])
def test_rows_without_any_number_have_a_page_and_a_picture(lengths, tmp_path):
    places = [{"length": length, "beyond_training": False} for length in lengths]
    rows = [row(name, seed, value=None, settings=at) for name in ("a", "b") for seed in (0, 1) for at in places]
    write_csv(rows, tmp_path / "results.csv")
    shown = Page(write_report(tmp_path)).text
    assert "out of memory" in shown
    pictures = [path.read_text() for path in (tmp_path / "report" / "figures").glob("*.svg")]
    assert [">100<" in svg for svg in pictures] == [True] * (len(lengths) - 1)


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize("size", [1e100, 800.0, 5e-324])
@pytest.mark.parametrize(("evaluation", "metric"), [("perplexity", "nats_per_character"), ("copy", "symbol_accuracy")])
def test_numbers_of_any_size_have_a_page(evaluation, metric, size, tmp_path):
    of = {"settings": {"split": "test", "checkpoint": "best", "context": "full", "length": 16}}
    of |= {"evaluation": evaluation, "metric": metric, "of": {"unit": "nat"}}
    named = {
        "softmax": (0.5, 0.6, 0.7),
        "much": (size, size, size),
        "both": (size, 0.1, -size),
        "near": (0.5, 0.5, size),
    }
    write_csv([it for name, values in named.items() for it in rows_of(name, *values, **of)], tmp_path / "results.csv")
    assert "much" in Page(write_report(tmp_path)).text


def test_a_perplexity_past_all_numbers_is_written_as_infinite():
    at = {"split": "test", "checkpoint": "best", "context": "full"}
    values = {"softmax": (0.5, 0.6, 0.7), "b": (800.0, 800.1, 800.2), "c": (1.0, 1.1, 1.2), "d": (900.0, 900.2, 900.3)}
    of = {"settings": at, "evaluation": "perplexity", "metric": "nats_per_character", "of": {"unit": "nat"}}
    rows = [it for name, given in values.items() for it in rows_of(name, *given, **of)]
    inputs = inputs_of(rows, list(values), reference="softmax", rank=list(values))
    assert "softmax has 100 % [100, 100] lower perplexity than d, " in answer(inputs)["Better"][0]
    # A picture has no place for it.
    section = difference_section(inputs.verdicts)
    assert section is not None
    (picture,) = pictures_of([section])
    assert {it["variant"] for it in picture.spec["datasets"]["figures"]} == {"c"}


def test_what_is_timed_alone_asks_for_no_reference():
    # Operators have no primary metric, and one reference would not make them comparable.
    assert answer(read_inputs(ROOT / "docs/results/decode-h200"))["No verdict"] == [NO_PRIMARY]


def test_what_a_mixer_did_not_get_stands_beside_its_score(page, summed):
    scores = [figure for figure in of(summed, "recall", "accuracy") if figure.variant == "linear"]
    assert {figure.without for figure in scores} == {"without conv_size, <b>gate</b>"}
    small = re.findall(r"<small>(without [^/]*/b&gt;)</small>", page.source)
    assert set(small) == {"without conv_size, &lt;b&gt;gate&lt;/b&gt;"}
    assert len(small) > 2 * len(scores)


def of(summed, evaluation, metric=None):
    return [f for f in summed if f.evaluation == evaluation and metric in (None, f.metric)]


@pytest.mark.usefixtures("without_charts")
def test_a_sweep_s_trainings_of_one_variant_are_told_apart(tmp_path):
    folder = write_experiment(tmp_path / "sweep", seeds=1, record=False, evaluations=["perplexity", "throughput"])
    for path in sorted(folder.glob("**/results")):
        again = path.parent.with_name(f"{path.parent.name}-longer") / "results"
        again.mkdir(parents=True)
        rows = read_results(path / "rows.jsonl")
        with ResultsWriter(again / "rows.jsonl", dataclasses.replace(rows[0].identity, seq_len=512)) as writer:
            for row in rows:
                writer.write(row.measurement)
        shutil.copy(path.parent / "environment.json", again.parent)
    variants = read_inputs(folder).protocol.variants
    assert variants == [f"{name} T{length}" for name in SKILL for length in (256, 512)]
    assert write_report(folder).exists()


def test_every_level_that_luck_reaches_is_told():
    settings = {"num_pairs": 16, "chance": 1 / 4096, "chance_among_pairs": 1 / 16}
    assert chances(settings) == "chance 0.0002441, among pairs 0.0625"
    assert chances({"num_pairs": 16}) == ""


def test_what_a_library_says_names_no_address():
    text = "no memory  (https://docs.pytorch.org/a#b) left; see http://x.y"
    assert without_addresses(text) == "no memory left; see"


def test_the_head_counts_evaluations_and_a_training_is_none(page):
    assert "training" in EVALUATIONS
    assert f"{len(EVALUATIONS) - 1} evaluations" in page.text


def test_the_page_is_whole_and_asks_no_network(page, report):
    assert page.open == []
    assert not ADDRESS.findall(page.source)
    assert not [words for _, words in page.elements if {"src", "srcset", "background", "action"} & words.keys()]
    links = {words["href"] or "" for _, words in page.elements if "href" in words}
    assert {link for link in links if not link.startswith("#")} == {"results.csv", "figures/"}
    assert page.source.count("window.vegaEmbed=") == 1
    assert report.stat().st_size < 2_000_000


def test_its_policy_lets_only_its_own_scripts_run(page):
    (policy,) = [words["content"] for tag, words in page.elements if words.get("http-equiv")]
    assert policy is not None
    assert "default-src 'none'" in policy
    directive = policy.partition("script-src")[2]
    assert "unsafe-inline" not in directive
    assert directive.count("'sha256-") == 2


def test_a_name_cannot_leave_its_place(page):
    scripts = [words for tag, words in page.elements if tag == "script"]
    assert len(scripts) == 3
    assert "<script>window" not in page.source
    assert "<b>bold" not in page.source
    assert HOSTILE in page.text
    assert HOSTILE in json.loads(page.data)["variants"]


def test_the_template_escapes_text_wherever_it_enters():
    text = "<b>\"'&\u202egnp.exe\x1b</script><!--"
    entry = {"title": text, "headers": [text], "lines": [[text]], "num_labels": 1}
    blocks = [
        *(Note(text), Table(**entry), Folded(text, text, Table(**entry)), Folded(text, text, {text: text})),
        *(Lines({text: [text]}), Scores(Table(**entry), text), Sentences([text]), {text: text}),
        Examples([Example(text, [(text, text)])]),
        Samples([Sample(label=text, prompt=text, text=text)]),
    ]
    page = render(
        **dict.fromkeys(("plan", "policy", "style", "command"), text),
        sections={"section-0": Section(title=text, blocks=blocks, parts={text: [Note(text)]})},
        **{"facts": [text], "anchors": {}, "scripts": [], "is_running": False},
        data={"charts": {text: text}, "colours": {text: text}, "copies": {text: text}},
    )
    assert "<b>" not in page
    assert page.count("</script>") == 1
    # What a terminal or a reader's eye would obey, such as a change of writing direction, is spelled out.
    assert not {"\u202e", "\x1b"} & set(page)
    assert "&lt;b&gt;&#34;&#39;&amp;\\u202egnp.exe\\x1b&lt;/script&gt;" in page
    with pytest.raises(UndefinedError, match="policy"):
        render(plan="demo", is_running=False)


def test_the_answer_comes_first_and_marks_what_the_comparisons_separated(page):
    headings = [tag for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert headings[:3] == ["h1", "h2", "h2"]
    assert all(int(after[1]) - int(before[1]) <= 1 for before, after in itertools.pairwise(headings))
    # The winner first, by how much, and the loser.
    assert re.search(r"softmax has [\d.]+ % \[[^]]+\] lower perplexity than [^.]*linear", page.text)
    assert not re.search(r"linear has [\d.]+ % \[[^]]+\] lower perplexity", page.text)
    first = page.source.index('<ul class="verdicts">')
    assert first < page.source.index("<table") < page.source.index("data-chart=")
    assert "three seeds" not in page.text
    assert "Smallest differences detectable with 80 % power, for the median pair and the worst pair: " in page.text
    tables = [index for index, (tag, _) in enumerate(page.elements) if tag == "table"]
    sections = [index for index, (tag, _) in enumerate(page.elements) if tag == "section"]
    assert sections[0] < tables[0] < sections[1]


# A check takes a fifth of a second, and charts of one kind come one after another.
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_charts_fit_the_schema_of_vega_lite(page, every):
    for spec in list(json.loads(page.data)["charts"].values())[::every]:
        # Datasets are not validated: they have no schema, and "config" belongs to the page.
        altair.LayerChart.from_dict({**spec, "datasets": {}})


def test_it_can_be_read_without_seeing_it(page):
    tags = dict(page.elements[:1])
    assert tags["html"]["lang"] == "en"
    assert all(words.get("scope") for tag, words in page.elements if tag == "th")
    charts = [words for _, words in page.elements if "data-chart" in words]
    assert {words["data-chart"] for words in charts} == json.loads(page.data)["charts"].keys()
    assert all(words["role"] == "img" and len(words["aria-label"] or "") > 60 for words in charts)
    assert sum(tag == "caption" for tag, _ in page.elements) == sum(tag == "table" for tag, _ in page.elements)
    ids = [words["id"] for _, words in page.elements if "id" in words]
    assert len(ids) == len(set(ids))
    targets = [words["href"] or "" for tag, words in page.elements if tag == "a"]
    assert {target[1:] for target in targets if target.startswith("#")} <= set(ids)


def test_no_line_ends_between_a_number_and_its_unit(page):
    told = [text for text in page.texts if "%" in text]
    assert any("\N{NO-BREAK SPACE}%" in text for text in told)
    assert [text for text in told if re.search(r"\d [%×]|\[[\d.]+, ", text)] == []
    assert unbroken("33 % (3, 2, 95), 2 of 3 solved") == "33\xa0% (3,\xa02,\xa095), 2\xa0of\xa03\xa0solved"
    # A line may end between words, and in a long list.
    assert unbroken("seeds 1 to 3 (1, 2, 3, 4, 5)") == "seeds 1 to 3 (1, 2, 3, 4, 5)"


def test_how_it_was_made_is_on_the_page(page):
    for text in (
        *("attnbench compare plan=demo", CORPUS, "Mixed commits. ", "00c0ffee0000", "5357fac305d1"),
        *("2.12.0+cu130", "at the edge of those tried", "the process was killed by signal 9"),
        *("Forward FLOPs a token", "models without these, such as recall’s", "loss is nan after 312 steps"),
        "150.2 GiB asked for, 139.8 GiB there",
    ):
        assert text in page.text, text


def test_an_accuracy_says_how_many_labels_are_behind_it(summed, report):
    sizes = sorted({figure.num_samples for figure in of(summed, "recall", "accuracy") if figure.num_samples})
    assert f"Each seed answers {listed(f'{size:,}' for size in sizes)} test items." in report.read_text()


def test_every_plot_is_a_file_too(page, report):
    names = json.loads(page.data)["charts"].keys()
    assert "copy-symbol_accuracy-length" in names
    files = {path.name for path in (report.parent / "figures").iterdir()}
    assert files == {f"{name}.{ending}" for name in names for ending in ("svg", "png")}
    svg = (report.parent / "figures" / "copy-symbol_accuracy-length.svg").read_text()
    assert "<svg" in svg
    assert to_png(svg).startswith(b"\x89PNG")


def test_a_picture_is_drawn_again_only_if_its_content_has_changed_or_it_is_missing(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("attnbench.report.charts.style.to_svg", lambda picture, variants: f"<svg>{picture.title}</svg>")
    monkeypatch.setattr("attnbench.report.charts.style.to_png", lambda svg: drawn.append(svg) or svg.encode())

    def written(title: str) -> tuple[str, str]:
        section = Section(title="", blocks=[Pictures([Picture(name="a", title=title, spec={}, description="")])])
        write_sections([section], target=tmp_path, title="", variants=[], facts=[], command="")
        svg, png = (tmp_path / "figures" / f"a.{ending}" for ending in ("svg", "png"))
        return svg.read_text().partition("<!--")[0], png.read_text()

    assert written("one") == written("one") == ("<svg>one</svg>",) * 2
    assert written("two") == ("<svg>two</svg>",) * 2
    (tmp_path / "figures" / "a.png").unlink()
    assert written("two") == ("<svg>two</svg>",) * 2
    assert drawn == [f"<svg>{title}</svg>" for title in ("one", "two", "two")]


def test_results_csv_holds_all_rows_and_is_read_back(inputs, report, tmp_path):
    rows = read_csv(report.parent / "results.csv")
    assert rows == inputs.rows
    write_csv(rows, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == (report.parent / "results.csv").read_bytes()


def test_a_bad_results_csv_names_its_row(report, tmp_path):
    text = (report.parent / "results.csv").read_text()
    (tmp_path / "results.csv").write_text(text.replace(",ok,", ",fine,", 1))
    with pytest.raises(UserError, match=r"results\.csv: row \d+: .*fine"):
        read_csv(tmp_path / "results.csv")


def test_only_the_files_of_the_record_are_used(experiment, tmp_path):
    folder = shutil.copytree(experiment, tmp_path / "demo", ignore=shutil.ignore_patterns("report"))
    record = json.loads((folder / "comparison.json").read_text())
    record["files"] = [name for name in record["files"] if name.startswith("cells/0-copy")]
    (folder / "comparison.json").write_text(json.dumps(record))
    assert {(r.identity.variant, r.identity.evaluation) for r in read_inputs(folder).rows} == {("softmax", "copy")}
    (folder / "comparison.json").unlink()
    found = {row.identity.evaluation for row in read_inputs(folder).rows}
    assert found == {"copy", "recall", "perplexity", "throughput", "memory", "training", "profile"}


@pytest.mark.usefixtures("without_charts")
def test_few_seeds_decide_nothing_and_the_seeds_that_would_are_named(tmp_path):
    folder = write_experiment(tmp_path / "demo", seeds=2, evaluations=["recall"], record=False)
    page = Page(write_report(folder))
    assert "recall at 2 seeds; would be decided by: all 6 pairs " in page.text
    assert "recall none (2 seeds are too few, 8 would do)" in page.text
    assert not [words for _, words in page.elements if words.get("class") == "sign"]


def test_timings_of_several_sittings_are_said_to_be_and_are_in_no_order(tmp_path, capsys):
    folder = write_experiment(tmp_path / "timed", seeds=1, evaluations=("throughput", "scaling"))

    def shown() -> tuple[str, str]:
        print_comparison(read_inputs(folder))
        first = capsys.readouterr().out.splitlines()[0]
        page = Page(write_report(folder)).text
        leads = [text for text in page.split(". ") if "No ranking of speed" in text]
        assert bool(leads) == first.startswith("No ranking of speed")
        return first, page

    first, page = shown()
    assert not first.strip()
    assert re.search("Tokens/s at [^:]*: gated_deltanet ", page)
    for path in folder.glob("cells/1-throughput*/results/*.jsonl"):
        path.write_text(re.sub('"sitting": "[^"]+"', '"sitting": "2026-03-02T09:00:00.000+00:00"', path.read_text()))
    first, page = shown()
    assert first
    assert re.search("Tokens/s at [^:]*: softmax ", page)


@pytest.mark.parametrize("slowed_ms", [41.0, 389.8])
def test_timings_are_shown_over_a_reference_and_not_ranked_where_that_was_slowed_down(
    slowed_ms, tmp_path, capsys, monkeypatch
):
    measure = EVALUATIONS["throughput"]

    def beside_reference(variant: str, *given: Any) -> Iterator[Measurement]:
        ratio, last = (2.5, slowed_ms) if variant == "linear" else (0.5, 40.0)
        told = {"reference_milliseconds": [39.8, last], "reference_ratio": ratio, "load_average": 0.2}
        for it in measure(variant, *given):
            yield it if it.unit == "MiB" else dataclasses.replace(it, settings=it.settings | told)

    monkeypatch.setitem(EVALUATIONS, "throughput", beside_reference)
    folder = write_experiment(tmp_path / "timed", seeds=1, evaluations=("throughput",))
    inputs = read_inputs(folder)
    sentence = "No ranking of speed: the load changed, as a reference timed beside each run shows: "
    page = Page(write_report(folder)).text
    print_comparison(inputs)
    printed = " ".join(capsys.readouterr().out.split())
    is_slowed = slowed_ms == 389.8
    for text in (page, printed):
        assert (sentence in text) == is_slowed
        assert ("(39.8 to 389.8 ms)" in text) == is_slowed
        # The ratio comes first, the number itself behind it.
        assert re.search(r"2\.5×, [\d,.]+", text)
        assert RATIO_NOTE in text
    table = score_table(summary(inputs.figures, []))
    best = [line[0] for line in table.lines if isinstance(line[1], TableCell) and line[1].mark == "best"]
    assert best == ([] if is_slowed else ["linear"])
    # On a narrow terminal a ratio and its number stand on lines of their own, both whole.
    with (console := Console(width=40)).capture() as narrow:
        print_table(table, console)
    assert max(map(len, narrow.get().splitlines())) <= 40
    assert {word for line in table.lines for cell in line[1:] for word in str(cell).split()} <= {*narrow.get().split()}


def test_times_without_a_reference_are_not_ranked_and_times_and_memory_name_their_batch(tmp_path):
    folder = write_experiment(tmp_path / "timed", seeds=1, evaluations=("throughput", "memory"))
    rows = []
    for given in read_inputs(folder).rows:
        it = given.measurement
        settings = {name: value for name, value in it.settings.items() if name != "reference_milliseconds"}
        rows.append(dataclasses.replace(given, measurement=dataclasses.replace(it, settings=settings)))
        if it.metric == "step_milliseconds" and it.settings["sequence_length"] == 256:
            # Rows of sizes name neither length nor batch.
            of_size = dataclasses.replace(it, settings={"model": "4m", "evaluation_options": {"batch_size": 7}})
            identity = dataclasses.replace(given.identity, evaluation="scaling")
            rows.append(dataclasses.replace(given, measurement=of_size, identity=identity))
    table = score_table(summary(figures(rows), []))
    assert table.lead.startswith("No ranking of speed: no reference timed beside each run")
    # Each reason names its own columns.
    mixed = [
        dataclasses.replace(it, sitting=it.identity.variant) if it.identity.evaluation == "scaling" else it
        for it in rows
    ]
    lead = score_table(summary(figures(mixed), [])).lead
    assert re.search(
        r"several sittings[^.]*: training step \(ms\) at [^.]*\. No ranking of speed: no ref[^.]*: tokens/s at", lead
    )
    # One command, but a change of the source between its runs.
    changed = [
        dataclasses.replace(it, identity=dataclasses.replace(it.identity, environment=str(index)))
        for index, it in enumerate(rows)
    ]
    lead = score_table(summary(figures(changed), [])).lead
    assert "several environments" in lead
    assert "sittings" not in lead
    heads = list(map(str, table.headers))
    cells = [pair for line in table.lines for pair in zip(heads, line, strict=True)]
    assert {head for head, cell in cells if getattr(cell, "mark", "") == "best"} == {heads[3]}
    assert heads[3].startswith("training memory (MiB) ↓ length 4,096, batch size 8")
    assert heads[1].endswith("length 8,192, batch size 4")
    assert heads[2].endswith("model 4m, length 256, batch size 7")


def test_a_published_table_of_rows_has_its_sittings_from_the_record(tmp_path):
    folder = write_experiment(tmp_path / "timed", seeds=1, evaluations=("throughput",))
    record = json.loads((folder / "comparison.json").read_text())
    rows = [
        dataclasses.replace(row, identity=dataclasses.replace(row.identity, config_hash=row.identity.variant))
        for row in read_inputs(folder).rows
    ]
    del record["files"]
    record["sittings"] = {name: "2026-03-01" for name in SKILL}
    for second, is_mixed in (("2026-03-01", False), ("2026-03-02", True)):
        record["sittings"]["linear"] = second
        write_csv(rows, tmp_path / "page" / "results.csv")
        (tmp_path / "page" / "comparison.json").write_text(json.dumps(record))
        inputs = read_inputs(tmp_path / "page")
        assert bool(score_table(summary(inputs.figures, [])).lead) == is_mixed


def test_an_evaluation_that_declares_no_plots_is_drawn_along_its_axis_of_most_numbers():
    rows = [row(settings={few: index % 2, "most": index, last: 0}, value=0.1 * index)
            for few, last in (("a", "z"), ("z", "a")) for index in range(4)]  # fmt: skip
    for half in (rows[:4], rows[4:]):
        assert [plot.axis for plot in plots_of(figures(half), None)] == ["most"]


def test_a_few_seeds_that_are_not_tested_are_shown_seed_by_seed():
    rows = [*rows_of("softmax", 0.5, 0.25, 0.75), *rows_of("linear", 0.5, 0.5, 0.13)]
    inputs = inputs_of(rows, ["softmax", "linear"], rank=[], descriptive=["Nothing is tested."])
    given = answer(inputs)
    assert given[NOT_TESTED] == ["Nothing is tested."]
    assert "Nothing is tested." in sentences(inputs)
    (line,) = given["Seed by seed"]
    assert line.endswith(
        ": softmax 50 % (seeds 50, 25, 75); linear 38 % (50, 50, 13). Seeds of softmax overlap with those of linear."
    )
    apart = inputs_of([*rows_of("softmax", 0.8, 0.9), *rows_of("linear", 0.5, 0.7)], ["softmax", "linear"], rank=[])
    assert answer(apart)["Seed by seed"][0].endswith("Every seed of softmax is better than any other variant’s.")
    assert not {"Better", "Equivalent", "Undecided"} & given.keys()
    many = [*rows_of("softmax", *[0.5] * 5), *rows_of("linear", *[0.25] * 5)]
    assert "Seed by seed" not in answer(inputs_of(many, ["softmax", "linear"], rank=[]))
    assert "Seed by seed" not in answer(inputs_of(rows, ["softmax", "linear"], rank=["softmax", "linear"]))


def test_sizes_that_were_not_matched_and_failures_are_said():
    of_it = {"settings": {"width": 32}, "metric": "parameters"}
    rows = [*rows_of("softmax", 1000.0, **of_it), *rows_of("mine", 610.0, **of_it), *rows_of("linear", 1001.0, **of_it)]
    failures = [{"cell": f"copy mine, seed {seed}", "reason": "not today"} for seed in (1, 2)]
    told = sentences(inputs_of(rows, ["softmax", "mine", "linear"], failures=failures))
    assert "Parameters: mine has 39 % fewer in copy than softmax." in told
    assert told[0] == "copy mine, seed 1 failed, and 1 more: not today."


def test_what_is_not_ranked_is_said_without_a_winner(summed):
    (column,) = headline_columns(summed, "throughput")
    sentence = plain_answer(summed, column)
    assert sentence.startswith("Tokens/s at ")
    assert "best" not in sentence
    assert "seeds" not in sentence


def test_a_processor_that_several_numbers_of_threads_ran_on_stands_once():
    cpu, other = "AMD EPYC (Rome)", "NVIDIA H200"
    assert devices([f"{cpu} (2 threads)", other, f"{cpu} (1 threads)", f"{cpu} (2 threads)", other]) == (
        f"{cpu} (1 or 2 threads) and {other}"
    )
    assert devices(["AMD EPYC (1 threads)"]) == "AMD EPYC (1 thread)"
    assert devices([other]) == other


def test_plots_are_those_that_an_evaluation_declares(inputs):
    declared = about("perplexity", inputs.protocol)
    assert declared.plots is not None
    assert ("perplexity", "sequence_length") in declared.plots
    assert "language model" in declared.purpose
    assert about("../../etc/passwd", inputs.protocol).plots is None


def test_an_evaluation_of_elsewhere_has_the_plots_that_the_comparison_recorded(tmp_path):
    folder = write_experiment(tmp_path / "outputs")
    record = json.loads((folder / "comparison.json").read_text())
    record["evaluations"] = {"perplexity": {"purpose": "Told by the record.", "plots": [["bits", "letter"]]}}
    (folder / "comparison.json").write_text(json.dumps(record))
    declared = about("perplexity", read_inputs(folder).protocol)
    assert (declared.purpose, declared.plots) == ("Told by the record.", [("bits", "letter")])
    record["evaluations"]["perplexity"].pop("plots")
    (folder / "comparison.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="evaluations"):
        read_inputs(folder)


def test_settings_apart_from_the_axis_make_plots_of_their_own(summed):
    plots = plots_of(of(summed, "perplexity"), [("perplexity", "sequence_length")])
    # Over all positions the same plot would stand beside it.
    assert [plot.fixed for plot in plots] == [{"split": "test", "checkpoint": "final"}]
    assert {figure.settings["context"] for figure in plots[0].figures} == {"full"}
    assert plots[0].positions == [256, 512, 1024, 2048]
    # Pairs and length go together, so neither splits the other's plot.
    (recall,) = plots_of(of(summed, "recall"), [("accuracy", "num_pairs")])
    assert recall.positions == [4, 8, 16, 64]
    assert len(recall.figures) == 16


def test_lengths_at_one_batch_and_at_one_number_of_tokens_are_two_plots(summed):
    template = of(summed, "throughput", "peak_memory_mib")[0]
    pairs = [(256, 128), (512, 128), (512, 64), (1024, 32)]
    own = [
        dataclasses.replace(template, settings={"sequence_length": length, "batch_size": batch})
        for length, batch in pairs
    ]
    plots = plots_of(own, [("peak_memory_mib", "sequence_length")])
    assert [(plot.positions, plot.fixed) for plot in plots] == [
        ([256, 512], {"batch_size": 128}),
        ([256, 512, 1024], {"tokens_per_step": 32768}),
    ]
    assert len({plot.name for plot in plots}) == 2


def test_an_axis_with_one_value_makes_no_second_plot(summed):
    own = [f for f in of(summed, "recall", "accuracy") if f.settings["num_pairs"] == 16]
    # The second axis has one value as well, and would show the same once more.
    (plot,) = plots_of(own, [("accuracy", "num_pairs"), ("accuracy", "sequence_length")])
    assert plot.title == "Accuracy, pairs 16"


def test_an_interval_that_reaches_below_zero_begins_at_the_edge_of_a_logarithmic_plot(summed):
    template = of(summed, "perplexity", "perplexity")[0]
    own = [
        dataclasses.replace(
            template,
            mean=mean,
            low=low,
            high=high,
            values={seed: mean + seed for seed in range(5)},
            settings=template.settings | {"sequence_length": length},
        )
        for length, mean, low, high in [(256, 4.0, 3.0, 5.0), (512, 80.0, -60.0, 220.0), (1024, 4000.0, 3000.0, 5000.0)]
    ]
    (plot,) = plots_of(own, [("perplexity", "sequence_length")])
    spec = picture(plot, list(SKILL)).spec
    bars = next(layer for layer in spec["layer"] if "y2" in layer["encoding"])
    assert bars["encoding"]["y"]["scale"]["type"] == "log"
    drawn = {datum["x"]: (datum["low"], datum["interval"]) for datum in spec["datasets"]["points"]}
    edge = bars["encoding"]["y"]["scale"]["domain"][0]
    assert 0 < edge < 4
    assert [drawn[length][0] for length in (256, 512, 1024)] == [max(edge, 3.0), edge, 3000.0]
    assert "-60" in drawn[512][1]


def test_a_chart_shows_crosses_above_and_the_chance_level(summed):
    (plot,) = plots_of(of(summed, "copy"), [("symbol_accuracy", "length")])
    assert missing_text(plot) == "linear diverged at 200"
    assert "Without a number: linear diverged at 200." in describe(plot)
    spec = picture(plot, list(SKILL)).spec
    marks = [layer["mark"] for layer in spec["layer"]]
    crosses = [layer for layer in spec["layer"] if str(layer["mark"].get("shape", "")).startswith("M")]
    assert len(crosses) == 1
    assert crosses[0]["encoding"]["y"]["value"] < 0
    assert any(mark.get("style") == "chance" for mark in marks)
    assert "$schema" not in json.dumps(spec)
    levels = [datum["value"] for datum in spec["datasets"]["levels"]]
    assert levels
    assert all(abs(level - 1 / 26) < 1e-9 for level in levels)


def test_parts_of_a_whole_are_one_bar_a_variant(summed):
    short, long = plots_of(of(summed, "profile"), [("part_share", "part")])
    assert short.is_whole
    assert short.title == "Share of a step's time by part, sequence length 256"
    assert long.fixed == {"sequence_length": 1024}
    # All of them, where a plot along an axis tells its ends.
    shares = [f for f in short.figures if f.variant == "softmax"]
    assert shares[0].mean is not None
    assert f"softmax mixing {100 * shares[0].mean:.0f} %, projections" in describe(short)
    shown = picture(short, list(SKILL))
    spec = shown.spec
    bars, labels = spec["layer"]
    assert bars["mark"]["type"] == "bar"
    assert bars["encoding"]["color"]["scale"]["domain"] == list(PARTS)
    assert bars["encoding"]["x"]["stack"] == labels["encoding"]["x"]["stack"] == "zero"
    values = spec["datasets"]["parts"]
    assert {value["variant"] for value in values} == set(SKILL)
    assert [value["order"] for value in values if value["variant"] == "softmax"] == list(range(len(PARTS)))
    assert "mixing" in to_svg(shown, list(SKILL))


def test_what_a_device_can_do_is_no_variant_and_implementations_of_an_operator_are_not_ranked(tmp_path):
    folder = write_experiment(tmp_path / "demo", evaluations=["profile"], record=False)
    flat = [
        dataclasses.replace(row, identity=dataclasses.replace(row.identity, mixer=""))
        for row in read_inputs(folder).rows
    ]
    ceiling = dataclasses.replace(flat[0], identity=dataclasses.replace(flat[0].identity, variant=DEVICE))
    write_csv([ceiling, *flat[1:]], tmp_path / "flat" / "results.csv")
    found = read_inputs(tmp_path / "flat")
    assert found.protocol.rank == []
    assert DEVICE not in found.protocol.variants
    assert {row.identity.variant for row in found.rows} == set(SKILL)


def test_a_chance_next_to_nothing_is_no_long_number(summed):
    (plot,) = plots_of(of(summed, "copy"), [("string_accuracy", "length")])
    assert chance_text(plot) == "chance 0.03846"
    tiny = [
        dataclasses.replace(f, settings={**f.settings, "chance": 26.0 ** -f.settings["length"]}) for f in plot.figures
    ]
    assert chance_text(dataclasses.replace(plot, figures=tiny)) == "chance below 0.0001"


def test_ticks_are_the_positions_themselves(summed):
    own = [
        dataclasses.replace(figure, settings={**figure.settings, "sequence_length": length})
        for figure in of(summed, "memory", "training_peak_mib")
        for length in (32, 64, 128)
        if figure.settings["sequence_length"] == 256
    ]
    (plot,) = plots_of(own, [("training_peak_mib", "sequence_length")])
    assert {">32<", ">64<", ">128<"} <= set(re.findall(r">\d+<", to_svg(picture(plot, list(SKILL)), list(SKILL))))


def test_variants_look_alike_in_every_chart(summed):
    (plot,) = plots_of(of(summed, "memory"), [("training_peak_mib", "sequence_length")])
    fewer = dataclasses.replace(plot, figures=[f for f in plot.figures if f.variant != "softmax"])
    found = []
    for one in (plot, fewer):
        points = next(layer for layer in picture(one, list(SKILL)).spec["layer"] if "shape" in layer["encoding"])
        found.append((points["encoding"]["color"]["scale"], points["encoding"]["shape"]["scale"]))
    assert found[0] == found[1]
    assert len(set(found[0][1]["range"])) == len(SKILL)


def test_a_variant_looks_alike_in_every_report():
    alone, among = looks(["kda", "mine"]), looks(["softmax", "mine", "linear", "kda"])
    assert {name: alone[name] for name in alone} == {name: among[name] for name in alone}
    assert len({(look.colour, look.shape) for look in looks([f"v{number}" for number in range(60)]).values()}) == 60
    # The first ten have colours of their own.
    assert len({look.colour for look in looks(KNOWN[:10]).values()}) == 10
    assert len(looks([f"v{number}" for number in range(100)])) == 100


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("nowhere", "nowhere: no such folder; give an experiment of outputs/, or a run"),
        ("README.md", "README.md: is a file; give"),
        ("tests/stored", "tests/stored: no results; an experiment's folder has runs with results/*.jsonl"),
    ],
)
def test_a_report_of_no_folder_says_so(folder, message):
    code, _, said = run_here("report.py", folder)
    assert (code, len(said.splitlines())) == (1, 1)
    assert said.startswith(f"error: {message}")


def test_trainings_of_searches_are_no_variants_where_a_plan_has_no_record_yet(tmp_path):
    for seed, rate in ((SELECTION_SEED, 1e-3), (SELECTION_SEED, 1e-2), (0, 1e-2)):
        identity = identity_of(evaluation="copy", seed=seed, run=f"copy-lr{rate}-seed{seed}")
        path = tmp_path / "cells" / identity.run / "results" / "copy.jsonl"
        path.parent.mkdir(parents=True)
        with ResultsWriter(path, identity, {"learning_rate": rate}) as writer:
            writer.write(Measurement(metric="symbol_accuracy", value=0.5, unit="1"))
    inputs = read_inputs(tmp_path)
    assert inputs.protocol.variants == ["softmax"]
    assert [row.identity.seed for row in inputs.rows] == [0]
    shutil.rmtree(path.parents[1])
    with pytest.raises(UserError, match="nothing is scored yet, 2 trainings of searches have results"):
        read_inputs(tmp_path)


def with_options(variant, evaluation, mixer, *options):
    """Row of a variant whose mixer has these options; of a hybrid each layer's."""
    identity = dataclasses.replace(row().identity, variant=variant, mixer=mixer, evaluation=evaluation)
    settings = {MIXER_OPTIONS: options[0] if len(options) == 1 else [*options]}
    return dataclasses.replace(row(settings=settings), identity=identity)


def around(variant, evaluation="recall", **options):
    return with_options(variant, evaluation, variant, options)


def differing(*rows) -> list[str]:
    line = equal_parts(rows, [], [])
    return line.partition(" Different: ")[2].removesuffix(".").split("; ") if "Different" in line else []


def test_what_differs_around_the_mixers_is_told_and_what_is_equal():
    rows = [
        around("softmax", rotary_theta=1e4, conv_size=4, heads=2),
        around("linear", conv_size=4, heads=2),
        around("delta", conv_size=4, heads=2, chunk=64),
        around("softmax", "perplexity", rotary_theta=1e4, conv_size=0, gate=False),
        around("linear", "perplexity", rotary_theta=None, conv_size=0, gate=False),
        around("delta", "perplexity", conv_size=4, gate="silu"),
    ]
    # With who has it; over the evaluations a variant may have several values.
    assert differing(*rows) == [
        "rotary positions (softmax only)",
        "convolution (4 and none: softmax and linear, 4: delta)",
        "gate",
    ]
    many = [around(f"linear{n}", conv_size=4 * (n > 0)) for n in range(6)]
    assert differing(*many) == ["convolution (4: all but linear0)"]
    # The null of a mixer's own option is a default, and its values are in the table of parts.
    assert differing(around("a", heads=4), around("b", heads=2)) == ["heads"]
    # An option that one mixer alone has is no difference.
    assert differing(*rows[1:3]) == []
    assert "around each mixer convolution (4)" in equal_parts(rows[1:3], [], [])
    # A part that a mixer has not differs from one that is switched on, not from one that is off.
    bare = around("softmax")
    assert differing(around("linear", output_norm=True), bare) == ["output norm (linear only)"]
    assert differing(around("linear", output_norm=False), bare) == []
    # A hybrid has the options of all its mixers.
    rotated, plain = {"rotary_theta": 1e4, "conv_size": 4}, {"rotary_theta": None, "conv_size": 4}
    both = with_options("both", "recall", "both", plain, rotated)
    table = surroundings_table([around("softmax", **rotated), around("delta", **plain), both])
    assert table is not None
    assert [line[:3] for line in table.lines] == [
        *(["both", "recall", "none and 10,000"], ["delta", "recall", "none"], ["softmax", "recall", "10,000"])
    ]
    assert surroundings([row()]) == []
    assert surroundings_table([row()]) is None


def test_what_is_equal_of_trainings_is_told():
    def sized(variant, seed, parameters):
        it = row(variant, seed)
        return dataclasses.replace(it, identity=dataclasses.replace(it.identity, parameters=parameters))

    def rate(variant, chosen, grid):
        return Choice(
            variant=variant, evaluation="copy", settings={}, grid=grid, scores={}, chosen=chosen, at_edge=False
        )

    same = [sized("a", 0, 1000), sized("b", 0, 1006)]
    given = [rate("a", 0.1, [0.1]), rate("b", 0.1, [0.1])]
    assert equal_parts(same, [], given) == (
        "data; budget of steps; seeds; learning rate (not searched); parameters (within 0.6 %)."
    )
    other = [*same, sized("b", 1, 1500)]
    searched = [rate("a", 0.1, [0.1, 0.2]), rate("b", 0.2, [0.1, 0.2])]
    assert equal_parts(other, [], searched) == (
        "data; budget of steps; search of the learning rate. Different: seeds; parameters (within 50 %)."
    )
    assert "Different: learning rate (not searched)" in equal_parts(same, [], [given[0], rate("b", 0.2, [0.2])])
    longer = dataclasses.replace(same[1].measurement, settings={"evaluation_options": {"num_steps": 40}})
    told = equal_parts([same[0], dataclasses.replace(same[1], measurement=longer)], [], given)
    assert "budget of steps" in told.partition("Different: ")[2]


def test_what_a_mixer_s_class_says_of_its_surroundings_is_told():
    rows = [
        with_options("softmax", "recall", "Softmax", {"conv_size": 4}),
        with_options("delta", "recall", "GatedDeltaNet", {"conv_size": 4, "value_expansion": 1}),
        with_options("mamba3", "recall", "Mamba3", {"conv_size": 4}),
        with_options("retnet", "recall", "RetNet", {"conv_size": 4, "value_expansion": 2}),
    ]
    undone, expansion = surroundings(rows)
    assert f"{ACTIVATION} (silu: delta and mamba3 only)" in differing(*rows)
    assert undone == f"conv_size (4) undoes the mixer of mamba3: {Mamba3.undone_by['conv_size']}."
    assert expansion.startswith("value_expansion is 1 for delta, where the mixer's paper has 2")
    # Without a convolution Mamba-3 has no activation either, and nothing undoes it.
    bare = [with_options(name.lower(), "recall", name, {"conv_size": 0}) for name in ("Mamba3", "Softmax")]
    assert surroundings(bare) == differing(*bare) == []
    hybrid = with_options("both", "recall", "Mamba2+Softmax", {"conv_size": 4})
    table = surroundings_table([*rows, hybrid, with_options("softmax", "copy", "Softmax", {"conv_size": 4})])
    assert table is not None
    assert table.headers[:4] == ["Variant", "In", "rotary theta", "conv size"]
    assert table.headers[-2:] == [ACTIVATION, "value expansion"]
    shown = {line[0]: [*line[1:4], line[-2]] for line in table.lines}
    assert shown["softmax"] == ["recall and copy", "has none", "4", "none"]
    assert shown["delta"] == ["recall", "has none", "4", "silu"]
    assert shown["both"][-1] == "silu and none"


def test_a_rate_at_the_edge_of_those_tried_is_in_the_answer(inputs):
    told = answer(inputs)["Learning rates"]
    found = "width 64: linear did best at 0.03, at the edge of the rates tried; one beyond it may be better."
    assert told == [f"Copy, {found}", f"Recall, {found}"]
    inside = [dataclasses.replace(rate, at_edge=False) for rate in inputs.protocol.rates]
    protocol = dataclasses.replace(inputs.protocol, rates=inside)
    assert "Learning rates" not in answer(dataclasses.replace(inputs, protocol=protocol))


def test_the_answer_of_a_plan_that_was_cut_off_begins_by_saying_so(inputs):
    assert "Unfinished" not in answer(inputs)
    for factors in ([], [{"conv": {"on": [], "off": []}}]):
        protocol = dataclasses.replace(inputs.protocol, missing=["copy linear, seed 1"], factors=factors)
        first, *_ = answer(dataclasses.replace(inputs, protocol=protocol)).items()
        assert first == ("Unfinished", [UNFINISHED])


def test_scores_beyond_the_trained_length_are_in_the_answer(inputs):
    beyond = answer(inputs)["Beyond training"]
    assert beyond[0].startswith("Perplexity at 2,048 characters, 8 times the trained length: ")
    assert beyond[1].startswith("Copying 100 symbols, 2 times the trained length: softmax 40 %, gated_deltanet 34 %, ")
    # The best first.
    assert beyond[0].index("gated_deltanet") < beyond[0].index("softmax")


@pytest.mark.parametrize(("corpus", "symbols"), [("a:bpe-4096@1", "tokens"), ("a:bytes@1", "bytes")])
def test_what_positions_hold_is_said_by_its_name(corpus, symbols, inputs):
    rows = [dataclasses.replace(row, identity=dataclasses.replace(row.identity, corpus=corpus)) for row in inputs.rows]
    told = answer(dataclasses.replace(inputs, rows=rows))["Beyond training"][0]
    assert told.startswith(f"Perplexity at 2,048 {symbols}, 8 times the trained length: ")
