"""Nothing silent: an exported folder that was changed in any way is refused in one line, or says the same to the last bit."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.inference.speculator import open_speculator
from tests import mutations
from tests.drafters import SERVED, VARIANTS, guesses, make
from tests.tiny_targets import tiny_target

TARGET = functools.cache(tiny_target)
SMALL: dict[str, dict[str, Any]] = {  # one of every format of engines, and two of our own
    "eagle": dict(draft_vocab=[0, 2, 3, 5, 8, 13, 21, 34, 55, 89, 90, 95], heads=4, kv_heads=2, window=8),
    **SERVED,
    "peagle": SERVED["peagle"] | dict(window=8, qk_norm=True, own_embedding=True),
    "dspark": SERVED["dspark"] | dict(layers=2, window=8, window_layers=[0]),
    "jetspec": dict(layers=2, block=4, window=8, window_layers=[1], draft_vocab=[1, 5, 6, 50, 95], mask_token=95),
    "draft_lm": {},
    "own_mtp": {},
    "pard": dict(depth=3, mask_token=95),
    "dflash": dict(layers=1, block=4),
    **dict.fromkeys(VARIANTS, SERVED["dspark"]),
    "hydra": dict(guesses=2, draft_vocab=[1, 5, 6, 50, 95]),
}
ENGINES = [head for head in SMALL if head not in ("dflash", "hydra")]
EACH = 38  # every 38th mutation is tried, starting at another one for each head; the slow tests try all
ALL = pytest.mark.parametrize("each", [EACH, pytest.param(1, marks=pytest.mark.slow)])


def opened(folder: Path) -> Drafter:
    """As every door opens a speculator."""
    return open_speculator(folder, TARGET())


def saved(head: str, folder: Path) -> Callable[[Drafter], bool]:
    """Whether a drafter says what this one says, as deep as both guess."""
    hub.save(make(head, TARGET(), **SMALL[head]), folder, TARGET().card, torch.float32)
    expected = guesses(opened(folder), TARGET())
    return lambda other: all(torch.equal(a, b) for a, b in zip(guesses(other, TARGET()), expected, strict=False))


@ALL
@pytest.mark.parametrize("head", SMALL)
def test_a_changed_folder_is_refused_or_says_the_same(head: str, each: int, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    same, refused = saved(head, folder), 0
    some = islice(mutations.mutations(folder), list(SMALL).index(head) % each, None, each)
    for mutation, outcome, what in mutations.outcomes(folder, some, opened, same, tmp_path / "copy"):
        assert outcome in (mutations.REFUSED, mutations.SAME), f"{mutation.name}: {outcome}: {what}"
        refused += outcome == mutations.REFUSED
    assert refused > 200 / each


@ALL
@pytest.mark.parametrize("head", ENGINES)
def test_the_halves_of_a_config_agree_even_without_digests(head: str, each: int, tmp_path: Path) -> None:
    """As of a folder that an earlier version saved: what engines would compute otherwise is refused."""
    folder = tmp_path / "s"
    same = saved(head, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["headstart"]["sha256"]
    (folder / "config.json").write_text(json.dumps(config))
    unseen = ("config.json", "headstart.arguments.depth")  # how deep it guesses is no matter of the folder's to engines
    found = (m for m in mutations.of_config(folder) if not m.name.startswith(unseen))
    some = islice(found, list(SMALL).index(head) % each, None, each)
    for mutation, outcome, what in mutations.outcomes(folder, some, opened, same, tmp_path / "copy"):
        assert outcome in (mutations.REFUSED, mutations.SAME), f"{mutation.name}: {outcome}: {what}"
