"""Prints our forms beside other people's, on this CPU, side by side in one run.

python scripts/benchmark_peers.py [--fla-naive fla/ops/gated_delta_rule/naive.py] [--nanogpt model.py] [--repeats 20]
"""

import argparse
import platform
import sys
from dataclasses import replace
from functools import partial

import torch

from attnbench.bench.peers import compare_peers, find_peer
from attnbench.bench.plain_gpt import NanoGPT, PlainGPT, compare_training_steps
from attnbench.config import compose
from attnbench.errors import UserError

SHAPES_BTHK = [(8, 256, 4, 64), (2, 2048, 4, 64), (32, 256, 4, 32)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fla-naive", metavar="PATH", help="naive.py of fla-core 0.6; else the installed one")
    parser.add_argument("--nanogpt", metavar="PATH", help="nanoGPT's model.py; else it is skipped")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, float32", flush=True)
    try:
        gated_delta_rule(given.fla_naive, given.repeats)
        training_step(given.nanogpt, given.repeats)
    except UserError as error:
        sys.exit(f"error: {error}")


def gated_delta_rule(path: str | None, repeats: int) -> None:
    peer = find_peer(path)
    print("\nGated delta rule, forward + backward: median (min to max)")
    if peer is None:
        print("  fla naive: skipped, flash-linear-attention is not installed (or give --fla-naive PATH)")
    for row in compare_peers(SHAPES_BTHK, repeats, peer):
        print(f"  {row}", flush=True)


def training_step(path: str | None, repeats: int) -> None:
    print("\nTraining step of flash, 4m, 8 × 256 tokens; tokens/s over the peer's: median (20th to 80th percentile)")
    settings = compose(["attn=flash", "model=4m", "device=cpu"])
    # With these a SwiGLU has nanoGPT's parameters.
    nanogpt = replace(settings.model, feed_forward_width=settings.model.dim * 8 // 3)
    for model, peer in ((settings.model, PlainGPT), (nanogpt, partial(NanoGPT, path) if path else None)):
        if peer is None:
            print("  nanoGPT: skipped (give --nanogpt PATH)")
            continue
        built = peer(model, 284, 256)
        print(f"  {compare_training_steps(settings.mixer, model, built, batch_size=8, num_rounds=repeats)}", flush=True)


if __name__ == "__main__":
    main()
