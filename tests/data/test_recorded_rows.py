"""Captured rows as texts: what stands before each supervised run, what was said, and the states of both; judged without the target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headstart.data.capture import capture
from headstart.data.pack import pack
from headstart.data.packed import Document
from headstart.data.recorded import _runs, recordings
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.reports.recorded import Recorded, replay
from tests.drafters import learn_by_heart, make, random_tokens
from tests.tiny_targets import tiny_target


def test_runs_of_what_is_supervised() -> None:
    mask = [True] * 5 + [False] * 3 + [True] * 4 + [False] + [True] * 2 + [False] + [True] * 6
    assert list(_runs(mask)) == [(1, 5), (8, 12), (16, 22)], "nothing stands before the first token; two tokens are too few"
    assert list(_runs([False] * 9)) == list(_runs([True])) == []


def test_rows_are_texts_that_are_judged_as_decoding_judges(tmp_path: Path) -> None:
    target = tiny_target()
    prompts = [random_tokens(n, n) for n in (9, 5, 12)]
    made = [generate(target, None, p, new_tokens=20).tokens for p in prompts]
    texts = [p + m for p, m in zip(prompts, made, strict=True)]
    drafter = learn_by_heart(make("eagle", target), target, [t[:25] for t in texts], depth=3, steps=15)
    documents = [Document(np.array(t, dtype=np.int32), np.arange(len(t)) >= len(p)) for t, p in zip(texts, prompts, strict=True)]
    capture(pack(documents, 64), target, drafter.taps, tmp_path / "shards")
    found = {tuple(each.prompt): each for each in recordings(tmp_path / "shards", target, drafter.taps)}
    assert {k: tuple(v.said) for k, v in found.items()} == {tuple(p): tuple(m) for p, m in zip(prompts, made, strict=True)}
    tree, rounds = TreePolicy(depth=3, nodes=6, branch=2), [0, 0]
    for prompt, said in zip(prompts, made, strict=True):
        stored, read = found[tuple(prompt)], Recorded.by(target, drafter.taps, prompt, said)
        assert all(torch.allclose(stored.states[tap], read.states[tap], atol=0.05, rtol=0.02) for tap in drafter.taps)  # in bf16
        rounds[0] += len(replay(stored, drafter, tree, SamplingParams()).emitted)
        rounds[1] += len(generate(target, Drafting(drafter), prompt, new_tokens=20, policy=tree).emitted)
        assert sum(replay(stored, drafter, tree, SamplingParams(1.0)).emitted) == 19
    assert rounds[0] == pytest.approx(rounds[1], rel=0.06) and rounds[1] < 50
    assert len(list(recordings(tmp_path / "shards", target, drafter.taps, 2))) == 2
