"""Progress bars: on a terminal, and as widgets in a notebook, which shows standard error in red."""

import logging
import sys
import textwrap
import warnings
from typing import Any

from tqdm import TqdmWarning, tqdm

COLUMNS = 79
"""Characters of a line on a terminal."""


def in_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and "IPKernelApp" in shell.config


def bar(**shape: Any) -> tqdm | None:
    """Return a tqdm bar of this shape, or None if none can be shown, as in a file or a pipe."""
    if not in_notebook():
        return tqdm(**shape, ncols=COLUMNS) if sys.stderr.isatty() else None
    with warnings.catch_warnings():
        # The warning only says that without ipywidgets the bar is text.
        warnings.simplefilter("ignore", TqdmWarning)
        from tqdm.auto import tqdm as tqdm_of_notebooks
    return tqdm_of_notebooks(**shape, file=sys.stdout)


def wrapped(text: str) -> str:
    """Break a line for a terminal between words, but not a command to copy, which begins with a space."""
    if not sys.stderr.isatty() or in_notebook() or text.startswith(" "):
        return text
    return textwrap.fill(text, COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


class AboveTheBar(logging.Handler):
    """Prints log lines above a bar: on standard error, in a notebook on standard output."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(wrapped(self.format(record)), file=sys.stdout if in_notebook() else sys.stderr)
