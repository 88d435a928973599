"""Our step beside a peer's, through real worker processes: turns, ratios, peers that are absent or die, the page."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_workers import is_running, wait_for

from attnbench.cli.compose import compose
from attnbench.machine import device as support
from attnbench.machine.environment import device_name
from attnbench.mixers import layers
from attnbench.model import loss
from attnbench.results.folder import ROOT
from attnbench.results.rows import Measurement, read_csv
from attnbench.results.tables import read_folders
from attnbench.settings.errors import UserError
from benchmarks.peers import turns
from benchmarks.peers.agreement import PATHS, largest_difference
from benchmarks.peers.benchmark import Request, benchmark
from benchmarks.peers.cases import CASES, Case, Peer
from benchmarks.peers.implementations import Job, build, use_plain_layers
from benchmarks.peers.page import write_page
from benchmarks.peers.rows import NO_DEVICE_MEMORY, Contestant, Spread, speed_ratio, write_rows
from benchmarks.peers.turns import Places, Repetition, run_case
from benchmarks.peers.worker import Worker, WorkerError

TINY = (
    *("model.dim=32", "model.num_layers=2", "model.head_width=16", "model.feed_forward_width=64", "device=cpu"),
    *("seq_len=16", "train.batch_size=2", "data=text", "data.vocabulary_size=null"),
)
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


@pytest.fixture
def overrides(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return [*TINY, f"data.path={path}"]


@pytest.fixture
def measure(tmp_path, overrides):
    """Runs a case of ours and these peers; gives its rows and what was said."""

    def measure(*found, nanogpt=None):
        case = Case(name="little", device="cpu", overrides=("attn=flash",), peers=found)
        folder, said = tmp_path / "peers" / "little", []
        done = run_case(
            case,
            compose,
            overrides,
            folder,
            places=Places(nanogpt=nanogpt),
            repetition=Repetition(repeats=3, seconds=0.01, max_steps=4),
            command="the command",
            say=said.append,
        )
        return (read_folders([folder]) if done else None), said

    return measure


def values(rows, metric):
    return {
        row.measurement.settings.get("peer", row.identity.variant): row.measurement
        for row in rows
        if row.measurement.metric == metric
    }


def test_a_median_and_its_ends():
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)


def test_a_ratio_is_of_neighbours():
    # A machine that is half as fast in the second turn changes no ratio.
    assert speed_ratio([200.0, 100.0, 210.0], [100.0, 50.0, 70.0]) == Spread(2.0, 2.0, 3.0)


def test_speeds_are_tokens_a_second(overrides):
    job = Job.of(compose(overrides), "ours", {})
    contestant = Contestant(name="ours", job=job, worker=None, milliseconds=[4.0, 8.0])  # pyright: ignore
    assert contestant.speeds() == [8000.0, 4000.0]


def test_the_largest_difference_is_of_either_sign():
    assert largest_difference([1.0, 2.0, 3.0], [1.5, 2.0, 2.75]) == 0.5


def test_a_job_survives_its_way_as_json(overrides):
    job = Job.of(compose([*overrides, "attn=gated_deltanet"]), "ours", {"compiled": False}, 1234)
    assert Job.from_dict(json.loads(json.dumps(job.to_dict()))) == job


def test_a_reference_takes_no_kernel_of_ours(monkeypatch):
    tensor = SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=torch.float32)
    for module in (support, layers, loss):
        assert module.on_kernels(tensor)
        # Put back at the end.
        monkeypatch.setattr(module, "on_kernels", module.on_kernels)
    use_plain_layers()
    assert not any(module.on_kernels(tensor) for module in (support, layers, loss))


def test_both_train_on_the_same_batches_at_equal_parameters(overrides):
    settings = compose(["attn=flash", *overrides, "train.warmup_steps=5", "train.learning_rate=1e-2"])
    peer = build(Job.of(settings, "plain_gpt", {}))
    ours = build(Job.of(settings, "ours", {}, peer.parameters))
    assert abs(ours.parameters / peer.parameters - 1) <= 0.01
    assert ours.corpus.fingerprint == peer.corpus.fingerprint
    for one in (ours, peer):
        first = float(one.step(0))
        for number in range(1, 40):
            last = float(one.step(number))
        assert last < 0.8 * first


def test_what_was_measured_before_it_was_cut_off_is_kept(measure, tmp_path, monkeypatch):
    turns_of = turns._turns

    def cut(*given):
        yield next(turns_of(*given))
        raise KeyboardInterrupt

    monkeypatch.setattr(turns, "_turns", cut)
    with pytest.raises(KeyboardInterrupt):
        measure(Peer(name="plain GPT", kind="plain_gpt"))
    rows = read_folders([tmp_path / "peers" / "little"])
    speeds = [row.measurement for row in rows if row.measurement.metric == "tokens_per_second"]
    assert [(speed.status, speed.num_samples) for speed in speeds] == [("ok", 1)] * 2


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
    said = [process.stdout.readline() for _ in range(2)]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert [line.split(": ")[1] for line in said] == ["plain GPT", "attnbench"]
    assert len(children) == 2
    if number == signal.SIGKILL:
        wait_for(lambda: not any(is_running(int(child)) for child in children), seconds=5)
        return
    assert process.returncode == 128 + number
    assert re.fullmatch(r"interrupted; what was measured is in \S+peers\n", stderr)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


def test_ours_and_a_peer_take_turns_and_end_as_rows_and_a_page(measure, tmp_path, monkeypatch):
    asked = []
    ask = Contestant.ask
    monkeypatch.setattr(
        Contestant, "ask", lambda own, what, **words: asked.append((own.name, what)) or ask(own, what, **words)
    )
    rows, said = measure(Peer(name="plain GPT", kind="plain_gpt"))
    assert [name for name, what in asked if what == "time"][-6:] == ["attnbench", "plain GPT"] * 3
    assert "feed_forward_width" in said[-1]
    (ratio,) = values(rows, "tokens_per_second_ratio").items()
    assert ratio[0] == "plain GPT"
    assert ratio[1].low <= ratio[1].value <= ratio[1].high
    assert ratio[1].num_samples == 3
    speeds, first = values(rows, "tokens_per_second"), values(rows, "first_step_seconds")
    assert speeds.keys() == first.keys() == {"attnbench", "plain GPT"}
    counts = {row.identity.variant: row.identity.parameters for row in rows}
    assert abs(counts["attnbench"] / counts["plain GPT"] - 1) <= 0.01
    memory = values(rows, "peak_memory_mib")["attnbench"]
    assert (memory.status, memory.reason) == ("unsupported", NO_DEVICE_MEMORY)
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "environment-00000000.json").write_text("{}")  # of rows that stood there before
    write_page(tmp_path / "peers", tmp_path / "page", title="Peers", with_figures=False)
    page = (tmp_path / "page" / "README.md").read_text()
    assert "## flash, 2 × 16 tokens, 2 layers of 32" in page
    assert f"| plain GPT | {counts['plain GPT']:,} | " in page
    assert "    the command\n" in page
    assert len(read_csv(tmp_path / "page" / "results.csv")) == len(rows)
    (row,) = {row.identity.environment for row in rows}
    assert [path.name for path in (tmp_path / "page").glob("environment-*")] == [f"environment-{row}.json"]


def test_a_peer_that_is_absent_is_left_out_by_name_and_a_case_without_any_is_skipped(measure):
    rows, said = measure(Peer(name="nanoGPT", kind="nanogpt"))
    assert rows is None
    assert said == [
        "little: nanoGPT: absent: give --nanogpt PATH of its model.py",
        "little: skipped, no peer is here",
    ]


def test_what_died_before_it_could_answer_is_a_row_too(tmp_path, overrides):
    job = Job.of(compose(overrides), "nanogpt", {})
    lost = Measurement(metric="tokens_per_second", value=None, unit="", status="failed", reason="exit code 7")
    write_rows(tmp_path / "little", "peers", "nanoGPT", job, {}, [lost])
    (row,) = read_folders([tmp_path / "little"])
    assert row.identity.device == device_name(torch.device("cpu"))
    assert row.identity.parameters is None
    assert (tmp_path / "little" / f"environment-{row.identity.environment}.json").exists()


@pytest.mark.slow
def test_a_peer_that_dies_has_failed_and_the_rest_goes_on(measure, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(DYING)
    rows, _ = measure(Peer(name="nanoGPT", kind="nanogpt"), Peer(name="plain GPT", kind="plain_gpt"), nanogpt=str(path))
    ratios, speeds = values(rows, "tokens_per_second_ratio"), values(rows, "tokens_per_second")
    for lost in (ratios["nanoGPT"], speeds["nanoGPT"]):
        assert (lost.status, lost.reason) == ("failed", "its process ended with exit code 7")
    assert ratios["plain GPT"].value > 0
    assert speeds["attnbench"].value > 0
    write_page(tmp_path / "peers", tmp_path / "page", title="Peers", with_figures=False)
    assert "nanoGPT: failed, its process ended with exit code 7." in (tmp_path / "page" / "README.md").read_text()


def test_a_peer_that_does_not_answer_in_time_has_failed_and_is_gone(tmp_path, overrides):
    # It is still importing torch then; what it hangs at makes no difference.
    with Worker(tmp_path / "log", limit_seconds=0.2) as worker:
        with pytest.raises(WorkerError, match=r"no answer to build within 0\.2 s; --limit") as caught:
            worker.ask("build", job=Job.of(compose(overrides), "ours", {}).to_dict())
        assert caught.value.status == "failed"
        assert worker._process.wait(timeout=10) == -signal.SIGKILL


def test_a_failure_here_waits_for_no_peer(tmp_path):
    with pytest.raises(KeyboardInterrupt), Worker(tmp_path / "log") as worker:
        raise KeyboardInterrupt
    assert worker._process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_peer_finds_its_own_packages_and_variables_first(tmp_path, overrides):
    models = tmp_path / "own" / "fla" / "models"
    models.mkdir(parents=True)
    (tmp_path / "own" / "transformers.py").write_text("")
    (models.parent / "__init__.py").write_text("")
    (models / "__init__.py").write_text(
        "import os, torch\nfrom types import SimpleNamespace as GatedDeltaNetConfig\n"
        "class GatedDeltaNetForCausalLM(torch.nn.Module):\n"
        "    def __init__(self, config):\n        super().__init__()\n"
        "        assert os.environ['PEER'] == 'yes' and config.tie_word_embeddings and config.head_dim == 8\n"
        "        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)\n"
        "    def forward(self, input_ids, labels):\n"
        "        logits = self.table(input_ids)[:, :-1].flatten(0, 1)\n"
        "        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())\n"
        "        return GatedDeltaNetConfig(loss=loss)\n"
    )
    options = {"model": "GatedDeltaNet", "head_dim": 8}
    job = Job.of(compose(overrides), "fla", options).to_dict()
    with Worker(tmp_path / "log", paths=(str(tmp_path / "own"),), variables={"PEER": "yes"}) as worker:
        built = worker.ask("build", job=job)
        assert built["mixer"] == "GatedDeltaNet"
        assert len(worker.ask("losses", num_steps=3)["losses"]) == 3
        assert worker.ask("time", num_steps=2)["milliseconds"] > 0
    with Worker(tmp_path / "log", paths=(str(tmp_path / "own"),)) as worker:
        with pytest.raises(WorkerError, match="KeyError: 'PEER'") as caught:
            worker.ask("build", job=job)
        assert caught.value.status == "failed"


def request(tmp_path, overrides, **changes):
    usual = Request(
        overrides=overrides,
        cases=None,
        mixers=["flash"],
        places=Places(),
        repeats=2,
        seconds=0.01,
        first_step=False,
        agreement_steps=None,
        outputs=tmp_path / "peers",
        command="the command",
    )
    return replace(usual, **changes)


@pytest.mark.slow
def test_agreement_is_measured_drawn_and_stated(tmp_path, overrides):
    given = request(tmp_path, [*overrides, "train.precision=bfloat16"], agreement_steps=12)
    benchmark(replace(given, mixers=["softmax", "flash"]), compose)
    rows = read_csv(tmp_path / "peers" / "results.csv")
    # Softmax's reference is flash's too.
    told = {(row.identity.variant, row.measurement.settings["attn"]) for row in rows}
    assert told == {(path, mixer) for path in PATHS for mixer in ("softmax", "flash")}
    rows = [row for row in rows if row.measurement.settings["attn"] == "flash"]
    largest = values(rows, "largest_loss_difference")
    assert 0 < largest["fast"].value < 0.05
    assert 0 < largest["reference in float32"].value < 0.05
    assert {row.measurement.settings["step"] for row in rows if row.measurement.metric == "train_loss"} == {0, 10, 11}
    write_page(tmp_path / "peers", tmp_path / "page", title="Peers", with_figures=True)
    page = (tmp_path / "page" / "README.md").read_text()
    assert "| mixer | fast | at most | reference in float32 | at most |" in page
    figures = sorted(path.name for path in (tmp_path / "page" / "figures").glob("*.svg"))
    metrics, mixers = ("loss_difference", "train_loss"), ("flash", "softmax")
    assert figures == [f"agreement-{metric}-step-attn_{mixer}.svg" for metric in metrics for mixer in mixers]
    assert all(f"figures/{name})" in page for name in figures)


@pytest.mark.slow
def test_the_first_step_is_cold_and_then_warm(tmp_path, overrides):
    benchmark(request(tmp_path, overrides, first_step=True), compose)
    rows = read_csv(tmp_path / "peers" / "results.csv")
    found = {(row.measurement.settings["cache"], row.measurement.metric): row.measurement.value for row in rows}
    assert found.keys() == {
        (cache, name) for cache in ("cold", "warm") for name in ("start_seconds", "first_step_seconds")
    }
    assert all(found[cache, "start_seconds"] > found[cache, "first_step_seconds"] > 0 for cache in ("cold", "warm"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cases": ["flush-256"]}, "--cases flush-256: unknown; there is flash-256,"),
        ({"repeats": 0}, "--repeats 0: must be at least 1"),
        ({"seconds": 0.0}, "--seconds 0.0: must be above 0"),
        ({"places": Places(limit_seconds=0)}, "--limit 0: must be above 0"),
        ({"agreement_steps": 1}, "--agreement 1: must be at least 2"),
    ],
)
def test_what_cannot_be_asked_for(tmp_path, overrides, changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        benchmark(request(tmp_path, overrides, **changes), compose)


@pytest.mark.parametrize("name", CASES)
def test_a_case_composes_at_the_shape_of_its_peers(name):
    case = CASES[name]
    settings = compose([*case.overrides, "device=cpu"])
    assert settings.train.batch_size * settings.seq_len > 0
    for peer in case.peers:
        own = compose([*case.overrides, *peer.overrides, "device=cpu"])
        assert (own.model, own.seq_len, own.train) == (settings.model, settings.seq_len, settings.train)
        if "shape" in peer.options:
            assert peer.options["shape"][:2] == [settings.train.batch_size, settings.seq_len]
        if "head_dim" in peer.options:
            assert peer.options["head_dim"] == settings.model.head_width


@pytest.mark.gpu
def test_on_a_gpu_the_captured_step_counts_its_pools_and_trains_like_the_reference(tmp_path, overrides):
    answers = {}
    for path in ("fast", "reference"):
        settings = compose(["attn=softmax", *overrides, "device=cuda", *PATHS[path]])
        with Worker(tmp_path / "log") as worker:
            options = {"plain": path == "reference"}
            built = worker.ask("build", job=Job.of(settings, "ours", options).to_dict())
            losses = [built["loss"], *worker.ask("losses", num_steps=20)["losses"]]
            answers[path] = losses, worker.ask("memory")["peak_mib"]
    (fast, fast_mib), (reference, reference_mib) = answers["fast"], answers["reference"]
    assert 0 < reference_mib < fast_mib
    assert largest_difference(fast, reference) < 0.05
    assert len(set(fast)) == len(fast)


def test_the_clock_starts_when_the_compiler_s_own_parts_are_imported():
    parts = ("torch._dynamo.backends.inductor", "torch._inductor.codegen.cuda_combined_scheduling")
    script = (
        "import sys\nfrom benchmarks.peers.worker import _import_compiler\n_import_compiler()\n"
        f"sys.exit(not all(name in sys.modules for name in {(*parts, 'triton.compiler.code_generator')!r}))"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0
