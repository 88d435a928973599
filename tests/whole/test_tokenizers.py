"""A language model of bytes and one of byte-pair encoding: trained, scored, asked for text, and refused elsewhere."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scripts_here import ROOT, run_here

from attnbench.cli.compose import compose
from attnbench.cli.generation import load_checkpoint, sample
from attnbench.comparison.execute import run
from attnbench.data.corpus import NATS_OF_A_BYTE
from attnbench.data.tokenizer import Bytes
from attnbench.model.stored import load_record, tokenizer_of
from attnbench.results import folder as results_folder
from attnbench.results.corpora import units_of
from attnbench.results.row_files import read_results
from attnbench.settings.errors import UserError
from attnbench.training.job import corpus_label
from attnbench.training.log import read_metrics
from attnbench.training.prepare import prepare, reopen

WORDS = [
    *("experiment=demo", "attn=linear", "model.num_layers=1", "model.dim=16", "model.head_width=16", "seq_len=16"),
    *("model.feed_forward_width=24", "train.num_tokens=640", "train.batch_size=8", "train.warmup_steps=1"),
    *("data=text", "logger=none", "device=cpu", "eval=[perplexity]", "eval.perplexity.extrapolation=[2]"),
    "eval.perplexity.batch_tokens=512",
]
KINDS = {
    "characters": ["data.tokenizer=characters"],
    "bytes": ["data.tokenizer=bytes"],
    "bpe": ["data.tokenizer=bpe", "data.vocabulary_size=280"],
}
TEXT = (
    "".join(f"the {number % 7}th cat – naïve – sees 中{number % 3} trees\n" for number in range(300))
    + "ß\U0001f600" * 40
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    (folder / "novel.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results_folder, "ROOT", folder)
        patch.chdir(folder)
        yield folder


def words(home: Path, kind: str) -> list[str]:
    return [*WORDS, *KINDS[kind], f"data.path={home / 'novel.txt'}", f"outputs_dir={home / 'outputs'}"]


@pytest.fixture(scope="module")
def trained(home) -> dict[str, Path]:
    return {kind: run(compose(words(home, kind))) for kind in KINDS}


def scores(folder: Path) -> dict[str, float]:
    (path,) = (folder / "results").glob("perplexity-*.jsonl")
    place = {"split": "test", "checkpoint": "final", "sequence_length": 16}
    rows = [row.measurement for row in read_results(path) if place.items() <= row.measurement.settings.items()]
    return {row.metric: row.value for row in rows if not {"position_bucket", "context"} & set(row.settings)}


@pytest.mark.parametrize("kind", KINDS)
def test_bits_a_byte_are_those_of_the_text_whatever_a_token_is(home, trained, kind):
    corpus, found = prepare(compose(words(home, kind))).corpus, scores(trained[kind])
    test_N, sizes = corpus.tokens["test"], corpus.splits["test"]
    text = corpus.decode(test_N)
    first = corpus.decode(test_N[:1])
    nats = math.log(found["perplexity"]) * (len(test_N) - 1)
    unknown = 0 if kind != "characters" else 2 * 40 + 4 * 40
    assert sizes.num_unknown_bytes == unknown
    if kind != "characters":
        assert TEXT.endswith(text)
    assert sizes.num_bytes == len(TEXT.encode()) - sum(
        corpus.splits[split].num_bytes for split in ("train", "validation")
    )
    num_bytes = sizes.num_bytes - len(first.encode())
    charged = nats + NATS_OF_A_BYTE * unknown
    assert found["bits_per_byte"] == pytest.approx(charged / num_bytes / math.log(2), rel=1e-9)
    assert found["nats_per_character"] == pytest.approx(nats / (len(text) - len(first)), rel=1e-9)
    looked = [row for row in read_metrics(trained[kind] / "metrics.jsonl") if row.get("split") == "validation"]
    assert all(0 < row["bits_per_byte"] < 10 for row in looked)
    assert looked[-1]["step"] == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_brings_its_tokenizer(home, trained, kind):
    record = load_record(trained[kind] / "checkpoint" / "final")
    tokenizer, corpus = tokenizer_of(record), prepare(compose(words(home, kind))).corpus
    assert tokenizer.state() == corpus.tokenizer.state()
    assert (record.tokenizer is None) == bool(record.vocabulary) == (kind == "characters")
    assert corpus.name == {"characters": "text:novel", "bytes": "text:novel:bytes", "bpe": "text:novel:bpe-280"}[kind]
    assert units_of(corpus_label(corpus)) == corpus.tokenizer.units
    model, read = load_checkpoint(trained[kind] / "checkpoint" / "final", device="cpu")
    assert model.embedding.weight.shape[0] == tokenizer.size
    assert len(sample(model, read, "the", num_tokens=30)) > 0
    (content,) = [json.loads((trained[kind] / "sample.json").read_text())]
    assert content["prompt"] in TEXT


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_generate_writes_whole_characters(home, trained, kind):
    script = str(ROOT / "scripts" / "generate.py")
    (home / "prompt.txt").write_text("the 中")
    given = [f"prompt_file={home / 'prompt.txt'}", "num_tokens=60", "device=cpu", f"run={trained[kind]}"]
    code, written, said = run_here(script, *given, cwd=home)
    assert code == 0, said
    assert written.startswith("the 中")
    assert re.search(rf"1 × 60 {'bytes' if kind == 'bytes' else 'tokens'} in", said)
    code, several, said = run_here(script, *given, "num_samples=2", cwd=home)
    assert code == 0, said
    assert "--- 2 of 2\nthe 中" in several


def test_a_run_of_another_tokenizer_is_refused(home, trained):
    settings = compose(words(home, "bpe"))
    settings.data.vocabulary_size = 270
    with pytest.raises(UserError, match=r"was trained on text:novel:bpe-280@\w+, and text:novel:bpe-270@\w+ is what"):
        reopen(trained["bpe"], settings)
    with pytest.raises(UserError, match=r"was trained on text:novel@\w+, and text:novel:bytes@\w+ is what is found"):
        reopen(trained["characters"], compose(words(home, "bytes")))
    assert len({folder.name for folder in trained.values()}) == 3


def test_a_record_has_one_tokenizer_that_fits_its_model(home, trained):
    record = load_record(trained["bytes"] / "checkpoint" / "final")
    for changes in ({"vocabulary": ["a"]}, {"vocabulary_size": 255}, {"tokenizer": {"kind": "words"}}):
        with pytest.raises(ValueError, match="tokenizer"):
            tokenizer_of(replace(record, **changes))
    assert tokenizer_of(record).state() == Bytes().state()


def test_a_budget_of_tokens_is_whole_steps(home):
    given = words(home, "characters")
    assert prepare(compose([*given, "train.num_tokens=641"])).num_steps == 6
    assert prepare(compose([*given, "train.num_tokens=1"])).num_steps == 1
    steps = prepare(compose([*given, "train.num_tokens=null", "train.num_steps=5"]))
    assert steps.config_hash == prepare(compose(given)).config_hash
    with pytest.raises(UserError, match=r"train.num_tokens=99999999999999: \d+ steps, at most"):
        prepare(compose([*given, "train.num_tokens=99999999999999"]))


def test_training_tokens_that_stay_on_the_host_give_the_same_batches(home, monkeypatch):
    from attnbench.data import batches

    corpus = prepare(compose(words(home, "bpe"))).corpus
    moved = batches.Batches(corpus.tokens["train"], 16, 4, 0, "cpu").train_batch(3)
    monkeypatch.setattr(batches, "MAX_MOVED_BYTES", 0)
    kept = batches.Batches(corpus.tokens["train"], 16, 4, 0, "cpu").train_batch(3)
    assert all(torch.equal(one, other) for one, other in zip(moved, kept, strict=True))
