"""Model card: scores and verdicts of a run, escaped, and nothing invented where there are none."""

import re
from pathlib import Path

import pytest
from report_rows import HOSTILE, write_experiment
from small import compose_once, record

from attnbench.export.card import model_card
from attnbench.results.tables import read_folders
from attnbench.settings.schema import ExportSettings


def card_of(run: Path, corpus: str = "wikitext2-v1@d2e97c40770b") -> str:
    of_model = record()
    of_model.corpus = corpus
    settings = ExportSettings(
        run=str(run), format="huggingface", checkpoint="best", to=None, command="python export.py"
    )
    rows = read_folders([run]) if (run / "results").exists() else []
    return model_card(run, compose_once(["attn=softmax"]), of_model, rows, settings, 1234)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Path:
    return write_experiment(tmp_path_factory.mktemp("made"), seeds=5, evaluations=["perplexity", "copy"])


def test_it_has_scores_and_the_verdicts_of_the_comparison(experiment):
    card = card_of(experiment / "0-perplexity-seed0")
    assert "| perplexity | nats_per_character |" in card
    assert re.search(r"^- Better: softmax has .* lower perplexity than .*linear", card, re.MULTILINE)
    assert "- Better: linear" not in card
    assert "- Better: gated_deltanet" not in card
    assert "WikiText-2, which is CC BY-SA 3.0" in card
    assert "    python export.py\n" in card


def test_books_are_in_the_public_domain(experiment):
    card = card_of(experiment / "0-perplexity-seed0", corpus="books@03e3e8b77133")
    assert "editions of Standard Ebooks, which are CC0 1.0" in card


def test_what_others_wrote_is_escaped(experiment):
    card = card_of(experiment / f"{3}-perplexity-seed0", corpus="text:<b>[x](y)|")
    assert HOSTILE not in card
    assert "<script" not in card
    assert "&lt;b>[x]\\(y)\\|" in card


def test_without_results_it_says_so(tmp_path):
    card = card_of(tmp_path / "softmax-run", corpus="text:mine@0123456789ab")
    assert "None was measured" in card
    assert "## Verdicts" not in card
    assert "text:mine@0123456789ab, whose licence is for its owner to say." in card
