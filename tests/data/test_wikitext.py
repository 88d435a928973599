"""Where WikiText-2 is looked for, what is said without a network, and how `attnbench data` brings it here."""

import hashlib
import runpy
import shutil
import socket
import sys
import time
import urllib.request
from pathlib import Path

import pyarrow as pa
import pytest
from corpora_on_disk import LINES, ROOT, V1, from_path, needs_real_data, write_parquet, write_splits

from attnbench.data import hub, wikitext
from attnbench.data.corpus import load_corpus
from attnbench.data.wikitext import prepare
from attnbench.settings.errors import UserError
from attnbench.settings.schema import DataSettings


@pytest.fixture
def away(monkeypatch, tmp_path):
    """No network, and Hugging Face caches that are empty folders under tmp_path."""
    for name in ("HF_ENDPOINT", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def refuse(*args, **kwargs):
        raise socket.gaierror("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tmp_path


def hang(*args, **kwargs):
    time.sleep(5)
    # By then nobody waits any more, but the thread is still there: no address, so that it ends in silence.
    return []


def publish(monkeypatch, folder: Path) -> Path:
    write_splits(folder)
    length = len("\n".join(LINES))
    monkeypatch.setitem(wikitext.CHARACTERS, "raw", (length, length, length))
    digests = {path.stem.partition("-")[0]: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    monkeypatch.setattr(wikitext, "RAW_SHA256", digests)
    return folder


def run_script(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, arguments)])
    runpy.run_path(str(ROOT / "scripts" / "prepare_data.py"), run_name="__main__")


def test_data_is_looked_at_before_the_caches_and_raw_before_v1(away):
    settings = DataSettings(name="wikitext2")

    def found() -> str:
        return load_corpus(settings, 8, away).name

    hf = away / "hf"
    tables = hf / "datasets/Salesforce___wikitext/wikitext-2-v1/0.0.0/abc"
    tables.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        table = pa.table({"text": LINES})
        with pa.ipc.new_stream(tables / f"wikitext-{split}.arrow", table.schema) as stream:
            stream.write_table(table)
    assert found() == "parquet:abc"
    snapshot = hf / "hub/datasets--Salesforce--wikitext/snapshots/1234/wikitext-2-raw-v1"
    write_splits(snapshot)
    assert found() == "parquet:wikitext-2-raw-v1"
    (snapshot / "test-00000-of-00001.parquet").unlink()
    assert found() == "parquet:abc"
    write_splits(away / "data/wikitext-2-v1")
    assert found() == "parquet:wikitext-2-v1"
    write_splits(away / "data")
    assert found() == "parquet:data"
    write_splits(away / "data/wikitext-2-raw-v1", train=["raw\n"] * 9)
    assert found() == "parquet:wikitext-2-raw-v1"
    (away / "data/wikitext-2-raw-v1/test-00000-of-00001.parquet").unlink()
    with pytest.raises(UserError, match="wikitext-2-raw-v1: has no test split"):
        found()


@pytest.mark.parametrize("resolver", ["fails", "hangs"])
def test_without_a_network_the_way_out_is_said_within_two_seconds(away, monkeypatch, resolver):
    if resolver == "hangs":
        monkeypatch.setattr(socket, "getaddrinfo", hang)
    start = time.monotonic()
    with pytest.raises(UserError, match=r"neither in .*/data nor .*/hf: huggingface.co cannot be reached; run .*embed"):
        load_corpus(DataSettings(name="wikitext2"), 8, away)
    assert time.monotonic() - start < 2


def test_behind_a_proxy_it_is_the_proxy_that_must_answer(away, monkeypatch):
    asked = []
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    # urllib reads the proxies once a process.
    monkeypatch.setattr(urllib.request, "_opener", None)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *rest: asked.append((host, port)) or [])
    with pytest.raises(UserError, match="cannot be reached"):
        load_corpus(DataSettings(name="wikitext2"), 8, away)
    assert asked == [("proxy.example", 3128)]


def break_off(*args, **kwargs):
    raise RuntimeError("connection reset\nrequest id")


def test_what_datasets_loads_is_checked_and_a_failure_is_one_line(away, monkeypatch):
    import datasets

    source = publish(monkeypatch, away / "hub" / wikitext.FOLDERS["raw"])
    asked = []

    def load(name: str, config: str, builder=datasets.load_dataset_builder, **options):
        asked.append((name, config))
        return builder(str(source))

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", away / "tables")
    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    monkeypatch.setattr(hub, "answers", lambda url, limit_seconds: True)
    corpus = load_corpus(DataSettings(name="wikitext2"), 8, away)
    assert (corpus.name, asked) == ("wikitext2-raw-v1", [("Salesforce/wikitext", "wikitext-2-raw-v1")])
    assert corpus.fingerprint == from_path(source, "wikitext2").fingerprint
    write_parquet(source / "test-00000-of-00001.parquet", LINES[1:])
    with pytest.raises(UserError, match=r"Salesforce/wikitext: is not WikiText-2 raw, by its characters \(train "):
        load_corpus(DataSettings(name="wikitext2"), 8, away)
    monkeypatch.setattr(datasets, "load_dataset_builder", break_off)
    with pytest.raises(UserError, match=r"data.config=wikitext-2-raw-v1: cannot be loaded \(connection reset request"):
        load_corpus(DataSettings(name="wikitext2"), 8, away)


def test_a_download_is_checked_and_a_failing_one_is_one_line(away, monkeypatch):
    import datasets

    source = publish(monkeypatch, away / "hub" / wikitext.FOLDERS["raw"])

    def fetch(manager, urls: list[str]) -> list[str]:
        assert all(url.startswith("hf://datasets/Salesforce/wikitext/wikitext-2-raw-v1/") for url in urls)
        return [str(source / url.rpartition("/")[2]) for url in urls]

    monkeypatch.setattr(hub, "answers", lambda url, limit_seconds: True)
    monkeypatch.setattr(datasets.DownloadManager, "download", fetch)
    assert prepare("raw", None, away / "project").is_dir()
    write_parquet(source / "test-00000-of-00001.parquet", LINES[1:])
    with pytest.raises(UserError, match=r"test-00000-of-00001\.parquet: its sha256 is not"):
        prepare("raw", None, away / "another")
    monkeypatch.setattr(datasets.DownloadManager, "download", break_off)
    with pytest.raises(UserError, match=r"huggingface.co failed \(connection reset request id\); run attnbench data"):
        prepare("raw", None, away / "another")


def test_prepare_refuses_a_source_that_is_not_the_published_one(away, monkeypatch):
    source = publish(monkeypatch, away / "source")
    write_parquet(source / "validation-00000-of-00001.parquet", LINES[::-1])
    with pytest.raises(SystemExit, match=r"^error: .*validation-00000-of-00001\.parquet: its sha256 is not"):
        run_script(monkeypatch, "--source", source, "--root", away)
    with pytest.raises(SystemExit, match=r"is not WikiText-2 v1, by its characters \(train 1,"):
        run_script(monkeypatch, "--version", "v1", "--source", source, "--root", away)
    assert not (away / "data").exists()


def test_prepare_names_its_own_option_where_the_source_is_missing(away, monkeypatch):
    source = publish(monkeypatch, away / "source")
    (source / "test-00000-of-00001.parquet").unlink()
    (away / "file").touch()
    for given, what in (
        (away / "nope", "is no folder"),
        (away / "file", "is no folder"),
        (source, "has no parquet file of test"),
    ):
        with pytest.raises(SystemExit, match=rf"^error: --source {given}: {what}; give the folder with WikiText"):
            run_script(monkeypatch, "--source", given, "--root", away)
    assert not (away / "data").exists()


def test_prepare_copies_whole_or_not_at_all(away, monkeypatch):
    source = publish(monkeypatch, away / "source")
    copyfile = shutil.copyfile

    def break_off(path, target):
        if "test" in path.name:
            raise OSError(28, "No space left on device")
        copyfile(path, target)

    monkeypatch.setattr(shutil, "copyfile", break_off)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
        prepare("raw", source, away)
    assert list((away / "data").iterdir()) == []
    monkeypatch.setattr(shutil, "copyfile", copyfile)
    run_script(monkeypatch, "--source", source, "--root", away)
    assert load_corpus(DataSettings(name="wikitext2"), 8, away).name == "wikitext2-raw-v1"
    assert [path.name for path in (away / "data").iterdir()] == ["wikitext-2-raw-v1"]
    run_script(monkeypatch, "--root", away)


@needs_real_data
def test_prepare_takes_the_real_v1(away):
    folder = prepare("v1", V1, away)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in V1.iterdir())


def test_prepare_without_a_network_says_so_in_one_line(away, monkeypatch):
    with pytest.raises(SystemExit, match=r"^error: WikiText-2: huggingface.co cannot be reached; ") as caught:
        run_script(monkeypatch, "--root", away)
    assert "\n" not in str(caught.value)
