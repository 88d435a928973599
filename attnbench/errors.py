"""The one exception that is shown to the user without a traceback."""


class UserError(Exception):
    """What the user can mend: one line that names the thing, says what is wrong with it and what to do."""


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
