"""Check the mixers and kernels that this machine can run: `python scripts/doctor.py`; see --help."""

from attnbench.cli.commands import doctor

if __name__ == "__main__":
    doctor()
