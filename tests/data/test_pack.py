"""Packing loses no token, keeps documents apart, and resumes exactly."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headstart.data.pack import CUT, pack
from headstart.data.packed import SHORTEST, Document
from headstart.data.plain import Text, encode_texts
from headstart.heads.errors import UserError


def make_documents(seed, sizes):
    """Every token is its own number, from 1, so that each can be found again and none is taken for padding."""
    rng, start, found = np.random.default_rng(seed), 1, []
    for size in sizes:
        found.append(Document(np.arange(start, start + size, dtype=np.int32), rng.random(size) < 0.5))
        start += size
    return found


SIZES = {
    "mixed": np.random.default_rng(0).integers(8, 300, 200).tolist(),
    "alike": [40] * 300,  # no two fit a row of 64, so rows are filled by cutting
    "long": [1000, 64, 640, 900],
    "tight": [40, 28],  # the cut leaves enough of the second to keep
    "one": [8],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_token_once_and_documents_whole(sizes):
    documents = make_documents(1, sizes)
    packed = pack(documents, 64)
    batch = packed.batch(slice(None))
    real = np.ones(packed.tokens_RT.shape, dtype=bool)
    seen, padding = [], 0
    for r in range(len(packed)):
        numbers = packed.documents_RT[r]
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), 64]
        pieces = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
        assert len(pieces) == len(set(numbers.tolist()))  # a number is one piece: contiguous
        for piece in pieces:
            assert packed.positions_RT[r, piece].tolist() == list(range(piece.stop - piece.start))
            tokens = packed.tokens_RT[r, piece]
            if (tokens == 0).all():
                assert not packed.loss_mask_RT[r, piece].any()
                padding += len(tokens)
                real[r, piece] = False
                assert piece.stop == 64
                continue
            assert (np.diff(tokens) == 1).all()  # a piece is a stretch of one document
            assert len(tokens) >= SHORTEST
            seen += tokens.tolist()
    starts = np.cumsum([1, *sizes])
    short = [t for i, size in enumerate(sizes) if 0 < size % 64 < SHORTEST for t in range(starts[i + 1] - size % 64, starts[i + 1])]
    assert sorted(seen + short) == list(range(1, 1 + sum(sizes)))
    assert packed.dropped == len(short) and packed.unsupervised == 0
    assert packed.padding == padding == 64 * len(packed) - len(seen)
    mask = np.concatenate([d.loss_mask for d in documents])
    assert np.array_equal(packed.loss_mask_RT[real], mask[packed.tokens_RT[real] - 1])
    assert batch.tokens_BT.dtype == torch.int64
    assert batch.loss_mask_BT.dtype == torch.bool


def sparse(seed, sizes, share):
    """Long stretches without supervision, as of prompts, and a few short answers."""
    rng, found = np.random.default_rng(seed), []
    for document in make_documents(seed, sizes):
        mask = np.zeros(len(document.tokens), dtype=np.bool_)
        if rng.random() < share:
            at = rng.integers(0, len(mask))
            mask[at : at + rng.integers(1, 12)] = True
        found.append(Document(document.tokens, mask))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_every_row_has_a_guess_to_learn_and_none_is_lost(seed):
    """What is left out teaches nothing at any depth; what is supervised elsewhere is in the rows still."""
    documents = sparse(seed, np.random.default_rng(seed).integers(8, 300, 150).tolist(), 0.3)
    packed = pack(documents, 64)
    batch = packed.batch(slice(None))
    assert batch.supervised(1).any(1).all()
    kept = set(packed.tokens_RT[packed.tokens_RT > 0].tolist())
    assert packed.unsupervised > 1000 and packed.dropped + packed.unsupervised + len(kept) == sum(len(d.tokens) for d in documents)
    for document in documents:  # alone in rows of its own, every window of it that has a guess
        for start in range(0, len(document.tokens), 64):
            window = slice(start, start + 64)
            if len(document.tokens[window]) >= SHORTEST and not kept & set(document.tokens[window].tolist()):
                assert not document.loss_mask[window][2:].any()


def test_nothing_to_learn_is_an_error():
    first = Document(np.arange(1, 31, dtype=np.int32), np.arange(30) < 2)  # supervised are the two that no root guesses
    with pytest.raises(UserError, match="nothing is supervised in 1 documents"):
        pack([first], 64)
    with pytest.raises(UserError, match="nothing is supervised in 8 documents"):
        pack(sparse(0, [40] * 8, 0.0), 64)


def test_little_padding_and_few_cuts():
    sizes = np.random.default_rng(2).integers(20, 400, 2000).tolist()
    packed = pack(make_documents(0, sizes), 512)
    assert packed.padding < 0.01 * packed.tokens_RT.size
    pieces = sum(len(set(row.tolist())) for row in packed.documents_RT)
    assert pieces < 1.05 * len(sizes) + len(packed)
    alike = pack(make_documents(0, [300] * 1000), 512)
    assert alike.padding < 0.01 * alike.tokens_RT.size


def test_the_stream_is_a_function_of_the_step():
    packed = pack(make_documents(3, SIZES["mixed"]), 64)

    def rows(steps, **kind):
        return [b.tokens_BT[:, 0].tolist() for b in islice(packed.stream(5, **kind), steps)]

    whole = rows(300, seed=7)
    assert rows(40, seed=7, start_step=260) == whole[260:]
    assert rows(300, seed=8) != whole
    firsts = packed.tokens_RT[:, 0].tolist()
    line = [row for step in whole for row in step]
    for epoch in range(len(line) // len(packed)):  # every row once an epoch, batches run over its end
        assert sorted(line[epoch * len(packed) : (epoch + 1) * len(packed)]) == sorted(firsts)
    assert line[: len(packed)] != line[len(packed) : 2 * len(packed)]
    assert packed.order(1, 7).tolist() != packed.order(0, 8).tolist()  # the orders of another seed are others


def test_the_seed_shuffles_the_rows():
    one, other = (pack(make_documents(3, SIZES["mixed"]), 64, seed=seed).tokens_RT[:, 0].tolist() for seed in (0, 1))
    assert one != other and sorted(one) == sorted(other)


def test_ranks_share_the_line():
    packed = pack(make_documents(3, SIZES["mixed"]), 64)
    one = [b.tokens_BT for b in islice(packed.stream(6, seed=1), 100)]
    ranks = [[b.tokens_BT for b in islice(packed.stream(2, seed=1, rank=r, world=3), 100)] for r in range(3)]
    for step in range(100):
        assert torch.equal(torch.cat([ranks[r][step] for r in range(3)]), one[step])
    first_epoch = len(packed) // 6
    rows = [{tuple(row.tolist()) for step in rank[:first_epoch] for row in step} for rank in ranks]
    assert not rows[0] & rows[1] and not rows[0] & rows[2] and not rows[1] & rows[2]


def test_digest_names_the_data():
    documents = make_documents(0, [100, 50])
    assert pack(documents, 64).digest() == pack(documents, 64).digest()
    assert pack(documents, 64).digest() != pack(documents, 65).digest()
    documents[0].loss_mask[3] ^= True
    assert pack(documents, 64).digest() != pack(make_documents(0, [100, 50]), 64).digest()
    packed = pack(documents, 64)
    packed.documents_RT[0, 40:] += 1  # the same tokens, cut elsewhere
    assert packed.digest() != pack(documents, 64).digest()


def test_what_is_to_be_guessed_is_counted():
    """Neither questions nor padding, of which most conversations are full."""
    documents = [Document(np.array([5] * 20 + [9] * 4, dtype=np.int32), np.array([False] * 20 + [True] * 4)) for _ in range(3)]
    counts = pack(documents, 32).counts(12)
    assert counts.tolist() == [12 if token == 9 else 0 for token in range(12)]


def test_refusals():
    documents = make_documents(0, [100])
    with pytest.raises(UserError, match=r"longer than the target's context of 64: set trainer\.length .* to 64 or less"):
        pack(documents, 65, context=64)
    with pytest.raises(UserError, match=r"too short: set trainer\.length .* to 16 or more"):
        pack(documents, CUT - 1)
    assert pack(documents, 64, context=64).length == 64 and pack(documents, CUT).length == CUT
    with pytest.raises(UserError, match="no document"):
        pack([], 64)
    with pytest.raises(UserError, match="no document"):
        pack(make_documents(0, [SHORTEST - 1, 0]), 64)


def test_texts_end_with_the_end():
    bpe = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")
    one, two, part = encode_texts(fast, [Text("x", "a b a"), Text("y", ""), Text("z", "a b", ends=False)])
    assert one.tokens.tolist() == [1, 2, 1, 0] and one.loss_mask.all()
    assert two.tokens.tolist() == [0] and part.tokens.tolist() == [1, 2]
    with pytest.raises(UserError, match="end-of-text"):
        encode_texts(SimpleNamespace(eos_token_id=None), [Text("x", "a")])
