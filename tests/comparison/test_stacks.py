"""Which trainings of a plan are made as one stack, and which are compiled."""

import json
from dataclasses import replace

import pytest
import torch
from probe_settings import probe_settings, smoke_words
from small import TINY_RUN, comparison_settings, compose_once, in_this_process, little_plan

from attnbench.comparison import compare, stacks, workers
from attnbench.comparison.stacks import compiled, in_stacks, measured_size, sizes
from attnbench.evals.runners.prepare_probe import prepare_probe
from attnbench.settings.errors import UserError

CUDA = torch.device("cuda")


def jobs_in(folder, number, **options):
    settings = probe_settings(folder, **options)
    first = prepare_probe(settings, settings.evaluations[0])[1][0]
    return [first.at(1e-2, seed) for seed in range(number)]


def test_trainings_that_differ_in_numbers_alone_are_stacked(tmp_path):
    first, [other] = jobs_in(tmp_path, 4), jobs_in(tmp_path, 1, copy_num_steps=7)
    cells = [*first[:2], other, *first[2:]]
    assert [len(group) for group in in_stacks(cells, lambda job: 1)] == [1] * 5
    groups = in_stacks(cells, lambda job: 3)
    assert [len(group) for group in groups] == [2, 2, 1]
    assert [*groups[0]] == first[:2]
    assert all(cell.in_stack for group in groups for cell in group)
    assert len({job.config_hash for job in first}) == 4
    assert first[0].shape_hash == replace(first[1], limit=5).shape_hash != other.shape_hash


def test_small_models_are_stacked_and_large_ones_are_not():
    small, copy, zoology = 64 * 32 * 32, 64 * 103 * 64, 256 * 256 * 64
    assert [measured_size(elements) for elements in (small, copy, zoology)] == [40, 23, 1]


def test_what_was_measured_at_the_first_run_holds(tmp_path, monkeypatch):
    [job] = jobs_in(tmp_path, 1)
    monkeypatch.setattr(stacks, "device_name", lambda device: "NVIDIA H200")
    size = sizes(None, CUDA, tmp_path)(job)
    assert size == 40
    assert json.loads((tmp_path / "stacks.json").read_text()) == {job.shape_hash: 40}
    # On another card the plan goes on with the same stacks; one that is new there has none.
    monkeypatch.setattr(stacks, "device_name", lambda device: "NVIDIA A100")
    assert sizes(None, CUDA, tmp_path)(job) == 40
    [other] = jobs_in(tmp_path, 1, copy_num_steps=7)
    with pytest.raises(UserError, match="knows NVIDIA H200, NVIDIA H100 80GB HBM3, not NVIDIA A100; name a"):
        sizes(None, CUDA, tmp_path)(other)
    assert sizes(None, torch.device("cpu"), tmp_path)(other) == 1
    assert sizes(7, CUDA, tmp_path)(other) == 7


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[40]", "must hold a JSON object"),
    ],
)
def test_sizes_that_were_altered_name_their_file(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(stacks, "device_name", lambda device: "NVIDIA H200")
    (tmp_path / "stacks.json").write_text(content)
    with pytest.raises(UserError, match=rf"^{tmp_path}/stacks\.json: {message}"):
        sizes(None, CUDA, tmp_path)


@pytest.mark.parametrize(
    ("elements", "number", "num_devices", "expected"),
    [(2**23, 30, 1, True), (2**23, 20, 2, False), (2**22, 20, 1, False), (2**16, 40, 1, False)],
)
def test_trainings_are_compiled_where_it_saves_more_than_it_takes(
    tmp_path, monkeypatch, elements, number, num_devices, expected
):
    monkeypatch.setattr(stacks, "activations", lambda job: elements)
    jobs = jobs_in(tmp_path, number, copy_num_steps=1000)
    compiled(jobs, num_devices)
    assert not any(job.compiled for job in jobs)
    for job in jobs:
        job.device = CUDA
    compiled([replace(cell, in_stack=True) for cell in jobs], num_devices)
    assert not any(job.compiled for job in jobs)
    compiled(jobs, num_devices)
    assert {job.compiled for job in jobs} == {expected}
    assert {job.row_settings()["stack"] for job in jobs} == {1}
    assert ("compiled" in jobs[0].row_settings()) == expected


def test_workers_of_one_device_are_not_counted_as_devices(text, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(compare, "compiled", lambda group, num_devices: asked.append(num_devices))
    monkeypatch.setattr(workers, "run_in_processes", in_this_process)
    given = {"variants": {"softmax": ["attn=softmax"]}, "rank": [], "num_workers": 2, "stack": None}
    plan = little_plan([*TINY_RUN, f"data.path={text}", *smoke_words("copy")], **given)
    settings = comparison_settings(plan, tmp_path)
    compare.compare(settings, compose_once)
    assert {*asked} == {1}
    assert compare._num_devices(replace(settings, launcher="slurm", slurm=replace(settings.slurm, tasks=3))) == 3
