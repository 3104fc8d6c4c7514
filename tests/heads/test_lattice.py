"""LiLiCorr's head: against its definition, from the exported folder alone, and against the numbers of another implementation.

Shapes: [S, D] slots by hidden size, [S, C] candidates of the slots, L = S * C.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.lilicorr import Correlator
from headstart.heads.memory import Memory
from headstart.heads.unembedding import in_digits, of_digits
from headstart.heads.unroll import unroll
from headstart.heads.visibility import CausalSees
from tests.drafters import fresh, judged, make, random_tokens, roots_of
from tests.tiny_targets import tiny_target

TARGET, MASK = functools.cache(tiny_target), 95
SMALL: dict[str, Any] = dict(layers=2, block=5, taps=[2, 3, 5], mask_token=MASK, candidates=4, width=24, factors=10, lattice_heads=4)


class Lattice:
    """The scores of one block, from the tensors of a folder and its config, in float64."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], embed: Tensor, slots: Tensor, logits: Tensor, z: Tensor) -> None:
        self.w = {key.removeprefix("lilicorr."): x.double() for key, x in tensors.items() if key.startswith("lilicorr.")}
        self.said = {key.removeprefix("lilicorr_"): value for key, value in config["dflash_config"].items()}
        self.eps = config["rms_norm_eps"]
        log_p = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
        order = log_p.sort(-1, descending=True)
        self.ids, log_p = (x[:, : self.said["candidate_topk"]] for x in (order.indices, order.values))
        own = self.candidates(embed.double()[self.ids], log_p, slots.double())
        anchor = self.norm(self.linear(z.double(), "context_proj"), "anchor_norm")
        joint = torch.cat([own, anchor.expand_as(own), own * anchor], -1)
        joint = F.silu(self.linear(joint, "factor_input_proj"))
        self.start = torch.stack([self.cosine(self.linear(anchor, "anchor_out_head"), x) for x in self.linear(joint[0], "in_head")])
        out, into = self.linear(joint[:-1], "out_head"), self.linear(joint[1:], "in_head")
        self.pairs = torch.stack(
            [torch.stack([torch.stack([self.cosine(a, b) for b in y]) for a in x]) for x, y in zip(out, into, strict=True)]
        )

    def candidates(self, embeds: Tensor, log_p: Tensor, slots: Tensor) -> Tensor:
        """[S, C, width] after the layers and the last norm."""
        S, C = log_p.shape
        rank = torch.arange(C).double().expand(S, C)
        features = torch.stack([log_p, log_p.exp(), log_p - log_p[:, :1], rank / (C - 1), (rank == 0).double()], -1)
        features = (features - features.mean(-1, keepdim=True)) / (features.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        features = features * self.w["feature_norm.weight"] + self.w["feature_norm.bias"]
        x = self.mlp(features, "feature_mlp") + self.linear(slots, "pass_hidden_proj")[:, None]
        x = x + (self.linear(embeds, "token_proj") if "token_proj.weight" in self.w else embeds)
        x = (x + self.w["slot_embedding"][0, 0] + self.w["rank_embedding"][0, 0]).flatten(0, 1)
        slot = torch.arange(S).repeat_interleave(C).tolist()
        for i in range(self.said["num_layers"]):
            x = x + self.attend(self.norm(x, f"layers.{i}.attn_norm"), f"layers.{i}.attn", slot)
            x = x + self.mlp(self.norm(x, f"layers.{i}.mlp_norm"), f"layers.{i}.mlp")
        return self.norm(x, "output_norm").view(S, C, -1)

    def attend(self, x: Tensor, name: str, slot: list[int]) -> Tensor:
        heads, far, same = self.said["num_heads"], self.w["relative_slot_bias"], self.w["same_slot_bias"]
        q, k, v = (x @ self.w[f"{name}.in_proj_weight"].T + self.w[f"{name}.in_proj_bias"]).view(len(x), 3, heads, -1).unbind(1)
        middle, out = far.shape[1] // 2, []
        for h in range(heads):
            scores = q[:, h] @ k[:, h].T / q.shape[-1] ** 0.5
            for i, a in enumerate(slot):
                for j, b in enumerate(slot):
                    scores[i, j] += far[h, a - b + middle] + (same[h] if a == b else 0.0)
            out.append(scores.softmax(-1) @ v[:, h])
        return self.linear(torch.cat(out, -1), f"{name}.out_proj")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.w[f"{name}.weight"]

    def mlp(self, x: Tensor, name: str) -> Tensor:
        return self.linear(F.silu(self.linear(x, f"{name}.up_proj")), f"{name}.down_proj")

    def cosine(self, a: Tensor, b: Tensor) -> Tensor:
        least, scale = self.said["vector_eps"], self.said["logit_scale"]
        return scale * (a / a.norm().clamp(min=least)) @ (b / b.norm().clamp(min=least))

    def row(self, depth: int, before: int) -> Tensor:
        """The scores [C] of the guesses of this depth. ``before``: the token before; a mean where that is no candidate."""
        if depth == 1:
            return self.start
        found = (self.ids[depth - 2] == before).nonzero()[:, 0].tolist()
        return self.pairs[depth - 2, found[0]] if found else self.pairs[depth - 2].mean(0)

    def logits(self, depth: int, before: int, vocab: int) -> Tensor:
        """The same as logits of all tokens [V]."""
        return torch.full((vocab,), -torch.inf, dtype=torch.float64).index_copy(0, self.ids[depth - 1], self.row(depth, before))


def opened(folder: Path, **changes: Any) -> Drafter:
    """A drafter that was saved and is loaded as anybody's."""
    hub.save(make("lilicorr", TARGET(), **SMALL | changes), folder, TARGET().card, torch.float32)
    config = json.loads((folder / "config.json").read_text())
    del config["headstart"]
    (folder / "config.json").write_text(json.dumps(config))
    drafter = hub.load(folder, TARGET().shape)
    drafter.attach(TARGET().ends)
    return drafter


def of_block(folder: Path, drafter: Any, states: dict[int, Tensor], draft: Any) -> Lattice:
    """The lattice of the only draft. The slots come from the drafter: they are DFlash's (test_block_formats.py)."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    slots, model = draft.state[0, 0, : 4 * 32].view(4, 32), TARGET().model
    joined = torch.cat([states[tap][0, -1] for tap in drafter.taps]) @ tensors["fc.weight"].T
    z = joined / (joined.pow(2).mean() + config["rms_norm_eps"]).sqrt() * tensors["hidden_norm.weight"]
    return Lattice(tensors, config, model.model.embed_tokens.weight, slots, slots @ model.lm_head.weight.T, z)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, dict(width=32), dict(candidates=16), dict(conv_taps=2, conv_group=8), dict(block=5, window=6)])
def test_chains_of_engines_are_ours(changes: dict[str, Any], tmp_path: Path) -> None:
    """Greedy ones, token by token, and all scores on the way; sampled ones have the softmax of the same scores."""
    drafter, tokens, moved = opened(tmp_path / "s", **changes), random_tokens(16, 6), 0
    every = roots_of(TARGET(), drafter, torch.tensor([tokens]))
    for n in range(4, 14):  # roots
        memory, sees = Memory(), CausalSees(n, n)
        draft = drafter.begin(every[:n], memory, sees, torch.tensor([[n - 1]]))
        lattice, said, best = of_block(tmp_path / "s", drafter, every[:n].states, draft), tokens[n], list[int]()
        for d in range(1, 5):
            if d > 1:
                draft = drafter.step(d, torch.tensor([[said]]), draft, torch.tensor([[n + d - 2]]), memory, sees)
            found, expected = drafter.unembedding(d).logits(draft.hidden_BNH)[0, 0], lattice.logits(d, said, 96)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
            said = int(lattice.ids[d - 1][lattice.row(d, said).argmax()])
            assert int(found.argmax()) == said
            best.append(said)
        moved += best != lattice.ids[:, 0].tolist()
    assert moved, "the head changes no guess"


def test_the_numbers_of_model_optimizer() -> None:
    """Its head with these weights and inputs has these scores, as TensorRT-LLM's own test holds them (2026)."""
    head = Correlator(32, slots=3, candidates=3, width=8, factors=8, layers=2, heads=2, mlp=2.0, eps=1e-5).eval()
    for name, x in head.named_parameters():
        x.data = (torch.arange(x.numel()) * 0.17 + sum(name.encode()) * 0.013).sin().mul(0.2).view(x.shape)
    embeds = torch.linspace(-1.2, 1.3, 512).view(16, 32)[torch.tensor([[[2, 5, 9], [6, 3, 1], [4, 7, 8]]])]
    log_p = torch.tensor([[[-0.4, -1.5, -3.0], [-0.6, -1.7, -2.7], [-0.2, -2.1, -3.4]]])
    slots, z = torch.linspace(-0.7, 0.9, 96).view(1, 3, 32), torch.linspace(-0.5, 0.4, 32).view(1, 32)
    start, pairs = head(embeds, log_p, slots, z, 1e-4)
    near = dict(rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(8 * start, torch.tensor([[-2.00565147, -2.00631571, -2.01010752]]), **near)
    first = [[1.16437435, 1.16812551, 1.15701485], [1.16656375, 1.17030466, 1.15921211], [1.17068172, 1.17445230, 1.16334319]]
    second = [[1.14806044, 1.14459574, 1.12698877], [1.14481199, 1.14134955, 1.12373281], [1.14475155, 1.14125943, 1.12357390]]
    torch.testing.assert_close(8 * pairs, torch.tensor([[first, second]]), **near)


@torch.no_grad()
def test_a_token_that_was_no_candidate_is_noted(tmp_path: Path) -> None:
    """For the loss, which leaves out what is behind it; also behind later tokens that were candidates."""
    drafter, n, sees, memory = opened(tmp_path / "s"), 9, CausalSees(9, 9), Memory()
    every = roots_of(TARGET(), drafter, torch.tensor([random_tokens(16, 6)]))
    draft = drafter.begin(every[:n], memory, sees, torch.tensor([[n - 1]]))
    lattice = of_block(tmp_path / "s", drafter, every[:n].states, draft)
    ids = lattice.ids
    strange = next(i for i in range(96) if i not in ids[1])
    known = []
    for d, token in ((2, int(ids[0, 3])), (3, strange), (4, int(ids[2, 0]))):
        draft = drafter.step(d, torch.tensor([[token]]), draft, torch.tensor([[n + d - 2]]), memory, sees)
        unembedding = drafter.unembedding(d)
        known.append(unembedding.parts(draft.hidden_BNH)[2].item())
        found = unembedding.logits(draft.hidden_BNH)[0, 0].double()
        torch.testing.assert_close(found, lattice.logits(d, token, 96), rtol=0, atol=2e-5)
    assert known == [1.0, 0.0, 0.0]


@torch.no_grad()
def test_one_candidate_is_the_backbones_likeliest_token() -> None:
    drafter = make("lilicorr", TARGET(), **SMALL | dict(candidates=1))
    for d, draft in enumerate(unroll(drafter, roots_of(TARGET(), drafter, torch.tensor([random_tokens(9, 6)])), None, 4), start=1):
        logits = drafter.unembedding(d).logits(draft.hidden_BNH)
        listed = logits > -torch.inf  # nor is the score NaN
        assert torch.equal(listed.sum(-1), torch.ones(1, 9, dtype=torch.int64))
        assert torch.equal(listed.int().argmax(-1), judged(drafter, d, draft.hidden_BNH).argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ids_survive_half_precision(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 255, 256], [65535, 262143, 2**24 - 1]])
    assert torch.equal(of_digits(in_digits(ids, dtype)), ids)


def test_names_that_are_numbered_load_too(tmp_path: Path) -> None:
    """As libraries write the head's MLPs: modules in a row, by their number. And a width of 0 is the backbone's."""
    drafter = opened(tmp_path / "s", width=32)
    path = tmp_path / "s" / "config.json"
    config, tensors = json.loads(path.read_text()), load_file(tmp_path / "s" / "model.safetensors")
    assert "lilicorr.token_proj.weight" not in tensors
    config["dflash_config"] |= {"lilicorr_hidden_size": 0, "projector_type": "lilicorr"}
    path.write_text(json.dumps(config))
    numbers = {
        "feature_norm": "feature_mlp.0",
        "feature_mlp.up_proj": "feature_mlp.1",
        "feature_mlp.down_proj": "feature_mlp.3",
        **{f"layers.{i}.mlp.{x}_proj": f"layers.{i}.mlp.{n}" for i in (0, 1) for x, n in (("up", 0), ("down", 2))},
    }
    renamed = {f"lilicorr.{a}.{x}": f"lilicorr.{b}.{x}" for a, b in numbers.items() for x in ("weight", "bias")}
    assert renamed.keys() <= tensors.keys()
    save_file({renamed.get(key, key): x for key, x in tensors.items()}, tmp_path / "s" / "model.safetensors")
    again = hub.load(tmp_path / "s", TARGET().shape)
    assert again.config == drafter.config
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in drafter.state_dict().items())


@pytest.mark.parametrize(
    "key", ["candidate_topk", "hidden_size", "factor_dim", "num_layers", "num_heads", "mlp_ratio", "logit_scale", "vector_eps"]
)
def test_a_folder_names_every_size(key: str, tmp_path: Path) -> None:
    """Two of them change no tensor's shape: with a default, another function would be computed."""
    opened(tmp_path / "s")
    path = tmp_path / "s" / "config.json"
    config = json.loads(path.read_text())
    del config["dflash_config"][f"lilicorr_{key}"]
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"lilicorr_{key}"):
        hub.load(tmp_path / "s", TARGET().shape)


def test_what_cannot_be_is_refused() -> None:
    shape = TARGET().shape
    for wrong, message in [
        (dict(candidates=97), r"head\.candidates must be from 1 to the target's 96 tokens, found 97"),
        (dict(candidates=12), r"head\.candidates=12: engines take 1, 2, 4, 8 or 16, with head\.mask_token"),
        (dict(candidates=32), r"head\.candidates=32: engines take"),
        (dict(width=26), r"head\.width=26 must be a multiple of head\.lattice_heads=4"),
        (dict(vector_eps=0.5), r"head\.vector_eps=0\.5 must be"),
        (dict(vector_eps=0.0), r"head\.vector_eps=0\.0 must be"),
        (dict(logit_scale=0.0), r"head\.logit_scale=0\.0 and"),
        (dict(lattice_mlp=-1.0), r"head\.lattice_mlp=-1\.0, "),
        (dict(lattice_mlp=0.01), r"head\.lattice_mlp=0\.01, .* at least one number wide"),
        (dict(conv_taps=2), r"head\.conv_taps=2 and head\.conv_group=None: set both or none"),
        (dict(conv_taps=2, conv_group=5), r"head\.conv_group must divide the target's hidden size 32, found 5"),
        (dict(draft_vocab=[1, 2]), "has no setting 'draft_vocab'"),
    ]:
        with pytest.raises(UserError, match=message):
            fresh("lilicorr", shape, **SMALL | wrong)
    native: Any = fresh("lilicorr", shape, **SMALL | dict(mask_token=None, candidates=12))
    listing_all: Any = fresh("lilicorr", shape, **SMALL | dict(mask_token=None, candidates=96, width=None))
    with torch.device("meta"):
        large: Any = fresh("lilicorr", replace(shape, hidden_size=2048), **SMALL | dict(width=None))
    assert native.format == "native" and listing_all.candidates == 96
    assert (listing_all.width, large.width) == (32, 1024), "as wide as the target, at most as published"
