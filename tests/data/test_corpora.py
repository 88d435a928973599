"""Files of text: what is read from them, and every kind of bad input with its message."""

import io
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora_on_disk import LINES, ROOT, from_path, write_parquet, write_splits

from attnbench.data import pieces
from attnbench.data import texts as corpora
from attnbench.data.corpus import load_corpus
from attnbench.data.pieces import Text, read_utf8, walk
from attnbench.data.texts import cut, find_embedded, read_text
from attnbench.settings.errors import UserError
from attnbench.settings.schema import DataSettings


def text_of(text: str) -> Text:
    size = pieces.PIECE_BYTES
    return Text(lambda: (text[start : start + size].encode() for start in range(0, len(text), size)))


def test_blank_rows_go_and_the_others_are_joined_by_a_line_end(tmp_path):
    rows = ["", " = Title = \n", "", " A sentence . \n", "  \n"]
    assert str(read_text(write_parquet(tmp_path / "a.parquet", rows))) == " = Title = \n\n A sentence . \n"
    large = pa.array(rows, pa.large_string())
    assert str(read_text(write_parquet(tmp_path / "b.parquet", large))) == " = Title = \n\n A sentence . \n"


def test_an_interpreter_without_its_topics_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match=r"Python 3\..* lacks its module pydoc_data.topics"):
        find_embedded(tmp_path, 0.05, 0.05)


def test_embedded_prose_is_written_once_as_parquet_and_read_from_there(tmp_path):
    first = str(find_embedded(tmp_path, 0.05, 0.05).read().splits["train"])
    (path,) = (tmp_path / "data" / "embedded").iterdir()
    assert pq.read_schema(path).names == ["text"]
    write_parquet(path, ["another line\n"] * 50)
    assert find_embedded(tmp_path, 0.05, 0.05).read().splits["train"].size.num_bytes < 1000
    path.unlink()
    assert str(find_embedded(tmp_path, 0.05, 0.05).read().splits["train"]) == first


@pytest.mark.parametrize("fractions", [(0.05, 0.05), (0.2, 0.3)])
def test_no_128_characters_of_validation_or_test_stand_in_train(tmp_path, fractions):
    splits = {split: str(text) for split, text in find_embedded(tmp_path, *fractions).read().splits.items()}
    windows = {split: {text[start : start + 128] for start in range(len(text) - 127)} for split, text in splits.items()}
    # Nothing within a split stands twice either, so that another cut finds none.
    assert {split: len(text) - 127 - len(windows[split]) for split, text in splits.items()} == dict.fromkeys(splits, 0)
    for split in ("validation", "test"):
        assert len(splits[split]) > 10_000
        assert windows[split].isdisjoint(windows["train"]), split
    assert windows["test"].isdisjoint(windows["validation"])


def test_a_data_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "data").write_text("in the way")
    with pytest.raises(UserError, match=r"data/embedded/distinct-python-3\..*cannot be written"):
        find_embedded(tmp_path, 0.05, 0.05)


def test_a_cut_moves_to_the_start_of_its_line_and_inside_a_line_without_end():
    splits = cut(text_of("aaaa\nbbbb\ncccc\ndddd\n"), 0.25, 0.3)
    assert [*map(str, splits.values())] == ["aaaa\n", "bbbb\n", "cccc\ndddd\n"]
    assert [*splits] == ["train", "validation", "test"]
    assert [text.size.num_characters for text in cut(text_of("x" * 100), 0.1, 0.2).values()] == [70, 10, 20]
    assert [*map(str, cut(text_of("aaaa\nbbbb\ncc"), 0.4, 0).values())] == ["aaaa\n", "bbbb\ncc", ""]
    with pytest.raises(UserError, match="leave nothing to train on"):
        cut(text_of("x" * 100), 0.5, 0.5)


@pytest.mark.parametrize("kept", [0, 2**26])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_a_text_in_pieces_is_the_text(size, kept, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", size)
    monkeypatch.setattr(pieces, "KEPT_BYTES", kept)
    whole = "aé\n\u4e2d\U0001f600b\n\ncc\n"
    for text in (text_of(whole), Text(lambda: read_utf8(io.BytesIO(whole.encode())))):
        for _ in range(2):
            assert str(text) == whole
        assert text.size == (len(whole.encode()), len(whole))
        for first in range(len(whole) + 1):
            for last in range(first, len(whole) + 1):
                start, stop = (len(whole[:index].encode()) for index in (first, last))
                assert str(text.part(start, stop)) == whole[first:last]
                lines = text.line_starts([first, last])
                expected = whole.rfind("\n", 0, first) + 1 or first
                behind = whole.rfind("\n", expected, last) + 1 or last
                assert lines == [len(whole[:index].encode()) for index in (expected, behind)]
                parts = {"a": text.part(0, start), "b": text.part(start, stop), "c": text.part(stop, 99)}
                walked = {name: b"".join(piece for other, piece in walk(parts) if other == name) for name in parts}
                assert [part.decode() for part in walked.values()] == [whole[:first], whole[first:last], whole[last:]]
    # A byte order mark is none of the text, at its start alone; an error still counts from the file's start.
    marked = io.BytesIO(f"\ufeff{whole}\ufeff".encode())
    assert b"".join(read_utf8(marked)).decode() == f"{whole}\ufeff"
    for broken, start in (
        (b"\xef\xbb\xbfab\xff", 5),
        (b"ab\xe4\xb8c", 2),
        (b"abc\xe4\xb8", 3),
        (b"\x80", 0),
        (b"a\xf0\x9f\x98\x80\xff", 5),
    ):
        with pytest.raises(UnicodeDecodeError) as caught:
            b"".join(read_utf8(io.BytesIO(broken)))
        assert caught.value.start == start


def test_shards_are_joined_in_order(tmp_path):
    write_splits(tmp_path)
    (tmp_path / "train-00000-of-00001.parquet").unlink()
    write_parquet(tmp_path / "train-00001-of-00002.parquet", ["second\n"])
    with pytest.raises(UserError, match="has 1 of the 2 files of the train split"):
        from_path(tmp_path, "wikitext2")
    write_parquet(tmp_path / "train-00000-of-00002.parquet", ["first\n"])
    corpus = from_path(tmp_path, "wikitext2")
    assert corpus.decode(corpus.tokens["train"]) == "first\n\nsecond\n"
    assert corpus.name == f"parquet:{tmp_path.name}"


def bad_parquet(tmp_path: Path, kind: str) -> Path:
    path = write_parquet(tmp_path / "bad.parquet", LINES)
    match kind:
        case "not parquet":
            path.write_text("<html>404</html>")
        case "no bytes":
            path.write_bytes(b"")
        case "cut off":
            path.write_bytes(path.read_bytes()[:-100])
        case "cut in the middle":
            whole = path.read_bytes()
            path.write_bytes(whole[:50] + whole[200:])
        case "other column":
            write_parquet(path, LINES, column="sentence")
        case "numbers":
            write_parquet(path, pa.array([1, 2]))
        case "nulls":
            write_parquet(path, pa.array(["a", None, None]))
        case "no rows":
            write_parquet(path, pa.array([], pa.string()))
        case "blank rows":
            write_parquet(path, ["", " \n"])
        case "not UTF-8":
            binary = pa.array([b"ab\xff"])
            write_parquet(path, pa.Array.from_buffers(pa.string(), 1, binary.buffers()))
        case "folder":
            path.unlink()
            path.mkdir()
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("not parquet", "cut off or not .parquet"),
        ("no bytes", "cut off or not .parquet"),
        ("cut off", "cut off or not .parquet"),
        ("cut in the middle", "cut off or not .parquet"),
        ("other column", "has no column 'text' .its columns: sentence."),
        ("numbers", "column 'text' holds int64, must hold strings"),
        ("nulls", "column 'text' has 2 nulls"),
        ("no rows", "holds no text"),
        ("blank rows", "holds no text"),
        ("not UTF-8", "not valid UTF-8 .invalid start byte at byte 2."),
        ("folder", "is a folder where a file is expected"),
    ],
)
def test_a_bad_parquet_file_is_named_in_one_line(tmp_path, kind, message):
    path = bad_parquet(tmp_path, kind)
    with pytest.raises(UserError, match=message) as caught:
        str(read_text(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_long_row_is_cut_into_pieces_and_stays_the_text(tmp_path, monkeypatch):
    rows = ["\ufeffone", "ä" * 40, " " * 90, "two", "\u3000" * 30, "x" * 100, ""]
    expected = "\n".join(row for row in rows if row and not row.isspace())
    for size in (1, 3, 16, 1000):
        monkeypatch.setattr(pieces, "PIECE_BYTES", size)
        monkeypatch.setattr(corpora, "PIECE_BYTES", size)
        for column in (pa.array(rows), pa.array(rows).dictionary_encode()):
            found = list(corpora.text_of("rows", [pa.record_batch({"text": column})]))
            assert b"".join(found).decode() == expected
            assert max(map(len, found)) < size + 5 + max(map(len, ["two", "\ufeffone"]))


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_delta_encodings_of_parquet_are_read(tmp_path, encoding):
    table = pa.table({"text": [*LINES, "", " \n", "last"]})
    for name, written in (("plain", {}), ("delta", {"use_dictionary": False, "column_encoding": {"text": encoding}})):
        pq.write_table(table, tmp_path / f"{name}.parquet", **written)
    assert str(read_text(tmp_path / "delta.parquet")) == str(read_text(tmp_path / "plain.parquet"))


def test_a_damaged_arrow_file_does_not_end_the_process(tmp_path):
    path = tmp_path / "wikitext-train.arrow"
    offsets = pa.py_buffer(np.array([0, 2**30, 5], dtype=np.int32).tobytes())
    damaged = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"short")])
    batch = pa.record_batch({"text": damaged})
    with pa.ipc.new_stream(path, batch.schema) as stream:
        stream.write_batch(batch)
    with pytest.raises(UserError, match=r"wikitext-train\.arrow: cannot be read, cut off or not \.arrow"):
        str(read_text(path))


def test_a_bad_text_file_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9\n" * 100)
    with pytest.raises(UserError, match=r"a\.txt: not valid UTF-8 \(invalid continuation byte at byte 3\)"):
        from_path(path)
    path.write_text(" \n")
    with pytest.raises(UserError, match=r"a\.txt: holds no text"):
        from_path(path)
    path.write_text("abc\n" * 20)
    with pytest.raises(UserError, match="its validation split has 4 characters and seq_len=8 needs 9"):
        from_path(path)
    # As many characters as a sequence: the target of the last one is missing.
    path.write_text("abc\n" * 40)
    with pytest.raises(UserError, match="its validation split has 8 characters and seq_len=8 needs 9"):
        from_path(path)
    with pytest.raises(UserError, match=r"must end in .txt"):
        from_path(path.rename(tmp_path / "a.csv"))


def test_a_file_without_permission_is_named(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        # A chmod would not stop root.
        raise PermissionError(13, "Permission denied")

    parquet, text = write_parquet(tmp_path / "a.parquet", LINES), tmp_path / "a.txt"
    text.write_text("abc")
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "iterdir", refuse)
    for path in (parquet, text, tmp_path):
        with pytest.raises(UserError, match=f"{path}: permission denied"):
            from_path(path)


def test_paths_that_lead_nowhere_are_named(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        from_path(tmp_path / "nowhere")
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        from_path(tmp_path / "nowhere", "wikitext2")
    with pytest.raises(UserError, match=r"has no train\.parquet"):
        from_path(tmp_path, "wikitext2")
    with pytest.raises(UserError, match=r"has no \.txt and no \.parquet file"):
        from_path(tmp_path)
    file = write_parquet(tmp_path / "train.parquet", LINES)
    with pytest.raises(UserError, match=r"train\.parquet: is a file where a folder is expected"):
        from_path(file, "wikitext2")
    with pytest.raises(UserError, match=r"has no validation and no test split beside train.parquet"):
        from_path(tmp_path, "wikitext2")
    with pytest.raises(UserError, match=r"data=text needs data.path"):
        load_corpus(DataSettings(name="text"), 8, ROOT)
    with pytest.raises(UserError, match="data=embedded reads no file"):
        from_path(file, "embedded")


def test_a_folder_that_can_be_read_in_two_ways_is_refused(tmp_path):
    write_splits(tmp_path)
    write_parquet(tmp_path / "train.parquet", LINES)
    with pytest.raises(UserError, match="holds the train split more than once"):
        from_path(tmp_path, "wikitext2")
    (tmp_path / "train.parquet").rename(tmp_path / "more.parquet")
    with pytest.raises(UserError, match=r"more\.parquet belongs to no split"):
        from_path(tmp_path)
    (tmp_path / "more.parquet").rename(tmp_path / "more.txt")
    with pytest.raises(UserError, match=r"holds both .txt and .parquet"):
        from_path(tmp_path)
