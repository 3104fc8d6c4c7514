"""A mix holds every row of its sources, as often as their weights ask for, and is the same wherever it goes on."""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headstart.data import source
from headstart.data.mix import Mixed
from headstart.data.pack import pack
from headstart.data.packed import Document
from headstart.data.source import check_source, is_captured, open_source
from headstart.heads.errors import UserError
from tests.data.conftest import write


def rows_of(first: int, count: int) -> Any:
    """So many rows, each of one token's repetition."""
    return pack([Document(np.full(16, token, dtype=np.int32), np.ones(16, dtype=np.bool_)) for token in range(first, first + count)], 16)


def test_weights_are_shares_of_the_rows() -> None:
    parts = [rows_of(1, 10), rows_of(100, 40)]
    for weights, counts in (
        (None, (10, 40)),
        ([1, 1], (40, 40)),
        ([1, 4], (10, 40)),
        ([1, 9], (10, 90)),
        ([3, 1], (120, 40)),
        ([0.2, 0.3], (27, 40)),
    ):
        mixed = Mixed(parts, weights)
        first = mixed.lay(np.arange(len(mixed))).tokens[:, 0]
        tokens = Counter(first.tolist())
        small, large = ([n for token, n in tokens.items() if (token >= 100) == big] for big in (False, True))
        assert (sum(small), sum(large)) == counts and len(small) == 10 and len(large) == 40  # every row of each
        assert max(small) - min(small) <= 1 and max(large) - min(large) <= 1
        assert mixed.counts(200)[100:].sum() == counts[1] * 16
    for order in (first[mixed.order(0, 5)], mixed.whole().tokens_RT[:, 0]):
        assert 0.4 < (order >= 100)[:20].mean() < 0.8  # mixed, not one behind the other
    assert Mixed([rows_of(1, 5), rows_of(100, 14)], [2, 3]).counts_S.tolist() == [10, 14], "what is rounded is no row"


@pytest.mark.parametrize("small", [1e-9, 1e-18, 1e-30, 1e-320])
def test_weights_that_are_too_far_apart_are_refused(small: float) -> None:
    """However far: a number of rows that no integer holds would come out negative."""
    for weights in ([small, 1.0], [1.0, 1 / max(small, 1e-308)]):
        with pytest.raises(UserError, match=r"at these weights an epoch has more than 2,147,483,648 rows: give the smallest source more"):
            Mixed([rows_of(1, 10), rows_of(100, 40)], weights)
    assert Mixed([rows_of(1, 10), rows_of(100, 40)], [1e-8, 1.0]).counts_S.tolist() == [10, 10**9]


def test_what_a_mix_leaves_empty_or_out_is_as_often_as_its_rows() -> None:
    words = [Document(np.full(size, size, dtype=np.int32), np.ones(size, dtype=np.bool_)) for size in (12, 12, 12, 16, 16, 20)]
    parts = [pack(words[:3], 16), pack(words[3:], 16)]  # the rest of the last document is too short to keep
    mixed = Mixed(parts, [3, 1])
    laid = mixed.lay(np.arange(len(mixed)))
    assert mixed.counts_S.tolist() == [9, 3] and mixed.padding == (laid.tokens == 0).sum() == 9 * 4 and mixed.dropped == 4


def test_the_digest_names_parts_and_weights() -> None:
    parts = [rows_of(1, 10), rows_of(100, 40)]
    known = {Mixed(*each).digest() for each in ((parts, None), (parts, [1, 1]), (parts, [1, 2]), (parts[::-1], None), (parts[:1], None))}
    assert len(known) == 5 and Mixed(parts, [2, 2]).digest() == Mixed(parts, [1, 1]).digest()


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    talk = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1 2 3 4 5 6 7"}]
    write(tmp_path / "talks.jsonl", [{"messages": talk}] * 40)
    (tmp_path / "some.txt").write_text("\n\n".join(f"{i} is a number, and another one is {i + 7}" for i in range(200)))
    return [
        {"name": "chat", "path": str(tmp_path / "talks.jsonl"), "weight": 1},
        {"name": "text", "path": str(tmp_path / "some.txt"), "weight": 3},
    ]


def test_as_a_source(sources: Any, target: Any, capsys: Any) -> None:
    """Rows, held-out text and prompts are of all; the k-th batch is what it was, whatever was before."""
    given = {"name": "mix", "sources": sources}
    check_source(given)
    made = open_source(given, target, length=64, seed=0)
    alone = [
        open_source(source.defaults(each) | {k: v for k, v in each.items() if k != "weight"}, target, length=64, seed=0) for each in sources
    ]
    assert made.packed is not None and made.held_out is not None
    assert len(made.held_out) == sum(len(held) for each in alone if (held := each.held_out) is not None)
    shares = [float(share) for share in re.findall(r"([\d.]+)% /", capsys.readouterr().out)]
    assert shares == [pytest.approx(25, abs=1), pytest.approx(75, abs=1)]
    assert made.prompts(2, 8) == [alone[0].prompts(2, 8)[0], alone[1].prompts(2, 8)[0]]
    whole = [batch.tokens_BT for batch in islice(made.stream((), 2, 1, 0, 0, 1), 12)]
    assert all(torch.equal(a, b.tokens_BT) for a, b in zip(whole[7:], made.stream((), 2, 1, 7, 0, 1), strict=False))
    laid = made.packed.lay(np.arange(len(made.packed)))
    said = torch.from_numpy(laid.tokens[laid.loss_mask]).long()
    assert torch.equal(made.counts(), torch.bincount(said, minlength=320))
    assert not is_captured(given)


def test_a_bad_row_says_which_source_drops_such_rows(sources: Any, target: Any, tmp_path: Path) -> None:
    bad = write(tmp_path / "data.jsonl", [{"messages": 5}])
    for given, says in (
        ({"name": "chat", "path": str(bad)}, r"data\.jsonl line 1: .* \(data\.sources\[1\]\.on_bad=skip drops such rows\)$"),
        ({"name": "chat", "path": str(bad), "on_bad": "skip"}, r"^data\.sources\[1\]\.path=.*data\.jsonl: no conversations in it"),
    ):
        with pytest.raises(UserError, match=says):
            open_source({"name": "mix", "sources": [sources[1] | {"weight": None}, given]}, target, length=64, seed=0)


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ([], r"data\.sources is empty"),
        ("chat", r"data\.sources must be a list of settings"),
        ([{"path": "x"}], "no data is called None"),
        ([{"name": "mix", "sources": []}], "a mix cannot hold another"),
        ([{"name": "shards", "path": "x"}], "is captured, and cannot be mixed"),
        ([{"name": "chat"}], r"data=chat needs data\.sources\[0\]\.path$"),
        (
            [{"name": "stdlib", "weight": 1}, {"name": "stdlib"}],
            r"data\.sources\[1\]\.weight must be a number above 0, of all sources or of none",
        ),
        ([{"name": "stdlib", "weight": 0}], "above 0"),
        ([{"name": "stdlib", "weight": True}], "above 0"),
        ([{"name": "stdlib", "weight": float("inf")}], "above 0"),
        ([{"name": "chat", "path": "x.jsonl", "stream": True}], r"sources\[0\]: what is streamed has no known size, and cannot be mixed"),
        ([{"name": "stdlib", "wieght": 1}], r"data=stdlib has no setting data\.sources\[0\]\.wieght: "),
        ([{"name": "chat", "path": "/nosuch/data.jsonl"}], r"^data\.sources\[0\]\.path=/nosuch/data\.jsonl: no such file"),
        ([{"name": "stdlib"}, {"name": "chat", "path": "x.jsonl", "limit": 0}], r"^data\.sources\[1\]\.limit must be"),
    ],
)
def test_what_cannot_be_mixed_is_one_line(sources: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        check_source({"name": "mix", "sources": sources})
    assert "\n" not in str(error.value)
