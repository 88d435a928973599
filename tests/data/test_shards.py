"""Tokens on the disk: equal to those in memory, made once, whatever cuts them off; and files that are not theirs."""

import gc
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corpora_on_disk import LINES, write_splits
from small import python_path

from attnbench.data import batches, bpe, pieces, shards
from attnbench.data import corpus as loading
from attnbench.data.corpus import Corpus, load_corpus
from attnbench.settings.errors import UserError
from attnbench.settings.schema import DataSettings

TEXT = "".join(f"line {number * number % 977} – naïve, and 中{number % 7}\n" for number in range(4000))
CUT = {"validation_fraction": 0.1, "test_fraction": 0.1}
TOKENIZERS = [{"tokenizer": "characters"}, {"tokenizer": "bytes"}, {"tokenizer": "bpe", "vocabulary_size": 300}]


@pytest.fixture
def on_disk(monkeypatch):
    """Every text is long."""
    monkeypatch.setattr(loading, "KEPT_BYTES", 0)
    monkeypatch.setattr(pieces, "KEPT_BYTES", 0)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(bpe, "CHUNK_BYTES", 700)
    monkeypatch.setattr(shards, "SAVED_BYTES", 20_000)


def write(tmp_path: Path, text: str = TEXT) -> Path:
    path = tmp_path / "novel.txt"
    path.write_bytes(text.encode())
    return path


def load(root: Path, **settings) -> Corpus:
    # As in another process.
    loading.LOADED.clear()
    given = {"path": str(root / "novel.txt"), **CUT, "tokenizer": "characters", **settings}
    return load_corpus(DataSettings(name="text", **given), 8, root)


def folder_in(root: Path) -> Path:
    (folder,) = (root / "data" / "tokens").iterdir()
    return folder


def equal(one: Corpus, other: Corpus) -> bool:
    assert (one.name, one.fingerprint, one.splits) == (other.name, other.fingerprint, other.splits)
    assert one.tokenizer.state() == other.tokenizer.state()
    assert torch.equal(one.train_count_V, other.train_count_V)
    return all(torch.equal(one.tokens[split], other.tokens[split]) for split in one.tokens)


@pytest.mark.parametrize("kind", TOKENIZERS[:2], ids=str)
def test_tokens_on_the_disk_are_those_in_memory(tmp_path, monkeypatch, kind):
    write(tmp_path)
    in_memory = load(tmp_path, **kind)
    assert not (tmp_path / "data").exists()
    monkeypatch.setattr(loading, "KEPT_BYTES", 0)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    made, found = load(tmp_path, **kind), load(tmp_path, **kind)
    assert equal(made, in_memory)
    assert equal(found, in_memory)
    assert sorted(path.name for path in folder_in(tmp_path).iterdir()) == [
        *("test.tokens", "tokens.json", "train.tokens", "validation.tokens"),
    ]
    whole = "".join(made.decode(made.tokens[split]) for split in ("train", "validation", "test"))
    assert whole == TEXT
    assert made.splits["train"].num_bytes == len(made.decode(made.tokens["train"]).encode())


def test_a_corpus_in_use_is_loaded_once(tmp_path):
    path = write(tmp_path)
    made = load(tmp_path)
    settings = DataSettings(name="text", path=str(path), tokenizer="characters", **CUT)
    assert load_corpus(settings, 9, tmp_path) is made
    assert load_corpus(replace(settings, vocabulary_size=1000), 9, tmp_path).vocabulary_size == 1000
    with pytest.raises(UserError, match="seq_len=10000"):
        load_corpus(settings, 10000, tmp_path)
    # Another file of the same name, size and date is another text.
    other = tmp_path / "other" / path.name
    other.parent.mkdir()
    other.write_bytes(path.read_bytes().replace(b"line 5", b"lime 5"))
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    assert load_corpus(replace(settings, path=str(other)), 9, tmp_path).fingerprint != made.fingerprint
    del made
    gc.collect()
    assert not loading.LOADED


@pytest.mark.parametrize("kind", TOKENIZERS, ids=str)
def test_what_is_made_is_not_read_again_and_a_changed_text_is(tmp_path, on_disk, monkeypatch, kind):
    path = write(tmp_path)
    made = load(tmp_path, **kind)
    monkeypatch.setattr(loading, "walk", lambda *_: pytest.fail("the text was read"))
    assert equal(load(tmp_path, **kind), made)
    monkeypatch.undo()
    monkeypatch.setattr(loading, "KEPT_BYTES", 0)
    stat = path.stat()
    write(tmp_path, TEXT.replace("line 5", "lime 5"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert load(tmp_path, **kind).fingerprint != made.fingerprint


@pytest.mark.parametrize("kind", TOKENIZERS, ids=str)
@pytest.mark.parametrize("stopped_at", [1, 30, 85, 110])
def test_what_was_cut_off_goes_on(tmp_path, on_disk, monkeypatch, kind, stopped_at):
    path = write(tmp_path)
    whole, write_tokens, count = load(tmp_path, **kind), shards._write_tokens, 0
    shutil.rmtree(folder_in(tmp_path))

    def stop(file, tokenizer, text):
        nonlocal count
        count += 1
        if count == stopped_at:
            file.write(b"torn")
            raise KeyboardInterrupt
        return write_tokens(file, tokenizer, text)

    monkeypatch.setattr(shards, "_write_tokens", stop)
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, **kind)
    first, folder = count, folder_in(tmp_path)
    assert not shards.is_made(folder)
    assert (folder / "train.tokens").exists()
    if kind["tokenizer"] == "bpe":
        monkeypatch.setattr(bpe, "train_bpe", lambda *_: pytest.fail("it was trained again"))
    stopped_at, count = 0, 0
    assert equal(load(tmp_path, **kind), whole)
    # All but what came since the progress was saved.
    total = len(path.read_bytes())
    assert count <= total // 600 + 3 - max(0, first - 1 - 20_000 // 600)


def test_what_was_noted_and_cannot_be_continued_is_one_line_with_the_remedy(tmp_path, on_disk, monkeypatch):
    write(tmp_path)
    whole = load(tmp_path)
    folder = folder_in(tmp_path)
    shutil.rmtree(folder)
    with monkeypatch.context() as context:
        context.setattr(shards, "count_ids", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load(tmp_path)
    for name, content in (("progress.json", b"{"), ("progress.json", b"[1]"), ("train.tokens", b"short")):
        path = folder / name
        kept = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}: .*; remove .*, the same command makes it anew"):
            load(tmp_path)
        path.write_bytes(kept)
    assert equal(load(tmp_path), whole)


@pytest.mark.parametrize("kind", ["torn", "missing", "index", "sizes", "version"])
def test_shards_that_do_not_fit_their_index_are_refused_in_one_line(tmp_path, on_disk, kind):
    write(tmp_path)
    made = load(tmp_path)
    folder = folder_in(tmp_path)
    train, index = folder / "train.tokens", folder / "tokens.json"
    known = json.loads(index.read_text())
    match kind:
        case "torn":
            # Another file: the tokens that were opened are mapped from this one.
            (folder / "copy").write_bytes(train.read_bytes()[:-3])
            (folder / "copy").replace(train)
        case "missing":
            train.unlink()
        case "index":
            index.write_text(index.read_text()[:-20])
        case "sizes":
            index.write_text(json.dumps({**known, "splits": {"train": 3}}))
        case "version":
            index.write_text(json.dumps({**known, "tokenizer": {"kind": "later"}}))
    with pytest.raises(UserError, match=r"remove .*, the same command makes it anew") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    shutil.rmtree(folder)
    assert equal(load(tmp_path), made)


def test_a_disk_that_is_full_or_read_only_is_one_line(tmp_path, on_disk, monkeypatch):
    write(tmp_path)
    whole = load(tmp_path)
    shutil.rmtree(folder_in(tmp_path))
    fsync, count = os.fsync, 0

    def full(descriptor):
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"No space left on device; tokens are kept in data/tokens.* resumes"):
            load(tmp_path)
    assert equal(load(tmp_path), whole)
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "data").write_text("in the way")
    with pytest.raises(UserError, match=r"data.*: Not a directory; tokens are kept in data/tokens"):
        load(tmp_path)


def _load_in_a_process(root: Path, results) -> None:
    loading.KEPT_BYTES = 0
    made = shards.make

    def slow(*arguments):
        time.sleep(1)
        results.put("made")
        made(*arguments)

    shards.make = slow
    results.put(load(root).fingerprint)


def test_two_processes_make_it_once(tmp_path, on_disk):
    write(tmp_path)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_load_in_a_process, args=(tmp_path, results)) for _ in range(2)]
    for process in processes:
        process.start()
    said = [results.get(timeout=60) for _ in range(3)]
    for process in processes:
        process.join(60)
    assert said.count("made") == 1
    assert len(set(said)) == 2


STOPPED = """
import os, signal, sys
from pathlib import Path
from attnbench.data import corpus, shards
from attnbench.machine.signals import ending_in_one_line
from attnbench.settings.schema import DataSettings
corpus.KEPT_BYTES, shards.SAVED_BYTES = 0, 20_000
root, stops = Path(sys.argv[1]), sys.argv[2:]
save = shards._save
def saved(*given):
    save(*given)
    if stops and given[4] > 100_000:
        os.kill(os.getpid(), getattr(signal, stops.pop()))
shards._save = saved
with ending_in_one_line():
    settings = DataSettings(name="text", path=str(root / "novel.txt"), tokenizer="bpe", vocabulary_size=300)
    print(corpus.load_corpus(settings, 8, root).fingerprint)
"""


@pytest.mark.slow
def test_a_signal_ends_it_in_one_line_and_the_same_command_goes_on(tmp_path):
    write(tmp_path, TEXT * 4)
    said = []
    for stops in (["SIGINT"], ["SIGTERM"], ["SIGKILL"], [], []):
        done = subprocess.run(
            [sys.executable, "-c", STOPPED, str(tmp_path), *stops],
            env=python_path(Path(__file__).parents[2]),
            capture_output=True,
            text=True,
        )
        expected = {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -signal.SIGKILL}[stops[0]] if stops else 0
        assert done.returncode == expected, done.stderr
        assert stops == ["SIGKILL"] or len((done.stdout + done.stderr).splitlines()) == 1, done.stderr
        said.append(done.stdout)
    assert said[3] == said[4] != ""


def test_a_tokenizer_that_cannot_be_made_leaves_no_folder(tmp_path, on_disk):
    write(tmp_path)
    for kept in (None, "other"):
        if kept is not None:
            (tmp_path / "data" / "tokens" / kept).mkdir(parents=True)
        with pytest.raises(UserError, match=r"the train split yields \d+ symbols of bpe"):
            load(tmp_path, tokenizer="bpe", vocabulary_size=99_999)
        left = [path.name for path in (tmp_path / "data").rglob("*")] if (tmp_path / "data").exists() else None
        assert left == (["tokens", kept] if kept is not None else None)
    load(tmp_path, **TOKENIZERS[2])


def test_splits_that_have_files_and_a_missing_one(tmp_path, on_disk):
    write_splits(tmp_path / "set")
    (tmp_path / "set" / "test-00000-of-00001.parquet").unlink()
    settings = DataSettings(name="text", path=str(tmp_path / "set"), test_fraction=0, tokenizer="bytes")
    made, found = (load_corpus(settings, 8, tmp_path) for _ in range(2))
    assert equal(made, found)
    assert len(found.tokens["test"]) == 0
    assert found.decode(found.tokens["validation"]) == "\n".join(LINES)


def test_a_training_gives_up_the_pages_that_it_has_read(tmp_path, on_disk, monkeypatch):
    write(tmp_path)
    corpus = load(tmp_path)
    expected = [tokens.clone() for tokens in corpus.tokens.values()]
    monkeypatch.setattr(batches, "RELEASED_ROWS", 8)
    released = []

    def release() -> None:
        released.append(step)
        corpus.release()

    drawn = batches.Batches(corpus.tokens["train"], 16, 4, 0, "cpu", release=release)
    kept = batches.Batches(expected[0], 16, 4, 0, "cpu")
    for step in range(7):
        assert all(map(torch.equal, drawn.train_batch(step), kept.train_batch(step)))
    assert released == [1, 3, 5]
    assert all(map(torch.equal, corpus.tokens.values(), expected))


def test_a_text_that_shrinks_while_it_is_read_is_refused(tmp_path, on_disk, monkeypatch):
    path, make = write(tmp_path), shards.make

    def cut_off(*arguments):
        path.write_bytes(path.read_bytes()[: len(TEXT) // 2])
        make(*arguments)

    monkeypatch.setattr(shards, "make", cut_off)
    with pytest.raises(UserError, match=r"novel\.txt: changed while it was read; the same command reads it anew"):
        load(tmp_path)
    monkeypatch.setattr(shards, "make", make)
    assert load(tmp_path).splits["train"].num_bytes < len(TEXT) // 2


@pytest.mark.parametrize("is_there", [False, True])
def test_who_may_not_write_into_data_keeps_tokens_in_a_cache(is_there, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="attnbench")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "data" / "tokens" / "a"
    if is_there:
        path.mkdir(parents=True)
    found = shards.kept_path(tmp_path, "tokens/a")
    assert found == (path if is_there else tmp_path / "cache" / "attnbench" / "tokens" / "a")
    assert ("this user may not write there" in caplog.text) == (not is_there)
