"""Identities that results are kept under: settings, source from elsewhere, versions of attnbench's own code."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from probe_settings import probe_settings, smoke_words
from scripts_here import run_here
from small import bench_words

import attnbench
from attnbench.bench.models import ModelsBench
from attnbench.cli.compose import CONF, compose
from attnbench.cli.reading import stored_settings
from attnbench.comparison.execute import run
from attnbench.evals.lib import solving
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.results import protocol
from attnbench.results.identity import code_of, config_hash, hashed_options
from attnbench.results.protocol import TEST_NAMES, protocol_id, protocol_of
from attnbench.settings.errors import UserError
from attnbench.settings.registry import trust
from attnbench.training.prepare import prepare, reopen
from attnbench.verdict.family import TESTS

MIXER = '''
from attnbench.mixers.linear import LinearAttention
from helpers.scales import SCALE


class Mine(LinearAttention):
    """Linear attention, scaled."""

    def _mix(self, x_BTD, state):
        mixed, *last = super()._mix(x_BTD, state)
        return SCALE * mixed, *last
'''
SMALL = [
    *("model.dim=32", "model.head_width=16", "model.feed_forward_width=24", "seq_len=32", "data=text"),
    *("train.num_epochs=null", "train.num_steps=2", "train.batch_size=4", "device=cpu", "logger=none", "match=none"),
]


@pytest.fixture
def outside(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder with a mixer of somebody's own, a package beside it, its yaml, and a text."""
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "__init__.py").touch()
    (tmp_path / "helpers" / "scales.py").write_text("SCALE = 2.0\n")
    (tmp_path / "helpers" / "unused.py").write_text("UNUSED = 1\n")
    (tmp_path / "mine.py").write_text(MIXER)
    (tmp_path / "conf" / "attn").mkdir(parents=True)
    own = yaml.safe_load((CONF / "attn" / "linear.yaml").read_text()) | {"_target_": "mine.Mine"}
    (tmp_path / "conf" / "attn" / "mine.yaml").write_text(yaml.safe_dump(own))
    (tmp_path / "text.txt").write_text("the cat sees a green tree and sleeps. " * 60)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget()


def forget() -> None:
    for name in ("mine", "helpers", "helpers.scales"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def edit(path: Path, text: str) -> None:
    """Change a source as in an editor, between two commands: another process sees the new one."""
    path.write_text(text)
    forget()
    for cached in path.parent.rglob("__pycache__/*.pyc"):
        cached.unlink()


def source() -> str:
    trust(["mine.Mine"])
    return code_of(["mine.Mine"], [])["sources"]["mine.Mine"]


def test_the_function_decides_and_its_description_does_not(outside):
    first = source()
    edit(outside / "mine.py", MIXER.replace("Linear attention, scaled", "The same") + "\n# A comment.\n\n\n")
    assert source() == first
    edit(outside / "helpers" / "unused.py", "UNUSED = 2\n")
    assert source() == first
    edit(outside / "mine.py", MIXER.replace("SCALE *", "-SCALE *"))
    assert source() != first


def test_what_it_imports_from_beside_it_counts(outside):
    first = source()
    edit(outside / "helpers" / "scales.py", "from .deeper import SCALE\n")
    (outside / "helpers" / "deeper.py").write_text("SCALE = 3.0\n")
    second = source()
    assert second != first
    edit(outside / "helpers" / "deeper.py", "SCALE = 4.0\n")
    sys.modules.pop("helpers.deeper", None)
    assert source() not in (first, second)


def test_a_source_is_that_of_the_module_that_was_loaded(outside):
    first = source()
    (outside / "mine.py").write_text(MIXER.replace("SCALE *", "-SCALE *"))
    assert source() == first


def test_a_class_without_source_is_an_error(outside):
    sys.modules["mine"] = type(sys)("mine")
    with pytest.raises(UserError, match=r"mine: its source cannot be read \(no \.py file\)"):
        source()


def test_an_edited_mixer_is_trained_again(outside):
    words = words_of(outside / "text.txt", outside / "outputs", "attn=mine", "eval=[copy,perplexity]")

    def trained() -> set[Path]:
        own = ["--config-dir", str(outside / "conf"), *words, *smoke_words("copy", "perplexity")]
        code, _, said = run_here("train.py", *own, cwd=outside)
        assert code == 0, said
        runs, cells = (list((outside / "outputs").glob(place)) for place in ("*/mine-*", "*/cells/copy-mine-*"))
        assert len(runs) == len(cells)
        return {*runs}

    first = trained()
    assert trained() == first
    edit(outside / "helpers" / "scales.py", "SCALE = -1.0\n")
    both = trained()
    assert len(both) == 2
    [old], [new] = first, both - first
    for folder, expected in ((old, "was trained by another source of its mixer"), (new, "")):
        given = ["--config-dir", str(outside / "conf"), f"run={folder}", "eval=[perplexity]", "device=cpu"]
        code, _, said = run_here("evaluate.py", *given, *smoke_words("perplexity"), cwd=outside)
        assert (code == 0) == (folder == new), said
        assert expected in said
        # Nor is a text written, or scores laid beside, by other code than was trained.
        for script, more in (
            ("generate.py", ["prompt=a", "num_tokens=3", "device=cpu"]),
            ("export.py", [f"to={outside / f'exported-{folder.name}'}"]),
        ):
            _, _, said = run_here(script, *given[:3], *more, cwd=outside)
            assert ("was trained by another source of its mixer" in said) == (folder == old), said


def test_an_edited_mixer_is_benched_again(outside, monkeypatch):
    words = ["bench=models", "device=cpu", f"outputs_dir={outside / 'outputs'}", "bench.mixers=[mine]"]
    words = [*bench_words("models"), *words, "bench.sizes=[[small,32,24,1,2]]"]

    def measured() -> int:
        code, _, said = run_here("benchmark.py", "--config-dir", str(outside / "conf"), *words, cwd=outside)
        assert code == 0, said
        return len(list((outside / "outputs").glob("benchmark/models/*")))

    assert [measured(), measured()] == [1, 1]
    edit(outside / "helpers" / "scales.py", "SCALE = -1.0\n")
    assert measured() == 2
    # So it is where the bench's own numbers have changed.
    monkeypatch.setattr(ModelsBench, "numbers_version", ModelsBench.numbers_version + 1)
    assert measured() == 3


def words_of(text: Path, outputs: Path, *words: str) -> list[str]:
    return [*SMALL, *words, f"data.path={text}", f"outputs_dir={outputs}"]


@pytest.mark.parametrize(
    ("part", "moved"),
    [
        ("model", {"training", "perplexity", "copy"}),
        ("data", {"training", "perplexity"}),
        ("evals", {"perplexity", "copy"}),
        ("timing", set()),
    ],
)
def test_a_raised_version_moves_what_uses_that_part(part, moved, text, tmp_path, monkeypatch):
    settings = compose(
        words_of(text, tmp_path, "attn=linear", "eval=[copy,perplexity]", *smoke_words("copy", "perplexity"))
    )
    before, version = hashes(settings), attnbench.NUMBERS_VERSION[part]
    monkeypatch.setitem(attnbench.NUMBERS_VERSION, part, version + 1)
    after = hashes(settings)
    assert {name for name in before if before[name] != after[name]} == moved
    monkeypatch.setitem(attnbench.NUMBERS_VERSION, part, version)
    assert hashes(settings) == before


def hashes(settings) -> dict[str, str]:
    from attnbench.evals.runners.checkpoint import EvaluationJob
    from attnbench.evals.runners.prepare_probe import prepare_probe

    copy, perplexity = settings.evaluations
    prepared = prepare(settings)
    return {
        "training": prepared.config_hash,
        "perplexity": EvaluationJob(prepared, perplexity).results.stem,
        "copy": prepare_probe(settings, copy)[1][0].at(1e-2, settings.seed).config_hash,
    }


def test_a_choice_of_none_enters_no_identity_and_a_size_of_0_does():
    def hashed(**options) -> str:
        return config_hash(hashed_options({"backend": "torch", **options}))

    assert hashed(output_gate="none") == hashed(output_gate=False) == hashed()
    assert len({hashed(), hashed(output_gate="silu"), hashed(output_gate="sigmoid"), hashed(conv_size=0)}) == 4


@pytest.mark.usefixtures("one_thread")
def test_a_run_whose_gate_was_stored_as_false_is_the_same_run(text, tmp_path):
    folder = run(compose(words_of(text, tmp_path, "attn=softmax", "eval=[]")))
    path = folder / "config.yaml"
    content = yaml.safe_load(path.read_text())
    del content["mixer"]["options"]["output_norm"]
    content["mixer"]["options"]["output_gate"] = False
    path.write_text(yaml.safe_dump(content))
    stored = stored_settings(folder)
    assert stored.mixer.options["output_gate"] == "none"
    assert reopen(folder, stored).config_hash == folder.name.rpartition("-")[2]


@pytest.mark.usefixtures("one_thread")
def test_a_run_of_another_version_is_not_evaluated_as_one_of_this(text, tmp_path, monkeypatch):
    words = words_of(text, tmp_path, "attn=linear", "eval=[]")
    folder = run(compose(words))
    monkeypatch.setitem(attnbench.NUMBERS_VERSION, "mixers", attnbench.NUMBERS_VERSION["mixers"] + 1)
    with pytest.raises(UserError, match="was trained by another version of attnbench"):
        reopen(folder, compose(words))


def one_job(folder, **changed):
    settings = probe_settings(folder, **changed)
    _, [job, *_] = prepare_probe(settings, settings.evaluations[0])
    return job


@pytest.mark.parametrize("rule", ["a margin", "the error", "the stop rule"])
def test_a_rule_that_changes_is_another_protocol_of_the_same_cell(rule, tmp_path, monkeypatch):
    before = one_job(tmp_path)
    then = (before.config_hash, protocol_id(before.protocol()))
    after: Any = one_job(tmp_path)
    if rule == "a margin":
        after.primary = replace(after.primary, margin=0.02)
    elif rule == "the error":
        monkeypatch.setattr(protocol, "SIGNIFICANCE", 0.1)
    else:
        monkeypatch.setattr(solving, "STOP_RULE", {**solving.STOP_RULE, "mastered": 0.98})
    now = (after.config_hash, protocol_id(after.protocol()))
    assert now[0] == then[0]
    assert now[1] != then[1]


def test_fixed_steps_have_no_stop_rule(tmp_path):
    assert one_job(tmp_path).protocol()["stop"] == solving.STOP_RULE
    assert one_job(tmp_path, copy_fixed_steps=True).protocol()["stop"] is None
    assert protocol_of(None)["primary"] is None


def test_the_tests_are_those_that_the_rules_name():
    names = {kind: test.name for kind, test in TESTS.items()}
    # No metric is a share any more; the protocol's id still covers its test.
    assert names == {kind: name for kind, name in TEST_NAMES.items() if kind != "share"}
