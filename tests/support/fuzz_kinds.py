"""What the fuzz feeds to attnbench, a class a kind: how an input is made, and who reads it.

An input is a list of bytes: one file's content, or one word of a command line each.
"""

import atexit
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st
from report_rows import write_experiment
from small import fresh_state, record

from attnbench.cli.compose import compose
from attnbench.cli.reading import stored_settings
from attnbench.comparison.imports import import_cells
from attnbench.comparison.program import ask_for
from attnbench.comparison.transfer import export_cells
from attnbench.data.texts import find_user_texts, read_text
from attnbench.model.stored import load_model
from attnbench.report.inputs import read_inputs
from attnbench.results.job import Job, measured_by
from attnbench.results.row_files import ResultsWriter, read_results
from attnbench.results.row_tables import read_csv, write_csv
from attnbench.results.rows import Identity, Measurement
from attnbench.settings.untrusted import parse_yaml
from attnbench.training import checkpoint
from attnbench.training.log import MetricsLog, read_metrics
from attnbench.verdict.seeds import figures
from attnbench.verdict.summary import summary, verdicts_of

JSON_WORDS = [
    *(b"null", b"true", b"[]", b"{}", b"-1", b"0", b"1e999", b"NaN", b'""', b'"x"', b"[", b"{", b'{"a":', b'"', b"\\"),
    *(b"1" * 400, b'"\\u0000"', b'"\\ud800"', b'"\\u001b[2J"', b'"../../x"', b'"/etc/passwd"', b"1.5", b"9" * 5000),
]
YAML_WORDS = [*JSON_WORDS, b"!!python/object/apply:os.system", b"&a ", b"*a", b"? ", b"2001-99-99", b"- ", b": ", b"|"]
FOLDER = "copy-softmax-01234567"
"""Folder of the cell that is imported."""

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
"""What a value of JSON may be that ought to be another."""


class Kind:
    """Inputs of one kind. Lives in one process; what it writes lies in a folder of its own."""

    structured: st.SearchStrategy[Any] | None = None
    """Draws one valid-looking input, for the half that is not mutated bytes."""

    def __init__(self) -> None:
        self.folder = Path(mkdtemp(prefix="attnbench-fuzz-"))
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        self.given: dict[Path, bytes] = {}
        """The files of the input being read, as they were given."""

    def originals(self) -> list[tuple[bytes, list[bytes]]]:
        """Valid contents, and words of their format."""
        raise NotImplementedError

    def read(self, content: bytes, original: int) -> None:
        """Gives a mutated content to its readers."""
        raise NotImplementedError

    def read_drawn(self, drawn: Any) -> None:
        """Gives what `structured` drew to its readers."""
        raise NotImplementedError

    def put(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.given[path] = content
        return path

    def mutate(self, draw: random.Random) -> tuple[bytes, int]:
        """A mutated original, and which one it was."""
        originals = self.kept
        index = draw.randrange(len(originals))
        return mutated(*originals[index], draw), index

    @cached_property
    def kept(self) -> list[tuple[bytes, list[bytes]]]:
        return self.originals()


class Texts(Kind):
    """.txt corpora."""

    structured = st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass"))

    def originals(self) -> list[tuple[bytes, list[bytes]]]:
        words = [b"\xff\xfe", b"\xed\xa0\x80", b"\x00", b"\xf4\x90\x80\x80", b"\n", b"\xe2\x80\xa8", b"\xef\xbb\xbf"]
        return [("Ein Satz, 中文, \N{GRINNING FACE}.\n".encode() * 40, words)]

    def read(self, content: bytes, original: int) -> None:
        from attnbench.data.corpus import load_corpus
        from attnbench.settings.schema import DataSettings

        path = self.put("corpus.txt", content)
        load_corpus(DataSettings(name="text", path=str(path)), 8, self.folder)

    def read_drawn(self, drawn: bytes) -> None:
        self.read(drawn, 0)


class Parquet(Kind):
    """Parquet and Arrow files, which C++ parses."""

    def originals(self) -> list[tuple[bytes, list[bytes]]]:
        rows = [f"line {number} of a text\n" for number in range(120)]
        words = [b"PAR1", b"text", b"ARROW:schema", b"\x15\x00", b"\x15\x80\x80\x80\x80\x08", b"\x19\xfc", b"\xff" * 8]
        made, table = [], pa.table({"text": rows, "number": list(range(120))})
        written: list[dict[str, Any]] = [{}, {"compression": "zstd"}, {"use_dictionary": False, "compression": "none"}]
        for options in written:
            path = self.folder / "original.parquet"
            pq.write_table(table, path, **options, row_group_size=50)
            made.append((path.read_bytes(), words))
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
        return [*made, (path.read_bytes(), words)]

    def read(self, content: bytes, original: int) -> None:
        if original == 3:
            str(read_text(self.put("corpus.arrow", content)))
        else:
            find_user_texts(self.put("corpus.parquet", content), 0.1, 0.1).read()


class Checkpoints(Kind):
    """Checkpoints whose checksums are right: who alters a file can alter these too."""

    FILES = ("weights.safetensors", "config.json", "state.json", "optimizer.safetensors")
    structured = st.tuples(
        st.sampled_from(["record", "mixers", "model", "options", "state"]), st.integers(0, 30), ANY_JSON
    )

    def originals(self) -> list[tuple[bytes, list[bytes]]]:
        checkpoint.save_step(self.folder / "original", fresh_state(), record())
        stored = self.folder / "original" / "step-00000000"
        words = [
            *JSON_WORDS,
            b'"F32"',
            b'"I64"',
            b"data_offsets",
            b"shape",
            b"__metadata__",
            b"attnbench.mixers.softmax",
        ]
        words += [b"os.system", b"attnbench.machine.processes.Worker", b"_target_", b"target"]
        return [((stored / name).read_bytes(), words) for name in self.FILES]

    def read(self, content: bytes, original: int) -> None:
        files = {name: valid for name, (valid, _) in zip(self.FILES, self.kept, strict=True)}
        files[self.FILES[original]] = content
        if original != self.FILES.index("state.json"):
            state = json.loads(files["state.json"])
            state["sha256"] = {
                name: hashlib.sha256(files[name]).hexdigest() for name in self.FILES if name != "state.json"
            }
            files["state.json"] = json.dumps(state).encode()
        folder = self.put(f"run/step-00000000/{self.FILES[original]}", content).parent
        for name, stored in files.items():
            self.put(f"run/step-00000000/{name}", stored)
        self._load(folder)

    def read_drawn(self, drawn: tuple[str, int, Any]) -> None:
        part, place, value = drawn
        content, state = asdict(record()), json.loads(self.kept[2][0])
        inside = {"record": content, "mixers": content["mixers"][0], "model": content["model"], "state": state}
        inside["options"] = content["mixers"][1]["options"]
        inside[part][sorted(inside[part])[place % len(inside[part])]] = value
        if part != "state":
            self.read(json.dumps(content).encode(), 1)
        else:
            self.read(json.dumps(state).encode(), 2)

    def _load(self, folder: Path) -> None:
        from attnbench.settings.errors import UserError

        for load in (load_model, lambda path: checkpoint.load_last(path.parent, fresh_state().model)):
            try:
                load(folder)
            except UserError as error:
                refusal = error
                continue
            refusal = None
        if refusal is not None:
            raise refusal


class CarriedJob(Job):
    """The job of a cell that is imported, as far as an import asks it."""

    def __init__(self, identity: Identity, config: dict[str, Any]) -> None:
        self.identity, self._config, self.evaluation, self.config_hash = identity, config, "copy", FOLDER[-8:]

    def rows(self) -> Iterator[Measurement]:
        raise NotImplementedError

    def columns(self) -> dict[str, Any]:
        return asdict(self.identity)

    def config(self) -> dict[str, Any]:
        return self._config


class Results(Kind):
    """Results files, results.csv, comparison.json, exported cells, a run's config.yaml and metrics.jsonl."""

    structured = st.tuples(st.integers(0, 3), st.integers(0, 40), ANY_JSON)

    def originals(self) -> list[tuple[bytes, list[bytes]]]:
        experiment, config = self.folder / "original", _run_config()
        first = next(write_experiment(self.folder / "made", seeds=1, evaluations=["copy"]).glob("cells/*/results/*"))
        rows = read_results(first)[:6]
        stamp = {"torch": "2", "device": "cpu", "commit": "abc", "dirty": False}
        rows = [
            replace(row, identity=replace(row.identity, run=FOLDER, config_hash=FOLDER[-8:], **measured_by(stamp)))
            for row in rows
        ]
        self.job = CarriedJob(rows[0].identity, parse_yaml(config))
        path = experiment / FOLDER / "results" / f"copy-{FOLDER[-8:]}.jsonl"
        path.parent.parent.mkdir(parents=True)
        with ResultsWriter(path, rows[0].identity) as writer:
            for row in rows:
                writer.write(row.measurement)
        jsonl = path.read_bytes()
        (experiment / FOLDER / "config.yaml").write_text(config)
        (experiment / FOLDER / "environment.json").write_text(json.dumps(stamp))
        (experiment / "comparison.json").write_text(json.dumps(COMPARISON))
        export_cells(experiment, self.folder / "cells.jsonl")
        write_csv(rows, self.folder / "original.csv")
        cells = (self.folder / "cells.jsonl").read_bytes()
        return [
            (jsonl, JSON_WORDS),
            ((self.folder / "original.csv").read_bytes(), [*JSON_WORDS, b",", b'"', b"\r", b"all", b"ok", b"\x00"]),
            (json.dumps(COMPARISON).encode(), JSON_WORDS),
            (cells, [*YAML_WORDS, FOLDER.encode(), b"../", b"/", b"cells/", b"\\n", b"comparison.json", b"%2e"]),
            (config.encode(), YAML_WORDS),
            (self._metrics(), [*JSON_WORDS, b"step"]),
        ]

    def _plan_in(self, outputs: Path) -> Any:
        """A plan of the one cell."""
        job = copy(self.job)
        job.folder = outputs / "little" / FOLDER
        return SimpleNamespace(
            folder=outputs / "little",
            carry_out=lambda driver, found: driver.run([ask_for([job])]),
            scores=[],
            timed=[],
            settings=None,
        )

    def _metrics(self) -> bytes:
        path = self.folder / "original.jsonl"
        log = MetricsLog(path, None)
        for step in (10, 20, 30):
            log.write({"step": step, "tokens": step * 256, "loss": 1 / step, "split": "train"})
        log.close()
        return path.read_bytes()

    def read(self, content: bytes, original: int) -> None:
        if original == 5:
            read_metrics(self.put("metrics.jsonl", content))
        elif original == 3:
            import_cells(self.put("cells.jsonl", content), Path(mkdtemp(dir=self.folder)), self._plan_in)
        elif original == 4:
            stored_settings(self.put("run/config.yaml", content).parent)
        elif original == 1:
            _report(self._experiment(content, "results.csv", read_csv))
        elif original == 0:
            _report(self._experiment(content, "one/results/a-0.jsonl", read_results))
        else:
            valid = self.kept[0][0]
            folder = self._experiment(valid, "one/results/a-0.jsonl", read_results)
            (folder / "comparison.json").write_bytes(content)
            _report(folder)

    def read_drawn(self, drawn: tuple[int, int, Any]) -> None:
        original, place, value = drawn
        if original == 1:
            lines = self.kept[0][0].splitlines()
            content = json.loads(lines[0])
            content["settings"][sorted(content["settings"])[0] if content["settings"] else "x"] = value
            self.read(b"\n".join([json.dumps(content).encode(), *lines[1:], b""]), 0)
        elif original in (0, 3):
            lines = self.kept[original][0].splitlines()
            content = json.loads(lines[0])
            content[sorted(content)[place % len(content)]] = value
            self.read(b"\n".join([json.dumps(content).encode(), *lines[1:], b""]), original)
        else:
            content = {**COMPARISON, sorted(COMPARISON)[place % len(COMPARISON)]: value}
            self.read(json.dumps(content).encode(), 2)

    def _experiment(self, content: bytes, name: str, read: Any) -> Path:
        folder = Path(mkdtemp(dir=self.folder))
        read(self.put(str((folder / name).relative_to(self.folder)), content))
        return folder


def _report(folder: Path) -> None:
    inputs = read_inputs(folder)
    summed = figures(inputs.rows)
    summary(summed, verdicts_of(summed, rank=inputs.protocol.rank, reference=inputs.protocol.reference))


class Overrides(Kind):
    """Words of a command line."""

    VALUES = (
        *("0", "-1", "1e999", "nan", "null", "true", "[]", "{}", "[1,2", "'", '"', "x" * 5000, "../../x", "/", "a/b"),
        *(
            "${x}",
            "${oc.env:HOME}",
            "${seq_len}",
            "${",
            "1e400",
            "9" * 400,
            "\x1b[2J",
            "\u202e",
            "\x00",
            "é",
            "",
            "1.5",
        ),
        *("os.system", "attnbench.mixers.softmax.Softmax", "{_target_:os.system}", "[softmax]", "softmax,linear", "64"),
    )
    structured = st.lists(
        st.tuples(
            st.sampled_from(["", "", "", "+", "++", "~", "@"]),
            st.sampled_from(
                [
                    *("attn", "model", "data", "train", "logger", "eval", "experiment", "seq_len", "seed", "device"),
                    *("match", "outputs_dir", "rerun", "attn._target_", "attn.backend", "attn.num_heads", "model.dim"),
                    *("model.head_width", "model.num_layers", "train.num_steps", "train.num_epochs", "train.precision"),
                    *("data.path", "data.vocabulary_size", "train.learning_rate", "train.batch_size", "train.compile"),
                    *("eval.copy._target_", "trusted", "model.name", "train", "hydra.run.dir", "x", "attn.x", "mixer"),
                ]
            )
            | st.text(max_size=8),
            st.sampled_from(VALUES) | st.text(max_size=12) | st.integers().map(str) | st.floats().map(str),
        ).map(lambda parts: f"{parts[0]}{parts[1]}={parts[2]}"),
        min_size=1,
        max_size=3,
    )

    def originals(self) -> list[tuple[bytes, list[bytes]]]:
        line = b"attn=gated_deltanet model=tiny train.num_steps=3 train.num_epochs=null seq_len=64 eval=[copy]"
        words = [value.encode() for value in self.VALUES]
        return [(line, [*words, b"=", b"+", b"~", b".", b",", b"attn=", b"eval=", b" ", b"[", b"{", b"$", b":", b"@"])]

    def read(self, content: bytes, original: int) -> None:
        compose(content.decode("utf-8", "surrogateescape").split(" "))

    def read_drawn(self, drawn: list[str]) -> None:
        compose(drawn)


COMPARISON = {
    "plan": "demo",
    "command": "attnbench compare plan=demo",
    "variants": ["softmax", "linear"],
    "rank": ["softmax", "linear"],
    "reference": None,
    "evaluations": {"copy": {"purpose": "repeats", "plots": [["accuracy", "length"]]}},
    "rates": [],
    "failures": [{"cell": "copy flash", "reason": "no GPU"}],
    "missing": ["recall linear"],
    "started": "2026-01-01T00:00:00+00:00",
    "seconds": 12,
}


def _run_config() -> str:
    settings = asdict(compose(["experiment=demo", "device=cpu"]))
    return yaml.safe_dump({**settings, "resolved": {"parameters": 1}}, sort_keys=False)


KINDS = {"texts": Texts, "parquet": Parquet, "checkpoints": Checkpoints, "results": Results, "overrides": Overrides}


NUMBERS = [bytes([value]) * width for value in (0x00, 0x7F, 0x80, 0xFF) for width in (1, 2, 4, 8)]
"""Wrong lengths and offsets."""


def mutated(original: bytes, words: Sequence[bytes], draw: random.Random) -> bytes:
    """One to eight changes of `original`: bits, bytes, runs, lengths, or `words` of the format in a wrong place."""
    content = bytearray(original)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 8))):
        draw.choice(CHANGES)(content, words, draw)
    return bytes(content)


def _place(content: bytearray, draw: random.Random) -> int:
    # Lengths and offsets stand at the ends of files, so these are hit more often than their share.
    size = len(content)
    head, tail = draw.randint(0, min(size, 64)), size - draw.randint(0, min(size, 512))
    return draw.choice((draw.randint(0, size), draw.randint(0, size), draw.randint(0, size), head, tail))


def _flip(content: bytearray, words: Sequence[bytes], draw: random.Random) -> None:
    if content:
        content[min(_place(content, draw), len(content) - 1)] ^= 1 << draw.randrange(8)


def _overwrite(content: bytearray, words: Sequence[bytes], draw: random.Random) -> None:
    start, put = _place(content, draw), draw.choice((*NUMBERS, draw.randbytes(draw.randint(1, 16))))
    content[start : start + len(put)] = put


def _insert(content: bytearray, words: Sequence[bytes], draw: random.Random) -> None:
    start = _place(content, draw)
    content[start:start] = draw.choice((draw.choice(words), draw.choice(words) * draw.choice((2, 5000)), b"\n"))


def _replace(content: bytearray, words: Sequence[bytes], draw: random.Random) -> None:
    """Takes out one word where it stands and puts another there."""
    there = [word for word in words if word and word in content]
    if there:
        word = draw.choice(there)
        start = content.find(word, draw.randrange(len(content)))
        start = content.find(word) if start < 0 else start
        content[start : start + len(word)] = draw.choice(words)


def _delete(content: bytearray, words: Sequence[bytes], draw: random.Random) -> None:
    start = _place(content, draw)
    del content[start : start + draw.choice((1, 4, 64, 1024))]


def _repeat(content: bytearray, words: Sequence[bytes], draw: random.Random) -> None:
    start = _place(content, draw)
    part = content[start : start + draw.choice((4, 64, 1024))]
    target = _place(content, draw)
    content[target:target] = part


def _truncate(content: bytearray, words: Sequence[bytes], draw: random.Random) -> None:
    del content[_place(content, draw) :]


CHANGES: list[Callable[[bytearray, Sequence[bytes], random.Random], None]] = [
    *(_flip, _overwrite, _insert, _replace, _replace, _delete, _repeat, _truncate),
]
