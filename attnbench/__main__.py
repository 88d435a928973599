"""`python -m attnbench`: the same as the command `attnbench`."""

from attnbench.cli.commands import main

if __name__ == "__main__":
    main()
