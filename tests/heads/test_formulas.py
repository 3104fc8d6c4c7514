"""Drafters of small heads against the formulas of their papers, in plain torch, one root at a time; and their folders.

Shape suffixes: T roots, D target hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
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
from headstart.heads.unroll import unroll
from headstart.inference.decoding.target import Target
from tests.drafters import HEADS, fresh, make, random_tokens, roots_of
from tests.heads.test_formats import foreign
from tests.tiny_targets import tiny_target

TARGET = functools.cache(tiny_target)
TEXT = random_tokens(14, seed=8)
TRIMMED = [0, 2, 3, 5, 8, 13, 21, 34, 55, 89, 90, 95]
DEPTH = 3
Weights = dict[str, Tensor]
TRIMMABLE = [h for h in HEADS if "draft_vocab" in inspect.signature(hub.drafter_class(h)).parameters]


@torch.no_grad()
def guesses(drafter: Drafter, target: Target) -> list[Tensor]:
    """Logits [T, V] over the target's vocabulary, depth by depth."""
    drafts = unroll(drafter, roots_of(target, drafter, torch.tensor([TEXT])), None, DEPTH)
    found = []
    for depth, draft in enumerate(drafts, start=1):
        unembedding = drafter.unembedding(depth)
        found.append(unembedding.to_target(unembedding.logits(draft.hidden_BNH), 96)[0])
    return found


def res_block(w: Weights, name: str, x: Tensor) -> Tensor:
    return x + F.silu(w[name + ".linear.weight"] @ x + w[name + ".linear.bias"])


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt()


def prefix(w: Weights, h_TD: Tensor) -> Tensor:
    """A decoder layer at the last of the given positions: two heads of 16, which share one of keys and values."""
    normed = [rms(h) * w["prefix.input_layernorm.weight"] for h in h_TD]

    def turned(x: Tensor, position: int) -> Tensor:
        angle = position * 10000.0 ** (-torch.arange(8) / 8)
        turn = torch.polar(torch.ones(8), angle.float())
        z = torch.complex(x[:8], x[8:]) * turn
        return torch.cat([z.real, z.imag])

    last, out = len(h_TD) - 1, []
    for head in range(2):
        q = turned((w["prefix.self_attn.q_proj.weight"] @ normed[last])[16 * head :][:16], last)
        keys = torch.stack([turned(w["prefix.self_attn.k_proj.weight"] @ x, i) for i, x in enumerate(normed)])
        values = torch.stack([w["prefix.self_attn.v_proj.weight"] @ x for x in normed])
        out.append((keys @ q / 4).softmax(0) @ values)
    x = h_TD[-1] + w["prefix.self_attn.o_proj.weight"] @ torch.cat(out)
    y = rms(x) * w["prefix.post_attention_layernorm.weight"]
    gated = F.silu(w["prefix.mlp.gate_proj.weight"] @ y) * (w["prefix.mlp.up_proj.weight"] @ y)
    return x + w["prefix.mlp.down_proj.weight"] @ gated


def medusa(w: Weights, settings: dict[str, Any], h_TD: Tensor, tokens: list[Tensor]) -> Tensor:
    k, x = len(tokens) - 1, h_TD[-1]
    for layer in range(settings.get("layers", 1)):
        x = res_block(w, f"blocks.{k}.{layer}", x)
    return w[f"lm_heads.{k}.weight"] @ x


def hydra(w: Weights, settings: dict[str, Any], h_TD: Tensor, tokens: list[Tensor]) -> Tensor:
    k, first = len(tokens) - 1, prefix(w, h_TD) if settings.get("prefix_attention", True) else h_TD[-1]
    z = torch.cat([first, *tokens])
    x = w[f"blocks.{k}.0.skip.weight"] @ z + F.silu(w[f"blocks.{k}.0.linear.weight"] @ z + w[f"blocks.{k}.0.linear.bias"])
    for layer in range(1, settings.get("layers", 1)):
        x = res_block(w, f"blocks.{k}.{layer}", x)
    return w[f"lm_heads.{k}.weight"] @ x


def redrafter(w: Weights, settings: dict[str, Any], h_TD: Tensor, tokens: list[Tensor]) -> Tensor:
    s = torch.zeros(32)
    for token in tokens:
        s = F.silu(w["rnn_u.weight"] @ s + w["rnn_u.bias"] + w["rnn_w.weight"] @ token)
    x = torch.cat([h_TD[-1], s])
    for layer in range(settings.get("layers", 1)):
        x = res_block(w, f"blocks.{layer}", x)
    return w["lm_head.weight"] @ x


def mlp_speculator(w: Weights, settings: dict[str, Any], h_TD: Tensor, ids: list[Tensor]) -> Tensor:
    """Its own embeddings: given the tokens' ids in place of the target's embeddings."""
    tied, heads = settings.get("tie_weights", True), settings.get("guesses", 5)
    width = w["proj.0.weight"].shape[0]
    a = 2 ** (-1 / (2 * heads))
    b = math.sqrt((1 - a * a) * width / 2)
    state, k = h_TD[-1], 0
    if settings.get("scale_input"):
        state = rms(state) / 2**0.5
    for depth, token in enumerate(ids):
        k = 0 if tied else depth
        mixed = a * (w[f"proj.{min(depth, 1) if tied else depth}.weight"] @ state) + b * w[f"emb.{k}.weight"][token]
        y = rms(mixed, eps=0.0) * w[f"ln.{k}.weight"] + w[f"ln.{k}.bias"]
        state = 0.5 * y * (1 + torch.erf(y / 2**0.5))
    return w[f"head.{k}.weight"] @ state


CASES: list[tuple[str, dict[str, Any]]] = [
    ("medusa", {"guesses": 3, "layers": 2}),
    ("hydra", {"guesses": 3, "prefix_attention": False}),
    ("hydra", {"guesses": 4, "layers": 3}),
    ("redrafter", {}),
    ("redrafter", {"layers": 2}),
    ("mlp_speculator", {"guesses": 3}),
    ("mlp_speculator", {"guesses": 4, "tie_weights": False, "inner_dim": 24}),
    ("mlp_speculator", {"guesses": 3, "inner_dim": 40, "scale_input": True}),
]


@torch.no_grad()
@pytest.mark.parametrize("draft_vocab", [None, TRIMMED], ids=["whole", "trimmed"])
@pytest.mark.parametrize(("head", "settings"), CASES)
def test_the_formula(head: str, settings: dict[str, Any], draft_vocab: list[int] | None) -> None:
    target = TARGET()
    drafter = make(head, target, **settings, draft_vocab=draft_vocab)
    w, formula = drafter.state_dict(), globals()[head]
    ids = torch.tensor(draft_vocab or range(96))
    h_TD = target.model.model(torch.tensor([TEXT])).last_hidden_state[0]
    own = head == "mlp_speculator"
    tokens = [torch.tensor(x) if own else target.model.model.embed_tokens.weight[x] for x in TEXT]
    for depth, found in enumerate(guesses(drafter, target), start=1):
        for t in range(len(TEXT) - depth):
            wanted = formula(w, settings, h_TD[: t + 1], tokens[t + 1 : t + 1 + depth])
            torch.testing.assert_close(found[t, ids], wanted, rtol=0, atol=2e-5)
        others = torch.ones(96, dtype=torch.bool).index_fill(0, ids, False)
        assert bool((found[:, others] == -torch.inf).all()) and found[:, ids].isfinite().all()


def unnoised(head: str, **settings: Any) -> Drafter:
    drafter = fresh(head, TARGET().shape, **settings)
    drafter.attach(TARGET().ends)
    drafter.start_from(TARGET().ends)
    return drafter.eval()


@torch.no_grad()
@pytest.mark.parametrize("draft_vocab", [None, TRIMMED], ids=["whole", "trimmed"])
@pytest.mark.parametrize(("head", "settings"), [c for c in CASES if c[0] != "mlp_speculator"])
def test_a_fresh_one_says_what_the_target_says(head: str, settings: dict[str, Any], draft_vocab: list[int] | None) -> None:
    target = TARGET()
    said = target.model(torch.tensor([TEXT])).logits[0]
    ids = torch.tensor(draft_vocab or range(96))
    for found in guesses(unnoised(head, **settings, draft_vocab=draft_vocab), target):
        torch.testing.assert_close(found[:, ids], said[:, ids], rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_fresh_mlp_speculator_knows_the_targets_tokens(scale: float) -> None:
    ends, theirs = TARGET().ends, TARGET().model.model.embed_tokens.weight
    drafter = fresh("mlp_speculator", TARGET().shape, guesses=2, tie_weights=False, draft_vocab=TRIMMED)
    drafter.start_from(replace(ends, embed=lambda x: scale * theirs[x]))  # type: ignore[arg-type]
    w = drafter.state_dict()
    for i in (0, 1):
        torch.testing.assert_close(w[f"emb.{i}.weight"] / theirs, torch.full((96, 32), float(32**-0.5 / theirs.pow(2).mean().sqrt())))
        assert torch.equal(w[f"head.{i}.weight"], ends.head_VD[TRIMMED])
    assert torch.equal(w["proj.0.weight"], torch.eye(32)) and not torch.equal(w["proj.1.weight"], torch.eye(32))
    before = fresh("mlp_speculator", TARGET().shape, inner_dim=48)
    after = {k: v.clone() for k, v in before.state_dict().items()}
    before.start_from(ends)
    assert all(torch.equal(v, before.state_dict()[k]) for k, v in after.items())


@pytest.mark.parametrize("head", TRIMMABLE)
def test_a_trimmed_head_has_fewer_rows_and_is_saved_as_such(head: str, tmp_path: Path) -> None:
    whole, trimmed = make(head, TARGET()), make(head, TARGET(), draft_vocab=TRIMMED)
    depths = range(1, (trimmed.max_depth or 1) + 1)

    def others(drafter: Drafter, rows: int) -> int:
        """Its parameters beside those with a row for each token."""
        blocks = [block for d in depths for block in drafter.unembedding(d).blocks]
        assert {len(block) for block in blocks} == {rows}
        return sum(p.numel() for p in drafter.parameters() if all(p is not block for block in blocks))

    assert others(trimmed, len(TRIMMED)) == others(whole, 96)
    hub.save(trimmed, tmp_path / "s", TARGET().card, torch.float32)
    loaded = hub.load(tmp_path / "s", TARGET().shape, TARGET().card)
    loaded.attach(TARGET().ends)
    ids = loaded.unembedding(1).ids_V
    assert ids is not None and ids.tolist() == TRIMMED
    for a, b in zip(guesses(trimmed, TARGET()), guesses(loaded.eval(), TARGET()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("head", TRIMMABLE)
def test_a_list_of_all_tokens_trims_nothing(head: str) -> None:
    whole, listed = (fresh(head, TARGET().shape, draft_vocab=ids).state_dict() for ids in (None, list(range(96))))
    assert {name: x.shape for name, x in listed.items()} == {name: x.shape for name, x in whole.items()}


@pytest.mark.parametrize("head", TRIMMABLE)
@pytest.mark.parametrize("wrong", [list(range(97)), [3, 2], [-1, 5], [96]])
def test_a_vocabulary_that_the_target_does_not_have_is_refused(head: str, wrong: list[int]) -> None:
    with pytest.raises(UserError, match="the draft vocabulary must be"):
        fresh(head, TARGET().shape, draft_vocab=wrong)


def test_guesses_deeper_than_the_heads_are_refused() -> None:
    for head in ("medusa", "hydra", "mlp_speculator"):
        drafter = make(head, TARGET(), guesses=2)
        with pytest.raises(UserError, match=r"has 2 heads, depth 3 was asked.*head\.guesses=3"):
            unroll(drafter, roots_of(TARGET(), drafter, torch.tensor([TEXT])), None, 3)
    with pytest.raises(UserError, match=r"head\.tie_weights=true needs head\.guesses of at least 2"):
        fresh("mlp_speculator", TARGET().shape, guesses=1)


@torch.no_grad()
def test_noise_on_the_states_of_eagle1_is_uniform_and_for_training_alone() -> None:
    """U(-0.2, 0.2) on what stands beside the token (2401.15077, section 4.1)."""
    drafter: Any = make("eagle1", TARGET())
    drafter.noise = 0.2
    roots, read = roots_of(TARGET(), drafter, torch.tensor([random_tokens(60, 1)])), list[Tensor]()
    drafter.fc.register_forward_hook(lambda layer, args, out: read.append(args[0][..., 32:]))

    def added() -> Tensor:
        unroll(drafter, roots, None, 1)
        return read.pop() - roots.states[6]

    assert not added().any()
    drafter.train()
    noise = added().flatten()
    assert 0.19 < noise.max() < 0.2 + 1e-5 and -0.2 - 1e-5 < noise.min() < -0.19
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 0.2 / 3**0.5) < 0.005
    assert not torch.equal(added().flatten(), noise), "the same numbers again"
    drafter.noise = 0.0
    assert not added().any()


# ---- folders ----


def folder_of(path: Path) -> tuple[Weights, dict[str, Any]]:
    return load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())


def test_the_medusa_folder_is_exactly_the_format(tmp_path: Path) -> None:
    drafter = make("medusa", TARGET(), guesses=3, layers=2)
    hub.save(drafter, tmp_path / "s", TARGET().card, torch.float32)
    w, config = folder_of(tmp_path / "s")
    assert w.keys() == {
        *(f"blocks.{h}.layers.{i}.{x}" for h in range(3) for i in range(2) for x in ("weight", "bias")),
        *(f"lm_heads.{h}.weight" for h in range(3)),
    }
    assert config["architectures"] == ["MedusaModel"] and config["model_type"] == "medusa"
    assert (config["num_heads"], config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (3, 2, 32, 96)
    assert config["medusa_fc_bias"] is True and config["truncated_vocab_size"] == 96 and config["original_lm_head"] is False
    h = roots_of(TARGET(), drafter, torch.tensor([TEXT])).states[6][0]
    for k, found in enumerate(guesses(drafter, TARGET())):  # as vLLM computes it from the folder
        x = h
        for i in range(2):
            x = x + F.silu(F.linear(x, w[f"blocks.{k}.layers.{i}.weight"], w[f"blocks.{k}.layers.{i}.bias"]))
        torch.testing.assert_close(found, x @ w[f"lm_heads.{k}.weight"].T, rtol=0, atol=1e-5)


AUTHORS = {f"blocks.{h}.layers.{i}.": f"medusa_heads.{h}.{i}.linear." for h in range(3) for i in range(2)}
AUTHORS |= {f"lm_heads.{h}.weight": f"medusa_heads.{h}.2.weight" for h in range(3)}
OURS_BEFORE = {f"blocks.{h}.layers.{i}.": f"blocks.{h}.{i}.linear." for h in range(3) for i in range(2)}


@pytest.mark.parametrize("fc_bias", [True, ..., None])  # the authors' config does not have the key
@pytest.mark.parametrize("rename", [{}, AUTHORS, {k: v.removeprefix("medusa_heads.") for k, v in AUTHORS.items()}, OURS_BEFORE])
def test_a_foreign_medusa_folder_loads(rename: dict[str, str], fc_bias: Any, tmp_path: Path) -> None:
    drafter = make("medusa", TARGET(), guesses=3, layers=2)
    hub.save(drafter, tmp_path / "s", TARGET().card, torch.float32)
    keys = dict(num_heads=..., num_hidden_layers=..., medusa_num_heads=3, medusa_num_layers=2) if rename is AUTHORS else {}
    foreign(tmp_path / "s", rename, medusa_fc_bias=fc_bias, **keys)
    loaded = hub.load(tmp_path / "s", TARGET().shape)
    assert loaded.config == {"head": "medusa", "guesses": 3, "layers": 2, "draft_vocab": None}
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in drafter.state_dict().items())


def test_medusa_folders_that_compute_otherwise(tmp_path: Path) -> None:
    drafter = make("medusa", TARGET(), guesses=3, layers=2)
    changes: list[dict[str, Any]] = [dict(original_lm_head=True), dict(truncated_vocab_size=12), dict(logit_scale=0.5)]
    for change in changes:
        hub.save(drafter, tmp_path / "s", TARGET().card, torch.float32)
        foreign(tmp_path / "s", {}, **change)
        key, value = next(iter(change.items()))
        with pytest.raises(UserError, match=f"the folder has {key}={value}"):
            hub.load(tmp_path / "s", TARGET().shape)
    hub.save(drafter, tmp_path / "s", TARGET().card, torch.float32)
    foreign(tmp_path / "s", {}, medusa_fc_bias=False)
    with pytest.raises(UserError, match="medusa_fc_bias=False, but biases in its file"):
        hub.load(tmp_path / "s", TARGET().shape)
    w, _ = folder_of(tmp_path / "s")
    save_file({k: v for k, v in w.items() if not k.endswith("bias")}, tmp_path / "s" / "model.safetensors")
    loaded = hub.load(tmp_path / "s", TARGET().shape).state_dict()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded[name], torch.zeros_like(tensor) if name.endswith("bias") else tensor)


@torch.no_grad()
@pytest.mark.parametrize("settings", [c[1] for c in CASES if c[0] == "mlp_speculator"])
def test_the_mlp_speculator_folder_is_exactly_the_format(settings: dict[str, Any], tmp_path: Path) -> None:
    drafter = make("mlp_speculator", TARGET(), **settings)
    hub.save(drafter, tmp_path / "s", TARGET().card, torch.float32)
    w, c = folder_of(tmp_path / "s")
    n, tied, width = settings["guesses"], settings.get("tie_weights", True), settings.get("inner_dim", 32)
    own = range(1 if tied else n)
    shapes: dict[str, tuple[int, ...]] = {f"speculator.{x}.{i}.weight": (96, width) for x in ("emb", "head") for i in own}
    shapes |= {f"speculator.ln.{i}.{x}": (width,) for x in ("weight", "bias") for i in own}
    shapes |= {f"speculator.proj.{i}.weight": (width, width if i else 32) for i in range(2 if tied else n)}
    assert {k: tuple(v.shape) for k, v in w.items()} == shapes
    assert c["architectures"] == ["MLPSpeculatorPreTrainedModel"] and c["model_type"] == "mlp_speculator"
    assert (c["n_predict"], c["emb_dim"], c["inner_dim"], c["vocab_size"]) == (n, 32, width, 96)
    assert c["tie_weights"] is tied and c["scale_input"] is settings.get("scale_input", False) and c["top_k_tokens_per_head"] == [1] * n
    roots = roots_of(TARGET(), drafter, torch.tensor([TEXT]))
    state, tokens = roots.states[6][0], roots.chosen_BT[0]
    if c["scale_input"]:
        state = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-6) / 2**0.5
    state_weight = 0.5 ** (0.5 / c["n_predict"])
    alpha = math.sqrt((1 - state_weight**2) * (c["inner_dim"] / 2)) / state_weight
    for i, found in enumerate(guesses(drafter, TARGET())):  # as vLLM computes it from the folder
        e, p = (0, min(i, 1)) if tied else (i, i)
        z = F.embedding(tokens, w[f"speculator.emb.{e}.weight"])
        state = state @ w[f"speculator.proj.{p}.weight"].T + alpha * z
        state = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + 1e-6)
        state = F.gelu(state * w[f"speculator.ln.{e}.weight"] + w[f"speculator.ln.{e}.bias"])
        rows = slice(0, len(TEXT) - 1 - i)  # further ones have no token to read
        torch.testing.assert_close(found[rows], (state @ w[f"speculator.head.{e}.weight"].T)[rows], rtol=0, atol=1e-5)
        tokens = F.pad(tokens[1:], (0, 1))


@pytest.mark.parametrize("prefix", ["speculator.", ""])
@pytest.mark.parametrize("settings", [c[1] for c in CASES if c[0] == "mlp_speculator"])
def test_a_foreign_mlp_speculator_folder_loads(settings: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    drafter = make("mlp_speculator", TARGET(), **settings)
    hub.save(drafter, tmp_path / "s", TARGET().card, torch.float32)
    foreign(tmp_path / "s", {"speculator.": prefix}, **({} if "inner_dim" in settings else {"inner_dim": 0}))
    w, _ = folder_of(tmp_path / "s")
    del w["embed_tokens.weight"]
    save_file(w, tmp_path / "s" / "model.safetensors")
    loaded = hub.load(tmp_path / "s", TARGET().shape)
    defaults = {"inner_dim": None, "tie_weights": True, "scale_input": False, "draft_vocab": None}
    assert loaded.config == {"head": "mlp_speculator"} | defaults | settings
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in drafter.state_dict().items())
    foreign_config = json.loads((tmp_path / "s" / "config.json").read_text())
    (tmp_path / "s" / "config.json").write_text(json.dumps(foreign_config | {"emb_dim": 64}))
    with pytest.raises(UserError, match="the folder has emb_dim=64, this drafter needs 32"):
        hub.load(tmp_path / "s", TARGET().shape)


@pytest.mark.parametrize("head", ["medusa", "mlp_speculator"])
def test_what_engines_cannot_load_is_not_named_as_theirs(head: str, tmp_path: Path) -> None:
    hub.save(make(head, TARGET(), draft_vocab=TRIMMED), tmp_path / "s", TARGET().card, torch.float32)
    _, config = folder_of(tmp_path / "s")
    assert "model_type" not in config and config["headstart"]["format"] == "native"
