"""Folders that the speculators library wrote, and what its own classes compute with them. Skipped where it is not installed:

pip install --no-deps --target DIR speculators==0.9.0 hs-connectors==0.9.0 loguru pydantic-settings python-dotenv
PYTHONPATH=DIR python -m pytest -q tests/heads/test_speculators.py
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import hub
from headstart.heads.unroll import unroll
from tests.drafters import random_tokens, roots_of
from tests.tiny_targets import tiny_target

pytest.importorskip("speculators")
TARGET = functools.cache(tiny_target)
IDS, TAPS, BLOCK, MASK = [0, 2, 3, 5, 8, 13, 21, 34, 55, 89], [2, 3, 5], 5, 95
SLIDING, FULL = "sliding_attention", "full_attention"
TOKENS, ANCHORS = 40, [1, 6, 19, 20, 33]
KINDS: list[tuple[str, dict[str, Any], list[str], list[int] | None]] = [  # its kind, its settings, its layers, its vocabulary
    ("dflash", {}, [FULL] * 3, None),
    ("dflash", {}, [SLIDING] * 3, IDS),  # as it trains by default, once there is a vocabulary
    ("dflash", {}, [SLIDING, FULL, SLIDING], IDS),
    ("dflash", {"sliding_window_non_causal": True}, [FULL, SLIDING, SLIDING], None),
    ("dspark", {"markov_rank": 6}, [SLIDING] * 3, IDS),
    ("dspark", {"markov_rank": 6}, [SLIDING, SLIDING, FULL], None),
    ("dspark", {"markov_rank": 6, "sliding_window_non_causal": True}, [SLIDING, FULL, FULL], IDS),
    ("dspark", {"markov_rank": 6, "markov_head_type": "gated"}, [SLIDING, FULL, FULL], IDS),
    ("dspark", {"markov_rank": 6, "markov_head_type": "rnn"}, [FULL] * 3, None),
    ("dflash2", {"selector_rank": 6, "selector_top_k": 96}, [SLIDING] * 3, None),
    ("dflash2", {"selector_rank": 6, "sliding_window_non_causal": False}, [SLIDING, FULL, SLIDING], None),
]


def theirs(kind: str, settings: dict[str, Any], layers: list[str], ids: list[int] | None) -> Any:
    """The library's drafter, with random weights, for the small target."""
    from speculators import SpeculatorModel, SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    shape = TARGET().shape
    layer = Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, rms_norm_eps=shape.norm_eps, max_position_embeddings=256, rope_parameters=dict(shape.rope), tie_word_embeddings=False,
        layer_types=layers, use_sliding_window=SLIDING in layers, sliding_window=9,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    about = SpeculatorsConfig(
        algorithm=kind, proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)], default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )  # fmt: skip
    classes: Any = SpeculatorModelConfig.registry
    config = classes[kind](
        transformer_layer_config=layer, draft_vocab_size=len(ids or range(96)), block_size=BLOCK, aux_hidden_state_layer_ids=TAPS,
        mask_token_id=MASK, speculators_config=about, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = SpeculatorModel.registry[kind](config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (p.ndim == 1))
        head_VD = TARGET().ends.head_VD
        model.embed_tokens.weight.copy_(TARGET().model.model.embed_tokens.weight)
        model.lm_head.weight.copy_(head_VD if ids is None else head_VD[ids])
    if ids is not None:
        t2d = torch.zeros(96, dtype=torch.bool)
        t2d[ids] = True
        model.load_vocab_mappings(t2d, torch.tensor(ids) - torch.arange(len(ids)))
    return model.eval()


def their_logits(kind: str, model: Any, tokens: Tensor, states: list[Tensor]) -> Tensor:
    """[anchors, slots, V]. An anchor is drawn from where the loss is; as many as there are, it gets all."""
    where = torch.zeros(1, TOKENS, dtype=torch.bool)
    where[0, ANCHORS] = True
    given = torch.cat(states, dim=-1), tokens, where, torch.zeros(1, TOKENS, 32), torch.zeros(1, TOKENS, dtype=torch.long)
    hidden, logits, *_, places = model._backbone_forward(*given, max_anchors=len(ANCHORS))
    blocks, logits = hidden.view(len(ANCHORS), BLOCK, -1), logits.view(len(ANCHORS), BLOCK, -1)
    read = tokens[0, places].view(len(ANCHORS), BLOCK)
    if kind == "dspark":
        return logits + model.markov_head.block_bias(prev_token_ids=read, hidden_states=blocks)
    return logits


@torch.no_grad()
@pytest.mark.parametrize(("kind", "settings", "layers", "ids"), KINDS)
def test_its_classes_compute_our_logits(kind: str, settings: Any, layers: Any, ids: Any, tmp_path: Path) -> None:
    model, tokens = theirs(kind, settings, layers, ids), torch.tensor([random_tokens(TOKENS, 4)])
    model.save_pretrained(tmp_path / "s")
    drafter = hub.load(tmp_path / "s", TARGET().shape)
    drafter.attach(TARGET().ends)
    again = tmp_path / "again"
    hub.save(drafter, again, TARGET().card, torch.float32)
    copy = hub.load(again, TARGET().shape, TARGET().card)
    copy.attach(TARGET().ends)
    roots = roots_of(TARGET(), drafter, tokens)
    expected = their_logits(kind, model, tokens, [roots.states[k] for k in TAPS])
    first = 0 if kind == "dspark" else 1
    for ours in (drafter, copy):
        drafts = unroll(ours, roots, None, BLOCK - first, ask_BA=torch.tensor([ANCHORS]) - 1)
        for d, draft in enumerate(drafts, start=1):
            unembedding = ours.unembedding(d)
            if kind == "dflash2":  # the logits of the backbone; the selector's are those of vLLM (test_block_formats.py)
                unembedding, draft.hidden_BNH = unembedding.uncorrected(), unembedding.parts(draft.hidden_BNH)[0]
            found, wanted = unembedding.logits(draft.hidden_BNH)[0], expected[:, d - 1 + first]
            print(f"{kind}: off by {(found - wanted).abs().max():.1e} of {wanted.abs().max():.1f}")
            torch.testing.assert_close(found, wanted, rtol=0, atol=3e-5)
