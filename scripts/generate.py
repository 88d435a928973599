"""Continue a prompt with the model of a run: `echo 'the' | python scripts/generate.py run=outputs/...`; see --help."""

from attnbench.cli.commands import generate

if __name__ == "__main__":
    generate()
