"""Scripts run in the process of the tests, which has loaded torch already: a new process takes seconds for it."""

import contextlib
import io
import logging
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_here(script: str, *words: str, cwd: Path = ROOT) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `python scripts/<script> words` in the folder `cwd`."""
    logger = logging.getLogger("attnbench")
    handlers, level, code = list(logger.handlers), logger.level, 0
    output, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        contextlib.chdir(cwd),
    ):
        patch.setattr(sys, "argv", [f"scripts/{script}", *words])
        # A script sets it for its process; here it is taken back afterwards.
        patch.setenv("HYDRA_FULL_ERROR", "0")
        # The script adds a handler that writes to standard error as it is now.
        logger.handlers = []
        try:
            runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
            errors.write(f"{ending.code}\n" if isinstance(ending.code, str) else "")
        finally:
            logger.handlers, logger.level = handlers, level
    return code, output.getvalue(), errors.getvalue()
