"""A value of an evaluation's option that cannot be is refused before anything runs, in one line that names it."""

import pytest
from small import compose_once

from attnbench.settings.errors import UserError

REFUSED = {
    "eval.copy.test_lengths=[5,5]": ["eval.copy.test_lengths=[5, 5]", "twice"],
    "eval.copy.max_length=501": ["eval.copy.max_length=501", "at most 500"],
    "eval.copy.stop_at=0.9": ["eval.copy.stop_at=0.9: needs eval.copy.fixed_steps=true"],
    "eval.copy.decay_fraction=1.0": ["must be above 0 and at most 0.5, or eval.copy.fixed_steps=true"],
    "eval.copy.decay_fraction=0.0": ["must be above 0 and at most 0.5, or eval.copy.fixed_steps=true"],
    "eval.copy.embedding_dropout=0": ["eval.copy.embedding_dropout=0", "above 0"],
    "eval.copy.doubled_residual=true": ["eval.copy.doubled_residual=true", "eval.copy.feed_forward_width=0"],
    "eval.copy.learning_rates=[0.1,0.01]": ["eval.copy.learning_rates=[0.1, 0.01]", "rise"],
    "eval.copy.precision=half": ["eval.copy.precision=half", "tf32"],
    "+eval.inference.length=[16]": ["length", "lengths"],
    "eval.inference.warmup=0": ["warmup=0", "at least 1"],
    "eval.ladder_copy.lengths=[8,24]": ["eval.ladder_copy.lengths=[8, 24]: each must be twice the one before"],
    "eval.ladder_copy.num_symbols=511": ["eval.ladder_copy.num_symbols=511: must be at least 512"],
    "eval.ladder_range.lengths=[32,64]": ["eval.ladder_range.lengths=[32, 64]", "at least 64"],
    "eval.ladder_range.vocabulary_size=33": ["eval.ladder_range.vocabulary_size=33: must be at least 34"],
    "eval.ladder_recall.length=1023": ["eval.ladder_recall.length=1023: must be at least 1024"],
    "eval.ladder_recall.vocabulary_size=512": ["eval.ladder_recall.vocabulary_size=512: must be at least 514"],
    "eval.ladder_state.rules=[mod_arithmetic]": ["eval.ladder_state.rules", "mod_arithmetic", "parity, s3"],
    "eval.ladder_state.rules=[[a]]": ["eval.ladder_state.rules=[['a']]"],
    "eval.ladder_state.min_length=40": ["eval.ladder_state.max_length=32: must be at least 40"],
    "eval.mad.cells=[[noisy_recall,53]]": ["eval.mad.cells: noisy_recall: length=53: must be at least 54"],
    "eval.mad.cells=[[[a],64]]": ["must be a list of [task, length], tasks of fuzzy_recall"],
    "eval.mad.cells=[[recall,64]]": ["must be a list of [task, length], tasks of fuzzy_recall"],
    "eval.mad.cells=[[memorise,32]]": ["must be a list of [task, length]", "[memorise, length, vocabulary size]"],
    "eval.mad.cells=[[memorise,32,4]]": ["eval.mad.cells: memorise: vocabulary size=[4]: must be at least 5"],
    "eval.mad.cells=[[memorise,7,256]]": ["eval.mad.cells: memorise: length=7: must be at least 8"],
    "eval.mad.cells=[[memorise,8,9],[memorise,16,9]]": ["each task may stand once"],
    "eval.mad.cells=[[compression,8],[compression,9]]": ["each task may stand once"],
    "eval.mad.num_train=10": ["eval.mad.num_train=10: must be at least 64"],
    "eval.memory.cpu_max_length=255": ["cpu_max_length=255", "min_length=256"],
    "eval.needle.depths=[101]": ["eval.needle.depths=[101]: must be at most 100"],
    "eval.needle.num_distractors=16": ["eval.needle.num_distractors=16: must be below eval.needle.num_keys=16"],
    "eval.needle.max_length=15": ["eval.needle.max_length=15: must be at least min_length=16"],
    "eval.perplexity.extrapolation=[0]": ["eval.perplexity.extrapolation=[", "must be at least 1"],
    "eval.recall.preset=tiny": ["eval.recall.preset=tiny", "zoology"],
    "eval.recall.preset=small": ["[512, 64]", "vocabulary_size of 130 and it is 64", "cells=null"],
    "eval.recall.cells=[[32,11]]": ["[32, 11]", "length of 44"],
    "eval.recall.cells=[32,4]": ["eval.recall.cells: 32", "[length, pairs]"],
    "eval.recall.cells=[[32,[4,4]]]": ["[4, 4]", "twice"],
    "eval.recall.cells=[[32,4],[32,4]]": ["[[32, 4], [32, 4]]", "once"],
    "eval.recall.cells=[]": ["eval.recall.cells=[]", "null"],
    "eval.recall.mixture=[]": ["eval.recall.mixture=[]", "1 to 8 cells"],
    "eval.recall.mixture=[[8,1]]": ["eval.recall.mixture=[[8, 1]]", "[length, pairs, training sequences]"],
    "eval.recall.mixture=[[8,1,9]]": ["eval.recall.mixture=[[8, 1, 9]]", "eval.recall.num_steps"],
    "eval.recall.mixture=[[8,3,9]]": ["eval.recall.mixture: [8, 3]", "length of 12"],
    "eval.recall.mixture=[[16,[1,2],9]]": ["eval.recall.mixture: [16, [1, 2], 9]: pairs", "an integer"],
    "eval.recall.mixture=[[8,1,0]]": ["eval.recall.mixture: [8, 1, 0]", "training sequences", "at least 1"],
    "eval.recall.mixture=[[8,1,9],[8,1,9]]": ["eval.recall.mixture=[[8, 1], [8, 1]]", "once"],
    "eval.recall.test_cells=[]": ["eval.recall.test_cells=[]", "null"],
    "eval.recall.test_cells=[[32,4]]": ["eval.recall.test_cells=[[32, 4]]", "one model", "eval.recall.cells"],
    "eval.recall.test_cells=[[32,[4]]]": ["eval.recall.test_cells: [32, [4]]: pairs", "an integer"],
    "eval.recall.widths=[64,64]": ["eval.recall.widths=[64, 64]", "twice"],
    "eval.recall.num_train=10": ["eval.recall.num_train=10", "at least 256"],
    "eval.recall.filler=noise": ["eval.recall.filler=noise", "blank, random, vocabulary"],
    "eval.scaling.max_seconds=inf": ["eval.scaling.max_seconds=inf", "finite"],
    "eval.scaling.names=[5m]": ["names=['5m']", "1m, 4m"],
    "eval.scaling.sizes.tiny.dim=0": ["eval.scaling.sizes.tiny.dim=0", "at least 1"],
    "+eval.scaling.sizes.tiny.width=8": ["eval.scaling.sizes.tiny.width=8", "head_width"],
    "+eval.scaling.sizes.huge=big": ["eval.scaling.sizes.huge=big", "conf/model"],
    "eval.state_tracking.num_train=9": ["eval.state_tracking.num_train=9: must be at least 64"],
    "eval.state_tracking.test_range=[9]": ["eval.state_tracking.test_range=[9]: must be [shortest, longest]"],
    "eval.state_tracking.test_range=[9,8]": ["eval.state_tracking.test_range=[9, 8]: must be [shortest, longest]"],
    "eval.state_tracking.rules=[]": ["must be some of parity, mod_arithmetic"],
    "eval.state_tracking.rules=[[a]]": ["rules=[['a']]: must be some of parity"],
    "eval.state_tracking.rules=[parity,s6]": ["rules=['parity', 's6']: must be some of parity"],
    "eval.state_tracking.rules=[s3,s3]": ["each once"],
    "eval.state_tracking.max_length=2": ["max_length=2: must be at least 4"],
    "eval.state_tracking.min_length=41": ["max_length=40: must be at least min_length=41"],
    "eval.state_tracking.max_length=503": ["at most 502"],
    "eval.throughput.repeats=many": ["repeats=many", "an integer"],
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
