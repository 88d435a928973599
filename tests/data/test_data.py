"""Corpora as tokens with their known counts, and what a batch depends on."""

import pytest
import torch
from corpora_on_disk import LINES, RAW, ROOT, V1, from_path, needs_real_data, write_splits

from attnbench.data import wikitext
from attnbench.data.batches import Batches, block_order, evaluation_batches, evaluation_shape
from attnbench.data.corpus import load_corpus
from attnbench.data.texts import find_user_texts
from attnbench.data.tokenizer import UNKNOWN
from attnbench.settings.errors import UserError
from attnbench.settings.schema import DataSettings

TOKENS = torch.arange(1003, dtype=torch.int16)


def batches(seed: int = 0, **ranks: int) -> Batches:
    return Batches(TOKENS, seq_len=10, batch_size=8, seed=seed, device="cpu", **ranks)


@needs_real_data
def test_wikitext2_v1_has_its_known_counts():
    corpus = from_path(V1, "wikitext2", seq_len=256)
    assert corpus.name == "wikitext2-v1"
    assert {split: len(tokens) for split, tokens in corpus.tokens.items()} == {
        "train": 10_778_301,
        "validation": 1_120_054,
        "test": 1_254_974,
    }
    assert corpus.vocabulary_size == len(corpus.vocabulary) == 283 + 1
    assert corpus.tokens["train"].dtype == torch.int16
    assert corpus.decode(corpus.tokens["train"][:28]) == " = Valkyria Chronicles III ="[:28]
    assert corpus.num_unknown == {"train": 0, "validation": 0, "test": 0}
    assert corpus.fingerprint == "d2e97c40770b"


@needs_real_data
def test_a_raw_split_alone_is_a_text_and_no_wikitext2():
    path = RAW / "test-00000-of-00001.parquet"
    corpus = from_path(path)
    assert corpus.name == "text:test-00000-of-00001"
    assert sum(map(len, corpus.tokens.values())) == wikitext.CHARACTERS["raw"][2]
    assert corpus.num_unknown["validation"] == 8
    with pytest.raises(UserError, match=r"no train and no validation split beside test-00000-of-00001.parquet"):
        from_path(RAW, "wikitext2")


def test_embedded_is_prose_in_three_parts_that_join_again():
    corpus = load_corpus(DataSettings(name="embedded"), 256, ROOT)
    whole = "".join(corpus.decode(tokens) for tokens in corpus.tokens.values())
    assert corpus.name == "embedded"
    assert len(whole) > 300_000
    assert whole.count(" the ") > 2000
    assert abs(len(corpus.tokens["test"]) / len(whole) - 0.05) < 0.005
    assert corpus.decode(corpus.tokens["train"][-1:]) == "\n"
    assert corpus.fingerprint == load_corpus(DataSettings(name="embedded"), 64, ROOT).fingerprint


def test_a_text_file_keeps_every_character(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_bytes("Ünï\r\n\n\ncode\t\U0001f600\n".encode() * 40)
    corpus = from_path(path)
    assert corpus.name == "text:novel"
    assert "".join(map(corpus.decode, corpus.tokens.values())) == "Ünï\r\n\n\ncode\t\U0001f600\n" * 40


def test_files_named_for_splits_keep_them_and_others_are_joined(tmp_path):
    for split, text in {"train": "abcd" * 9, "validation": "abxd" * 9, "test": "yyyy" * 9}.items():
        (tmp_path / f"{split}.txt").write_text(text)
    corpus = from_path(tmp_path)
    assert corpus.vocabulary == ("a", "b", "c", "d", UNKNOWN)
    assert corpus.num_unknown == {"train": 0, "validation": 9, "test": 36}
    assert corpus.decode(corpus.tokens["validation"][:4]) == f"ab{UNKNOWN}d"
    assert corpus.tokenizer.encode("dz\udcff").tolist() == [3, 4, 4]

    for name, other in (("train", "latest"), ("validation", "The Greatest"), ("test", "a contest")):
        (tmp_path / f"{name}.txt").rename(tmp_path / f"{other}.txt")
    joined = find_user_texts(tmp_path, 0.1, 0.1).read()
    assert "".join(map(str, joined.splits.values())) == "\n".join(["abxd" * 9, "yyyy" * 9, "abcd" * 9])


@pytest.mark.parametrize(
    "names",
    [
        ("Train.txt", "Valid.TXT", "TEST.txt"),
        ("wiki.train.txt", "wiki.val.txt", "wiki.test.txt"),
        ("my_corpus-training.txt", "my_corpus-dev.txt", "my_corpus-testing.txt"),
        tuple(f"{split}-00000-of-00001-0123456789abcdef.txt" for split in ("train", "validation", "test")),
        tuple(f"c4-{split}.00000-of-00001.txt" for split in ("train", "validation", "test")),
    ],
)
def test_usual_names_of_splits_are_recognised(tmp_path, names):
    for name, text in zip(names, ("abcd" * 9, "abxd" * 9, "yyyy" * 9), strict=True):
        (tmp_path / name).write_text(text)
    corpus = from_path(tmp_path)
    assert corpus.decode(corpus.tokens["train"]) == "abcd" * 9
    assert corpus.num_unknown == {"train": 0, "validation": 9, "test": 36}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("chapter.txt", "testset.txt"), r"testset\.txt is named like a part of the data"),
        (("train.txt", "valid.txt", "eval.txt"), r"eval\.txt is named like"),
        (("train_small.txt", "train_large.txt"), r"train_large\.txt is named like"),
        (("all.train.test.txt", "other.txt"), r"all\.train\.test\.txt is named like"),
        (("a.txt", "held-out.txt"), r"held-out\.txt is named like"),
        (("wiki.train.txt", "wiki.valid.txt", "news.test.txt"), "its splits are named after different texts"),
        (("train.txt", "dev.txt", "valid.txt"), "holds the validation split more than once"),
        (("train-00000-of-00002-aaaaaaaa.txt", "train-00000-of-00002-bbbbbbbb.txt"), "train split more than once"),
        (("train-00000-of-00003-aaaaaaaa.txt", "train-00001-of-00003-bbbbbbbb.txt"), "has 2 of the 3 files"),
    ],
)
def test_names_that_mention_a_split_otherwise_are_refused(tmp_path, names, message):
    for name in names:
        (tmp_path / name).write_text("abcd" * 9)
    with pytest.raises(UserError, match=message):
        from_path(tmp_path)


def test_a_corpus_without_a_test_split_is_asked_for(tmp_path):
    for split in ("train", "validation"):
        (tmp_path / f"{split}.txt").write_text("abcd" * 9)
    with pytest.raises(UserError, match=r"has no test split beside train\.txt; .* data.test_fraction=0 does without"):
        from_path(tmp_path)
    named = from_path(tmp_path, test_fraction=0)
    assert {split: len(tokens) for split, tokens in named.tokens.items()} == {"train": 36, "validation": 36, "test": 0}
    whole = from_path(tmp_path / "train.txt", seq_len=2, validation_fraction=0.25, test_fraction=0)
    assert {split: len(tokens) for split, tokens in whole.tokens.items()} == {"train": 27, "validation": 9, "test": 0}


def test_the_fingerprint_follows_the_texts_and_their_splits(tmp_path):
    prints = {
        from_path(write_splits(tmp_path / name, **rows), "wikitext2").fingerprint
        for name, rows in {
            "same": {},
            "train": {"train": [*LINES, "x\n"]},
            "moved": {"train": LINES[:-1], "validation": [LINES[-1], *LINES]},
        }.items()
    }
    assert len(prints) == 3
    copy = from_path(write_splits(tmp_path / "copy"), "wikitext2")
    assert copy.fingerprint in prints
    assert len(copy.fingerprint) == 12


@pytest.mark.parametrize(
    ("size", "kind"),
    [(255, torch.uint8), (2**15 - 1, torch.int16), (2**15, torch.uint16), (2**16, torch.int32)],
)
def test_tokens_are_true_numbers_whatever_their_type(tmp_path, size, kind):
    characters = "".join(chr(0x10000 + number) for number in range(size))
    (tmp_path / "a.txt").write_text(characters * 2, encoding="utf-8")
    corpus = from_path(tmp_path / "a.txt", validation_fraction=0.25, test_fraction=0.25)
    train_N = corpus.tokens["train"]
    assert train_N.dtype == kind
    assert train_N.tolist() == list(range(size))
    assert corpus.count(train_N).tolist() == [1] * size + [0]
    inputs_BT, targets_BT = Batches(train_N, seq_len=4, batch_size=2, seed=0, device="cpu").train_batch(0)
    assert torch.equal(inputs_BT + 1, targets_BT)
    last = list(evaluation_batches(train_N, seq_len=4, batch_size=2))[-1]
    assert last[1].max() == size - 1


def test_the_vocabulary_is_padded_and_never_cut(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abc\n" * 200)
    corpus = from_path(path, vocabulary_size=1015)
    assert corpus.vocabulary_size == 1015
    assert len(corpus.vocabulary) == 5
    assert corpus.decode(torch.tensor([1, 4, 1000])) == f"a{UNKNOWN}{UNKNOWN}"
    with pytest.raises(UserError, match=r"data.vocabulary_size=4: text:a has 5 symbols"):
        from_path(path, vocabulary_size=4)


def test_a_batch_is_a_function_of_seed_and_number():
    forwards = [batches().train_batch(step)[0] for step in range(40)]
    one = batches()
    for step in (39, 3, 12, 11, 0, 25):
        assert torch.equal(one.train_batch(step)[0], forwards[step])
    other = batches(seed=1)
    assert not any(torch.equal(other.train_batch(step)[0], forwards[step]) for step in range(12))
    torch.manual_seed(5)
    assert torch.equal(batches().train_batch(0)[0], forwards[0])
    # Another order here changes every published number: say so where it is changed.
    assert forwards[0][:3, 0].tolist() == [420, 940, 20]


def test_an_epoch_takes_each_block_once_in_an_order_of_its_own():
    data = batches()
    assert (data.num_blocks, data.batches_per_epoch) == (100, 12)
    epochs = [torch.cat([data.train_batch(12 * epoch + n)[0] for n in range(12)])[:, 0] for epoch in range(3)]
    for firsts in epochs:
        assert len(set(firsts.tolist())) == 96
        assert all(first % 10 == 0 for first in firsts.tolist())
    assert not torch.equal(epochs[0], epochs[1])
    # Seed 0 in epoch 1 must not be seed 1 in epoch 0.
    assert not torch.equal(block_order(100, 0, 1), block_order(100, 1, 0))
    assert sorted(block_order(100, 0, 1).tolist()) == list(range(100))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_share_out_the_rows_of_the_same_batch(num_ranks):
    for step in (0, 13):
        whole = batches().train_batch(step)
        for rank in range(num_ranks):
            part = batches(rank=rank, num_ranks=num_ranks).train_batch(step)
            assert torch.equal(part[0], whole[0][rank::num_ranks])
            assert torch.equal(part[1], whole[1][rank::num_ranks])


def test_a_batch_larger_than_the_split_is_refused():
    Batches(TOKENS, seq_len=10, batch_size=100, seed=0, device="cpu")
    with pytest.raises(UserError, match=r"train.batch_size=101: at seq_len=10 the train split has only 100 blocks"):
        Batches(TOKENS, seq_len=10, batch_size=101, seed=0, device="cpu")
    with pytest.raises(UserError, match=r"train.batch_size=2: must be at least the number of processes, 3"):
        Batches(TOKENS, seq_len=10, batch_size=2, seed=0, device="cpu", num_ranks=3)


def test_the_last_block_may_end_with_the_text():
    assert Batches(TOKENS[:21], seq_len=10, batch_size=1, seed=0, device="cpu").num_blocks == 2
    assert Batches(TOKENS[:20], seq_len=10, batch_size=1, seed=0, device="cpu").num_blocks == 1


@pytest.mark.parametrize(
    ("length", "num_batches", "num_rows"),
    [(2, 1, 1), (10, 1, 1), (11, 1, 1), (12, 1, 2), (40, 1, 4), (41, 1, 4), (42, 2, 3), (1003, 26, 4)],
)
def test_an_evaluation_weighs_every_character_once(length, num_batches, num_rows):
    assert evaluation_shape(length, 10, 4) == (num_batches, num_rows)
    scored, batches = [], list(evaluation_batches(TOKENS[:length], seq_len=10, batch_size=4))
    assert len(batches) == num_batches
    for inputs_BT, targets_BT, weight_BT in batches:
        assert inputs_BT.shape == targets_BT.shape == weight_BT.shape == (num_rows, 10)
        assert (inputs_BT.dtype, targets_BT.dtype, weight_BT.dtype) == (torch.int64, torch.int64, torch.float32)
        assert torch.equal(inputs_BT + 1, targets_BT)
        assert set(weight_BT.unique().tolist()) <= {0.0, 1.0}
        assert bool((weight_BT.diff(dim=1) <= 0).all())
        scored += targets_BT[weight_BT == 1].tolist()
    assert scored == list(range(1, length))
