"""Results carried from one machine to another: what is taken over, and what is refused whole."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from probe_settings import probe_settings

from attnbench.comparison import transfer
from attnbench.comparison.cells import Cell, execute
from attnbench.comparison.search import searches_of_probe
from attnbench.comparison.transfer import export_cells, import_cells
from attnbench.results.row_files import is_complete, read_results
from attnbench.settings.errors import UserError


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> list[Cell]:
    """Two finished cells of one experiment; tests only read them."""
    settings = probe_settings(tmp_path_factory.mktemp("outputs"), copy_learning_rates=[1e-2, 3e-2])
    [search] = searches_of_probe(settings, settings.evaluations[0])
    found = search.cells()
    for cell in found:
        execute(cell)
    return found


@pytest.fixture(scope="module")
def experiment(cells) -> Path:
    return cells[0].results[0].parents[3]


@pytest.fixture
def exported(experiment, tmp_path) -> Path:
    assert export_cells(experiment, tmp_path / "carried" / "rows.jsonl") == 2
    return tmp_path / "carried" / "rows.jsonl"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(experiment, tmp_path):
    with pytest.raises(UserError, match=f"^export={tmp_path}: Is a directory"):
        export_cells(experiment, tmp_path)


def test_rows_settings_and_environments_are_carried_and_nothing_else(cells, experiment, exported, tmp_path):
    assert import_cells(exported, tmp_path / "other") == 2
    taken, own = files(tmp_path / "other"), files(experiment)
    assert taken == {name: own[name] for name in taken}
    assert {Path(name).suffix for name in taken} == {".jsonl", ".json", ".yaml"}
    assert not any("checkpoint" in name or "metrics" in name for name in taken)
    for cell in cells:
        assert is_complete(tmp_path / "other" / cell.results[0].relative_to(experiment))


def test_what_is_complete_is_kept_and_what_was_cut_off_replaced(cells, experiment, exported, tmp_path):
    shutil.copytree(experiment, tmp_path / "here")
    first, second = (tmp_path / "here" / cell.results[0].relative_to(experiment) for cell in cells)
    second.write_text(second.read_text().splitlines()[0])
    before = first.stat().st_mtime_ns
    assert import_cells(exported, tmp_path / "here") == 1
    assert first.stat().st_mtime_ns == before
    assert read_results(second) == read_results(cells[1].results[0])
    assert import_cells(exported, tmp_path / "here") == 0


def test_what_was_cut_off_is_not_exported(cells, experiment, tmp_path):
    shutil.copytree(experiment, tmp_path / "here")
    path = tmp_path / "here" / cells[0].results[0].relative_to(experiment)
    path.write_text(path.read_text().splitlines()[0])
    assert export_cells(tmp_path / "here", tmp_path / "rows.jsonl") == 1
    with pytest.raises(UserError, match="no complete results"):
        export_cells(tmp_path / "nothing", tmp_path / "rows.jsonl")


LEGAL = "cells/copy-softmax-0123abcd/environment.json"


@pytest.mark.parametrize(
    "path",
    [
        "../x/environment.json",
        "cells/../environment.json",
        "cells/../../config.yaml",
        "../config.yaml",
        "./results/copy-0123abcd.jsonl",
        "/tmp/x/config.yaml",
        "//x/config.yaml",
        "cells/x/checkpoint/weights.safetensors",
        "cells/x/train.py",
        "cells/x/y/config.yaml",
        "cells/comparison.json",
        "cells/x\0/config.yaml",
        "cells/x\n/config.yaml",
        "cells/\ud800/config.yaml",
        f"cells/{'x' * 300}/config.yaml",
        "cells/x/environment.json/../config.yaml",
        3,
        None,
    ],
)
def test_a_path_that_is_no_cell_s_is_refused_and_nothing_written(path, exported, tmp_path):
    # In the middle, so that lines before it are in order.
    lines = exported.read_text().splitlines()
    lines.insert(2, json.dumps({"path": path, "text": "{}"}))
    refused(lines, tmp_path, r"rows\.jsonl:3: not a line that export= writes")


def refused(lines: list[str], tmp_path: Path, message: str, experiment: str = "outputs/other") -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(lines))
    before = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    with pytest.raises(UserError, match=message):
        import_cells(source, tmp_path / experiment)
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (LEGAL, "no json"),
        (LEGAL, "[1, 2]"),
        ("cells/x/config.yaml", "a: [1"),
        ("cells/x/config.yaml", "!!python/object/apply:os.system ['true']"),
        ("cells/x/config.yaml", "only text"),
        ("cells/x/results/copy-0123abcd.jsonl", "no json\n"),
        ("cells/x/results/copy-0123abcd.jsonl", '{"schema": 1, "complete": true, "num_rows": 0}\n'),
        ("cells/x/results/copy-0123abcd.jsonl", '{"schema": 1, "complete": true, "num_rows": 3}\n'),
        ("cells/x/results/copy-0123abcd.jsonl", ""),
    ],
)
def test_content_that_is_not_what_its_name_says_is_refused(path, text, exported, tmp_path):
    lines = [*exported.read_text().splitlines(), json.dumps({"path": path, "text": text})]
    refused(lines, tmp_path, "is not what its name says")


def test_rows_under_the_name_of_another_cell_are_refused(exported, tmp_path):
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    lines[-1]["path"] = lines[-1]["path"][: -len("01234567.jsonl")] + "01234567.jsonl"
    refused([json.dumps(line) for line in lines], tmp_path, "is not what its name says .rows of copy-")


def test_a_torn_an_altered_and_an_empty_file_are_refused(exported, tmp_path):
    lines = exported.read_text().splitlines()
    refused([*lines[:-1], lines[-1][:50]], tmp_path, "its last line is torn")
    refused([lines[0][:50], *lines[1:]], tmp_path, "not a JSON object")
    refused([], tmp_path, "is empty")
    refused(["{}"], tmp_path, "not a line that export= writes")
    with pytest.raises(UserError, match="cannot be read"):
        import_cells(tmp_path / "nothing.jsonl", tmp_path / "other")


def test_a_packed_file_has_the_same_cells_and_equal_bytes_each_time(experiment, exported, tmp_path):
    packed = [tmp_path / name for name in ("one.jsonl.gz", "two.jsonl.gz")]
    for path in packed:
        assert export_cells(experiment, path) == 2
    assert gzip.decompress(packed[0].read_bytes()) == exported.read_bytes()
    # Names differ; times, the header's bytes 4 to 7, would in another second.
    assert packed[0].read_bytes() == packed[1].read_bytes()
    assert packed[0].read_bytes()[4:8] == bytes(4)
    assert import_cells(packed[0], tmp_path / "packed") == 2
    assert import_cells(exported, tmp_path / "plain") == 2
    assert files(tmp_path / "packed") == files(tmp_path / "plain")


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (lambda content: gzip.decompress(content), "cannot be read .Not a gzipped file"),
        (lambda content: content[:-20], "cannot be read .Compressed file ended before"),
        (lambda content: content[:40] + bytes(20) + content[60:], "cannot be read .Error -3 while decompressing"),
        (lambda content: gzip.compress(bytes(2**19 + 1)), "longer than the 524288 bytes that such a file"),
    ],
)
def test_a_packed_file_that_is_none_or_unpacks_to_too_much_is_refused(
    damaged, message, experiment, tmp_path, monkeypatch
):
    path = tmp_path / "cells.jsonl.gz"
    export_cells(experiment, path)
    path.write_bytes(damaged(path.read_bytes()))
    monkeypatch.setattr(transfer, "MAX_CELLS_BYTES", 2**19)
    with pytest.raises(UserError, match=message):
        import_cells(path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_nothing_is_written_over_a_symbolic_link(depth, cells, experiment, exported, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    parts = cells[0].results[0].relative_to(experiment).parts[:depth]
    link = (tmp_path / "outputs" / "other").joinpath(*parts)
    link.parent.mkdir(parents=True)
    link.symlink_to(outside if depth < 4 else outside / "file")
    refused(exported.read_text().splitlines(), tmp_path, "is a symbolic link")
    assert not any(outside.iterdir())
