"""Prints our chunked Gated DeltaNet beside flash-linear-attention's naive chunk form: forward + backward on the CPU.

python scripts/benchmark_peers.py [--fla-naive PATH] [--repeats 20]
"""

import argparse
import platform
import sys

import torch

from attnbench.bench.peers import compare_peers, find_peer
from attnbench.errors import UserError

SHAPES_BTHK = [(8, 256, 4, 64), (2, 2048, 4, 64), (32, 256, 4, 32)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fla-naive", metavar="PATH", help="fla/ops/gated_delta_rule/naive.py; else the installed one")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    try:
        peer = find_peer(arguments.fla_naive)
    except UserError as error:
        sys.exit(str(error))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, float32")
    if peer is None:
        print("fla naive: skipped, flash-linear-attention is not installed (or give --fla-naive PATH)")
    print(f"{'(B, T, H, K)':<20}{'implementation':<16}{'median':>10}{'min':>10}{'max':>10}{'speedup':>10}{'error':>10}")
    for row in compare_peers(SHAPES_BTHK, arguments.repeats, peer):
        print(
            f"{row.shape_BTHK!s:<20}{row.implementation:<16}{row.median_milliseconds:>7.1f} ms"
            f"{row.minimum_milliseconds:>7.1f} ms{row.maximum_milliseconds:>7.1f} ms{row.speedup:>10.2f}"
            f"{row.max_error:>10.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
