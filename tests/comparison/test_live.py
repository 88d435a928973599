"""The report of a plan while it runs: written seldom, not beside timed runs, and closed at the end."""

from types import SimpleNamespace

import pytest
from report_rows import write_experiment

from attnbench.comparison import live as module
from attnbench.comparison.live import LiveReport
from attnbench.report.template import RUNNING


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.usefixtures("without_charts")
def test_it_is_written_after_a_while_and_seldom(tmp_path, clock):
    folder = write_experiment(tmp_path / "demo", seeds=2, evaluations=["recall"])
    written = []

    def record() -> bool:
        clock[0] += 1.0
        written.append(clock[0])
        return True

    live = LiveReport(folder, record)
    live.write()
    live.write_last()
    assert written == []
    clock[0] += module.FIRST_SECONDS
    live.write()
    page = folder / "report" / "index.html"
    assert RUNNING in page.read_text()[:200]
    # One second of writing, so that it pauses for the others of its share.
    clock[0] += 0.9 / module.SHARE
    live.write()
    assert len(written) == 1
    clock[0] += 0.2 / module.SHARE
    live.write()
    live.write_last()
    assert len(written) == 3
    live.end()
    assert RUNNING not in page.read_text()[:200]


def test_without_scores_there_is_no_page(tmp_path, clock):
    live = LiveReport(tmp_path, lambda: False)
    clock[0] += 2 * module.FIRST_SECONDS
    live.write()
    live.end()
    assert list(tmp_path.iterdir()) == []
