"""Our step beside a peer's, through real worker processes: turns, ratios, peers that are absent or die, the page."""

import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnbench.cli.compose import compose
from attnbench.machine import device as support
from attnbench.machine.environment import device_name
from attnbench.mixers import layers
from attnbench.model import loss
from attnbench.results.folder import ROOT
from attnbench.results.row_tables import read_csv
from attnbench.results.rows import Measurement
from attnbench.results.tables import read_folders
from attnbench.settings.errors import UserError
from benchmarks.peers import turns
from benchmarks.peers.benchmark import benchmark
from benchmarks.peers.cases import CASES, Case, Peer
from benchmarks.peers.contestants import Contestant, Request
from benchmarks.peers.report import write_page
from benchmarks.peers.steps import Order, build, use_plain_layers
from benchmarks.peers.trainings import PATHS, largest_difference
from benchmarks.peers.turns import NO_DEVICE_MEMORY, run_case, speed_ratios
from benchmarks.peers.worker import Worker, WorkerError

TINY = (
    *("model.dim=32", "model.num_layers=2", "model.head_width=16", "model.feed_forward_width=64", "device=cpu"),
    *("seq_len=16", "train.batch_size=2", "data=text", "data.vocabulary_size=null"),
)
PLAIN = Peer(name="plain GPT", kind="plain_gpt")
NANOGPT = Peer(name="nanoGPT", kind="nanogpt")
DYING = """
import os, torch
from types import SimpleNamespace as GPTConfig
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        print("what a library prints is no answer")
        # Of about the size of the model that is to be matched with it.
        self.unused = torch.nn.Parameter(torch.zeros(16000))
        self.table, self.num_calls = torch.nn.Embedding(config.vocab_size, config.vocab_size), 0
    def forward(self, tokens, targets):
        self.num_calls += 1
        if self.num_calls > 8:
            os._exit(7)
        logits = self.table(tokens)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
FLA = """
import os, torch
from types import SimpleNamespace as GatedDeltaNetConfig
class GatedDeltaNetForCausalLM(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        assert os.environ['PEER'] == 'yes' and config.tie_word_embeddings and config.head_dim == 8
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)
    def forward(self, input_ids, labels):
        logits = self.table(input_ids)[:, :-1].flatten(0, 1)
        return GatedDeltaNetConfig(loss=torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten()))
"""


@pytest.fixture
def overrides(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return [*TINY, f"data.path={path}"]


@pytest.fixture
def request_of(tmp_path, overrides):
    """Makes a request of little work."""
    usual = Request(overrides=overrides, mixers=["flash"], repeats=3, seconds=0.01, outputs=tmp_path / "peers",
                    command="the command")  # fmt: skip
    return lambda **changes: replace(usual, **changes)


@pytest.fixture
def run_little(tmp_path, request_of, monkeypatch):
    """Runs a case of ours and these peers; returns its rows."""
    monkeypatch.setattr(turns, "MAX_STEPS", 4)

    def run(*peers, **changes):
        case = Case(name="little", device="cpu", overrides=("attn=flash",), peers=peers)
        return read_folders([tmp_path / "peers" / "little"]) if run_case(case, request_of(**changes)) else None

    return run


def page_of(tmp_path, **changes) -> str:
    write_page(tmp_path / "peers", tmp_path / "page", title="Peers", with_figures=False, **changes)
    return (tmp_path / "page" / "README.md").read_text()


def values(rows, metric):
    return {
        row.measurement.settings.get("peer", row.identity.variant): row.measurement
        for row in rows
        if row.measurement.metric == metric
    }


def contestant(overrides, kind="ours", folder=Path()) -> Contestant:
    return Contestant("peers", kind, Order(kind=kind, overrides=overrides), folder)


def test_speeds_are_tokens_a_second_and_ratios_those_of_neighbours(overrides):
    ours = contestant(overrides)
    ours.milliseconds = [4.0, 8.0]
    assert ours.speeds() == [8000.0, 4000.0]
    # A machine that is half as fast in the second turn changes no ratio.
    assert speed_ratios([200.0, 100.0, 210.0], [100.0, 50.0, 70.0]) == [2.0, 2.0, 3.0]


def test_a_reference_takes_no_kernel_of_ours(monkeypatch):
    tensor = SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=torch.float32)
    for module in (support, layers, loss):
        assert module.on_kernels(tensor)
        monkeypatch.setattr(module, "on_kernels", module.on_kernels)
    use_plain_layers()
    assert not any(module.on_kernels(tensor) for module in (support, layers, loss))


def test_both_train_on_the_same_batches_at_equal_parameters(overrides):
    words = ["attn=flash", *overrides, "train.warmup_steps=5", "train.learning_rate=1e-2"]
    peer = build(Order(kind="plain_gpt", overrides=words), compose(words))
    ours = build(Order(kind="ours", overrides=words, parameters=peer.parameters), compose(words))
    assert abs(ours.parameters / peer.parameters - 1) <= 0.01
    assert ours.corpus is not None
    assert peer.corpus is not None
    assert ours.corpus.fingerprint == peer.corpus.fingerprint
    for one in (ours, peer):
        first = float(one.step(0))
        for number in range(1, 40):
            last = float(one.step(number))
        assert last < 0.8 * first


@pytest.mark.slow
def test_the_turns_before_a_cut_off_are_kept(run_little, tmp_path, monkeypatch):
    turns_of = turns._turns

    def cut(*given):
        yield next(turns_of(*given))
        raise KeyboardInterrupt

    monkeypatch.setattr(turns, "_turns", cut)
    with pytest.raises(KeyboardInterrupt):
        run_little(PLAIN)
    speeds = values(read_folders([tmp_path / "peers" / "little"]), "tokens_per_second").values()
    assert [(speed.status, speed.num_samples) for speed in speeds] == [("ok", 1)] * 2


def is_running(pid: str) -> bool:
    status = Path(f"/proc/{pid}/stat")
    # A zombie, whose new parent has not yet looked, does nothing any more.
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_the_command_and_its_workers(number, tmp_path, overrides):
    script = [sys.executable, "scripts/benchmark_peers.py", "--cases", "flash-cpu-plain", "--seconds", "1000"]
    process = subprocess.Popen(
        [*script, "--outputs", str(tmp_path / "peers"), *overrides],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Both are built, so that no process is being started when the signal comes.
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert [line.split(": ")[1] for line in lines] == ["plain GPT", "attnbench"]
    # The third is multiprocessing's own, which ends soon after its parent.
    assert len(children) == 3
    deadline = time.monotonic() + 5
    while any(map(is_running, children)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert re.fullmatch(r"interrupted; what was measured is in \S+peers\n", stderr)


@pytest.mark.slow
def test_ours_and_a_peer_take_turns_and_end_as_rows_and_a_page(run_little, tmp_path, monkeypatch, capsys):
    asked = []
    ask = Contestant.ask
    monkeypatch.setattr(
        Contestant, "ask", lambda one, what, **words: asked.append((one.label, what)) or ask(one, what, **words)
    )
    rows = run_little(PLAIN)
    assert [name for name, what in asked if what == "time"][-6:] == ["attnbench", "plain GPT"] * 3
    assert "feed_forward_width" in capsys.readouterr().out
    ((peer, ratio),) = values(rows, "tokens_per_second_ratio").items()
    assert peer == "plain GPT"
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.num_samples == 3
    speeds, first = values(rows, "tokens_per_second"), values(rows, "first_step_seconds")
    assert speeds.keys() == first.keys() == {"attnbench", "plain GPT"}
    counts = {row.identity.variant: row.identity.parameters for row in rows}
    assert abs(counts["attnbench"] / counts["plain GPT"] - 1) <= 0.01
    memory = values(rows, "peak_memory_mib")["attnbench"]
    assert (memory.status, memory.reason) == ("unsupported", NO_DEVICE_MEMORY)
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "environment-00000000.json").write_text("{}")  # of rows that stood there before
    page = page_of(tmp_path)
    assert "## flash, 2 × 16 tokens, 2 layers of 32" in page
    assert f"| plain GPT | {counts['plain GPT']:,} | " in page
    assert "    the command\n" in page
    assert len(read_csv(tmp_path / "page" / "results.csv")) == len(rows)
    (environment,) = {row.identity.environment for row in rows}
    assert [path.name for path in (tmp_path / "page").glob("environment-*")] == [f"environment-{environment}.json"]


@pytest.mark.slow
def test_a_peer_that_is_absent_is_left_out_by_name_and_a_case_without_any_is_skipped(run_little, capsys):
    assert run_little(NANOGPT) is None
    assert capsys.readouterr().out.splitlines() == [
        "little: nanoGPT: absent: give --nanogpt PATH of its model.py",
        "little: skipped, no peer is here",
    ]


def test_a_peer_that_died_before_it_could_answer_is_a_row_too(tmp_path, overrides):
    lost = Measurement(metric="tokens_per_second", value=None, unit="", status="failed", reason="exit code 7")
    contestant(overrides, "nanogpt", tmp_path / "little").keep([lost])
    (row,) = read_folders([tmp_path / "little"])
    assert row.identity.device == device_name(torch.device("cpu"))
    assert row.identity.parameters is None
    assert (tmp_path / "little" / f"environment-{row.identity.environment}.json").exists()


@pytest.mark.slow
def test_a_peer_that_dies_has_failed_and_the_rest_goes_on(run_little, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(DYING)
    rows = run_little(NANOGPT, PLAIN, nanogpt=str(path))
    ratios, speeds = values(rows, "tokens_per_second_ratio"), values(rows, "tokens_per_second")
    for lost in (ratios["nanoGPT"], speeds["nanoGPT"]):
        assert (lost.status, lost.reason) == ("failed", "its process ended with exit code 7")
    assert ratios["plain GPT"].value > 0
    assert speeds["attnbench"].value > 0
    assert "nanoGPT: failed, its process ended with exit code 7." in page_of(tmp_path)


def test_a_peer_that_does_not_answer_in_time_has_failed_and_is_gone(tmp_path):
    # It is still importing torch then; what it hangs at makes no difference.
    with Worker(tmp_path / "log", tmp_path, limit_seconds=0.2) as worker:
        with pytest.raises(WorkerError, match=r"no answer to build within 0\.2 s; --limit") as caught:
            worker.ask("build", order={})
        assert caught.value.status == "failed"
        assert worker.child.exit_code() == -signal.SIGKILL


def test_a_failure_here_waits_for_no_peer(tmp_path):
    with pytest.raises(KeyboardInterrupt), Worker(tmp_path / "log", tmp_path) as worker:
        raise KeyboardInterrupt
    assert worker.child.exit_code() == -signal.SIGKILL


@pytest.mark.slow
def test_a_peer_finds_the_packages_and_variables_given_for_it_first(tmp_path, overrides):
    models = tmp_path / "own" / "fla" / "models"
    models.mkdir(parents=True)
    (tmp_path / "own" / "transformers.py").write_text("")
    (models.parent / "__init__.py").write_text("")
    (models / "__init__.py").write_text(FLA)
    order = {"kind": "fla", "overrides": overrides, "options": {"model": "GatedDeltaNet", "head_dim": 8}}
    with Worker(tmp_path / "log", tmp_path, paths=(str(tmp_path / "own"),), variables={"PEER": "yes"}) as worker:
        assert worker.ask("build", order=order)["mixer"] == "GatedDeltaNet"
        assert len(worker.ask("losses", num_steps=3)["losses"]) == 3
        assert worker.ask("time", num_steps=2)["milliseconds"] > 0
    with Worker(tmp_path / "log", tmp_path, paths=(str(tmp_path / "own"),)) as worker:
        with pytest.raises(WorkerError, match="KeyError: 'PEER'") as caught:
            worker.ask("build", order=order)
        assert caught.value.status == "failed"


@pytest.mark.slow
def test_agreement_is_measured_drawn_and_stated(tmp_path, overrides, request_of):
    words = [*overrides, "train.precision=bfloat16"]
    benchmark(request_of(overrides=words, agreement_steps=12, mixers=["softmax", "flash"]))
    write_page(tmp_path / "peers", tmp_path / "page", title="Peers", with_figures=True)
    page, rows = (tmp_path / "page" / "README.md").read_text(), read_csv(tmp_path / "page" / "results.csv")
    # Softmax's reference is flash's too.
    assert {(row.identity.variant, row.measurement.settings["attn"]) for row in rows} == {
        (path, mixer) for path in PATHS for mixer in ("softmax", "flash")
    }
    rows = [row for row in rows if row.measurement.settings["attn"] == "flash"]
    largest: Any = values(rows, "largest_loss_difference")
    assert all(0 < largest[path].value < 0.05 for path in ("fast", "reference in float32"))
    assert {row.measurement.settings["step"] for row in rows if row.measurement.metric == "train_loss"} == {0, 10, 11}
    assert "| mixer | fast | at most | reference in float32 | at most |" in page
    images = sorted(path.name for path in (tmp_path / "page" / "figures").glob("*.svg"))
    metrics, mixers = ("loss_difference", "train_loss"), ("flash", "softmax")
    assert images == [f"agreement-{metric}-step-attn_{mixer}.svg" for metric in metrics for mixer in mixers]
    assert all(f"figures/{name})" in page for name in images)


@pytest.mark.slow
def test_the_first_step_is_cold_and_then_warm(tmp_path, request_of):
    benchmark(request_of(first_step=True))
    assert "| mixer | cold, s | of which the step | warm, s | of which the step |" in page_of(tmp_path)
    rows = read_csv(tmp_path / "page" / "results.csv")
    measured = [row.measurement for row in rows]
    seconds = {(own.settings["cache"], own.metric): own.value or 0 for own in measured}
    assert len(seconds) == 4
    for cache in ("cold", "warm"):
        assert seconds[cache, "start_seconds"] > seconds[cache, "first_step_seconds"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cases": ["flush-256"]}, "--cases flush-256: unknown; there is flash-256,"),
        ({"repeats": 0}, "--repeats 0: must be at least 1"),
        ({"seconds": 0.0}, "--seconds 0: must be above 0"),
        ({"limit_seconds": 0}, "--limit 0: must be above 0"),
        ({"agreement_steps": 1}, "--agreement 1: must be at least 2"),
    ],
)
def test_an_impossible_request_is_refused(request_of, changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        benchmark(request_of(**changes))


@pytest.mark.parametrize("name", CASES)
def test_a_case_composes_at_the_shape_of_its_peers(name):
    case = CASES[name]
    settings = compose([*case.overrides, "device=cpu"])
    assert settings.train.batch_size * settings.seq_len > 0
    for peer in case.peers:
        beside = compose([*case.overrides, *peer.overrides, "device=cpu"])
        assert (beside.model, beside.seq_len, beside.train) == (settings.model, settings.seq_len, settings.train)
        if "shape" in peer.options:
            assert peer.options["shape"][:2] == [settings.train.batch_size, settings.seq_len]
        if "head_dim" in peer.options:
            assert peer.options["head_dim"] == settings.model.head_width


@pytest.mark.gpu
def test_on_a_gpu_the_captured_step_counts_its_pools_and_trains_like_the_reference(tmp_path, overrides):
    answers = {}
    for path in ("fast", "reference"):
        words = ["attn=softmax", *overrides, "device=cuda", *PATHS[path]]
        with Worker(tmp_path / "log", tmp_path / path) as worker:
            order = {"kind": "ours", "overrides": words, "options": {"plain": path == "reference"}}
            losses = [worker.ask("build", order=order)["loss"], *worker.ask("losses", num_steps=20)["losses"]]
            answers[path] = losses, worker.ask("memory")["peak_mib"]
    (fast, fast_mib), (reference, reference_mib) = answers["fast"], answers["reference"]
    assert 0 < reference_mib < fast_mib
    assert largest_difference(fast, reference) < 0.05
    assert len(set(fast)) == len(fast)


@pytest.mark.slow
def test_the_clock_starts_when_the_compiler_s_parts_are_imported():
    parts = ("torch._dynamo.backends.inductor", "torch._inductor.codegen.cuda_combined_scheduling")
    script = (
        "import sys\nfrom benchmarks.peers.session import _import_compiler\n_import_compiler()\n"
        f"sys.exit(not all(name in sys.modules for name in {(*parts, 'triton.compiler.code_generator')!r}))"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0
