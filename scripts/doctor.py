"""Check the mixers and kernels that this machine can run: `python scripts/doctor.py`; see --help."""

from pathlib import Path

from attnbench.cli.compose import compose_mixers
from attnbench.cli.launch import launch
from attnbench.cli.reading import read_doctor
from attnbench.settings.schema import DoctorSettings


def main(settings: DoctorSettings) -> Path:
    """Import the doctor only after the configuration is checked: torch takes longer to load than its checks."""
    from attnbench.correctness.doctor import diagnose

    return diagnose(settings, compose_mixers(settings.mixers))


if __name__ == "__main__":
    launch(main, "doctor", read=read_doctor)
