"""Work in other processes: what comes back, whatever becomes of them, and that none is left behind."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import torch
from small import python_path
from worker_acts import act

from attnbench.machine import processes as workers
from attnbench.machine.device import all_gpus
from attnbench.machine.locks import folder_lock
from attnbench.machine.processes import IdleWorkers, Outcome, run_alone, run_in_processes
from attnbench.machine.timing import CappedChild
from attnbench.settings.errors import UserError
from attnbench.settings.registry import resolve, trust

ROOT = Path(__file__).parents[2]


def outcomes(items: Sequence[tuple[str, str]], folder: Path, **settings) -> list[Outcome[tuple[str, str]]]:
    with closing(run_in_processes(act, items, log=folder / "log" / "output.log", **settings)) as found:
        return list(found)


def pids(folder: Path) -> list[str]:
    marks = [path.name.split("-") for path in folder.iterdir() if path.is_file()]
    return [pid for pid, _ in sorted(marks, key=lambda mark: int(mark[1]))]


def is_running(pid: int) -> bool:
    process = Path(f"/proc/{pid}")
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        threads = list((process / "task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A zombie, whose parent has not yet looked, does nothing any more; but a killed process is one as soon as its first
    # thread is gone, and its parent hears of it when the last one is.
    return state != "Z" or len(threads) > 1


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


@pytest.mark.parametrize("fresh", [False, True])
def test_each_worker_sees_a_gpu_of_its_own_also_one_that_takes_another_s_place(tmp_path, monkeypatch, fresh):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    items = [("see", str(tmp_path)), ("kill", ""), *[("see", str(tmp_path))] * 3]
    outcomes(items, tmp_path, num_workers=2, fresh=fresh, gpus=["5", "7"])
    seen = [path.read_text() for path in sorted(tmp_path.glob("*-*"))]
    assert len(seen) == 4
    assert set(seen) == {"5", "7"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,7"


def test_items_that_are_added_between_outcomes_are_worked_off_too_also_after_the_last(tmp_path):
    items = deque([("wait", "0")])
    with closing(run_in_processes(act, items, num_workers=2, log=tmp_path / "log" / "output.log")) as found:
        for number, outcome in enumerate(found):
            assert outcome.error is None
            if number < 2:
                items.extend([("mark", str(tmp_path))] * 2)
    assert number == 4
    assert len(pids(tmp_path)) == 4


def test_without_names_of_gpus_workers_see_those_that_this_process_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    outcomes([("see", str(tmp_path))], tmp_path, num_workers=1)
    assert [path.read_text() for path in tmp_path.glob("*-*")] == ["5,7"]


def test_all_gpus_are_those_that_are_visible_of_one_kind(monkeypatch):
    kinds = ["H100", "H100", "H200"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: kinds[index])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert all_gpus(torch.device("cuda")) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb,none")
    assert all_gpus(torch.device("cuda")) == ["GPU-aa", "GPU-bb"]
    for device in ("cpu", "cuda:1"):
        with pytest.raises(UserError, match=f"plan.devices=all: with device={device} there is one"):
            all_gpus(torch.device(device))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(UserError, match=r"the GPUs differ \(H100, H200\)"):
        all_gpus(torch.device("cuda"))


def test_whatever_ends_an_item_is_its_outcome_and_the_others_run(tmp_path):
    items = [
        ("refuse", "a setting"),
        ("kill", ""),
        ("raise", "two"),
        ("leave", "3"),
        ("exit", "4"),
        ("mark", str(tmp_path)),
    ]
    found = {outcome.item[0]: outcome.error for outcome in outcomes(items, tmp_path, num_workers=2)}
    assert found == {
        "refuse": "a setting: cannot be\\nand more",
        "kill": "its process was ended by SIGKILL, perhaps for want of memory",
        "raise": "ValueError: two",
        "leave": "its process ended with exit code 3",
        "exit": "its process ended with exit code 4",
        "mark": None,
    }
    assert len(pids(tmp_path)) == 1
    assert "Traceback" in (tmp_path / "log" / "output.log").read_text()


def test_results_come_as_they_are_ready(tmp_path):
    items = [("wait", "1.5"), ("wait", "0"), ("wait", "0.01")]
    found = outcomes(items, tmp_path, num_workers=2)
    assert [outcome.item[1] for outcome in found] == ["0", "0.01", "1.5"]
    assert all(outcome.error is None for outcome in found)
    assert found[-1].seconds >= 1.5


@pytest.mark.parametrize(("fresh", "num_processes"), [(True, 3), (False, 1)])
def test_a_fresh_process_for_each_item_or_one_for_all(fresh, num_processes, tmp_path):
    outcomes([("mark", str(tmp_path))] * 3, tmp_path, num_workers=1, fresh=fresh)
    found = pids(tmp_path)
    assert len(found) == 3
    assert len(set(found)) == num_processes
    assert str(os.getpid()) not in found


@pytest.mark.slow
def test_workers_stay_between_calls_until_they_are_not_wanted(tmp_path):
    mark, settings = ("mark", str(tmp_path)), {"num_workers": 2, "num_threads": 1}
    with IdleWorkers() as idle:
        outcomes([mark, mark], tmp_path, idle=idle, **settings)
        outcomes([mark, mark, ("kill", "")], tmp_path, idle=idle, **settings)
        # One has died, so that at most one of the two is there; one of another number of threads is another.
        outcomes([mark], tmp_path, idle=idle, **settings)
        outcomes([mark], tmp_path, idle=idle, num_workers=1, num_threads=2)
        outcomes([mark], tmp_path, idle=idle, fresh=True, **settings)
        first, second, third, other, fresh = (found := pids(tmp_path))[:2], found[2:4], *found[4:]
        assert set(second) <= set(first)
        assert third in first
        assert other not in first
        assert fresh not in {*first, other}
        assert is_running(int(third))
        assert is_running(int(other))
        # One that dies while it waits costs no item its outcome.
        for pid in {third, other}:
            os.kill(int(pid), signal.SIGKILL)
        wait_for(lambda: not is_running(int(third)) and not is_running(int(other)))
        [outcome] = outcomes([mark], tmp_path, idle=idle, **settings)
        assert outcome.error is None
        idle.end()
        found = pids(tmp_path)
        assert not any(is_running(int(pid)) for pid in found)
        outcomes([mark], tmp_path, idle=idle, **settings)
        last = pids(tmp_path)[-1]
        assert last not in found
    assert not is_running(int(last))


def test_what_workers_print_is_in_the_log_and_not_on_the_terminal(tmp_path, capfd):
    outcomes([("say", "hello")], tmp_path, num_workers=1)
    assert capfd.readouterr() == ("", "")
    text = (tmp_path / "log" / "output.log").read_text()
    assert "hello on standard output" in text
    assert "hello on standard error" in text


def test_a_worker_that_waits_for_a_folder_says_so_here(tmp_path, caplog):
    held = ExitStack()
    held.enter_context(folder_lock(tmp_path, waits=False))

    def release() -> None:
        with held:
            wait_for(lambda: caplog.messages, seconds=60)

    releasing = Thread(target=release)
    releasing.start()
    assert [outcome.error for outcome in outcomes([("hold", str(tmp_path))], tmp_path, num_workers=1)] == [None]
    releasing.join()
    [message] = caplog.messages
    assert message.startswith(f"waiting for {tmp_path}, in use by pid {os.getpid()} on ")
    assert message in (tmp_path / "log" / "output.log").read_text()


def test_alone_a_failure_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"^no: cannot be\\nand more$"):
        run_alone(act, ("refuse", "no"), log=tmp_path / "output.log", num_threads=1)


def test_a_worker_may_build_what_the_process_that_starts_it_may(tmp_path):
    trust(["argparse.Namespace"])
    items = [("resolve", "argparse.Namespace"), ("resolve", "argparse.ArgumentParser")]
    trusted, refused = [outcome.error for outcome in outcomes(items, tmp_path, num_workers=1)]
    assert trusted is None
    assert refused is not None
    assert "is no class of attnbench" in refused
    with CappedChild(partial(partial, resolve), 256) as child:
        assert child.ask("argparse.Namespace", object) is argparse.Namespace


def test_a_caller_that_fails_leaves_no_worker_behind(tmp_path):
    def look_at_the_first() -> None:
        items = [("wait", "0"), ("stay", str(tmp_path)), ("wait", "0")]
        with closing(run_in_processes(act, items, num_workers=2, log=tmp_path / "output.log")) as found:
            for _ in found:
                wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        look_at_the_first()
    assert (tmp_path / "saved").exists()
    wait_for(lambda: not any(is_running(int(path.name[4:])) for path in tmp_path.glob("pid-*")), seconds=2)


def test_who_does_not_stop_in_time_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "STOP_SECONDS", 0.05)
    with closing(
        run_in_processes(act, [("wait", "0"), ("stay", str(tmp_path))], num_workers=2, log=tmp_path / "log")
    ) as found:
        next(found)
        wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    assert not (tmp_path / "saved").exists()
    wait_for(lambda: not any(is_running(int(path.name[4:])) for path in tmp_path.glob("pid-*")), seconds=2)


PARENT = """
import sys
from contextlib import closing
from pathlib import Path
from attnbench.settings.errors import Interrupted
from attnbench.machine.signals import interruptible
from attnbench.machine.processes import run_in_processes
from worker_acts import act

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    items = [("wait", "0"), ("wait", "0"), ("stay", str(folder))]
    try:
        with (
            interruptible("stopped"),
            closing(run_in_processes(act, items, num_workers=3, log=folder / "output.log")) as found,
        ):
            for outcome in found:
                print(outcome.item, flush=True)
    except Interrupted as interruption:
        print(interruption)
        sys.exit(interruption.exit_code)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_parent_that_is_stopped_stops_its_workers_after_they_have_saved(number, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        env=python_path(ROOT, ROOT / "tests" / "support"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=30)
    if number == signal.SIGKILL:
        # It could not ask them, nor wait for them.
        assert process.returncode == -number
        wait_for((tmp_path / "saved").exists)
    else:
        assert process.returncode == 128 + number, printed
        assert printed.splitlines()[-1] == "stopped"
        assert (tmp_path / "saved").exists()
    wait_for(lambda: not any(is_running(int(path.name[4:])) for path in tmp_path.glob("pid-*")), seconds=2)


PROGRAM = """
import sys
from contextlib import closing
from pathlib import Path
from attnbench.machine.processes import run_in_processes
from worker_acts import act

with closing(run_in_processes(act, [("wait", "0")], num_workers=1, log=Path(sys.argv[1], "output.log"))) as outcomes:
    print([outcome.error for outcome in outcomes])
"""


@pytest.mark.parametrize("is_file", [True, False])
def test_a_program_without_a_main_guard_or_a_file_has_workers_too(is_file, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program) if is_file else "-", str(tmp_path)],
        input="" if is_file else PROGRAM,
        env=python_path(ROOT, ROOT / "tests" / "support"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("[None]\n", "")


def test_a_trusted_class_of_the_program_is_found_in_its_workers(tmp_path):
    program = tmp_path / "program.py"
    lines = PROGRAM.replace('"wait", "0"', '"resolve", "__main__.Mine"').strip().split("\n")
    head = ["from attnbench.settings.registry import trust", *lines[:5], "class Mine: ...", "trust(['__main__.Mine'])"]
    guarded = ["if __name__ == '__main__':", *(f"    {line}" for line in lines[5:])]
    program.write_text("\n".join([*head, *guarded]))
    command = [sys.executable, str(program), str(tmp_path)]
    environment = python_path(ROOT, ROOT / "tests" / "support")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[None]\n", "")
