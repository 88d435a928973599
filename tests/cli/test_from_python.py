"""attnbench from Python: words, classes and what comes back."""

import shlex
import sys
from types import ModuleType, SimpleNamespace

import pytest
from markupsafe import escape
from torch import nn

import attnbench
from attnbench.cli import from_python
from attnbench.cli.compose import prepared_words
from attnbench.machine.bars import bar, in_notebook
from attnbench.report.results import Results
from attnbench.report.sections.front import first_answer
from attnbench.report.sections.words import unbroken
from attnbench.results.numbers import reaches
from attnbench.settings.errors import Interrupted, UserError

LAYER = "from torch import nn\n\nclass Doubling(nn.Module):\n    def forward(self, x_BTD):\n        return {} * x_BTD\n"


@pytest.fixture
def asked(monkeypatch):
    """Settings of the comparisons that were asked for; nothing runs."""
    asked = []
    monkeypatch.setattr(from_python, "carry_out", lambda settings, *_, **__: asked.append(settings) or "outputs/demo")
    return asked


@pytest.fixture(scope="module")
def published(root):
    return attnbench.load(root / "docs" / "results" / "small-cpu")


def test_a_comparison_is_that_of_the_command_line(asked):
    variants = {"softmax": "attn=softmax", "taps": ["attn=linear", "attn.conv_size=3"], "soft": "attn=softmax"}
    attnbench.compare(variants, "plan.seeds=[0,1]", plan="demo", only=["recall"], logger="none", device="cpu")
    (settings,) = asked
    assert list(settings.plan.variants) == list(variants)
    assert settings.plan.variants["taps"] == variants["taps"]
    assert (settings.plan.seeds, settings.plan.only, settings.logger.mode) == ([0, 1], ["recall"], "none")
    # The command that stands in the report asks for the same.
    words = shlex.split(settings.command)[2:]
    assert from_python.read_words(from_python.read_comparison, words, "compare").plan == settings.plan


def test_a_class_stands_for_the_words_that_name_it(asked):
    attnbench.compare({"a": "attn=softmax", "b": nn.Identity, "c": [nn.Identity, "recipe=bare"]}, plan="demo")
    path = f"attn.path={nn.Identity.__module__}:Identity"
    assert asked[0].plan.variants["b"] == ["attn=module", path]
    assert asked[0].plan.variants["c"] == ["attn=module", path, "recipe=bare"]


def test_a_list_of_variants_is_refused_and_compose_takes_one_text():
    with pytest.raises(UserError, match=r"^variants=\[.*must be a dictionary of names"):
        attnbench.compare([nn.Identity], plan="demo")  # pyright: ignore[reportArgumentType]
    assert attnbench.compose("attn=linear experiment=demo").mixer.name == "linear"


def test_a_class_of_no_file_is_refused_with_the_way_out(asked):
    class Inner(nn.Module): ...

    cell = type("Cell", (nn.Module,), {"__module__": "__main__"})
    for cls, name in ((Inner, "Inner"), (cell, "Cell")):
        with pytest.raises(UserError, match=f"%%writefile my_layer.py.*from my_layer import {name}"):
            attnbench.compare({"mine": cls}, plan="demo")
    with pytest.raises(UserError, match=r"give the class, Linear, .*'attn\.options"):
        attnbench.compare({"mine": nn.Linear(2, 2)}, plan="demo")
    for wrong in (int, 3, [3]):
        with pytest.raises(UserError, match=r"a class of an nn\.Module"):
            attnbench.compare({"mine": wrong}, plan="demo")
    assert not asked


def test_values_are_written_as_hydra_reads_them(asked):
    words = ["experiment=demo", "eval.recall.cells=[[64,4]]", "it's"]
    attnbench.compare({"a": "attn=softmax"}, plan="demo", overrides=words, rerun=True, export=None, recipe="bare")
    assert asked[0].plan.overrides == ["recipe=bare", *words]
    assert asked[0].rerun is True


def test_a_stop_is_told_without_where_its_signal_came(monkeypatch):
    def deep(*_, **__):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise Interrupted("stopped; the same command resumes", 130) from None

    monkeypatch.setattr(from_python, "carry_out", deep)
    with pytest.raises(Interrupted, match="the same command resumes") as stopped:
        attnbench.compare({"a": "attn=softmax"}, plan="demo")
    assert stopped.value.exit_code == 130
    assert "deep" not in [entry.name for entry in stopped.traceback]


def test_names_that_are_loaded_late_are_listed_for_completion():
    assert {*attnbench.__all__} <= {*dir(attnbench)}


def test_a_variant_needs_no_quotes_and_no_plus():
    given = ["variants.mine=[attn=module,attn.path=a:B]", "+plan.variants.mine=['attn=module','attn.path=a:B']"]
    assert len({*prepared_words(given)}) == 1
    plan = from_python.read_words(from_python.read_comparison, ["plan=demo", given[0]], "compare").plan
    assert plan.variants["mine"] == ["attn=module", "attn.path=a:B"]
    with pytest.raises(UserError, match=r"^plan\.variants\.mine=attn=linear: .*'plan\.variants\.mine=\[attn=linear\]'"):
        prepared_words(["plan.variants.mine=attn=linear"])


def test_a_wrong_word_is_one_line(asked):
    with pytest.raises(UserError, match="onyl"):
        attnbench.compare({"a": "attn=softmax"}, plan="demo", onyl=["recall"])
    with pytest.raises(UserError, match="variants=my mixer"):
        attnbench.compare({"my mixer": "attn=softmax"}, plan="demo")
    assert UserError("seeds=1: wrong")._render_traceback_() == ["UserError: seeds=1: wrong"]
    assert Interrupted("saved", 130)._render_traceback_() == ["Interrupted: saved"]


def test_a_run_has_its_rows_curves_and_those_of_its_probes(tmp_path):
    words = ["attn=linear experiment=demo", "train.num_epochs=null", "train.num_steps=2", "eval=[perplexity,recall]"]
    words += ["eval.recall.preset=small", "eval.recall.cells=[[16,2]]", "eval.recall.widths=[8]", "device=cpu"]
    words += ["eval.recall.num_steps=2", "eval.recall.learning_rates=[1e-2]", "eval.recall.head_width=8"]
    results = attnbench.run(*words, logger="none", outputs_dir=str(tmp_path), seq_len=32)
    assert set(results.rows["evaluation"]) >= {"training", "perplexity", "recall"}
    assert set(results.curves["evaluation"]) == {"training", "recall"}
    assert results.curves["step"].max() == 2
    again = attnbench.load(results.folder)
    assert again.scores.equals(results.scores)


def test_results_have_tables_charts_and_the_answer(published):
    scores, verdicts = published.scores, published.verdicts
    assert {"softmax", "linear", "gated_deltanet"} <= set(scores["variant"])
    tested = verdicts[verdicts["outcome"].isin(["better", "worse"])]
    assert len(tested)
    for line in tested.itertuples():
        assert not reaches(0, line.low) or not reaches(line.high, 0)
    assert (published.rows["status"] == "ok").any()
    html = published._repr_html_()
    told, _ = first_answer(published.inputs)
    assert told
    assert all(f"<p>{escape(unbroken(sentence))}</p>" in html for sentence in told)
    assert "Bold: the best mean of a column." in html
    assert html.count("<tr>") == 1 + published.scores["variant"].nunique()
    chart = published.plot().to_dict()
    assert next(iter(published.plots.values())) == chart["title"]["text"]
    with pytest.raises(UserError, match="no chart what"):
        published.plot("what")


def test_without_a_test_verdicts_still_have_their_columns(published):
    empty = attnbench.load(published.folder)
    empty.inputs.__dict__["verdicts"] = []
    assert list(empty.verdicts.columns) == list(published.verdicts.columns)


def test_a_dry_run_is_shown_without_results(tmp_path):
    assert "no such folder" in Results(tmp_path / "<demo>")._repr_html_()
    assert "&lt;demo&gt;" in Results(tmp_path / "<demo>")._repr_html_()


def test_an_edited_file_is_imported_again_in_a_session(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    path, words = tmp_path / "doubled_here.py", ["attn=module", "attn.path=doubled_here:Doubling"]
    path.write_text(LAYER.format(2))
    import doubled_here

    def factor():
        from_python._import_edited(words)
        return sys.modules["doubled_here"].Doubling()(1)

    assert doubled_here.Doubling()(1) == factor() == 2
    kept = sys.modules["doubled_here"]
    assert factor() == 2
    assert sys.modules["doubled_here"] is kept
    path.write_text(LAYER.format("  30"))
    assert factor() == 30


def test_a_notebook_has_a_bar_on_standard_output(monkeypatch, capsys):
    assert not in_notebook()
    assert bar(total=2) is None
    fake = ModuleType("IPython")
    fake.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", fake)
    shown = bar(total=2, bar_format="{desc} {n_fmt}/{total_fmt}")
    shown.update(2)
    shown.close()
    out, err = capsys.readouterr()
    assert "2/2" in out
    assert not err


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: attnbench.prepare("attn=softmax"), ("settings='attn=softmax'", "compose(", "not str")),
        (lambda: attnbench.load(5), ("folder=5", "experiment")),
        (lambda: attnbench.load_checkpoint(None), ("folder=None", "run")),
        (lambda: attnbench.read_folders("outputs/demo"), ("folders='outputs/demo'", "list")),
        (lambda: attnbench.read_folders(["outputs/nowhere"]), ("folders=outputs/nowhere", "outputs/EXPERIMENT/RUN")),
        (lambda: attnbench.sample("model", "record", "text"), ("model='model'", "load_checkpoint")),
        (lambda: attnbench.compose({"attn": "softmax"}), ("overrides={", "not dict")),
        (lambda: attnbench.compose([1]), ("word=1", "text")),
        (lambda: attnbench.compose("attn='softmax"), ("attn='softmax", "quot")),
        (lambda: attnbench.run(5), ("5", "attn=linear", "nn.Module")),
        (lambda: attnbench.compare({5: "attn=softmax"}), ("name=5", "text")),
        (lambda: attnbench.compare({"a": "attn=softmax"}, ["plan=demo"]), ("word=['plan=demo']", "text")),
        (lambda: attnbench.compare({"a": "attn=softmax"}, plan="demo", only="copy"), ("plan.only=copy", "[copy]")),
        (lambda: attnbench.compare({"a": "attn=softmax"}, plan="demo", seeds=3), ("plan.seeds=3", "plan.seeds=[3]")),
        (lambda: attnbench.compare({"a": "attn=softmax"}, plan="demo", sedes=[0]), ("sedes=[0]", "seeds")),
        (lambda: attnbench.compare({"a": None}), ("variants: a", "None", "attn=linear")),
        (lambda: attnbench.compare({"a": nn.Linear(1, 1)}), ("Linear", "instance", "class")),
    ],
)
def test_a_call_with_a_wrong_argument_names_it_and_the_way_out(call, named, asked):
    with pytest.raises(UserError) as refused:
        call()
    assert all(word in str(refused.value) for word in named), refused.value
    assert "\n" not in str(refused.value)
    assert not asked


def test_printed_results_are_the_table_and_the_sentences(published, tmp_path):
    text = str(published)
    assert all(variant in text for variant in published.inputs.protocol.variants)
    assert all(" ".join(sentence.split()) in " ".join(text.split()) for sentence in published.sentences[:3])
    assert max(map(len, text.splitlines())) <= 80
    assert "no such folder" in str(Results(tmp_path / "nowhere"))
