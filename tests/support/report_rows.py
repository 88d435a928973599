"""A made-up comparison for the tests of the report: rows as runs leave them, with everything that can go wrong.

The numbers mean nothing; names, axes, units and files are those of the battery.
"""

import dataclasses
import json
import math
import random
from collections.abc import Collection, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from made_rows import IDENTITY

from attnbench.machine.environment import environment_id
from attnbench.results.metrics import is_timed
from attnbench.results.row_files import ResultsWriter, begin_sitting
from attnbench.results.rows import Identity, Measurement
from attnbench.verdict.seeds import BESIDE_REFERENCE

HOSTILE = "<script>window.executed = 1</script>\"'&"
SKILL = {"softmax": 1.0, "linear": 0.72, "gated_deltanet": 0.97, HOSTILE: 0.9}
"""Variants, and how well each of them does."""

STAMP = {
    "device": "NVIDIA H200",
    "torch": "2.13.0+cu130",
    "python": "3.11.14",
    "platform": "Linux-6.18-x86_64-with-glibc2.39",
    "triton": "3.7.1",
    "flash-attn": None,
    "commit": "5357fac305d1",
    "dirty": False,
}
OTHER_STAMP = {**STAMP, "torch": "2.12.0+cu130", "commit": "00c0ffee0000", "dirty": True}
CORPUS = "wikitext2-v1@d2e97c40770b"


def write_experiment(
    folder: Path, *, seeds: int = 3, record: bool = True, evaluations: Collection[str] | None = None
) -> Path:
    """Writes runs, cells and the comparison's own record into `folder`; of all evaluations, or of these."""
    files = []
    begin_sitting()
    for variant in SKILL:
        for evaluation, measure in EVALUATIONS.items():
            if evaluations is not None and evaluation not in evaluations:
                continue
            per_seed = evaluation in ("copy", "recall", "perplexity", "training")
            for seed in range(seeds if per_seed else 1):
                name = f"{list(SKILL).index(variant)}-{evaluation}-seed{seed}"
                path = folder / ("cells" if evaluation != "perplexity" else "") / name / "results" / "rows.jsonl"
                stamp = OTHER_STAMP if variant == "linear" and evaluation == "perplexity" else STAMP
                identity = _identity(folder.name, name, variant, evaluation, seed, stamp)
                path.parents[1].mkdir(parents=True, exist_ok=True)
                with ResultsWriter(path, identity) as writer:
                    for measurement in measure(variant, SKILL[variant], random.Random(f"{variant}{evaluation}{seed}")):
                        writer.write(_beside_reference(measurement) if evaluation in BESIDE_REFERENCE else measurement)
                (path.parent.parent / "environment.json").write_text(json.dumps(stamp))
                if evaluation in ("copy", "recall", "training"):
                    _leave_progress(path.parents[1], evaluation == "training", SKILL[variant] + 0.01 * seed)
                files.append(str(path.relative_to(folder)))
    if record:
        (folder / "comparison.json").write_text(json.dumps(_record(files)))
    return folder


def _beside_reference(measured: Measurement) -> Measurement:
    told = {"reference_milliseconds": [40.0, 40.0]} if is_timed(measured.metric, measured.unit) else {}
    return dataclasses.replace(measured, settings=told | measured.settings)


def _leave_progress(folder: Path, is_text: bool, skill: float) -> None:
    """Writes the metrics of a training, and what a language model's wrote."""
    rows = []
    for step in range(10, 2010, 10):
        loss = 1.2 + 4 / (1 + skill * step / 50)
        rows.append({"step": step, "loss": loss})
        if step % 200 == 0 or not is_text:
            checked = {"nats_per_character": loss + 0.02} if is_text else {"selection": min(1.0, skill * step / 1500)}
            rows.append({"step": step, "split": "validation", **checked})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if is_text:
        sample = {"prompt": f"The {HOSTILE}", "text": "river \x1b[2J</script><b>ran</b>\n" * 80}
        (folder / "sample.json").write_text(json.dumps(sample))


def _identity(experiment: str, run: str, variant: str, evaluation: str, seed: int, stamp: dict[str, Any]) -> Identity:
    return dataclasses.replace(
        IDENTITY,
        experiment=experiment,
        run=run,
        mixer=variant.title(),
        variant=variant,
        backend={"softmax": "torch", "linear": "triton"}.get(variant, "fla"),
        model="4m",
        parameters=None if evaluation in ("copy", "recall", "scaling") else 3_826_944 + 131 * len(variant),
        evaluation=evaluation,
        seed=seed,
        precision="float32" if evaluation in ("copy", "recall") else "bfloat16",
        device=stamp["device"],
        environment=environment_id(stamp),
        commit=stamp["commit"],
        corpus=CORPUS if evaluation in ("perplexity", "training") else None,
    )


def _lost(metric: str, unit: str, settings: dict[str, Any], status: str, reason: str) -> Measurement:
    return Measurement(metric=metric, value=None, unit=unit, settings=settings, status=status, reason=reason)


def _accuracy(metric: str, value: float, settings: dict[str, Any], items: int) -> Measurement:
    return Measurement(metric=metric, value=value, unit="1", settings=settings, num_samples=items)


def _cell_rows(skill: float, settings: dict[str, Any]) -> Iterator[Measurement]:
    yield Measurement(metric="parameters", value=50_112 + round(100 * skill), unit="1", settings=settings)
    yield Measurement(metric="forward_flops_per_token", value=98_304.0 + 1e4 * skill, unit="FLOP", settings=settings)
    yield Measurement(metric="state_bytes", value=65_536.0 * skill, unit="byte", settings=settings)


def _copy(variant: str, skill: float, draw: random.Random) -> Iterator[Measurement]:
    rate = {"learning_rate": 0.01 if skill > 0.8 else 0.1}
    yield from _cell_rows(skill, rate)
    for length in (5, 10, 20, 30, 50, 75, 100, 200):
        settings = {**rate, "split": "test", "length": length, "beyond_training": length > 50, "chance": 1 / 26}
        if variant == "linear" and length == 200:
            reason = "loss is nan after 312 steps"
            for metric in ("symbol_accuracy", "string_accuracy"):
                yield _lost(metric, "1", settings, "diverged", reason)
            continue
        fall = 1 / (1 + math.exp((length - 90 * skill**2) / 20))
        value = min(1.0, max(0.0, 1 / 26 + 0.96 * fall + draw.uniform(-0.02, 0.02) * (length > 10)))
        yield _accuracy("symbol_accuracy", value, settings, 1000 * length)
        yield _accuracy("string_accuracy", value**4, settings, 1000)
    if variant == "linear":
        reason = "0.95 of the best not reached in 2,000 steps"
        yield _lost("steps_to_95", "step", rate, "not_reached", reason)
    else:
        yield Measurement(metric="steps_to_95", value=100 * round(10 / skill), unit="step", settings=rate)


def _recall(variant: str, skill: float, draw: random.Random) -> Iterator[Measurement]:
    for length, pairs in ((64, 4), (128, 8), (256, 16), (512, 64)):
        task: dict[str, Any] = {"sequence_length": length, "num_pairs": pairs, "learning_rate": 0.01}
        if variant == "linear":
            task["not_applicable"] = ["conv_size", "<b>gate</b>"]
        value = 1.0 if variant == "softmax" else min(1.0, skill ** (pairs / 8) + draw.uniform(-0.01, 0.01))
        yield _accuracy("accuracy", max(0.0, value), {**task, "split": "test", "chance": 1 / 4096}, 1000 * pairs)
        yield from _cell_rows(skill, task)


def _perplexity(variant: str, skill: float, draw: random.Random) -> Iterator[Measurement]:
    nats = 1.2 - 0.15 * skill + draw.uniform(-0.004, 0.004)
    for checkpoint in ("best", "final"):
        for split in ("validation", "test"):
            lengths = (256, 512, 1024, 2048) if (checkpoint, split) == ("final", "test") else (256,)
            for length, context in product(lengths, ({}, {"context": "full"})):
                settings = {"split": split, "checkpoint": checkpoint, "sequence_length": length, **context}
                # Without rotary positions beyond the training length softmax gets worse, the others do not.
                extra = 0.3 * math.log2(length / 256) if variant == "softmax" else 0.01
                extra -= 0.03 if context else 0
                for metric, unit, value in (
                    ("perplexity", "1", math.exp(nats + extra)),
                    ("bits_per_character", "bit", (nats + extra) / math.log(2)),
                    ("nats_per_character", "nat", nats + extra),
                ):
                    chance = {"perplexity": 20.1, "bits_per_character": 4.33, "nats_per_character": 3.0}[metric]
                    place = {**settings, "chance": chance}
                    yield Measurement(metric=metric, value=value, unit=unit, settings=place, num_samples=1_120_053)
    settings = {"split": "test", "checkpoint": "final", "sequence_length": 256}
    for start, end in ((0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63), (64, 127), (128, 255)):
        value = nats + 2.2 / (1 + start)
        place = {**settings, "position_bucket": f"{start}-{end}"}
        yield Measurement(metric="nats_per_character", value=value, unit="nat", settings=place, num_samples=9000)


def _training(variant: str, skill: float, draw: random.Random) -> Iterator[Measurement]:
    yield Measurement(metric="forward_flops_per_token", value=8_123_000 + 1e4 * skill, unit="FLOP")
    yield Measurement(metric="tokens_per_second", value=2.1e6 / skill + draw.uniform(0, 9e3), unit="token/s")
    yield Measurement(metric="train_seconds", value=41.0 * skill + draw.uniform(0, 1), unit="s")
    yield Measurement(metric="first_step_seconds", value=18.0 + draw.uniform(0, 1), unit="s")
    yield Measurement(metric="peak_memory_mib", value=2830.0, unit="MiB")


def _throughput(variant: str, skill: float, draw: random.Random) -> Iterator[Measurement]:
    for length in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768):
        settings = {"sequence_length": length, "batch_size": 32768 // length}
        slow = 1 + (length / 4096 if variant == "softmax" else 0.3)
        if variant == "softmax" and length > 16384:
            for metric, unit in (("tokens_per_second", "token/s"), ("peak_memory_mib", "MiB")):
                yield _lost(metric, unit, settings, "out_of_memory", "150.2 GiB asked for, 139.8 GiB there")
            continue
        if variant == HOSTILE and length > 8192:
            reason = "this kernel's positions end at 8,192 </script><b>bold</b>"
            yield _lost("tokens_per_second", "token/s", settings, "unsupported", reason)
            continue
        speed = 2.4e6 / slow * (1 + 0.1 * skill)
        low, high = speed * 0.98, speed * 1.015
        measured = {"settings": settings, "low": low, "high": high, "num_samples": 50}
        yield Measurement(metric="tokens_per_second", value=speed, unit="token/s", **measured)
        yield Measurement(metric="step_milliseconds", value=32768e3 / speed, unit="ms", settings=settings)
        yield Measurement(metric="peak_memory_mib", value=2000 + length * slow / 8, unit="MiB", settings=settings)


def _memory(variant: str, skill: float, draw: random.Random) -> Iterator[Measurement]:
    for length in (256, 512, 1024, 2048, 4096):
        settings = {"sequence_length": length, "batch_size": 8}
        power = 2 if variant == "softmax" else 1
        yield Measurement(metric="training_peak_mib", value=(length / 16) ** power, unit="MiB", settings=settings)
        yield Measurement(metric="forward_peak_mib", value=(length / 64) ** power, unit="MiB", settings=settings)
        state = 4096.0 * length if variant == "softmax" else 131_072.0 + 1000 * skill
        yield Measurement(metric="state_bytes", value=state, unit="byte", settings=settings)
    yield Measurement(metric="growth_exponent", value=float(power), unit="1", settings={"batch_size": 8})


PARTS = ("mixing", "projections", "feed-forward", "norm", "loss", "optimizer", "other", "idle")


def _profile(variant: str, skill: float, draw: random.Random) -> Iterator[Measurement]:
    for length in (256, 1024):
        settings = {"subject": "training step", "sequence_length": length, "form": "captured"}
        yield Measurement(metric="step_milliseconds", value=length / 64 / skill, unit="ms", settings=settings)
        weights = [draw.uniform(0.01, 3.0 if part in ("mixing", "feed-forward") else 0.6) for part in PARTS]
        for part, weight in zip(PARTS, weights, strict=True):
            own = settings | {"part": part}
            yield Measurement(metric="part_share", value=weight / sum(weights), unit="1", settings=own)


EVALUATIONS = {
    "copy": _copy,
    "recall": _recall,
    "perplexity": _perplexity,
    "throughput": _throughput,
    "memory": _memory,
    "training": _training,
    "profile": _profile,
}


def _record(files: list[str]) -> dict[str, Any]:
    rates = [
        {
            "variant": variant,
            "evaluation": evaluation,
            "settings": {"width": 64},
            "grid": [0.003, 0.01, 0.03, 0.1],
            "scores": {"0.003": 0.61 * skill, "0.01": 0.9 * skill, "0.03": 0.88, "0.1": None if skill < 0.8 else 0.2},
            "seeds": {"0.003": [0.6 * skill, 0.62 * skill], "0.01": [0.91 * skill, 0.89 * skill], "0.03": [0.88, 0.88]},
            "rate_window": 0.77 * skill,
            "rate_sensitivity": 0.031,
            "chosen": 0.01 if skill > 0.8 else 0.03,
            "at_edge": skill < 0.8,
        }
        for variant, skill in SKILL.items()
        for evaluation in ("copy", "recall")
    ]
    return {
        "plan": "demo",
        "command": "attnbench compare plan=demo",
        "variants": list(SKILL),
        "rank": list(SKILL),
        "reference": None,
        "files": files,
        "rates": rates,
        "failures": [{"cell": "scaling-linear-12m", "reason": "the process was killed by signal 9"}],
        "started": "2026-03-01T09:00:00+00:00",
        "seconds": 1873.4,
    }
