"""What a stranger may hand over, and what must not come of it; docs/reliability.md names these tests."""

import ast
import gzip
import io
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from report_rows import write_experiment
from scripts_here import run_here
from small import TINY_RUN, fresh_state, identity_of, python_path, record, rewrite_checkpoint
from sources import imports_of

from attnbench.cli.compose import compose
from attnbench.cli.generation import read_prompt
from attnbench.cli.reading import stored_settings
from attnbench.comparison import transfer
from attnbench.comparison.transfer import read_cells
from attnbench.data import texts as corpora
from attnbench.data.texts import read_text
from attnbench.mixers.base import Mixer
from attnbench.model import stored as model_files
from attnbench.model.stored import load_model, load_record
from attnbench.report.inputs import read_inputs
from attnbench.results import files as jsonlines
from attnbench.results.files import MAX_LINE_BYTES, MAX_LINES, replace_file
from attnbench.results.folder import recording, write_config
from attnbench.results.row_files import ResultsWriter, read_results
from attnbench.results.row_tables import MAX_ROWS, read_csv
from attnbench.results.rows import COLUMNS
from attnbench.results.tables import read_folders
from attnbench.settings.errors import UserError
from attnbench.settings.escape import OneLine, markdown_text, printable
from attnbench.settings.registry import resolve
from attnbench.settings.schema import GenerationSettings
from attnbench.settings.untrusted import MAX_JSON_BYTES, MAX_YAML_BYTES, parse_json, parse_yaml, read_object
from attnbench.training import checkpoint
from attnbench.training.log import MetricsLog, read_metrics, stream_metrics

SENTINEL = "sentinel-0123456789abcdef0123456789abcdef"
KEYS = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "OPENAI_API_KEY")
CLIMBING = ["..", "../x", "/tmp/x", "a/../../b", "x\x00", "n" * 300, ".", "a\nb", "\x1b[2J"]


def test_nothing_unpickles(root):
    """Our own processes talk through multiprocessing, whose pipes do; no file and no stranger reaches these."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    calls = {"load", "unsafe_load", "full_load", "load_all", "instantiate", "read_pickle", "eval", "exec"}
    torch_calls = {"torch.load", "torch.save", "torch.jit.load", "torch.package"}
    for path in [*(root / "attnbench").rglob("*.py"), *(root / "scripts").glob("*.py")]:
        assert not forbidden & {found.name.partition(".")[0] for found in imports_of(path, root)}, path
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            assert not any(word.arg in ("allow_pickle", "weights_only") for word in node.keywords), path
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name not in calls | {"save", "package"}:
                continue
            called = ast.unparse(node.func)
            is_known = called in ("OmegaConf.load", "tl.load", "cpp_extension.load") or called.endswith(".eval")
            assert called not in torch_calls, path
            assert name not in calls or is_known, f"{path}: {called}"


class MakesAFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("option", ["--experimental-rerun", "--experimental-r", "--e"])
@pytest.mark.parametrize("as_one_word", [True, False])
def test_hydra_s_own_rerun_which_unpickles_is_refused(option, as_one_word, tmp_path):
    stored = tmp_path / "config.pickle"
    stored.write_bytes(pickle.dumps(MakesAFolder(tmp_path / "made")))
    words = [f"{option}={stored}"] if as_one_word else [option, str(stored)]
    code, _, errors = run_here("train.py", "attn=linear", *words)
    assert code == 1
    assert "--experimental-rerun runs whatever its file holds" in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "target",
    [
        *("os.system", "builtins.eval", "subprocess.Popen", "torch.nn.Linear", "attnbench.machine.processes.Outcome"),
        *("attnbench.model.language_model.Block", "attnbench.model.language_model.nn.Linear", "attnbench.", "", "."),
        *("attnbench..mixers", "attnbench.mixers.softmax.os", "attnbench.nowhere.X", "attnbench.\x00.x"),
    ],
)
def test_a_target_outside_the_registry_is_refused_in_a_checkpoint_too(target, tmp_path):
    with pytest.raises(UserError, match="_target_"):
        resolve(target, Mixer)
    stored = saved(tmp_path)
    content = json.loads((stored / "config.json").read_text())
    content["mixers"][0]["target"] = target
    rewrite_checkpoint(stored, "config.json", json.dumps(content).encode())
    with pytest.raises(UserError, match="_target_"):
        load_model(stored)


def saved(folder: Path) -> Path:
    checkpoint.save_step(folder, fresh_state(), record())
    return folder / "step-00000000"


def test_a_header_that_claims_gigabytes_is_refused_before_it_is_read(tmp_path):
    stored = saved(tmp_path)
    rewrite_checkpoint(stored, "weights.safetensors", (2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(UserError, match=r"not a readable checkpoint .*header too large"):
        load_model(stored)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors"])
def test_a_file_that_is_larger_than_the_model_needs_is_not_read(tmp_path, monkeypatch, name):
    stored = saved(tmp_path)
    with (stored / name).open("r+b") as file:
        file.truncate(20 * 2**30)
    hashed = model_files._sha256
    monkeypatch.setattr(model_files, "_sha256", lambda path: pytest.fail(name) if path.name == name else hashed(path))
    for load in (lambda: load_model(stored), lambda: checkpoint.load_last(tmp_path, fresh_state().model)):
        with pytest.raises(
            UserError, match=rf"{name}: 21,474,836,480 bytes, and the model of its record needs at most"
        ):
            load()


def test_a_record_of_a_larger_model_takes_no_memory(tmp_path, monkeypatch):
    stored = saved(tmp_path)
    content = json.loads((stored / "config.json").read_text())
    content["vocabulary_size"] = 2**24
    rewrite_checkpoint(stored, "config.json", json.dumps(content).encode())
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(UserError, match="its tensors are not those of the model"):
        load_model(stored)


@pytest.mark.parametrize(("name", "value"), [("step", "x"), ("step", -1), ("best_nats", [1]), ("seconds", None)])
def test_counters_of_another_type_are_refused(name, value, tmp_path):
    stored = saved(tmp_path)
    state = json.loads((stored / "state.json").read_text())
    (stored / "state.json").write_text(json.dumps({**state, name: value}))
    with pytest.raises(UserError, match=r"state\.json"):
        checkpoint.load_last(tmp_path, fresh_state().model)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/passwd", "x\x00", "n" * 300, "train.log"])
def test_names_in_state_json_are_those_of_a_checkpoint(name, tmp_path):
    stored = saved(tmp_path)
    state = json.loads((stored / "state.json").read_text())
    state["sha256"][name] = "0" * 64
    (stored / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"state\.json: has checksums of files that do not belong"):
        load_model(stored)


@pytest.mark.parametrize("vocabulary", [["ab", "c"], ["", "a"], [["a"]], [1, 2], "abc", {"a": 1}, ["a"] * 5000])
def test_a_record_s_vocabulary_is_single_characters(vocabulary, tmp_path):
    stored = saved(tmp_path)
    content = json.loads((stored / "config.json").read_text())
    content["vocabulary"] = vocabulary
    rewrite_checkpoint(stored, "config.json", json.dumps(content).encode())
    with pytest.raises(UserError, match=r"config\.json: not a record of a model"):
        load_record(stored)


@pytest.mark.parametrize(("num_bytes", "num_rows"), [(100_000, 20_000), (2**20, 1024), (2**26, 3)])
def test_a_small_file_that_stands_for_much_text_is_refused_before_it_is_decoded(
    tmp_path, monkeypatch, num_bytes, num_rows
):
    column = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), pa.array(["x" * num_bytes]))
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"text": column}), path, store_schema=False, compression="zstd", write_statistics=False)
    assert path.stat().st_size < 10_000
    limit = num_bytes * num_rows // 4
    monkeypatch.setattr(corpora, "MAX_TEXT_BYTES", limit)
    usual, counting = pa.default_memory_pool(), pa.proxy_memory_pool(pa.system_memory_pool())
    pa.set_memory_pool(counting)
    try:
        with pytest.raises(UserError, match=rf"bomb\.parquet: holds more than {limit} bytes"):
            str(read_text(path))
    finally:
        pa.set_memory_pool(usual)
    # The value itself, decompressed and as a dictionary, but no row of it.
    assert 0 < counting.max_memory() < 4 * num_bytes + 2**22


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "NaN", "[1e999]", "9" * 400, "-Infinity"])
def test_json_is_bounded(text):
    with pytest.raises(ValueError, match=r"deep|finite|digits"):
        parse_json(text)


@pytest.mark.parametrize("content", [b" " * (MAX_JSON_BYTES + 1), b"{}\n" * (MAX_LINES + 1)])
def test_a_file_of_json_lines_is_bounded_before_it_is_parsed(content, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "MAX_CELLS_BYTES", MAX_JSON_BYTES)
    (tmp_path / "rows.jsonl").write_bytes(content)
    for read in (read_results, read_cells):
        with pytest.raises(UserError, match=r"rows\.jsonl: (longer|more) than"):
            read(tmp_path / "rows.jsonl")


def test_a_small_table_that_unpacks_to_many_rows_is_refused_within_its_size(tmp_path):
    path, line = tmp_path / "results.csv.gz", b"," * (len(COLUMNS) - 1) + b"\n"
    header = ",".join(COLUMNS).encode() + b"\n"
    path.write_bytes(gzip.compress(header + line * 200_000))
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"results\.csv\.gz: row 2:"):
            read_csv(path)
        assert tracemalloc.get_traced_memory()[1] < 2**27
    finally:
        tracemalloc.stop()
    path.write_bytes(gzip.compress(header + line * (MAX_ROWS + 1)))
    with pytest.raises(UserError, match=r"more than the 262144 rows"):
        read_csv(path)


def test_a_line_of_metrics_is_bounded_and_their_number_is_not(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, None)
    for step in range(100):
        log.write({"step": step, "loss": 1.5})
    log.close()
    # Of 64 MiB a run of our own has more than enough time to write: it is read a line at a time.
    monkeypatch.setattr(jsonlines, "MAX_JSON_BYTES", 1000)
    monkeypatch.setattr(jsonlines, "MAX_LINES", 10)
    assert MetricsLog(path, 98).num_rows == 99
    assert [row["step"] for row in stream_metrics(path)] == list(range(99))
    path.write_bytes(b" " * (MAX_LINE_BYTES + 1))
    with pytest.raises(UserError, match=r"metrics\.jsonl:1: longer than"):
        read_metrics(path)


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system [id]", "[" * 2**18, "a: 2001-99-99", "? {[]: 1}"])
def test_yaml_is_data(text):
    with pytest.raises(ValueError, match=r"constructor|deep|month|hash|parsing|expected"):
        parse_yaml(text)


def test_an_alias_which_makes_gigabytes_of_a_few_bytes_is_refused(tmp_path):
    levels = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 9)]
    bomb = "\n".join(["a0: &a0 [x]", *levels])
    with pytest.raises(ValueError, match=r"\*a0: an alias"):
        parse_yaml(bomb)
    (tmp_path / "config.yaml").write_text(bomb)
    with pytest.raises(UserError, match="an alias"):
        stored_settings(tmp_path)


READERS = {
    "text.txt": lambda path: str(read_text(path)),
    "text.parquet": lambda path: str(read_text(path)),
    "cells.jsonl": read_cells,
    "cells.jsonl.gz": read_cells,
    "results/rows.jsonl": read_results,
    "metrics.jsonl": read_metrics,
    "results.csv": read_csv,
    "cells.txt": lambda path: read_folders([path.parent]),
    "comparison.json": lambda path: read_inputs(path.parent),
    "environment.json": read_object,
    "prompt.txt": lambda path: read_prompt(compose_generation(path)),
    "config.yaml": lambda path: stored_settings(path.parent),
    **{
        f"checkpoint/final/{name}": lambda path: load_model(path.parent)
        for name in ("state.json", "config.json", "weights.safetensors")
    },
    "checkpoint/step-00000000/optimizer.safetensors": lambda path: checkpoint.load_last(
        path.parents[1], fresh_state().model
    ),
}


def compose_generation(prompt: Path) -> GenerationSettings:
    return GenerationSettings(
        run="", checkpoint="final", prompt=None, prompt_file=str(prompt), num_tokens=1, num_samples=1,
        temperature=0.0, top_k=None, seed=0, backend=None, device="cpu",
    )  # fmt: skip


@pytest.fixture
def within_seconds():
    """What waits for ever, for somebody to write into a FIFO say, fails."""

    def hangs(number, frame):
        pytest.fail("hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "device"])
def test_what_is_no_regular_file_is_refused(name, make, tmp_path, within_seconds):
    path = tmp_path / name
    if name.startswith("checkpoint"):
        checkpoint.save_step(path.parents[1], fresh_state(), record())
        (path.parents[1] / "step-00000000").rename(path.parent)
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    with pytest.raises(UserError, match="not a regular file") as caught:
        READERS[name](path)
    assert path.name in str(caught.value)


def test_a_fifo_where_a_run_writes_is_replaced(tmp_path, within_seconds):
    for name in ("rows.jsonl", "train.log", "metrics.jsonl", "config.yaml"):
        os.mkfifo(tmp_path / name)
    ResultsWriter(tmp_path / "rows.jsonl", identity_of()).complete()
    MetricsLog(tmp_path / "metrics.jsonl", None).close()
    write_config(tmp_path, {"a": 1})
    with recording(tmp_path, waits=False):
        pass
    assert not [path for path in tmp_path.iterdir() if path.is_fifo()]


@pytest.mark.parametrize("part", ["variants", "rates"])
def test_a_record_of_a_hundred_thousand_is_refused(part, tmp_path, within_seconds):
    path = write_experiment(tmp_path, seeds=1, evaluations=["copy"]) / "comparison.json"
    content = json.loads(path.read_text())
    if part == "variants":
        content["variants"] += [f"v{number}" for number in range(100_000)]
    else:
        content["rates"][0]["grid"] = [float(number) for number in range(100_000)]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="a report shows at most 256"):
        read_inputs(tmp_path)


def test_a_long_config_is_refused_before_it_is_parsed(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 1\n" * MAX_YAML_BYTES)
    with pytest.raises(UserError, match="longer than"):
        stored_settings(tmp_path)


@pytest.mark.parametrize("name", CLIMBING)
def test_a_name_that_climbs_out_is_refused(name, tmp_path):
    with pytest.raises(UserError) as caught:
        compose([f"model.name={json.dumps(name)}", "data=embedded"])
    assert str(caught.value).isprintable()
    settings = compose(["data=embedded"])
    content = {**asdict(settings), "resolved": {}}
    del content["rerun"]
    content["mixer"]["name"] = name
    write_config(tmp_path, content)
    with pytest.raises(UserError, match="attn="):
        stored_settings(tmp_path)


@pytest.mark.parametrize("line", ["../elsewhere", "/etc", "cells/../../x"])
def test_cells_outside_of_the_experiment_are_refused(line, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "cells.txt").write_text(f"{line}\n")
    with pytest.raises(UserError, match="outside"):
        read_folders([tmp_path / "run"])


def test_a_symbolic_link_is_replaced_and_not_written_through(tmp_path):
    other, run = tmp_path / "other", tmp_path / "run"
    other.write_text("mine")
    run.mkdir()
    names = ["config.yaml", "train.log", "failed.txt", "rows.jsonl", "table.csv", f".table.csv.{os.getpid()}.new"]
    for name in names:
        (run / name).symlink_to(other)
    write_config(run, {"a": 1})
    ResultsWriter(run / "rows.jsonl", identity_of()).complete()
    replace_file(run / "table.csv", "x")
    with pytest.raises(UserError), recording(run, waits=False):
        raise UserError("no")
    assert other.read_text() == "mine"
    assert not any((run / name).is_symlink() for name in names)


def test_errors_and_log_lines_are_one_printable_line():
    hostile = "\x1b]0;title\x07 a\nb \u202e \x9b2J " + "x" * 5000
    assert str(UserError(hostile)).isprintable()
    assert len(str(UserError(hostile))) <= 2000
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLine("%(message)s"))
    handler.emit(logging.LogRecord("attnbench", logging.INFO, "", 0, "evaluating %s", (hostile,), None))
    assert stream.getvalue().removesuffix("\n").isprintable()


def test_what_a_terminal_would_obey_leaves_a_report_s_files_spelled_out(tmp_path):
    character = "\x07\x00\x1b[2J\uffff\ud800\u202e"
    for path in write_experiment(tmp_path, seeds=1, evaluations=["copy"], record=False).rglob("rows.jsonl"):
        rows = read_results(path)
        if rows[0].identity.variant == "linear":
            with ResultsWriter(path, replace(rows[0].identity, variant=f"a{character}b")) as writer:
                for row in rows:
                    writer.write(replace(row.measurement, unit=f"u{character}", reason=f"r{character}"))
    # The plotting library ends this process where such a character reaches it.
    code, _, errors = run_here("report.py", str(tmp_path))
    assert code == 0, errors
    made = [path for path in (tmp_path / "report").rglob("*") if path.suffix in (".csv", ".html", ".svg")]
    assert len(made) > 2
    for path in made:
        text = path.read_text(encoding="utf-8")
        assert f"a{printable(character)}b" in text, path
        assert not set(character.replace("[2J", "")) & set(text), path


def test_a_cell_of_a_page_holds_no_html_and_no_link():
    hostile = "<script>x</script> [a](javascript:x) | \x1b[2J\n# heading"
    shown = markdown_text(hostile)
    assert "<" not in shown
    assert "](" not in shown
    assert shown.isprintable()
    assert shown.count("|") == shown.count("\\|")


def test_a_configuration_reads_no_environment_variable(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SENTINEL)
    with pytest.raises(UserError, match="environment") as caught:
        compose(["logger.project=${oc.env:HF_TOKEN}", "data=embedded"])
    assert SENTINEL not in str(caught.value)


@pytest.mark.slow
def test_keys_of_the_environment_are_in_nothing_that_a_run_leaves(root, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("a line of a text\n" * 200)
    words = [*TINY_RUN, f"data.path={tmp_path / 'text.txt'}", f"outputs_dir={tmp_path / 'outputs'}", "device=cpu"]
    environment = {**python_path(root), **dict.fromkeys(KEYS, SENTINEL), "HOME": str(tmp_path)}
    command = [sys.executable, root / "scripts" / "train.py", *words, "logger=offline"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in KEYS:
        monkeypatch.setenv(name, SENTINEL)
    code, *said = run_here("report.py", str(tmp_path / "outputs" / "default"))
    assert code == 0, said
    assert SENTINEL not in "".join([done.stdout, done.stderr, *said])
    left = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"config.yaml", "environment.json", "train.log", "index.html"} <= {path.name for path in left}
    [mirrored] = [content for path, content in left.items() if path.suffix == ".wandb"]
    assert (tmp_path / "wandb").is_dir(), "it lies beside outputs_dir"
    # Its records are not packed: what it was given can be read there.
    assert b"learning_rate" in mirrored
    assert not [path for path, content in left.items() if SENTINEL.encode() in content]


@pytest.mark.parametrize("word", ["+=", "=1", "++train.learning_rate=" + "9" * 400, "x" * 100_000])
def test_a_word_that_is_no_setting_is_refused_at_once(word):
    with pytest.raises(UserError, match=r"names no setting|must be finite|longer than"):
        compose(["data=embedded", word])
