"""Folders of block drafters as serving engines read them: written again from the description of the formats, from the files alone.

Shapes: [T, D] rows by hidden size.
"""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads import hub
from headstart.heads.errors import UserError, warn_once
from headstart.heads.formats import speculators
from headstart.heads.memory import Memory
from headstart.heads.unroll import unroll
from headstart.heads.visibility import CausalSees
from tests.drafters import fresh, make, random_tokens, roots_of
from tests.heads.reference import Reference, markov_bias
from tests.heads.test_lattice import Lattice
from tests.tiny_targets import tiny_target

TARGET, MASK = functools.cache(tiny_target), 95
SMALL: dict[str, dict[str, Any]] = {
    name: dict(layers=2, block=5, taps=[2, 3, 5])
    for name in ("dflash", "jetspec", "dflare", "dflash2", "lilicorr", "xpress", "dspark", "domino")
}
SMALL["domino"] |= dict(gru=24, rank=12)
SMALL["dspark"] |= dict(rank=10)
SMALL["dflash2"] |= dict(rank=10, candidates=12, conv_taps=3, conv_group=8)
SMALL["lilicorr"] |= dict(width=24, factors=10, candidates=4, lattice_heads=4)
SMALL["xpress"] |= dict(rank=16, mlp_hidden=64)
SMALL["peagle"] = dict(layers=2, depth=4, taps=[2, 3, 5])
EXTRA = {
    "dflash": set(),
    "jetspec": set(),
    "dflare": {"layer_fusion_weights", *(f"layers.{i}.self_attn.{x}_proj_target.weight" for i in (0, 1) for x in "kv")},
    "dflash2": {
        *(f"candidate_selector.{x}" for x in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")),
        *(f"layers.{i}.{on}_conv.{x}" for i in (0, 1) for on in ("attention", "mlp") for x in ("base_kernel", "kernel_projection.weight")),
    },
    "xpress": {
        *(f"xpress_head.{x}.weight" for x in ("w1", "w2", "down_h", "down_g", "in_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
        "xpress_head.mix.L",
    },
    "lilicorr": {
        *(f"lilicorr.{x}" for x in ("slot_embedding", "rank_embedding", "relative_slot_bias", "same_slot_bias")),
        *(f"lilicorr.{x}_norm.weight" for x in ("output", "anchor")),
        *(f"lilicorr.layers.{i}.{x}" for i in (0, 1) for x in ("attn_norm.weight", "mlp_norm.weight")),
        *(f"lilicorr.layers.{i}.attn.in_proj_{x}" for i in (0, 1) for x in ("weight", "bias")),
        *(
            f"lilicorr.{x}.{y}"
            for y in ("weight", "bias")
            for x in (
                "token_proj",
                "pass_hidden_proj",
                "context_proj",
                "feature_norm",
                "feature_mlp.up_proj",
                "feature_mlp.down_proj",
                *(f"layers.{i}.{z}" for i in (0, 1) for z in ("attn.out_proj", "mlp.up_proj", "mlp.down_proj")),
                "factor_input_proj",
                "out_head",
                "in_head",
                "anchor_out_head",
            )
        ),
    },
    "dspark": {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight", "confidence_head.proj.bias"},
    "domino": {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"},
}

ARCHITECTURES = {
    "dflare": "QwenDFlareDraftModel",
    "dflash2": "DFlash2DraftModel",
    "lilicorr": "LiLiCorrDraftModel",
    "xpress": "Qwen3XPressModel",
    "dspark": "Qwen3DSparkModel",
}
XPRESS = {  # of vLLM's names those of the speculators library
    "xpress_head.w1.weight": "refiner_head.token_embed.weight",
    "xpress_head.w2.weight": "refiner_head.readout.weight",
    "xpress_head.mix.L": "refiner_head.mix_l",
    **{f"xpress_head.{x}.weight": f"refiner_head.{x}.weight" for x in ("down_h", "down_g", "in_proj")},
    **{f"xpress_head.mlp.{x}_proj.weight": f"refiner_head.mlp_{x}.weight" for x in ("gate", "up", "down")},
}


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in EXTRA),
    ("dflash", dict(window=6)),
    ("dflash", dict(window=6, window_layers=[1])),
    ("dflash", dict(window=6, window_layers=[0], window_causal=False)),
    ("jetspec", dict(window=5, window_layers=[0])),
    ("dflash2", dict(window=6, window_causal=False)),
    ("domino", dict(window=6, window_layers=[1])),
    ("xpress", dict(window=6, window_layers=[1])),
    ("lilicorr", dict(window=6, window_layers=[1])),
]
TRIMMABLE, IDS = ("dflash", "jetspec", "dspark"), [0, 2, 3, 5, 8, 13, 21, 34, 55, 89]
CASES += [*((name, dict(draft_vocab=IDS)) for name in TRIMMABLE), ("dspark", dict(draft_vocab=IDS, window=6))]
CASES += [("dspark", dict(markov="gated")), ("dspark", dict(markov="rnn")), ("dspark", dict(markov="rnn", draft_vocab=IDS))]
MARKOV = {
    "vanilla": set[str](),
    **{k: {f"markov_head.{x}_proj.{y}" for y in ("weight", "bias")} for k, x in (("gated", "gate"), ("rnn", "joint"))},
}


class Engine(Reference):
    """Adds what DFlash's folders need. The context's keys and values are made by each layer from what the target's states became."""

    def joined(self, tapped: list[Tensor]) -> Tensor:
        """What the target's states become, for all layers."""
        ids = (self.config | self.config.get("dflash_config", {}))["target_layer_ids"]
        return self.norm(self.linear(torch.cat([tapped[i + 1] for i in ids], -1), "fc"), "hidden_norm")

    def block(self, tapped: list[Tensor], bonus: int, position: int) -> Tensor:
        """The slots after the last norm: the bonus token, then masks, at ``position`` on."""
        settings = self.config | self.config.get("dflash_config", {})
        ids, slots = settings["target_layer_ids"], settings["block_size"]
        mixes, context = self.w.get("layer_fusion_weights"), torch.empty(0)  # DFlare's, of each layer and tap
        if mixes is None:
            context = self.joined(tapped)
        x = self.embed[torch.tensor([bonus] + [settings["mask_token_id"]] * (slots - 1))]
        where, positions = torch.arange(position), position + torch.arange(slots)
        row, column = positions[:, None], torch.cat([where, positions])
        for i in range(self.config["num_hidden_layers"]):
            name, sliding = f"layers.{i}.self_attn.", self.config["layer_types"][i] == "sliding_attention"
            causal = sliding if self.config["is_causal"] is None else self.config["is_causal"]
            sees = row >= column if causal else (row >= 0) & (column >= 0)
            if sliding:
                sees &= row - column < self.config["sliding_window"]

            if mixes is not None:
                mixed = torch.einsum("kth,k->th", torch.stack([tapped[j + 1] for j in ids]), mixes[i].softmax(0))
                context = self.norm(mixed, "hidden_norm")

            def heads(rows: Tensor, kind: str, name: str = name, of: str = "") -> Tensor:
                found = self.linear(rows, f"{name}{kind}_proj{of}").view(len(rows), -1, self.d)
                return found if kind == "v" else self.norm(found, f"{name}{kind}_norm")

            normed = self.norm(x, f"layers.{i}.input_layernorm")
            into = self.convolve(normed, f"layers.{i}.attention_conv", 0, normed)
            q = self.rotate(heads(into, "q"), positions)
            of = "" if mixes is None else "_target"
            k = torch.cat([self.rotate(heads(context, "k", of=of), where), self.rotate(heads(into, "k"), positions)])
            v = torch.cat([heads(context, "v", of=of), heads(into, "v")])
            k, v = (y.repeat_interleave(self.h // self.g, 1) for y in (k, v))
            p = (torch.einsum("qhd,khd->hqk", q, k) / self.d**0.5).masked_fill(~sees, -torch.inf).softmax(-1)
            attended = self.linear(torch.einsum("hqk,khd->qhd", p, v).reshape(slots, -1), name + "o_proj")
            x = x + self.convolve(attended, f"layers.{i}.attention_conv", 1, normed)
            normed = self.norm(x, f"layers.{i}.post_attention_layernorm")
            y = self.convolve(normed, f"layers.{i}.mlp_conv", 0, normed)
            gated = F.silu(self.linear(y, f"layers.{i}.mlp.gate_proj")) * self.linear(y, f"layers.{i}.mlp.up_proj")
            x = x + self.convolve(self.linear(gated, f"layers.{i}.mlp.down_proj"), f"layers.{i}.mlp_conv", 1, normed)
        return self.norm(x, "norm")

    def convolve(self, x: Tensor, name: str, which: int, normed: Tensor) -> Tensor:
        """DFlash 2's grouped convolution, as matrices over the slots; other folders have none."""
        if f"{name}.base_kernel" not in self.w:
            return x
        settings, slots = self.config["dflash_config"], len(x)
        taps, group = settings["conv_kernel_size"], settings["conv_group_size"]
        delta = self.linear(normed, f"{name}.kernel_projection").view(slots, 2, taps, -1)[:, which].repeat_interleave(group, -1)
        kernel = self.w[f"{name}.base_kernel"][which] + delta  # [slots, taps, D]
        back = [torch.diag(torch.ones(slots - t), -t) for t in range(taps)]  # t slots back
        return sum((kernel[:, t] * (back[t] @ x) for t in range(taps)), torch.zeros_like(x))


def saved(name: str, folder: Path, **changes: Any) -> Engine:
    drafter = make(name, TARGET(), **SMALL[name] | dict(mask_token=MASK) | changes)
    hub.save(drafter, folder, TARGET().card, torch.float32)
    return Engine(folder, TARGET().model)


@functools.cache
def text() -> tuple[list[int], list[Tensor]]:
    tokens = random_tokens(16, 6)
    with torch.no_grad():
        return tokens, [s[0] for s in TARGET().model(torch.tensor([tokens]), output_hidden_states=True).hidden_states]


def ours(folder: Path, root: int, depth: int) -> list[Tensor]:
    """Our logits of one root, from the folder without our own block in its config: as anybody's."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("headstart", None)
    (folder / "config.json").write_text(json.dumps(config))
    drafter = hub.load(folder, TARGET().shape)
    drafter.attach(TARGET().ends)
    drafts = unroll(drafter, roots_of(TARGET(), drafter, torch.tensor([text()[0]])), None, depth)
    return [drafter.unembedding(d).logits(draft.hidden_BNH)[0, root] for d, draft in enumerate(drafts, start=1)]


def refined(w: dict[str, Tensor], slots: Tensor, before: list[int]) -> Tensor:
    """What XPress's refiner adds to the logits of all slots but the first, in one pass. ``before``: the token before each slot."""
    w = {name.removeprefix("xpress_head."): tensor for name, tensor in w.items()}
    mean = slots.mean(0).expand(len(slots), -1)
    parts = [slots @ w["down_h.weight"].T, mean @ w["down_g.weight"].T, w["w1.weight"][torch.tensor(before)]]
    x = torch.cat(parts, -1) @ w["in_proj.weight"].T
    x = torch.einsum("ckj,jc->kc", w["mix.L"].tril() + torch.eye(len(slots)), x)
    gated = F.silu(x @ w["mlp.gate_proj.weight"].T) * (x @ w["mlp.up_proj.weight"].T)
    return ((x + gated @ w["mlp.down_proj.weight"].T) @ w["w2.weight"].T)[1:]


@torch.no_grad()
def test_passes_over_whole_blocks_end_where_steps_do(tmp_path: Path) -> None:
    """XPress as engines draft with it: the likeliest tokens of the backbone, refined as often as config.json says."""
    drafter, (tokens, states), settled = make("xpress", TARGET(), **SMALL["xpress"] | dict(mask_token=MASK)), text(), list[int]()
    drafter.token_latent.weight *= 20  # type: ignore[operator]  # else the tokens before would hardly ever change a guess
    hub.save(drafter, tmp_path / "s", TARGET().card, torch.float32)
    engine, every = Engine(tmp_path / "s", TARGET().model), roots_of(TARGET(), drafter, torch.tensor([tokens]))
    assert (engine.config["xpress_num_passes"], engine.config["xpress_topc"]) == (4, 0)
    for n in range(4, 13):  # roots
        slots, anchor, sees = engine.block([s[:n] for s in states], tokens[n], n), [tokens[n]], CausalSees(n, n)
        logits = (slots @ engine.head.T)[1:]
        passes = [logits.argmax(-1).tolist()]
        for _ in range(4):
            passes.append((logits + refined(engine.w, slots, anchor * 2 + passes[-1][:-1])).argmax(-1).tolist())
        memory, found = Memory(), list[int]()
        draft = drafter.begin(every[:n], memory, sees, torch.tensor([[n - 1]]))
        for d in range(1, 5):
            if d > 1:
                draft = drafter.step(d, torch.tensor([found[-1:]]), draft, torch.tensor([[n + d - 2]]), memory, sees)
            found.append(int(drafter.unembedding(d).logits(draft.hidden_BNH).argmax()))
        assert passes[-1] == found
        settled.append(passes.index(found))
    assert max(settled) > 1, "one pass would always do"


@torch.no_grad()
@pytest.mark.parametrize(("name", "changes"), CASES)
def test_engines_compute_what_we_do(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder, root, trimmed = tmp_path / "s", 7, "draft_vocab" in changes
    engine = saved(name, folder, **changes)
    w, (tokens, states) = engine.w, text()
    layer = [f"self_attn.{x}.weight" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer += [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")] + ["input_layernorm.weight", "post_attention_layernorm.weight"]
    own = {"lm_head.weight", "d2t", "t2d"} if trimmed else set()
    joined = set() if name == "dflare" else {"fc.weight"}
    whole = joined | {"hidden_norm.weight", "norm.weight", *(f"layers.{i}.{x}" for i in (0, 1) for x in layer)}
    kind = changes.get("markov", "vanilla")
    assert w.keys() == whole | EXTRA[name] | MARKOV[kind] | own and engine.config.get("draft_vocab_size") == (len(IDS) if trimmed else None)
    if trimmed:
        assert (w["d2t"] + torch.arange(len(IDS))).tolist() == w["t2d"].nonzero()[:, 0].tolist() == IDS
    named = ARCHITECTURES.get(name, "DFlashDraftModel")
    by_layer = "window" in changes and changes.get("window_causal", name != "jetspec")
    assert engine.config["is_causal"] == (None if by_layer else name == "jetspec") and engine.config["architectures"] == [named]
    slots = engine.block([s[: root + 1] for s in states], tokens[root + 1], root + 1)
    logits = list(slots @ (w["lm_head.weight"] if trimmed else engine.head).T)
    if name not in ("dspark", "domino"):
        logits = logits[1:]
    if name == "dflash2":
        part = {x: w[f"candidate_selector.{x}"] for x in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")}
        for k, x in enumerate(logits):
            ids = x.topk(12).indices
            context = part["predecessor_codebook"][tokens[root + 1 + k]] * (part["hidden_projection.weight"] @ slots[k + 1])
            scores = x[ids] + part["successor_codebook"][ids] @ context
            logits[k] = torch.full_like(x, -torch.inf).index_copy(0, ids, scores)
    if name == "lilicorr":
        before, z = tokens[root + 1 :], engine.joined([s[: root + 1] for s in states])[-1]
        lattice = Lattice(w, engine.config, engine.embed, slots[1:], torch.stack(logits), z)
        logits = [lattice.logits(d, before[d - 1], 96).float() for d in range(1, 5)]
    if name == "xpress":
        logits = list(torch.stack(logits) + refined(w, slots, tokens[root + 1 : root + 2] + tokens[root + 1 : root + 5]))
    if name == "dspark":
        assert engine.config["markov_head_type"] == kind
        head = {k.removeprefix("markov_head.").replace("_proj", "").replace("w2.weight", "w2"): v for k, v in w.items()}
        logits = list((torch.stack(logits) + markov_bias(kind, head, slots, tokens[root + 1 : root + 6])).float())
    if name == "domino":
        gru = torch.nn.GRU(32, 24, bias=False, batch_first=True)
        gru.load_state_dict({k: w[f"prefix_gru.{k}"] for k in ("weight_ih_l0", "weight_hh_l0")})
        read = gru(engine.embed[torch.tensor([tokens[root + 1 : root + 6]])])[0][0]
        for k in range(1, 5):
            narrow = F.silu(w["embed_proj.0.weight"] @ torch.cat([slots[k], read[k]]))
            logits[k] = logits[k] + w["embed_proj.2.weight"] @ narrow
    if name == "dspark":
        assert w["confidence_head.proj.weight"].shape == (1, 42) and w["confidence_head.proj.bias"].shape == (1,)
    found = ours(folder, root, len(logits))
    for a, b in zip(found, logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "draft_vocab"), [("dflash", None), ("dflash2", None), ("xpress", None), ("dspark", None), ("dflash", IDS), ("dspark", IDS)]
)
def test_folders_of_the_speculators_library_load(name: str, draft_vocab: list[int] | None, tmp_path: Path) -> None:
    """As its 0.9.0 writes them (EXPERIMENTS.md, 2026-11-26: its own classes compute our logits)."""
    folder, path = tmp_path / "s", tmp_path / "s" / "config.json"
    saved(name, folder, **({} if draft_vocab is None else {"draft_vocab": draft_vocab}))
    ours = hub.load(folder, TARGET().shape)
    said = json.loads(path.read_text())
    said |= said.pop("dflash_config", {})
    said.pop("draft_vocab_size", None)
    keys = ("mask_token_id", "block_size", "sample_from_anchor", "markov_rank", "markov_head_type", "enable_confidence_head",
            "confidence_head_with_markov", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")  # fmt: skip
    own = {key: said.pop(key) for key in keys if key in said}
    if name == "xpress":
        for key in ("xpress_block_size", "xpress_mlp_hidden", "xpress_num_passes", "xpress_topc"):
            del said[key]
        own |= {"xpress_rank": said.pop("xpress_rank"), "xpress_mlp_ratio": 4, "num_jacobi_passes": 6}
        tensors = load_file(folder / "model.safetensors")
        save_file({XPRESS.get(key, key): value for key, value in tensors.items()}, folder / "model.safetensors")
    for key in ("headstart", "architectures", "is_causal", "num_target_layers"):
        del said[key]
    taps = [k + 1 for k in said.pop("target_layer_ids")]
    own |= {
        "aux_hidden_state_layer_ids": taps,
        "draft_vocab_size": len(draft_vocab or range(96)),
        "target_hidden_size": None,
        "sliding_window_non_causal": True,
    }
    own |= {"speculators_model_type": name, "speculators_version": "0.9.0", "speculators_config": {}, "auto_map": {}}

    def load(**changes: Any) -> Any:
        outside = {"sample_from_anchor": False, "architectures": ["DFlashDraftModel"], "transformer_layer_config": said} | own | changes
        path.write_text(json.dumps(outside))
        return hub.load(folder, TARGET().shape)

    loaded = load()
    assert loaded.config == ours.config | dict(heads=2, kv_heads=1, intermediate_size=48)  # said, where ours took the target's
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in ours.state_dict().items())
    if name == "xpress":
        with pytest.raises(UserError, match=r"xpress_mlp_ratio and xpress_rank must be whole numbers, found '4' and 16"):
            load(xpress_mlp_ratio="4")
        with pytest.raises(UserError, match=r"xpress_head\.mlp"):
            load(xpress_mlp_ratio=8)
    near = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2048, "use_sliding_window": True}
    for both_ways in (True, False, None):
        loaded = load(transformer_layer_config=said | near, sliding_window_non_causal=both_ways)
        causal = not (name in ("dflash", "dflash2") if both_ways is None else both_ways)
        found = {key: loaded.config[key] for key in ("window", "window_layers", "window_causal", "window_slides")}
        assert found == dict(window=2048, window_layers=[0], window_causal=causal, window_slides=False)
    other = name != "dspark"  # of the two layouts of a block
    for changes, message in [
        ({"sample_from_anchor": other}, f"sample_from_anchor={other}"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids=None, expected a list of layers"),
        ({"aux_hidden_state_layer_ids": [0, 2, 4]}, r"aux_hidden_state_layer_ids=\[0, 2, 4\]: block drafters read outputs of layers"),
        ({"draft_vocab_size": 50}, f"draft_vocab_size=50, this drafter needs {len(draft_vocab or range(96))}"),
        ({"transformer_layer_config": None}, "transformer_layer_config must be a dictionary"),
        ({"transformer_layer_config": said | {"layer_types": ["sliding_attention"] * 2}}, "layers with a sliding window"),
        ({"transformer_layer_config": said | near | {"use_sliding_window": False}}, "use_sliding_window=False, this drafter needs True"),
        ({"transformer_layer_config": said | near | {"is_causal": True}}, "is_causal=True"),
        ({"sliding_window_non_causal": "no"}, "sliding_window_non_causal='no', this drafter needs True or False"),
        ({"mask_token_id": None}, "mask_token_id"),
    ]:
        with pytest.raises(UserError, match=message):
            load(**changes)


def test_half_a_trimmed_vocabulary_is_refused(tmp_path: Path) -> None:
    """vLLM would take the target's first rows, or guess the first ids, and say nothing."""
    for name in TRIMMABLE:
        folder = tmp_path / name
        saved(name, folder, draft_vocab=IDS)
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        del config["headstart"]
        for lost, message in [("lm_head.weight", "lm_head.weight is missing"), ("d2t", "draft_vocab_size=10, this drafter needs 96"),
                              ("draft_vocab_size", "draft_vocab_size=None, this drafter needs 10")]:  # fmt: skip
            (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != lost}))
            save_file({key: value for key, value in tensors.items() if key != lost}, folder / "model.safetensors")
            with pytest.raises(UserError, match=message):
                hub.load(folder, TARGET().shape)


@torch.no_grad()
@pytest.mark.parametrize("draft_vocab", [None, IDS])
def test_parallel_eagle_is_eagle_with_masks(draft_vocab: list[int] | None, tmp_path: Path) -> None:
    """One pass over the real slots and K-1 masks behind, causal."""
    folder, root = tmp_path / "s", 7
    engine = saved("peagle", folder, draft_vocab=draft_vocab)
    tokens, states = text()
    assert engine.w["mask_hidden"].shape == (1, 1, 3 * 32) and engine.config["mask_token_id"] == MASK
    unknown = engine.w["mask_hidden"][0].expand(3, -1).chunk(3, -1)
    x = engine.features([torch.cat([states[k][: root + 1], m]) for k, m in zip((2, 3, 5), unknown, strict=True)])
    rows = root + 4
    ids = torch.tensor(tokens[1 : root + 2] + [MASK] * 3)
    logits, _ = engine.eagle3(ids, x, torch.arange(rows), torch.ones(rows, rows, dtype=torch.bool).tril())
    config = json.loads((folder / "config.json").read_text())
    assert config["headstart"]["arguments"]["depth"] == 4
    for a, b in zip(ours(folder, root, 4), logits[root:], strict=True):
        expected = b if draft_vocab is None else b[torch.tensor(draft_vocab)]
        torch.testing.assert_close(a, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_without_a_mask_token_the_folder_is_our_own(name: str, tmp_path: Path) -> None:
    drafter = make(name, TARGET(), **SMALL[name])
    hub.save(drafter, tmp_path / "s", TARGET().card, torch.float32)
    assert drafter.format == "native" and "mask_embedding" in load_file(tmp_path / "s" / "model.safetensors")


@pytest.mark.parametrize("name", ["dflash", "peagle"])
def test_the_first_token_of_all_may_be_the_mask(name: str, tmp_path: Path) -> None:
    """Also in a folder that others wrote."""
    hub.save(make(name, TARGET(), **SMALL[name] | dict(mask_token=0)), tmp_path / "s", TARGET().card, torch.float32)
    assert hub.load(tmp_path / "s", TARGET().shape).mask_token == 0
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    del config["headstart"]
    (tmp_path / "s" / "config.json").write_text(json.dumps(config))
    assert hub.load(tmp_path / "s", TARGET().shape).mask_token == 0


def test_what_a_folder_cannot_say_is_refused(tmp_path: Path) -> None:
    shape = TARGET().shape
    for name, wrong, message in [
        ("dflash", dict(mask_token=96), r"head\.mask_token must be a token of the target \(0\.\.95\), found 96"),
        ("peagle", dict(mask_token=10**9), r"head\.mask_token"),
        ("dflash", dict(mask_token=-1), r"head\.mask_token must be a whole number of at least 0 or null, found -1"),
        ("dflash", dict(mask_token=False), r"head\.mask_token must be a whole number of at least 0 or null, found False"),
        ("xpress", dict(mask_token=5, rank=24), r"head\.rank=24: engines take powers of two from 16 on, with head\.mask_token"),
        ("xpress", dict(mask_token=5, rank=8), r"head\.rank=8"),
        ("xpress", dict(mask_token=5, mlp_hidden=96), r"head\.mlp_hidden=96: engines take multiples of 64, with head\.mask_token"),
        ("dspark", dict(mask_token=5, taps=[2, 6]), r"engines read outputs of layers.*within 1\.\.5"),
        ("dflash", dict(mask_token=5, taps=[0, 3]), r"engines read outputs of layers.*within 1\.\.5"),
        ("peagle", dict(mask_token=5, taps=[1, 6]), r"with head\.mask_token they end before layer 6"),
    ]:
        with pytest.raises(UserError, match=message):
            fresh(name, shape, **wrong)
    for name, key, wrong_value in [
        ("dspark", "sample_from_anchor", False),
        ("dspark", "markov_head_type", "lstm"),
        ("dflash", "attention_bias", True),
        ("dflash", "layer_types", ["sliding_attention", "full_attention"]),
        ("domino", "shift_label", False),
        ("dflash2", "sample_from_anchor", True),
        ("lilicorr", "sample_from_anchor", True),
        ("xpress", "sample_from_anchor", True),
    ]:
        folder = tmp_path / f"{name}-{key}"
        saved(name, folder)
        config = json.loads((folder / "config.json").read_text())
        del config["headstart"]
        (config["dflash_config"] if key in config.get("dflash_config", {}) else config)[key] = wrong_value
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match="sliding window" if key == "layer_types" else f"{key}="):
            hub.load(folder, shape)


def test_it_warns_where_vllm_would_compute_something_else(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM 0.33 takes a missing ``sliding_window_non_causal`` of dflash for true, and the key for all layers; of dspark for none."""
    near, full = "sliding_attention", "full_attention"
    for kind, layers, non_causal, warned in [
        ("dflash", [near] * 3, False, False),
        ("dflash", [near, full, near], False, True),
        ("dflash", [full] * 3, False, True),
        ("dflash", [full] * 3, True, False),
        ("dflash", [near, full, near], None, False),
        ("dspark", [near, full, near], False, False),
        ("dspark", [near, full, near], True, True),
        ("xpress", [near, full, near], False, False),
    ]:
        warn_once.cache_clear()
        caplog.clear()
        config = {"speculators_model_type": kind, "aux_hidden_state_layer_ids": [2, 3], "sliding_window_non_causal": non_causal}
        with caplog.at_level(logging.WARNING):
            found = speculators.flat(config | {"transformer_layer_config": {"layer_types": layers}})
        assert ("vLLM would run" in caplog.text) == warned, (kind, layers, non_causal)
        assert found.get("is_causal") is (False if non_causal or (non_causal is None and kind == "dflash") else None)
