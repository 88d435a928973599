"""Scripts run in the process of the tests, which has loaded torch already: a new process takes seconds for it."""

import contextlib
import io
import logging
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_here(program: str, *words: str, cwd: Path = ROOT) -> tuple[int, str, str]:
    """Run a program in the folder `cwd`; return its exit code, standard output and standard error.

    Args:
        program: a file of scripts/, or a subcommand of attnbench.
    """
    logger = logging.getLogger("attnbench")
    handlers, level, code = list(logger.handlers), logger.level, 0
    output, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        contextlib.chdir(cwd),
    ):
        is_script = program.endswith(".py")
        patch.setattr(sys, "argv", [f"scripts/{program}", *words] if is_script else ["attnbench", program, *words])
        # A command adds its folder, and its conf/.
        patch.setattr(sys, "path", list(sys.path))
        # A script sets it for its process; here it is taken back afterwards.
        patch.setenv("HYDRA_FULL_ERROR", "0")
        # The script adds a handler that writes to standard error as it is now.
        logger.handlers = []
        try:
            if is_script:
                runpy.run_path(str(ROOT / "scripts" / program), run_name="__main__")
            else:
                runpy.run_module("attnbench", run_name="__main__")
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
            errors.write(f"{ending.code}\n" if isinstance(ending.code, str) else "")
        finally:
            logger.handlers, logger.level = handlers, level
    return code, output.getvalue(), errors.getvalue()
