"""Says what this machine can run, and whether it runs it right: `python scripts/doctor.py`; see --help."""

from pathlib import Path

from attnbench.cli.compose import compose_mixers
from attnbench.cli.launch import launch
from attnbench.cli.reading import read_doctor
from attnbench.settings.schema import DoctorSettings


def main(settings: DoctorSettings) -> Path:
    """Imports the doctor only once the configuration stands: torch takes longer to load than all its checks."""
    from attnbench.correctness.doctor import diagnose

    return diagnose(settings, compose_mixers(settings.mixers))


if __name__ == "__main__":
    launch(main, "doctor", read=read_doctor)
