"""The folder of one MTP module in the form that vLLM loads: what it holds, what is refused, and what stays in our own form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headstart.heads import hub
from headstart.heads.errors import UserError
from headstart.heads.serving import serving
from headstart.heads.unroll import unroll
from headstart.inference.decoding.target import Target
from tests.drafters import make, random_tokens, roots_of
from tests.heads.test_mtp import Modules
from tests.tiny_targets import tiny_target


def as_vllm_reads(folder: Path, target: Target) -> Modules:
    """The formula with the file's tensors: the matrices of queries, keys and values are one, each head as wide as the states allow."""
    w, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    heads, kv_heads, width = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    rows = [n * (width // heads) for n in (heads, kv_heads, kv_heads)]
    parts = dict(zip("qkv", w.pop("layers.0.self_attn.qkv_proj.weight").split(rows), strict=True))
    w |= {f"layers.0.self_attn.{x}_proj.weight": part for x, part in parts.items()}
    found = Modules(hub.build("mtp", target.shape, heads=heads, kv_heads=kv_heads), target)
    found.h, found.g = heads, kv_heads
    found.w = {k if k.startswith("layers.") else f"layers.0.{k.replace('fc.', 'eh_proj.')}": v for k, v in w.items()}
    return found


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, dict(kv_heads=2, intermediate_size=80)], ids=["the target's sizes", "its own sizes"])
def test_the_folder_holds_what_vllm_computes(changes: dict[str, Any], tmp_path: Path) -> None:
    target, tokens = tiny_target(), torch.tensor(random_tokens(12, 1))
    drafter = make("mtp", target, **changes)
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    reference = as_vllm_reads(tmp_path / "s", target)
    states = target.model(tokens[None], output_hidden_states=True).hidden_states[-1][0]
    loaded = hub.load(tmp_path / "s", target.shape).eval()
    assert all(torch.equal(v, drafter.state_dict()[k]) for k, v in loaded.state_dict().items()) and loaded.unserved == ""
    loaded.attach(target.ends)
    for depth, draft in enumerate(unroll(loaded, roots_of(target, loaded, tokens[None]), None, 3), start=1):
        for t in range(12 - depth):
            found = loaded.unembedding(depth).logits(draft.hidden_BNH)[0, t]
            torch.testing.assert_close(found, reference.guess(tokens, states, t, depth), rtol=0, atol=1e-4)


def test_the_keys_make_vllms_layer_llamas(tmp_path: Path) -> None:
    target = tiny_target()
    hub.save(make("mtp", target), tmp_path / "s", target.card, torch.bfloat16)
    w, config = load_file(tmp_path / "s" / "model.safetensors"), json.loads((tmp_path / "s" / "config.json").read_text())
    norms = ("enorm", "hnorm", "norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    others = ("fc", *(f"layers.0.{x}" for x in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")))
    assert w.keys() == {f"{name}.weight" for name in (*norms, *others)} and w["layers.0.self_attn.qkv_proj.weight"].shape == (64, 32)
    assert config["architectures"] == ["EagleDeepSeekMTPModel"] and config["model_type"] == "llama" and config["num_hidden_layers"] == 1
    assert config["n_routed_experts"] == 0 and config["first_k_dense_replace"] == 7  # vLLM counts its layer behind the target's six
    assert not any("rope_head_dim" in key or "lora_rank" in key for key in config)


def without_our_block(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("headstart", None)
    config = {key: value for key, value in (config | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_folder_without_our_block_is_the_same_drafter(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = make("mtp", target, intermediate_size=80)
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    without_our_block(tmp_path / "s")
    loaded = hub.load(tmp_path / "s", target.shape)
    assert loaded.config["head"] == "mtp" and loaded.config["intermediate_size"] == 80
    assert all(torch.equal(v, drafter.state_dict()[k]) for k, v in loaded.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_routed_experts": "absent"}, "has no n_routed_experts, which must be 0"),
        ({"n_routed_experts": 8}, "n_routed_experts=8"),
        ({"first_k_dense_replace": 1}, "first_k_dense_replace=1"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim=64"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"draft_vocab_size": 48}, "draft_vocab_size=48"),
        ({"routed_scaling_factor": 2.5}, r"routed_scaling_factor=2\.5"),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, "num_attention_heads=1: vLLM would make them wider than 16"),
        ({"rms_norm_eps": 1e-3}, r"rms_norm_eps 0\.001"),
        ({"model_type": "deepseek_v3", "rope_theta": "absent", "rope_parameters": "absent"}, "no rope_theta"),
    ],
)
def test_keys_that_make_it_another_layer_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = tiny_target()
    hub.save(make("mtp", target), tmp_path / "s", target.card, torch.float32)
    without_our_block(tmp_path / "s", **changes)
    with pytest.raises(UserError, match=message) as e:
        hub.load(tmp_path / "s", target.shape)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"modules": 3}, "head.modules=1"),
        ({"draft_vocab": [1, 5, 50]}, "head.draft_vocab=null"),
        ({"modules": 2, "draft_vocab": [1, 5, 50]}, "head.modules=1 head.draft_vocab=null"),
        ({"heads": 4}, "head.heads=2 head.kv_heads=2"),
        ({"heads": 3, "kv_heads": 1}, "head.heads=2"),
    ],
)
def test_what_vllms_class_cannot_be_keeps_our_own_form(changes: dict[str, Any], settings: str, tmp_path: Path) -> None:
    target = tiny_target()
    drafter = make("mtp", target, **changes)
    assert drafter.format == "native" and drafter.unserved == f"engines have no such module; trained with {settings}, vLLM loads it"
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    assert json.loads((tmp_path / "s" / "config.json").read_text())["architectures"] == ["Mtp"]
    loaded = hub.load(tmp_path / "s", target.shape)
    assert all(torch.equal(v, drafter.state_dict()[k]) for k, v in loaded.state_dict().items()) and loaded.unserved == drafter.unserved
    asked = {part.partition("=")[0][5:]: json.loads(part.partition("=")[2]) for part in settings.split()}
    assert make("mtp", target, **changes | asked).format == "mtp"


def test_a_target_that_no_number_of_heads_fills() -> None:
    shape = replace(tiny_target().shape, head_dim=24)
    assert hub.build("mtp", shape).unserved == "engines have no such module; no number of heads of 24 is as wide as the target, 32"


def test_a_folder_of_an_earlier_version_loads_and_becomes_one_for_vllm(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = make("mtp", target)
    drafter.format = "native"  # as it was saved then
    hub.save(drafter, tmp_path / "old", target.card, torch.float32)
    loaded = hub.load(tmp_path / "old", target.shape)
    assert all(torch.equal(v, drafter.state_dict()[k]) for k, v in loaded.state_dict().items())
    assert serving(loaded, "TARGET", "DIR", 4).unserved.startswith("an earlier version saved it, in a form that none reads")
    hub.save(loaded, tmp_path / "new", target.card, torch.float32)
    again = hub.load(tmp_path / "new", target.shape)
    assert serving(again, "TARGET", "DIR", 4).unserved == ""
    assert all(torch.equal(v, drafter.state_dict()[k]) for k, v in again.state_dict().items())
