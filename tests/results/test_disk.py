"""Disks that fill up, folders that vanish or may not be written, files torn or altered: one line, nothing lost."""

import errno
import os
import random
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
from check_results import check
from made_rows import IDENTITY
from probe_settings import smoke_words
from scripts_here import run_here
from small import TINY_RUN, bench_words, compose_once, fresh_state, record, small_model

from attnbench.comparison.execute import run
from attnbench.model import stored
from attnbench.results.files import replace_file
from attnbench.results.folder import recording
from attnbench.results.row_files import ResultsWriter, read_results
from attnbench.results.rows import Measurement, ResultRow
from attnbench.settings.errors import UserError
from attnbench.training.checkpoint import load_last, save_step
from attnbench.training.hooks import Sitting
from attnbench.training.log import read_metrics
from attnbench.training.prepare import prepare

PERPLEXITY = ["eval=perplexity", *smoke_words("perplexity", perplexity_characters=100)]


def settings(folder: Path, *words: str):
    """A training, of which nothing is measured unless the words say so."""
    text = folder / "small.txt"
    text.write_text(" ".join(random.Random(0).choices(["the", "cat", "sees", "a", "tree"], k=1000)))
    own = ["train.num_steps=8", "train.validation_interval_steps=2", "device=cpu", "logger=none"]
    paths = [f"data.path={text}", f"outputs_dir={folder / 'outputs'}"]
    return compose_once([*TINY_RUN, *own, *paths, *(words or ["eval=[]"])])


def forked(act) -> int:
    """The exit code of `act` in a process of its own, whose limits are its own."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(share, tmp_path):
    state = fresh_state()
    save_step(tmp_path, state, record())
    largest = max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())

    def quota():
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * largest), resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        state.step = 4
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            save_step(tmp_path, state, record())

    assert forked(quota) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
    assert load_last(tmp_path, small_model()) is not None


@pytest.mark.parametrize(
    ("place", "code"),
    [("save_file", errno.ENOSPC), ("save_file", errno.EROFS), ("sync", errno.EDQUOT), ("sync", errno.EIO)],
)
def test_a_disk_that_fills_up_is_one_line_and_the_same_command_goes_on(code, place, tmp_path, monkeypatch):
    own, calls, act = settings(tmp_path), [], getattr(stored, place)

    def fails(*given):
        calls.append(given)
        if len(calls) > 7:
            raise OSError(code, os.strerror(code), str(given[-1]))
        return act(*given)

    with monkeypatch.context() as patch:
        patch.setattr(stored, place, fails)
        with pytest.raises(UserError, match=os.strerror(code)) as caught:
            run(own)
    assert "\n" not in str(caught.value)
    assert "the same command resumes" in str(caught.value)
    [kept] = (tmp_path / "outputs").rglob("checkpoint")
    for folder in kept.glob("[!.]*"):
        stored.read_files(folder)
    assert not [*kept.glob(".*")]
    folder = run(own)
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")][-1] == 8


def test_the_tensor_library_s_full_disk_has_its_number(tmp_path, monkeypatch):
    def fails(tensors, path):
        raise stored.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(stored, "save_file", fails)
    with pytest.raises(OSError, match="No space left") as caught:
        save_step(tmp_path, fresh_state(), record())
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value.filename).endswith("weights.safetensors")


def test_a_folder_that_vanishes_ends_the_run(tmp_path, monkeypatch):
    own = settings(tmp_path)

    def vanish(self, state, report, keep=Sitting.keep):
        if state.step == 4:
            shutil.rmtree(tmp_path / "outputs")
        keep(self, state, report)

    with monkeypatch.context() as patch:
        patch.setattr(Sitting, "keep", vanish)
        with pytest.raises(UserError, match="No such file or directory"):
            run(own)
    assert not (tmp_path / "outputs").exists()


def test_a_folder_that_may_not_be_written_is_one_line(tmp_path, monkeypatch):
    def refused(path, *rest, act=os.open, **named):
        if str(path).endswith(".lock"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return act(path, *rest, **named)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(UserError, match="Read-only file system"), recording(tmp_path, waits=False):
        pass


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "results", "train.log"])
def test_what_is_in_the_way_is_named_and_so_is_the_way_out(name, tmp_path):
    own = settings(tmp_path)
    place = prepare(own).folder / name
    place.parent.mkdir(parents=True)
    place.mkdir() if "." in name else place.write_text("")
    if name == "metrics.jsonl":
        # Not replaced by a rename where nothing is in it.
        (place / "own").mkdir()
    with pytest.raises(UserError) as caught:
        run(own)
    assert f"{place}: " in str(caught.value) or f"{place}/" in str(caught.value)
    assert "rename or remove it; the same command then resumes" in str(caught.value)
    place.rename(tmp_path / "elsewhere")
    assert run(own) == place.parent


def test_a_file_with_other_names_is_replaced_and_they_keep_what_they_had(tmp_path):
    own = settings(tmp_path, *PERPLEXITY)
    folder = run(own)
    copy = tmp_path / "snapshot"
    shutil.copytree(folder, copy, copy_function=os.link)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    own.rerun = True
    run(own)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    assert (folder / "train.log").read_bytes().startswith((copy / "train.log").read_bytes())


def test_results_are_on_the_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    synced = []

    def watched(descriptor, sync=os.fsync):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path, path.read_text() if path.is_file() else None))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    path = tmp_path / "results" / "perplexity.jsonl"
    with ResultsWriter(path, IDENTITY) as writer:
        writer.write(Measurement(metric="loss", value=1, unit="nats"))
    [(written, text), folder] = synced
    assert (written.parent, text, folder) == (path.parent, path.read_text(), (path.parent, None))


def test_a_full_disk_ends_the_scripts_in_one_line(tmp_path, monkeypatch):
    code = errno.ENOSPC
    trained = run(settings(tmp_path, *PERPLEXITY))
    (trained.parent / "comparison.json").write_text("{}")

    def fails(descriptor):
        raise OSError(code, os.strerror(code), "the disk")

    monkeypatch.setattr(os, "fsync", fails)
    target = str(tmp_path / "target")
    for script, *words in (
        ("report.py", str(trained), "--output", target),
        ("dashboard.py", "--mode", "offline", "--output", f"{target}.json"),
        ("publish.py", target, str(trained.parent), "--title", "t"),
        ("evaluate.py", f"run={trained}", "device=cpu", "rerun=true"),
        ("benchmark.py", *bench_words("decode"), "bench=decode", "device=cpu", f"outputs_dir={target}"),
    ):
        exit_code, _, errors = run_here(script, *words)
        assert exit_code == 1, errors
        lines = [line for line in errors.splitlines() if "error: " in line]
        assert len(lines) == 1, errors
        assert os.strerror(code) in lines[0]
        assert "Traceback" not in errors


def test_a_replacement_that_does_not_fit_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    replace_file(path, "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        replace_file(path, "new")
    assert [found.read_text() for found in tmp_path.iterdir()] == ["old"]


def test_an_error_of_a_replacement_names_the_file_that_the_user_knows(tmp_path):
    (tmp_path / "report.html").mkdir()
    for path in (tmp_path / "report.html", tmp_path / "nowhere" / "report.html"):
        with pytest.raises(OSError, match=f"{re.escape(str(path))}'") as caught:
            replace_file(path, "x")
        assert caught.value.filename == str(path)
    assert [found.name for found in tmp_path.iterdir()] == ["report.html"]


def read_or_refused(path: Path) -> list[ResultRow] | None:
    """The rows of a file; None where it is refused by its name."""
    try:
        return read_results(path)
    except UserError as error:
        return None if str(path) in str(error) and "\n" not in str(error) else []


def test_no_bit_of_a_complete_results_file_changes_a_row_unseen(tmp_path):
    folder = run(settings(tmp_path, *PERPLEXITY))
    [path] = (folder / "results").glob("training-*.jsonl")
    content, rows = path.read_bytes(), read_results(path)
    chance = random.Random(0)
    # Every byte of the last line, and a hundred before it: the checksum sees those, the record must guard itself.
    ending = content.rstrip(b"\n").rfind(b"\n") + 1
    for position in [*range(ending, len(content)), *chance.sample(range(ending), 100)]:
        flipped = content[position] ^ (1 << chance.randrange(8))
        path.write_bytes(content[:position] + bytes([flipped]) + content[position + 1 :])
        assert read_or_refused(path) in (None, rows), f"byte {position}"
    for length in chance.sample(range(len(content) - 1), 60):
        path.write_bytes(content[:length])
        assert read_or_refused(path) is None


def test_files_that_were_cut_off_in_place_are_found_and_removed(tmp_path, capsys):
    paths = [tmp_path / "run" / "results" / f"{name}-01234567.jsonl" for name in ("cut", "altered", "whole")]
    paths[0].parent.mkdir(parents=True)
    for path in paths:
        with ResultsWriter(path, IDENTITY) as writer:
            writer.write(Measurement(metric="loss", value=1, unit="nats"))
    paths[0].write_text(paths[0].read_text().splitlines()[0])
    paths[1].write_text(paths[1].read_text().replace('"value": 1', '"value": 2'))
    assert check(tmp_path, remove=False) == 2
    assert check(tmp_path, remove=True) == 2
    assert sorted(paths[0].parent.iterdir()) == sorted(paths[1:])
    assert "altered after it was written" in capsys.readouterr().out
