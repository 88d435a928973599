"""The one exception that is shown to the user without a traceback, and how others are told of."""

import difflib
from collections.abc import Iterable

from attnbench.escaping import printable

MOST_CHARACTERS = 2000
"""Of a message; a longer one has lost its middle, which is a value that somebody gave."""


class UserError(Exception):
    """What the user can mend: one line that names the thing, says what is wrong with it and what to do.

    Its text is printable whatever values it names: a terminal obeys nothing in it.
    """

    def __str__(self) -> str:
        text = printable(super().__str__())
        half = MOST_CHARACTERS // 2 - 2
        return text if len(text) <= MOST_CHARACTERS else f"{text[:half]}...{text[-half:]}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " (did you mean NAME?)", to stand behind a name that is not known; empty where none that is known is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def one_line(error: BaseException) -> str:
    """The exception's kind and the first line of what it says."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


class Interrupted(BaseException):
    """A signal asked the run to stop and its state is saved.

    No `Exception`, so that a sweep ends with it instead of going on to its next job.

    Args:
        message: what was saved, and how to go on.
        exit_code: 130 after SIGINT, 143 after SIGTERM.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
