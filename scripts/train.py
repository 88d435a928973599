"""Train one mixer in a language model and evaluate it: `python scripts/train.py attn=gated_deltanet`; see --help."""

from attnbench.cli.commands import train

if __name__ == "__main__":
    train()
