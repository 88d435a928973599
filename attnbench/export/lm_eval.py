"""The command of lm-evaluation-harness with the model `attnbench`: `python -m attnbench.export.lm_eval --model ...`.

The harness's own command `lm_eval` has a fixed list of models.
"""

import argparse
import sys
from importlib import util

from attnbench.settings.errors import UserError
from attnbench.settings.escape import printable

MODEL = "attnbench"


def main() -> None:
    if util.find_spec("lm_eval") is None:
        raise SystemExit("error: lm-evaluation-harness is not installed; run: pip install 'lm-eval>=0.4.13,<0.5'")
    # The harness fills its list of models only while it is empty.
    import lm_eval.models  # pyright: ignore[reportMissingImports]  # noqa: F401
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import model_registry  # pyright: ignore[reportMissingImports]

    model_registry.register(MODEL, target="attnbench.export.harness:AttnbenchLM")
    if _leaves_device_open(sys.argv[1:]):
        # The harness's default is cuda:0, even without a GPU.
        sys.argv += ["--device", "auto"]
    try:
        cli_evaluate()
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(1) from None


def _leaves_device_open(words: list[str]) -> bool:
    parser = argparse.ArgumentParser(add_help=False)
    for names in (["--model", "-M"], ["--device"], ["--config", "-C"]):
        parser.add_argument(*names)
    given, _ = parser.parse_known_args(words)
    return given.model == MODEL and given.device is None and given.config is None


if __name__ == "__main__":
    main()
