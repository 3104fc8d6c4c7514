"""EAGLE-3 and P-EAGLE of the speculators library, as its own training starts them by default, and what its classes compute. Skipped where
it is not installed (tests/heads/test_speculators.py says how).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import hub
from headstart.heads.base import Roots
from headstart.heads.unroll import unroll
from tests.drafters import random_tokens, roots_of
from tests.tiny_targets import tiny_target

pytest.importorskip("speculators")
TARGET = functools.cache(tiny_target)
IDS, TAPS, MASK = [0, 2, 3, 5, 8, 13, 21, 34, 55, 89], [2, 3, 5], 95
TOKENS, DEPTH = 40, 5
ASKED = [1, 6, 19, 20, 33]
CASES: list[tuple[str, dict[str, Any], list[int] | None]] = [  # its kind, settings other than the defaults, the vocabulary
    ("eagle3", {}, IDS),
    ("eagle3", {"sliding_window": 9}, None),  # a window that hides something here
    ("eagle3", {"sliding_window": 9, "num_layers": 2, "draft_arch": "qwen3", "norm_output": False}, IDS),
    ("eagle3", {"full_attention_indices": [0], "fc_norm": True, "norm_before_fc": False, "norm_before_residual": False}, None),
    ("peagle", {}, None),
    ("peagle", {"sliding_window": 9, "num_layers": 2}, IDS),
    ("peagle", {"sliding_window": 8, "draft_arch": "llama", "norm_before_residual": False, "norm_before_fc": True}, None),
]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("verifier")
    TARGET().model.save_pretrained(folder)
    return str(folder)


def theirs(kind: str, settings: dict[str, Any], ids: list[int] | None, verifier: str) -> Any:
    """The library's drafter as its command line builds it, with random weights in the place of fresh and copied ones."""
    from speculators import SpeculatorModel
    from speculators.train.cli import build_draft_model
    from speculators.train.config.schema import TrainConfig

    given = {"speculator_type": kind, "verifier_name_or_path": verifier, "target_layer_ids": TAPS, "mask_token_id": MASK}
    flat = TrainConfig.from_flat(given | settings).flatten()
    flat |= {"draft_attn_impl": "eager"}  # the default runs on a GPU only
    t2d = d2t = None
    if ids is not None:
        t2d, d2t = torch.zeros(96, dtype=torch.bool).index_fill(0, torch.tensor(ids), True), torch.tensor(ids) - torch.arange(len(ids))
    classes: Any = SpeculatorModel.registry
    torch.manual_seed(0)
    model: Any = build_draft_model(argparse.Namespace(**flat), classes[kind], t2d, d2t, len(ids or range(96)))
    assert model.embed_tokens.weight.requires_grad == (kind == "peagle")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.startswith("verifier") or (name == "embed_tokens.weight" and not p.requires_grad):
                continue
            p.copy_(torch.randn_like(p) * 0.2 + (p.ndim == 1))
    return model.eval()


class Enough(Exception):
    """The logits are known: the loss is not wanted."""


def their_logits(kind: str, model: Any, roots: Roots, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """[depths, asked roots, V]."""
    found: list[Tensor] = []

    def keep(module: Any, inputs: Any, logits: Tensor) -> None:
        found.append(logits[0])
        if kind == "peagle":
            raise Enough

    handle = model.lm_head.register_forward_hook(keep)
    states = torch.cat([roots.states[k] for k in TAPS], dim=-1)
    documents = torch.zeros(1, TOKENS, dtype=torch.long)
    with contextlib.suppress(Enough):
        if kind == "eagle3":
            model(states, roots.chosen_BT, documents, ttt_steps=DEPTH)
        else:  # its training draws which depths of which roots it computes
            anchors = torch.cat([torch.arange(TOKENS), torch.tensor(ASKED).repeat(DEPTH - 1)])
            depths = torch.cat([torch.zeros(TOKENS, dtype=torch.long), torch.arange(1, DEPTH).repeat_interleave(len(ASKED))])
            monkeypatch.setattr("speculators.models.peagle.core.generate_cod_sample_indices", lambda **_: (anchors, depths))
            model(states, roots.chosen_BT, documents, verifier_last_hidden_states=torch.zeros(1, TOKENS, 32))
    handle.remove()
    if kind == "eagle3":
        return torch.stack(found)[:, ASKED]
    return torch.cat([found[0][ASKED][None], found[0][TOKENS:].unflatten(0, (DEPTH - 1, -1))])


@torch.no_grad()
@pytest.mark.parametrize(("kind", "settings", "ids"), CASES)
def test_its_classes_compute_our_logits(
    kind: str, settings: dict[str, Any], ids: list[int] | None, verifier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = theirs(kind, settings, ids, verifier)
    model.save_pretrained(tmp_path / "s")
    drafter: Any = hub.load(tmp_path / "s", TARGET().shape)
    drafter.attach(TARGET().ends)
    assert drafter.window == (None if "full_attention_indices" in settings else settings.get("sliding_window", 2048))
    hub.save(drafter, tmp_path / "again", TARGET().card, torch.float32)
    copy = hub.load(tmp_path / "again", TARGET().shape, TARGET().card)
    copy.attach(TARGET().ends)
    roots = roots_of(TARGET(), drafter, torch.tensor([random_tokens(TOKENS, 4)]))
    expected = their_logits(kind, model, roots, monkeypatch)
    assert len(expected) == DEPTH
    for ours in (drafter, copy):
        for d, draft in enumerate(unroll(ours, roots, None, DEPTH), start=1):
            found = ours.unembedding(d).logits(draft.hidden_BNH)[0, ASKED]
            print(f"{kind}: off by {(found - expected[d - 1]).abs().max():.1e} of {expected[d - 1].abs().max():.1f}")
            torch.testing.assert_close(found, expected[d - 1], rtol=0, atol=3e-5)
