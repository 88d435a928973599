"""enwik8 and text8: where the file is looked for, that it is the published one, and where it is cut."""

import hashlib
from pathlib import Path

import pytest

from attnbench.cli.compose import CONF, compose
from attnbench.data import enwik
from attnbench.data.corpus import Corpus, load_corpus
from attnbench.settings.errors import UserError
from attnbench.settings.schema import DataSettings

TEXT = "<page> naïve 中文 text\n" * 50


@pytest.fixture
def published(monkeypatch) -> bytes:
    content = TEXT.encode()
    monkeypatch.setattr(enwik, "NUM_BYTES", len(content))
    monkeypatch.setattr(enwik, "NUM_HELD_OUT", 100)
    monkeypatch.setitem(enwik.FILES, "enwik8", hashlib.sha1(content).hexdigest())
    return content


def load(root: Path, **settings) -> Corpus:
    return load_corpus(DataSettings(name="enwik8", **{"tokenizer": "bytes", **settings}), 8, root)


def test_the_file_is_found_in_data_or_where_path_says(tmp_path, published):
    (tmp_path / "data" / "enwik8").mkdir(parents=True)
    with pytest.raises(
        UserError, match=r"data/enwik8: there is no enwik8; unpack http://mattmahoney.net/dc/enwik8.zip"
    ):
        load(tmp_path)
    (tmp_path / "data" / "enwik8" / "enwik8").write_bytes(published)
    found = load(tmp_path)
    assert found.name == "enwik8:bytes"
    (tmp_path / "data" / "enwik8").rename(tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere", tmp_path / "elsewhere" / "enwik8"):
        assert load(tmp_path, path=str(path)).fingerprint == found.fingerprint
    (tmp_path / "elsewhere" / "enwik8").rename(tmp_path / "data" / "enwik8")
    assert load(tmp_path).fingerprint == found.fingerprint
    with pytest.raises(UserError, match=r"data.path=.*elsewhere: there is no enwik8"):
        load(tmp_path, path=str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("held_out", range(97, 104))
def test_it_is_cut_at_bytes_and_never_inside_a_character(tmp_path, published, monkeypatch, held_out):
    monkeypatch.setattr(enwik, "NUM_HELD_OUT", held_out)
    (tmp_path / "enwik8").write_bytes(published)
    for tokenizer in ("bytes", "characters"):
        corpus = load(tmp_path, path=str(tmp_path), tokenizer=tokenizer)
        texts = [corpus.decode(corpus.tokens[split]) for split in ("train", "validation", "test")]
        assert "".join(texts) == TEXT
        for index, wanted in ((1, held_out), (2, held_out)):
            assert abs(len(texts[index].encode()) - wanted) <= 3
        assert 0 <= len("".join(texts[1:]).encode()) - 2 * held_out <= 3


def test_another_file_of_that_name_is_refused(tmp_path, published):
    for content in (published[:-1], published + b"\n", published.replace(b"text", b"test")):
        (tmp_path / "enwik8").write_bytes(content)
        with pytest.raises(UserError, match="enwik8: is not enwik8 as published, by its SHA-1") as caught:
            load(tmp_path, path=str(tmp_path))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "data").glob("*.yaml")))
def test_every_corpus_composes(name):
    needed = {"hub": ["data.name=a/b"], "text": ["data.path=a.txt"], "fineweb_edu": ["data.vocabulary_size=8192"]}
    assert compose([f"data={name}", *needed.get(name, [])]).data.validation_fraction > 0
