"""Books: 164 long English texts in the public domain, made from the XHTML that Standard Ebooks keeps on GitHub.

books.tsv lists them in the order of the corpus, with commit and SHA-256 of each text; the texts are made on the user's
machine.
"""

import gzip
import hashlib
import re
import shutil
import tarfile
import time
import unicodedata
import zlib
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq

from attnbench.data.pieces import Text
from attnbench.data.texts import SPLITS, CorpusSource, Texts, read_splits, split_files
from attnbench.machine.environment import answers
from attnbench.results.files import replace_file
from attnbench.settings.errors import UserError
from attnbench.settings.escape import printable
from attnbench.settings.paths import name_beside
from attnbench.settings.untrusted import open_regular, read_bounded_bytes

LIST = Path(__file__).with_name("books.tsv")

SHA256 = {
    "train": "00aa8f55ea796728ad44fd2ace6bc2b29565a09659671811a965f0daf36493a6",
    "validation": "98cf0400bd8464296fec02b26da54eac5e1d8d2e163cb2bfb78bb2aed589f429",
    "test": "e3f7789ebd07df4dc4192593a0c30a222ada0e5ca8170023283be7615b873cf2",
}
"""SHA-256 of the texts of each split, joined by line ends."""

URL = "https://github.com/standardebooks"
PAUSE_SECONDS = 1.0
"""Between two downloads."""

PROBE_SECONDS, TIMEOUT_SECONDS = 5.0, 60.0

MAX_FILE_BYTES, MAX_BOOK_BYTES, MAX_ARCHIVE_BYTES = 2**24, 2**26, 2**29
"""Longest file of a book, all its files together, and an archive with its pictures, decompressed."""

REMEDY = (
    "the same command makes the missing books alone; attnbench data books --source FOLDER takes their archives "
    "(NAME-COMMIT.tar.gz), or the three parquet files from another machine"
)

WAY_OUT = "attnbench data books makes it, where there is a network; or give data.path=FOLDER"

NEEDED = re.compile(r"(?:[^/]+/)?src/epub/(content\.opf|text/[^/]+\.xhtml)")
"""Files of an archive that are read, with or without the folder that GitHub puts around them."""

NOT_TEXT = {
    *("titlepage", "imprint", "colophon", "copyright-page", "halftitlepage", "toc", "loi", "z3998:frontispiece"),
    *("frontispiece", "endnotes", "noteref"),
}
"""Values of epub:type that are left out; `copyright-page` is the page called uncopyright, `loi` lists illustrations."""

LEFT_OUT = {
    # Its author died in 1993.
    "sherwood-anderson_winesburg-ohio": "text/introduction.xhtml",
    # Lists the sources of the notes, which are left out themselves.
    "john-bunyan_the-pilgrims-progress": "text/foreword.xhtml",
}

NO_TEXT = {"head", "img", "rt", "rp"}
BLOCKS = {
    *("article", "blockquote", "body", "caption", "dd", "div", "dl", "dt", "figcaption", "figure", "footer", "h1"),
    *("h2", "h3", "h4", "h5", "h6", "header", "hgroup", "hr", "li", "nav", "ol", "p", "section", "table", "ul"),
}
"""Elements that begin and end a paragraph."""

MAX_LINE_CHARACTERS = 200
"""Longest text that is a line of a table where no other cell of its row has any; a longer one is a paragraph."""

REMOVED = re.compile("[\u2060\u200b-\u200f\u00ad\ufeff]|(?<=[“”‘’\"'])[\u2009\u200a\u202f](?=[“”‘’\"'])")
"""Characters without a width, word joiners and soft hyphens among them, and thin spaces between quotation marks."""

REPLACED = str.maketrans({**dict.fromkeys("\u00a0\u2009\u200a\u202f", " "), "\u2011": "-", "\uffe1": "£"})


class Book(NamedTuple):
    author: str
    title: str
    num_characters: int
    repository: str
    commit: str
    split: str
    sha256: str


class BookError(Exception):
    """A book cannot be made; the others still can."""


def listed(*splits: str) -> list[Book]:
    cells = [line.split("\t") for line in LIST.read_text(encoding="utf-8").splitlines()[1:]]
    books = [Book(author, title, int(length), *others) for author, title, length, *others in cells]
    return [book for book in books if book.split in (splits or SPLITS)]


def find_books(path: Path | None, root: Path) -> CorpusSource:
    folder = root / "data" / "books" if path is None else path
    files = split_files(folder) if folder.is_dir() else {}
    if set(files) != set(SPLITS):
        missing = " and ".join(f"{split}.parquet" for split in SPLITS if split not in files)
        where = folder if path is None else f"data.path={path}"
        raise UserError(f"{where}: has no {missing} of data=books; {WAY_OUT}")

    def read() -> Texts:
        return Texts(name="books", origin=str(folder), splits=_checked(folder))

    return CorpusSource(label="books", files=[file for parts in files.values() for file in parts], read=read)


def _checked(folder: Path) -> dict[str, Text]:
    splits = read_splits(folder, split_files(folder))
    for split, text in splits.items():
        digest = hashlib.sha256()
        for piece in text:
            digest.update(piece)
        if digest.hexdigest() != SHA256[split]:
            raise UserError(
                f"{folder}: its {split} split is not that of the corpus books, by its SHA-256; remove it and call "
                "attnbench data books, or use data=text"
            )
    return splits


def prepare(source: Path | None, root: Path) -> Path:
    """Put the corpus into data/books under `root` and return that folder; print a line for each book.

    Args:
        source: folder with the parquet files, or with archives or work trees of the repositories; None: GitHub.
    """
    target = root / "data" / "books"
    made = target / "made"
    if not target.is_dir() or set(split_files(target)) != set(SPLITS):
        if source is not None and not source.is_dir():
            raise UserError(f"{source}: is no folder; give one with the parquet files or the archives of the books")
        copied = split_files(source) if source is not None else {}
        if source is not None and copied:
            _checked(source)
        try:
            made.mkdir(parents=True, exist_ok=True)
            if not copied:
                _make(source, made)
            for split in SPLITS:
                for path in copied.get(split, [Path(f"{split}.parquet")]):
                    beside = name_beside(target / path.name)
                    if copied:
                        shutil.copyfile(path, beside)
                    else:
                        _write(listed(split), made, beside)
                    beside.rename(target / path.name)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"{target}: cannot be written ({reason}); make room or give --root=FOLDER") from None
    _checked(target)
    shutil.rmtree(made, ignore_errors=True)
    return target


def _write(books: Sequence[Book], made: Path, path: Path) -> None:
    columns = {
        "text": pa.array([(made / f"{book.repository}.txt").read_bytes() for book in books], pa.binary()),
        "author": [book.author for book in books],
        "title": [book.title for book in books],
    }
    table = pa.table(columns).cast(pa.schema(dict.fromkeys(columns, pa.string())))
    pq.write_table(table, path, compression="zstd", use_dictionary=False, row_group_size=16)


def _make(source: Path | None, made: Path) -> None:
    """Make each book that is not in `made` yet; raise UserError in the end if some could not be."""
    books, missing = listed(), []
    if source is None and not answers(URL, PROBE_SECONDS):
        raise UserError(f"{URL}: cannot be reached; {REMEDY}")
    for number, book in enumerate(books, start=1):
        path, outcome = made / f"{book.repository}.txt", "made"
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == book.sha256:
            continue
        try:
            text = text_of_book(_download(book) if source is None else _local(book, source), book.repository)
            if hashlib.sha256(text.encode()).hexdigest() != book.sha256:
                raise BookError("is not the text of the list, by its SHA-256")
            replace_file(path, text)
        except BookError as error:
            outcome = str(error)
            missing.append(book.title)
        print(f"{number}/{len(books)} {book.author}, {book.title}: {printable(outcome)}", flush=True)
    if missing:
        named = ", ".join(missing[:5]) + f" and {len(missing) - 5} more" * (len(missing) > 5)
        raise UserError(f"data=books: {len(missing)} of {len(books)} books are missing: {named}; {REMEDY}")


def _download(book: Book) -> dict[str, bytes]:
    url = f"{URL}/{book.repository}/archive/{book.commit}.tar.gz"
    time.sleep(PAUSE_SECONDS)
    try:
        with urlopen(Request(url, headers={"User-Agent": "attnbench"}), timeout=TIMEOUT_SECONDS) as stream:
            return _unpacked(stream)
    except (OSError, HTTPException) as error:
        if isinstance(error, HTTPError) and error.code == 404:
            raise BookError(f"there is no {url}") from None
        raise UserError(f"{url}: the download failed ({' '.join(str(error).split())}); {REMEDY}") from None


def _local(book: Book, source: Path) -> dict[str, bytes]:
    stems = [source / f"{book.repository}-{book.commit}", source / book.repository]
    tree = next((stem / "src" / "epub" for stem in stems if stem.is_dir()), None)
    archive = next((path for stem in stems if (path := stem.with_name(f"{stem.name}.tar.gz")).exists()), None)
    try:
        if tree is not None:
            paths = [tree / "content.opf", *tree.glob("text/*.xhtml")]
            return {path.relative_to(tree).as_posix(): read_bounded_bytes(path, MAX_FILE_BYTES) for path in paths}
        if archive is not None:
            with open_regular(archive) as stream:
                return _unpacked(stream)
    except OSError as error:
        raise BookError(f"{tree or archive}: cannot be read ({error.strerror})") from None
    raise BookError(f"{stems[0]}.tar.gz: no such file, nor a folder of that name")


class _Capped:
    """Stream of at most MAX_ARCHIVE_BYTES: a short archive can unpack to terabytes."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self.stream, self.num_left = stream, MAX_ARCHIVE_BYTES

    def read(self, size: int) -> bytes:
        content = self.stream.read(size)
        self.num_left -= len(content)
        if self.num_left < 0:
            raise BookError(f"its archive holds more than {MAX_ARCHIVE_BYTES} bytes")
        return content


def _unpacked(stream: Any) -> dict[str, bytes]:
    """Return the files that NEEDED names from a .tar.gz, by their paths in src/epub, without writing."""
    files, num_bytes = {}, 0
    try:
        capped: Any = _Capped(gzip.GzipFile(fileobj=stream))
        with tarfile.open(fileobj=capped, mode="r|") as archive:
            for member in archive:
                match = NEEDED.fullmatch(member.name)
                if match and member.isreg():
                    num_bytes += member.size
                    if member.size > MAX_FILE_BYTES or num_bytes > MAX_BOOK_BYTES:
                        raise BookError(f"its archive holds more than {MAX_BOOK_BYTES} bytes of text")
                    content = archive.extractfile(member)
                    files[match[1]] = content.read() if content else b""
    except (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError, ValueError, RecursionError) as error:
        raise BookError(f"its archive is cut off or damaged ({error})") from None
    return files


def text_of_book(files: Mapping[str, bytes], repository: str = "") -> str:
    """Return the text of a book: its paragraphs, separated by blank lines. Raises BookError if a file is missing or
    cannot be read.

    Args:
        files: content.opf and the XHTML that it names, by their paths in src/epub.
        repository: name by which LEFT_OUT names a file.
    """
    try:
        package = _parsed(files["content.opf"])
        paths = {item.get("id"): item.get("href", "") for item in package.iter() if _tag(item) == "item"}
        spine = [paths[item.get("idref")] for item in package.iter() if _tag(item) == "itemref"]
        paragraphs = _Paragraphs()
        for path in spine:
            if path != LEFT_OUT.get(repository):
                paragraphs.add(_parsed(files[path]))
    except KeyError as error:
        raise BookError(f"its files lack {error}") from None
    except (ElementTree.ParseError, RecursionError) as error:
        raise BookError(f"its XHTML cannot be read ({error})") from None
    return "\n\n".join(paragraphs.done())


def _parsed(content: bytes) -> ElementTree.Element:
    if b"<!ENTITY" in content:
        raise BookError("its XHTML declares entities, which can expand without end")
    return ElementTree.fromstring(content)


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _kinds(element: ElementTree.Element) -> set[str]:
    return set(element.get("{http://www.idpf.org/2007/ops}type", "").split())


class _Paragraphs:
    def __init__(self) -> None:
        self.finished: list[str] = []
        self.parts: list[str] = []
        """Text of the paragraph that is not finished; each "\\n" is a line break."""

    def done(self) -> list[str]:
        text = unicodedata.normalize("NFC", "".join(self.parts))
        lines = (re.sub(" +", " ", line).strip(" ") for line in REMOVED.sub("", text).translate(REPLACED).split("\n"))
        if paragraph := "\n".join(filter(None, lines)):
            self.finished.append(paragraph)
        self.parts = []
        return self.finished

    def add(self, element: ElementTree.Element) -> None:
        tag = _tag(element)
        if tag in NO_TEXT or _kinds(element) & NOT_TEXT:
            return
        if tag == "br":
            self.parts.append("\n")
        elif tag in BLOCKS:
            self.done()
            if tag == "table":
                self.add_table(element)
            else:
                self.add_content(element)
            self.done()
        else:
            self.add_content(element)

    def add_content(self, element: ElementTree.Element) -> None:
        self._add_text(element.text)
        for child in element:
            self.add(child)
            self._add_text(child.tail)

    def _add_text(self, text: str | None) -> None:
        self.parts.append(re.sub(r"[ \t\r\n]+", " ", text or ""))

    def add_table(self, table: ElementTree.Element) -> None:
        """A row is a line, cells are two spaces apart. Of drama a row is a paragraph, and cells are lines."""
        for caption in table:
            if _tag(caption) == "caption":
                self.add(caption)
        lines: list[str] = []
        for row in (element for element in table.iter() if _tag(element) == "tr"):
            cells = [text for cell in row if (text := _cell(cell))]
            is_speech = any("z3998:persona" in _kinds(cell) for cell in row)
            if is_speech or (len(cells) == 1 and ("\n" in cells[0] or len(cells[0]) > MAX_LINE_CHARACTERS)):
                self._add_lines(lines)
                lines = []
                self._add_lines(cells)
            elif cells:
                lines.append("  ".join(cell.replace("\n", " ") for cell in cells))
        self._add_lines(lines)

    def _add_lines(self, lines: Sequence[str]) -> None:
        self.finished += ["\n".join(lines)] if lines else []


def _cell(element: ElementTree.Element) -> str:
    paragraphs = _Paragraphs()
    paragraphs.add_content(element)
    return "\n".join(paragraphs.done())


def authors_of(split: str) -> list[tuple[int, int]]:
    """Return for each book of a split the number of its author and the character behind it, with its line end."""
    numbers: dict[str, int] = {}
    ends = accumulate(book.num_characters + 1 for book in listed(split))
    return [(numbers.setdefault(book.author, len(numbers)), end) for book, end in zip(listed(split), ends, strict=True)]
