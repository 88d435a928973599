"""A value of an evaluation's option that cannot be is refused before anything runs, in one line that names it."""

import pytest
from small import compose_once

from attnbench.settings.errors import UserError

REFUSED = {
    "eval.copy.test_lengths=[5,0]": ["eval.copy.test_lengths=[5, 0]", "at least 1"],
    "eval.copy.test_lengths=[5,5]": ["eval.copy.test_lengths=[5, 5]", "twice"],
    "eval.copy.max_length=501": ["eval.copy.max_length=501", "at most 500"],
    "eval.copy.num_test=0": ["eval.copy.num_test=0", "at least 1"],
    "eval.copy.feed_forward_width=-1": ["eval.copy.feed_forward_width=-1", "at least 0"],
    "eval.copy.learning_rates=[]": ["eval.copy.learning_rates=[]", "at least one"],
    "eval.copy.learning_rates=[0.1,0.01]": ["eval.copy.learning_rates=[0.1, 0.01]", "rise"],
    "eval.copy.precision=half": ["eval.copy.precision=half", "tf32"],
    "+eval.inference.length=[16]": ["length", "lengths"],
    "eval.inference.lengths=[16,0]": ["lengths=[16, 0]", "at least 1"],
    "eval.inference.batch_sizes=3": ["batch_sizes=3", "a list"],
    "eval.inference.warmup=0": ["warmup=0", "at least 1"],
    "eval.inference.max_seconds=0": ["eval.inference.max_seconds=0", "above 0"],
    "eval.mad.cells=[[noisy_recall,53]]": ["eval.mad.cells: noisy_recall: length=53: must be at least 54"],
    "eval.mad.cells=[[[a],64]]": ["must be a list of [task, length], tasks of fuzzy_recall"],
    "eval.mad.cells=[[recall,64]]": ["must be a list of [task, length], tasks of fuzzy_recall"],
    "eval.mad.cells=[[compression,8],[compression,9]]": ["each task may stand once"],
    "eval.mad.num_train=10": ["eval.mad.num_train=10: must be at least 64"],
    "+eval.memory.cap=4": ["cap", "cpu_cap_mib"],
    "eval.memory.cpu_max_length=255": ["cpu_max_length=255", "min_length=256"],
    "eval.memory.min_length=-1": ["min_length=-1", "at least 1"],
    "eval.needle.depths=[101]": ["eval.needle.depths=[101]: must be at most 100"],
    "eval.needle.min_length=3": ["eval.needle.min_length=3: must be at least 4"],
    "eval.needle.max_length=15": ["eval.needle.max_length=15: must be at least min_length=16"],
    "eval.perplexity.extrapolation=[0]": ["eval.perplexity.extrapolation=[", "must be at least 1"],
    "eval.perplexity.extrapolation=[-1]": ["eval.perplexity.extrapolation=[", "must be at least 1"],
    "eval.perplexity.extrapolation=[a]": ["eval.perplexity.extrapolation=[", "must be "],
    "eval.perplexity.extrapolation=[1.5]": ["eval.perplexity.extrapolation=[", "must be "],
    "eval.perplexity.extrapolation=[true]": ["eval.perplexity.extrapolation=[", "must be "],
    "eval.perplexity.extrapolation=[[2]]": ["eval.perplexity.extrapolation=[", "must be "],
    "eval.recall.preset=tiny": ["eval.recall.preset=tiny", "zoology"],
    "eval.recall.preset=small": ["[512, 64]", "vocabulary_size of 130 and it is 64", "cells=null"],
    "eval.recall.cells=[[32,11]]": ["[32, 11]", "length of 44"],
    "eval.recall.cells=[32,4]": ["eval.recall.cells: 32", "[length, pairs]"],
    "eval.recall.cells=[[32,[4,4]]]": ["[4, 4]", "twice"],
    "eval.recall.cells=[[32,4],[32,4]]": ["[[32, 4], [32, 4]]", "once"],
    "eval.recall.cells=[]": ["eval.recall.cells=[]", "null"],
    "eval.recall.widths=[64,64]": ["eval.recall.widths=[64, 64]", "twice"],
    "eval.recall.num_train=10": ["eval.recall.num_train=10", "at least 256"],
    "eval.recall.batch_size=0": ["eval.recall.batch_size=0", "at least 1"],
    "eval.recall.filler=noise": ["eval.recall.filler=noise", "blank, random, vocabulary"],
    "eval.recall.head_width=0": ["eval.recall.head_width=0", "at least 1"],
    "eval.recall.feed_forward_width=-1": ["eval.recall.feed_forward_width=-1", "at least 0"],
    "eval.recall.vocabulary_size=3": ["eval.recall.vocabulary_size=3", "at least 4"],
    "eval.scaling.max_seconds=inf": ["eval.scaling.max_seconds=inf", "finite"],
    "+eval.scaling.size=1m": ["size", "sizes"],
    "eval.scaling.names=[5m]": ["names=['5m']", "1m, 4m"],
    "eval.scaling.sizes.tiny.dim=0": ["eval.scaling.sizes.tiny.dim=0", "at least 1"],
    "+eval.scaling.sizes.tiny.width=8": ["eval.scaling.sizes.tiny.width=8", "head_width"],
    "+eval.scaling.sizes.huge=big": ["eval.scaling.sizes.huge=big", "conf/model"],
    "eval.scaling.learning_rates=[0]": ["learning_rates", "above 0"],
    "eval.scaling.num_seeds=0": ["num_seeds=0", "at least 1"],
    "eval.scaling.train_tokens=0": ["train_tokens=0", "at least 1"],
    "eval.state_tracking.test_range=[9]": ["eval.state_tracking.test_range=[9]: must be [shortest, longest]"],
    "eval.state_tracking.test_range=[9,8]": ["eval.state_tracking.test_range=[9, 8]: must be [shortest, longest]"],
    "eval.state_tracking.rules=[]": ["must be some of parity, mod_arithmetic"],
    "eval.state_tracking.rules=[[a]]": ["rules=[['a']]: must be some of parity"],
    "eval.state_tracking.rules=[parity,s6]": ["rules=['parity', 's6']: must be some of parity"],
    "eval.state_tracking.rules=[s3,s3]": ["each once"],
    "eval.state_tracking.max_length=2": ["max_length=2: must be at least 4"],
    "eval.state_tracking.min_length=41": ["max_length=40: must be at least min_length=41"],
    "eval.state_tracking.max_length=503": ["at most 502"],
    "eval.state_tracking.multiples=[0]": ["at least 1"],
    "+eval.throughput.length=[16]": ["length", "lengths"],
    "eval.throughput.lengths=[16,0]": ["lengths=[16, 0]", "at least 1"],
    "eval.throughput.batch_size=0": ["batch_size=0", "at least 1"],
    "eval.throughput.repeats=many": ["repeats=many", "an integer"],
    "eval.throughput.max_seconds=nan": ["eval.throughput.max_seconds=nan", "above 0"],
    "eval.throughput.constant_tokens=1000": ["constant_tokens=1000", "multiple of 256"],
    "eval.throughput.constant_tokens=128": ["constant_tokens=128", "multiple of 256"],
    "eval.throughput.lengths=[]": ["lengths=[]", "constant_tokens"],
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_value_that_cannot_be_is_refused_by_name(override):
    name = override.split(".")[1]
    with pytest.raises(UserError) as caught:
        compose_once([f"eval=[{name}]", "data=embedded", "device=cpu", override])
    assert all(part in str(caught.value) for part in REFUSED[override]), caught.value
    assert "\n" not in str(caught.value)
