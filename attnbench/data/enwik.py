"""enwik8 and text8: the first 100 million bytes of a Wikipedia dump, raw and in 27 letters."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from attnbench.data.pieces import Text, read_utf8
from attnbench.data.texts import CorpusSource, Texts, naming, parts_of
from attnbench.settings.errors import UserError
from attnbench.settings.untrusted import open_regular

FILES = {
    "enwik8": "57b8363b814821dc9d47aa4d41f58733519076b2",
    "text8": "0dc3edebc970dcc96137e7deda4d9995af9d93de",
}
"""Published SHA-1 of each."""

NUM_BYTES = 10**8
NUM_HELD_OUT = 5 * 10**6
"""Bytes of validation, and of test after it, as usual."""


def find_enwik(name: str, path: Path | None, root: Path) -> CorpusSource:
    places = [path] if path is not None else [root / "data" / name, root / "data"]
    files = [place / name if place.is_dir() else place for place in places]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        where = f"data.path={path}" if path is not None else f"{root / 'data' / name}"
        raise UserError(
            f"{where}: there is no {name}; unpack http://mattmahoney.net/dc/{name}.zip there, or give data.path=FILE"
        )
    return CorpusSource(label=name, files=[file], read=lambda: _texts(name, file))


def _texts(name: str, file: Path) -> Texts:
    with naming(file), open_regular(file) as stream:
        digest = hashlib.file_digest(stream, "sha1").hexdigest()
        if stream.tell() != NUM_BYTES or digest != FILES[name]:
            raise UserError(f"{file}: is not {name} as published, by its SHA-1; get it again, or use data=text")
        starts = []
        for wanted in (NUM_BYTES - 2 * NUM_HELD_OUT, NUM_BYTES - NUM_HELD_OUT):
            # No character is cut: up to three more bytes are held out.
            stream.seek(wanted - 3)
            before = stream.read(4)
            starts.append(wanted - next(back for back in range(4) if before[3 - back] & 0xC0 != 0x80))

    def read() -> Iterator[bytes]:
        with naming(file), open_regular(file) as stream:
            yield from read_utf8(stream)

    return Texts(name=name, origin=str(file), splits=parts_of(Text(read), *starts))
