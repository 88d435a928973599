"""Data sets as the Hugging Face Hub has them: a local folder of the same layout, the package's cache, and mistakes."""

import gzip
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from corpora_on_disk import LINES, ROOT, write_parquet
from small import python_path

from attnbench.cli.compose import compose
from attnbench.data import corpus as loading
from attnbench.data import hub, pieces
from attnbench.data.corpus import Corpus, load_corpus
from attnbench.settings.errors import UserError
from attnbench.settings.schema import DataSettings

CARD = """---
configs:
- config_name: whole
  data_files:
  - {split: train, path: whole/train-*}
  - {split: validation, path: whole/validation-*}
  - {split: test, path: whole/test-*}
- config_name: bare
  data_files:
  - {split: train, path: whole/train-*}
- config_name: odd
  data_files:
  - {split: left, path: whole/train-*}
  - {split: right, path: whole/test-*}
---
"""


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)

    def refuse(*args, **kwargs):
        raise socket.gaierror("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    folder = tmp_path / "Some_Set"
    for split, rows in {"train": LINES, "validation": LINES[:20], "test": LINES[20:40]}.items():
        write_parquet(folder / "whole" / f"{split}-00000-of-00001.parquet", rows)
    (folder / "README.md").write_text(CARD)
    return folder


def load(name: Path | str, config: str | None, **settings) -> Corpus:
    return load_corpus(DataSettings(name=str(name), config=config, **settings), 8, ROOT)


def text(corpus: Corpus, split: str) -> str:
    return corpus.decode(corpus.tokens[split])


def test_splits_that_have_their_names_are_taken(repository):
    corpus = load(repository, "whole")
    assert corpus.name == "hub:Some_Set:whole"
    expected = {"train": LINES, "validation": LINES[:20], "test": LINES[20:40]}
    assert {split: text(corpus, split) for split in expected} == {
        split: "\n".join(rows) for split, rows in expected.items()
    }
    # The same text has the same fingerprint, whoever read it.
    as_files = load_corpus(DataSettings(name="text", path=str(repository / "whole")), 8, ROOT)
    assert corpus.fingerprint == as_files.fingerprint


def test_splits_that_are_missing_are_cut_from_train(repository):
    cut = load(repository, "bare", validation_fraction=0.2, test_fraction=0.1)
    whole = "\n".join(LINES)
    assert "".join(text(cut, split) for split in ("train", "validation", "test")) == whole
    assert len(cut.tokens["validation"]) > len(cut.tokens["test"]) > 0
    assert len(load(repository, "bare", test_fraction=0).tokens["test"]) == 0
    (repository / "README.md").write_text(CARD.replace("  - {split: validation, path: whole/validation-*}\n", "", 1))
    half = load(repository, "whole", validation_fraction=0.2)
    assert text(half, "test") == "\n".join(LINES[20:40])
    assert text(half, "train") + text(half, "validation") == whole


def test_json_lines_and_some_files_of_a_set_are_read_and_no_line_is_lost(repository):
    folder = repository.parent / "stories"
    (folder / "sample").mkdir(parents=True)
    documents = [f"document {number}, without a line end" for number in range(90)]
    for part in range(3):
        rows = (json.dumps({"text": text}) + "\n" for text in documents[part * 30 : part * 30 + 30])
        (folder / "sample" / f"{part}.jsonl").write_text("".join(rows))
    first = load(folder, None, files="sample/0.jsonl", validation_fraction=0.2, test_fraction=0.1)
    assert first.name == "hub:stories:sample/0.jsonl"
    assert "".join(text(first, split) for split in first.tokens) == "\n".join(documents[:30])
    whole = load(folder, None, files="sample/*.jsonl", validation_fraction=0.2, test_fraction=0.1)
    assert "".join(text(whole, split) for split in whole.tokens) == "\n".join(documents)
    with pytest.raises(UserError, match=r"data.files=no/\*.jsonl: cannot be loaded"):
        load(folder, None, files="no/*.jsonl")
    # Where the other splits have files of their own, the last document of train stays too.
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    for split in ("validation", "test"):
        shutil.copyfile(folder / "train.jsonl", folder / f"{split}.jsonl")
    shutil.rmtree(folder / "sample")
    assert text(load(folder, None), "train") == "\n".join(documents)


def test_a_folder_reads_nothing_outside_itself(repository, tmp_path):
    secret = tmp_path / "secret"
    write_parquet(secret / "train.parquet", LINES)
    for path in ("../secret/train.parquet", str(secret / "train.parquet"), "https://localhost/train.parquet"):
        (repository / "README.md").write_text(CARD.replace("whole/train-*", path))
        with pytest.raises(UserError, match=r"is not in that folder|cannot be loaded"):
            load(repository, "bare")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "train.parquet").symlink_to(secret / "train.parquet")
    with pytest.raises(UserError, match=r"reads .*train.parquet, which is not in that folder"):
        load(linked, None)
    # The Hub's own cache holds links to the content that lies beside the snapshots.
    snapshot, blobs = tmp_path / "cached" / "snapshots" / "0123", tmp_path / "cached" / "blobs"
    snapshot.mkdir(parents=True)
    secret.rename(blobs)
    (snapshot / "train.parquet").symlink_to(blobs / "train.parquet")
    assert "".join(text(load(snapshot, None), split) for split in ("train", "validation", "test")) == "\n".join(LINES)


def test_train_takes_no_files_that_are_named_for_another_split(tmp_path, repository):
    folder = tmp_path / "named"
    for name in ("Train", "Test"):
        write_parquet(folder / name / "0.parquet", LINES)
    with pytest.raises(UserError, match=r"its train split takes Test/0.parquet, which is named for test"):
        load(folder, None)
    assert text(load(folder, None, files="Test/0.parquet", validation_fraction=0.1), "train").startswith(LINES[0])
    shutil.rmtree(folder / "Train")
    (folder / "Test").rename(folder / "test")
    with pytest.raises(UserError, match="has no train split, only test"):
        load(folder, None)


def test_a_part_without_a_row_is_read_and_a_damaged_file_is_not_the_name_s_fault(tmp_path, repository):
    folder = tmp_path / "shards"
    for number, rows in enumerate((LINES[:20], [], LINES[20:])):
        folder.mkdir(exist_ok=True)
        table = pa.table({"text": rows}, schema=pa.schema([("text", pa.string())]))
        pq.write_table(table, folder / f"part-{number}.parquet")
    corpus = load(folder, None)
    assert "".join(text(corpus, split) for split in corpus.tokens) == "\n".join(LINES)
    (folder / "part-2.parquet").write_bytes(b"PAR1 damaged")
    with pytest.raises(UserError, match=r"cannot be .*Parquet") as caught:
        load(folder, None)
    assert "correct data.name" not in str(caught.value)


@pytest.mark.slow
def test_a_conversion_takes_bounded_memory(tmp_path):
    folder = tmp_path / "bomb"
    folder.mkdir()
    with gzip.GzipFile(folder / "train.jsonl.gz", "wb", 1) as file:
        file.write(b'{"text": "' + b"a" * 2**27 + b'"}\n')
    # A process of its own: where the threads of one that has done much else get no memory, C++ ends it.
    call = f"hub.find_hub({str(folder)!r}, None, None, 'text', 0, 0)"
    program = f"from attnbench.data import hub\nhub.CONVERSION_MIB = 96\n{call}"
    environment = {**python_path(ROOT), "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert "takes more than 0.1 GiB of memory to convert" in done.stderr


def test_a_long_set_is_read_from_the_package_s_files_and_made_into_tokens_once(repository, tmp_path, monkeypatch):
    short = load_corpus(DataSettings(name=str(repository), config="whole"), 8, tmp_path)
    monkeypatch.setattr(loading, "KEPT_BYTES", 0)
    monkeypatch.setattr(pieces, "KEPT_BYTES", 0)
    made = load_corpus(DataSettings(name=str(repository), config="whole"), 8, tmp_path)
    monkeypatch.setattr(hub, "text_of", lambda *_: pytest.fail("the text was read"))
    found = load_corpus(DataSettings(name=str(repository), config="whole"), 8, tmp_path)
    for corpus in (made, found):
        assert (corpus.name, corpus.fingerprint, corpus.splits) == (short.name, short.fingerprint, short.splits)
        assert all(torch.equal(corpus.tokens[split], short.tokens[split]) for split in short.tokens)


def test_what_was_loaded_before_is_found_without_a_network(repository, tmp_path):
    loaded = load(repository, "whole")
    shutil.copytree(tmp_path / "cache" / "some_set", tmp_path / "cache" / "owner___some_set")
    found = load("owner/Some_Set", "whole")
    assert (found.name, found.fingerprint) == ("hub:owner/Some_Set:whole", loaded.fingerprint)
    assert not sys.modules["datasets"].config.HF_HUB_OFFLINE
    with pytest.raises(UserError, match=r"^data.name=owner/Some_Set data.config=other: huggingface.co cannot"):
        load("owner/Some_Set", "other")


@pytest.mark.parametrize("variable", ["HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"])
def test_the_network_is_not_asked_where_the_environment_says_so(variable, repository, monkeypatch):
    monkeypatch.setattr(hub, "answers", lambda *asked: pytest.fail("the network was asked"))
    monkeypatch.setenv(variable, "1")
    with pytest.raises(UserError, match=f"data.name=no/such: {variable} is set, and the cache"):
        load("no/such", None)


@pytest.mark.parametrize(
    ("config", "column", "message"),
    [
        (None, "text", r"cannot be loaded \(Config name is missing.*'whole', 'bare', 'odd'"),
        ("none", "text", r"data.config=none: cannot be loaded \(BuilderConfig 'none' not found. Available:"),
        ("bare", "words", r"has no column 'words' \(its columns: text\); name another as data.column"),
        ("odd", "text", "has no train split, only left, right"),
    ],
)
def test_a_mistake_is_one_line(repository, config, column, message):
    with pytest.raises(UserError, match=message) as caught:
        load(repository, config, column=column)
    assert str(caught.value).startswith(f"data.name={repository}")
    assert "\n" not in str(caught.value)


def test_a_name_is_a_folder_or_one_of_the_hub(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="is no folder, and no OWNER/NAME"):
        load(tmp_path / "nowhere", None)
    for words, message in (
        (
            [],
            "data.name=: must be one of wikitext2, embedded, text, books, enwik8, text8, or, with data=hub, OWNER/NAME",
        ),
        (["data.name=c4"], "data.name=c4: must be one of"),
        (["data.name=a/b", "data.path=x.txt"], "data.path=x.txt: data=hub reads data.name=a/b"),
    ):
        with pytest.raises(UserError, match=message):
            compose(["data=hub", *words])
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    assert compose(["data=hub", "data.name=corpus"]).data.name == "corpus"
    for word in ("data.column=words", "+data.column=words", "+data.config=words"):
        with pytest.raises(UserError, match=word.lstrip("+")):
            compose(["data=text", "data.path=x.txt", word])
    data = compose(["data=hub", "data.name=a/b", "data.config=c", "data.column=d"]).data
    assert (data.name, data.config, data.column) == ("a/b", "c", "d")


def test_the_package_is_loaded_where_it_is_used_alone():
    code = "import sys, attnbench.data.batches; sys.exit('datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0
