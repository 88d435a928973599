"""Time our training step beside peers, each implementation in a separate process, and write a table for each case.

python scripts/benchmark_peers.py --nanogpt nanoGPT/model.py --fla-path TRITON_3_7_1 --peer-env TRITON_PTXAS_PATH=PTXAS
python scripts/benchmark_peers.py --first-step (or --agreement 200)
python scripts/benchmark_peers.py --publish docs/results/peers-MACHINE --title TITLE

Words behind the options are settings of train.py and win over the case's: data=text data.path=FILE device=cpu
"""

import argparse
import shlex
import sys
from pathlib import Path

from attnbench.machine.signals import ending_in_one_line
from attnbench.settings.errors import UserError


def main() -> None:
    # The peers are no part of the package that is installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.peers.benchmark import benchmark
    from benchmarks.peers.contestants import Request
    from benchmarks.peers.report import write_page
    from benchmarks.peers.worker import LIMIT_SECONDS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="settings of train.py, GROUP.SETTING=VALUE")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="default: all that are meant for the device")
    parser.add_argument("--nanogpt", metavar="PATH", help="nanoGPT's model.py; without it nanoGPT is skipped")
    parser.add_argument("--fla-path", dest="fla", metavar="DIR", action="append", default=[], help="PYTHONPATH of fla")
    parser.add_argument(
        "--peer-env", dest="variables", metavar="KEY=VALUE", action="append", default=[], help="of peers"
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns of each implementation")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one turn, about")
    parser.add_argument("--limit", dest="limit_seconds", type=float, default=LIMIT_SECONDS, help="seconds of an answer")
    parser.add_argument("--first-step", action="store_true", help="instead: how long a training takes to start")
    parser.add_argument(
        "--agreement", dest="agreement_steps", metavar="STEPS", type=int, help="instead: losses of paths"
    )
    parser.add_argument("--mixers", nargs="+", help="of first steps and agreement; default: all")
    parser.add_argument("--outputs", type=Path, default=Path("outputs/peers"))
    parser.add_argument("--publish", type=Path, metavar="DIR", help="instead: write the page of --outputs there")
    parser.add_argument("--title", default="Training steps beside peers", help="of the page")
    given = vars(parser.parse_intermixed_args())
    target, title, words = given.pop("publish"), given.pop("title"), given.pop("variables")
    with ending_in_one_line(f"interrupted; what was measured is in {given['outputs']}"):
        if len(variables := dict(word.split("=", 1) for word in words if "=" in word)) < len(words):
            raise UserError(f"--peer-env {' '.join(words)}: each must be KEY=VALUE, and no KEY twice")
        request = Request(**given, variables=variables, command=shlex.join(["python", *sys.argv]))
        if target is None:
            benchmark(request)
        write_page(request.outputs, target or request.outputs, title=title, with_figures=target is not None)
        print(f"written: {(target or request.outputs) / 'README.md'}", flush=True)


if __name__ == "__main__":
    main()
