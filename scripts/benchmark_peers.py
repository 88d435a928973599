"""Times our training step beside other people's, each in a process of its own, and writes a table a case.

python scripts/benchmark_peers.py --nanogpt nanoGPT/model.py --fla-path TRITON_3_7_1 --peer-env TRITON_PTXAS_PATH=PTXAS
python scripts/benchmark_peers.py --first-step (or --agreement 200)

What stands behind the options are settings of train.py and win over the case's: data=text data.path=FILE device=cpu
"""

import argparse
import shlex
import sys
from pathlib import Path

from attnbench.cli.compose import compose
from attnbench.machine.signals import ending_in_one_line
from attnbench.settings.errors import UserError


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.peers.benchmark import Request, benchmark
    from benchmarks.peers.turns import Places
    from benchmarks.peers.worker import LIMIT_SECONDS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="of train.py, GROUP.SETTING=VALUE")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="default: all that are meant for the device")
    parser.add_argument("--nanogpt", metavar="PATH", help="nanoGPT's model.py; without it nanoGPT is skipped")
    parser.add_argument("--fla-path", dest="fla", metavar="DIR", action="append", default=[], help="PYTHONPATH of fla")
    parser.add_argument("--peer-env", metavar="KEY=VALUE", action="append", default=[], help="of peers' environment")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each implementation")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one turn, about")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS", help="of one answer of a peer")
    parser.add_argument("--first-step", action="store_true", help="instead: how long a training takes to start")
    parser.add_argument("--agreement", metavar="STEPS", type=int, help="instead: losses of fast and reference path")
    parser.add_argument("--mixers", nargs="+", default=["softmax", "flash", "linear", "gated_deltanet"])
    parser.add_argument("--outputs", type=Path, default=Path("outputs/peers"))
    given = parser.parse_intermixed_args()
    with ending_in_one_line(f"interrupted; what was measured is in {given.outputs}"):
        if len(variables := dict(word.split("=", 1) for word in given.peer_env if "=" in word)) < len(given.peer_env):
            raise UserError(f"--peer-env {' '.join(given.peer_env)}: each must be KEY=VALUE, and no KEY twice")
        places = Places(nanogpt=given.nanogpt, fla=tuple(given.fla), variables=variables, limit_seconds=given.limit)
        request = Request(
            overrides=given.settings,
            cases=given.cases,
            mixers=given.mixers,
            places=places,
            repeats=given.repeats,
            seconds=given.seconds,
            first_step=given.first_step,
            agreement_steps=given.agreement,
            outputs=given.outputs,
            command=shlex.join(["python", *sys.argv]),
        )
        benchmark(request, compose)


if __name__ == "__main__":
    main()
