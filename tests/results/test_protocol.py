"""The name of the rules in every row, which no identity has."""

from dataclasses import replace

import pytest
from probe_settings import probe_settings

from attnbench.evals.lib import solving
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.results import protocol
from attnbench.results.protocol import TEST_NAMES, protocol_id, protocol_of
from attnbench.verdict.family import TESTS


def one_job(folder, **changed):
    settings = probe_settings(folder, **changed)
    _, [job, *_] = prepare_probe(settings, settings.evaluations[0])
    return job


@pytest.mark.parametrize("rule", ["a margin", "the error", "the stop rule"])
def test_a_rule_that_changes_is_another_protocol_of_the_same_cell(rule, tmp_path, monkeypatch):
    before = one_job(tmp_path)
    then = (before.config_hash, protocol_id(before.protocol()))
    after = one_job(tmp_path)
    if rule == "a margin":
        after.primary = replace(after.primary, margin=0.02)
    elif rule == "the error":
        monkeypatch.setattr(protocol, "SIGNIFICANCE", 0.1)
    else:
        monkeypatch.setattr(solving, "STOP_RULE", {**solving.STOP_RULE, "mastered": 0.98})
    now = (after.config_hash, protocol_id(after.protocol()))
    assert now[0] == then[0]
    assert now[1] != then[1]


def test_fixed_steps_have_no_stop_rule(tmp_path):
    assert one_job(tmp_path).protocol()["stop"] == solving.STOP_RULE
    assert one_job(tmp_path, copy_fixed_steps=True).protocol()["stop"] is None
    assert protocol_of(None)["primary"] is None


def test_the_tests_are_those_that_the_rules_name():
    assert {kind: test.name for kind, test in TESTS.items()} == TEST_NAMES
