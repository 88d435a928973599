"""One made-up experiment, and what is read of it."""

from pathlib import Path

import pytest
from report_rows import write_experiment

from attnbench.report.inputs import read_inputs
from attnbench.verdict.seeds import figures


@pytest.fixture(scope="session")
def experiment(tmp_path_factory) -> Path:
    return write_experiment(tmp_path_factory.mktemp("outputs") / "demo")


@pytest.fixture(scope="session")
def inputs(experiment):
    return read_inputs(experiment)


@pytest.fixture(scope="session")
def summed(inputs):
    return figures(inputs.rows)
