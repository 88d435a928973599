"""Evaluate a trained run: `python scripts/evaluate.py run=outputs/... 'eval=[perplexity,recall]'`; see --help."""

from attnbench.cli.commands import evaluate

if __name__ == "__main__":
    evaluate()
