"""The corpus books: how XHTML becomes text, what `attnbench data books` makes and refuses, and its authors."""

import gzip
import hashlib
import io
import sys
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from corpora_on_disk import REAL, from_path, write_parquet

from attnbench.cli.commands import data
from attnbench.data import books
from attnbench.data.books import BookError, text_of_book
from attnbench.data.corpus import load_corpus
from attnbench.settings.errors import UserError
from attnbench.settings.schema import DataSettings

NAMES = {"train": "a-author_first", "validation": "b-author_second", "test": "c-author_third"}
COMMIT = "0" * 40


def files_of(*pages: str) -> dict[str, bytes]:
    """A book of these pages, the content of each body, in an order that is not that of their names."""
    paths = [f"text/{chr(ord('z') - index)}.xhtml" for index in range(len(pages))]
    items = "".join(f'<item id="{path}" href="{path}"/>' for path in sorted(paths))
    spine = "".join(f'<itemref idref="{path}"/>' for path in paths)
    opf = f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>'
    around = (
        '<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops"><head><title>No</title>'
    )
    contents = [f"{around}</head><body>{page}</body></html>" for page in pages]
    return {"content.opf": opf.encode()} | {path: page.encode() for path, page in zip(paths, contents, strict=True)}


def packed(files: dict[str, bytes], prefix: str = "name-commit/src/epub/") -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(prefix + path)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return content.getvalue()


def test_pages_are_read_in_the_order_of_the_spine_without_what_is_no_text():
    pages = [
        '<section epub:type="titlepage"><h1>Title</h1></section>',
        '<section epub:type="dedication"><p>To <b>you</b>.</p></section>',
        '<section epub:type="chapter"><hgroup><h2 epub:type="ordinal">I</h2><p epub:type="title">The Start</p></hgroup>'
        '<p>A note.<a href="#n" epub:type="noteref">1</a> And\n\t <i>more</i><img alt="no" src="a"/>.</p><hr/>'
        "<ul><li><p>one</p></li><li>two</li></ul><blockquote><p>Said.</p><cite>A. B.</cite></blockquote></section>",
        '<section epub:type="endnotes"><ol><li>A note <a epub:type="backlink">back</a></li></ol></section>',
    ]
    paragraphs = ["To you.", "I", "The Start", "A note. And more.", "one", "two", "Said.", "A. B."]
    assert text_of_book(files_of(*pages)) == "\n\n".join(paragraphs)


def test_verse_keeps_its_lines_and_readings_above_a_line_go():
    page = '<p><span>One,</span>\n<br/>\n<span class="i1"> two</span><br/></p><p><ruby>low<rt>high</rt></ruby></p>'
    assert text_of_book(files_of(page)) == "One,\ntwo\n\nlow"


def test_tables_have_a_line_for_a_row_and_drama_a_paragraph_for_a_speech():
    table = (
        "<table><caption>Costs</caption><thead><tr><th>What</th><th>How<br/>much</th></tr></thead>"
        "<tr><td>Nails</td><td/><td>3</td></tr><tr><td/><td><p>Sum</p></td></tr>"
        f"<tr><td>{'long ' * 41}</td></tr><tr><td/></tr><tr><td>End</td></tr></table>"
    )
    lines = ["Costs", "What  How much\nNails  3\nSum", ("long " * 41).strip(), "End"]
    assert text_of_book(files_of(table)) == "\n\n".join(lines)
    drama = (
        '<table><tr><td epub:type="z3998:persona">Ann</td><td><i>Aside.</i> <p>Yes.</p><p>No.</p></td></tr>'
        "<tr><td/><td>They sit.</td></tr><tr><td/><td>They rise.</td></tr>"
        "<tr><td/><td><p>A song<br/>of two lines</p></td></tr></table>"
    )
    assert text_of_book(files_of(drama)) == "Ann\nAside.\nYes.\nNo.\n\nThey sit.\nThey rise.\n\nA song\nof two lines"


def test_characters_are_composed_and_spaces_and_hyphens_plain():
    text = "cafe\u0301\u00a0au\u2009lait\u200a… co\u00adop\u2060er\u200e a\u2011b \uffe15 “\u200a‘so’\u200a” “\u00a0”"
    assert text_of_book(files_of(f"<p>{text}</p>")) == "café au lait … cooper a-b £5 “‘so’” “ ”"


def test_files_that_two_books_leave_out():
    pages = ["<p>Kept.</p>", "<p>Introduction.</p>"]
    files = files_of(*pages)
    files = {path.replace("text/y", "text/introduction"): content for path, content in files.items()}
    files["content.opf"] = files["content.opf"].replace(b"text/y", b"text/introduction")
    assert text_of_book(files, "sherwood-anderson_winesburg-ohio") == "Kept."
    assert text_of_book(files, "another") == "Kept.\n\nIntroduction."


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<p>never closed", "cannot be read"),
        ("<p>&nbsp;</p>", "cannot be read"),
        ("<i>" * 20_000 + "</i>" * 20_000, "cannot be read"),
        ('<!-- --></body></html><!--<!ENTITY a "b">-->', "declares entities"),
    ],
)
def test_xhtml_that_is_damaged_or_hostile_is_an_error_of_its_book(page, message):
    with pytest.raises(BookError, match=message):
        text_of_book(files_of(page))


def test_archives_that_are_damaged_or_hostile_are_an_error_of_their_book(monkeypatch):
    files = files_of("<p>Text</p>")
    whole = packed(files)
    outside = packed(files | {"../../../../etc/passwd": b"x", "text/../../x.xhtml": b"x"})
    for content in (whole, packed(files, "src/epub/"), outside):
        assert books._unpacked(io.BytesIO(content)) == files
    for content in (whole[: len(whole) // 2], b"", b"<html>", gzip.compress(b"no tar at all " * 100)):
        with pytest.raises(BookError, match=r"cut off or damaged|files lack"):
            text_of_book(books._unpacked(io.BytesIO(content)))
    link = tarfile.TarInfo("a/src/epub/content.opf")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    linked = io.BytesIO()
    with tarfile.open(fileobj=linked, mode="w:gz") as archive:
        archive.addfile(link)
    assert books._unpacked(io.BytesIO(linked.getvalue())) == {}
    for limit in ("MAX_FILE_BYTES", "MAX_BOOK_BYTES", "MAX_ARCHIVE_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(books, limit, 20)
            with pytest.raises(BookError, match="holds more than"):
                books._unpacked(io.BytesIO(whole))


TEXTS = {split: f"{split} naïve\n\n" + "\n\n".join(f"Paragraph {n}." for n in range(30)) for split in NAMES}


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """A folder with archives of three small books, which the list names in place of the real ones."""
    lines, folder = ["author\ttitle\tcharacters\trepository\tcommit\tsplit\tsha256"], tmp_path / "source"
    folder.mkdir()
    for split, name in NAMES.items():
        text = TEXTS[split]
        page = "".join(f"<p>{paragraph}</p>" for paragraph in text.split("\n\n"))
        (folder / f"{name}-{COMMIT}.tar.gz").write_bytes(packed(files_of(page)))
        digest = hashlib.sha256(text.encode()).hexdigest()
        lines.append("\t".join(("A. Author", f"Of {split}", str(len(text)), name, COMMIT, split, digest)))
        monkeypatch.setitem(books.SHA256, split, digest)
    (tmp_path / "books.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.setattr(books, "LIST", tmp_path / "books.tsv")
    monkeypatch.setattr(books, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(books, "answers", lambda url, limit_seconds: True)
    monkeypatch.setattr(books, "urlopen", lambda *asked, **options: pytest.fail("the network was asked"))
    return folder


def run(monkeypatch, root: Path, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["attnbench data", "books", *map(str, words), "--root", str(root)])
    data()


def test_a_version_of_books_is_refused(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, tmp_path, "--version", "v1")
    assert "--version: is of WikiText-2; books have one version" in capsys.readouterr().err


def serve(monkeypatch, source: Path) -> list[str]:
    """Let GitHub answer with the archives of the folder; return the list of the addresses that are asked for."""
    asked = []

    def answer(request, timeout: float):
        asked.append(request.full_url)
        name = request.full_url.split("/")[4]
        return io.BytesIO((source / f"{name}-{COMMIT}.tar.gz").read_bytes())

    monkeypatch.setattr(books, "urlopen", answer)
    return asked


def test_books_are_made_from_archives_or_work_trees_and_a_second_call_reads_no_source(
    source, tmp_path, monkeypatch, capsys
):
    archive = source / f"{NAMES['test']}-{COMMIT}.tar.gz"
    with tarfile.open(archive) as content:
        content.extractall(source / NAMES["test"], filter="data")
    (source / NAMES["test"] / "name-commit" / "src").rename(source / NAMES["test"] / "src")
    archive.unlink()
    run(monkeypatch, tmp_path, "--source", source)
    assert "3/3 A. Author, Of test: made\n" in capsys.readouterr().out
    folder = tmp_path / "data" / "books"
    assert sorted(path.name for path in folder.iterdir()) == ["test.parquet", "train.parquet", "validation.parquet"]
    for split, text in TEXTS.items():
        row = {"text": text, "author": "A. Author", "title": f"Of {split}"}
        assert pq.read_table(folder / f"{split}.parquet").to_pylist() == [row]
    run(monkeypatch, tmp_path)
    assert capsys.readouterr().out == f"{folder}: 3 books, complete and as published\n"
    run(monkeypatch, tmp_path / "other", "--source", folder)
    found = [load_corpus(DataSettings(name="books"), 8, root) for root in (tmp_path, tmp_path / "other")]
    found.append(from_path(folder, "books"))
    assert {corpus.name for corpus in found} == {"books"}
    assert len({corpus.fingerprint for corpus in found}) == 1
    write_parquet(folder / "test.parquet", ["another text"])
    with pytest.raises(UserError, match="its test split is not that of the corpus books, by its SHA-256; remove it"):
        from_path(folder, "books")
    with pytest.raises(SystemExit, match="its test split is not"):
        run(monkeypatch, tmp_path)


def test_a_book_of_another_text_is_named_and_the_next_call_makes_it_alone(source, tmp_path, monkeypatch, capsys):
    path = source / f"{NAMES['validation']}-{COMMIT}.tar.gz"
    whole, asked = path.read_bytes(), serve(monkeypatch, source)
    for content, reason in (
        (packed(files_of("<p>Another</p>")), "is not the text of the list, by its SHA-256"),
        (whole[:200], "its archive is cut off or damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(SystemExit, match="1 of 3 books are missing: Of validation; the same command") as caught:
            run(monkeypatch, tmp_path)
        assert "\n" not in str(caught.value)
        assert f"2/3 A. Author, Of validation: {reason}" in capsys.readouterr().out
        made = {path.name for path in (tmp_path / "data" / "books" / "made").iterdir()}
        assert made == {f"{NAMES['train']}.txt", f"{NAMES['test']}.txt"}
    with pytest.raises(UserError, match=r"has no train.parquet .*; attnbench data books makes it"):
        load_corpus(DataSettings(name="books"), 8, tmp_path)
    path.write_bytes(whole)
    # An altered text is made again.
    (tmp_path / "data" / "books" / "made" / f"{NAMES['test']}.txt").write_text("altered")
    asked.clear()
    run(monkeypatch, tmp_path)
    names = [NAMES["validation"], NAMES["test"]]
    assert asked == [f"https://github.com/standardebooks/{name}/archive/{COMMIT}.tar.gz" for name in names]
    assert load_corpus(DataSettings(name="books"), 8, tmp_path).splits["test"].num_characters == len(TEXTS["test"])


def test_without_a_network_or_a_book_the_remedy_is_said_in_one_line(source, tmp_path, monkeypatch):
    def refuse(*asked, **options):
        raise OSError(104, "Connection reset\nby peer")

    monkeypatch.setattr(books, "urlopen", refuse)
    with pytest.raises(
        SystemExit, match=r"a-author_first/archive/0+.tar.gz: the download failed .*same command"
    ) as caught:
        run(monkeypatch, tmp_path)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(books, "answers", lambda url, limit_seconds: False)
    with pytest.raises(
        SystemExit, match=r"github.com/standardebooks: cannot be reached; .*attnbench data books --source FOLDER"
    ):
        run(monkeypatch, tmp_path)
    (source / f"{NAMES['train']}-{COMMIT}.tar.gz").unlink()
    with pytest.raises(SystemExit, match="1 of 3 books are missing: Of train"):
        run(monkeypatch, tmp_path, "--source", source)
    with pytest.raises(SystemExit, match="nowhere: is no folder"):
        run(monkeypatch, tmp_path, "--source", tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"data.path=.*nowhere: has no train.parquet and validation.parquet and test"):
        from_path(tmp_path / "nowhere", "books")


@pytest.mark.parametrize("tokenizer", ["characters", "bytes"])
def test_each_token_has_the_author_of_its_book(tokenizer, tmp_path, monkeypatch):
    texts = {"one": "äbc" * 5, "two": "de" * 4, "three": "ä" * 7}
    rows = [("X", "one"), ("Y", "two"), ("X", "three")]
    lines = [
        f"{author}\t{name}\t{len(texts[name])}\tr\tc\t{split}\ts" for split in books.SPLITS for author, name in rows
    ]
    (tmp_path / "books.tsv").write_text("\n".join(["header", *lines]), encoding="utf-8")
    monkeypatch.setattr(books, "LIST", tmp_path / "books.tsv")
    joined = "\n".join(texts.values())
    for split in books.SPLITS:
        write_parquet(tmp_path / "books" / f"{split}.parquet", list(texts.values()))
        monkeypatch.setitem(books.SHA256, split, hashlib.sha256(joined.encode()).hexdigest())
    corpus = from_path(tmp_path / "books", "books", tokenizer=tokenizer)
    authors_N = corpus.authors("test")
    length = len if tokenizer == "characters" else lambda text: len(text.encode())
    expected = [0] * (length(texts["one"]) + 1) + [1] * (length(texts["two"]) + 1) + [0] * length(texts["three"])
    assert authors_N is not None
    assert authors_N.tolist() == expected
    assert from_path(tmp_path / "books", tokenizer=tokenizer).authors("test") is None


def test_the_list_names_each_book_once_and_no_author_twice():
    listed = books.listed()
    assert [len(books.listed(split)) for split in books.SPLITS] == [145, 9, 10]
    assert len({book.repository for book in listed}) == len({book.sha256 for book in listed}) == 164
    assert sum(book.num_characters for book in listed) == 132_950_820
    authors = [{book.author for book in books.listed(split)} for split in books.SPLITS]
    assert [len(names) for names in authors] == [112, 6, 7]
    assert len(set.union(*authors)) == 125
    order = [(books.SPLITS.index(book.split), f"standardebooks/{book.repository}") for book in listed]
    assert order == sorted(order, key=lambda it: (it[0], hashlib.sha256(it[1].encode()).hexdigest()))


@pytest.mark.skipif(not (REAL / "books").is_dir(), reason=f"the books are not in {REAL}")
def test_the_real_books_have_the_published_text(tmp_path):
    corpus = load_corpus(DataSettings(name="books", path=str(REAL / "books")), 1024, tmp_path)
    # With the line ends between the books.
    counts = {split: corpus.splits[split].num_characters for split in books.SPLITS}
    assert counts == {"train": 119_732_932 + 144, "validation": 6_632_025 + 8, "test": 6_585_863 + 9}
    assert corpus.name == "books"
    for split, path in ((split, REAL / "books" / f"{split}.parquet") for split in books.SPLITS):
        rows = zip(pq.read_table(path).to_pylist(), books.listed(split), strict=True)
        assert all((row["author"], row["title"]) == (book.author, book.title) for row, book in rows)
    authors_N = corpus.authors("test")
    assert authors_N is not None
    assert len(authors_N.unique()) == 7
