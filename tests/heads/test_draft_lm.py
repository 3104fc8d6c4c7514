"""An independent small model as drafter: from a folder, from the target's own layers, by LoRA, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.heads import hub
from headstart.heads.base import Drafter, TargetEnds
from headstart.heads.errors import UserError
from headstart.heads.unroll import unroll
from headstart.inference.decoding.target import Target
from tests.drafters import learn_by_heart, random_tokens, roots_of
from tests.tiny_targets import tiny_target

SMALL: dict[str, Any] = dict(model_type="llama", hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
LORA: dict[str, Any] = dict(rank=3, alpha=6, names=["q_proj", "down_proj"])


def fitting(target: Target, **arguments: Any) -> Drafter:
    drafter = hub.build("draft_lm", target.shape, **arguments)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    return drafter.eval()


@torch.no_grad()
def guesses(drafter: Drafter, target: Target, tokens: list[int]) -> torch.Tensor:
    """Of depth 1, behind x[1], x[2], .."""
    (draft,) = unroll(drafter, roots_of(target, drafter, torch.tensor([tokens])), None, 1)
    return drafter.unembedding(1).logits(draft.hidden_BNH)[0, :-1]


def test_a_folder_is_kept_bit_for_bit(tmp_path: Path) -> None:
    small, target = tiny_target(seed=3, num_hidden_layers=2), tiny_target()
    small.model.save_pretrained(tmp_path / "small")
    drafter = hub.build("draft_lm", target.shape, folder=str(tmp_path / "small"))
    assert all(torch.equal(drafter.state_dict()[f"lm.{k}"], v) for k, v in small.model.state_dict().items())
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    (tmp_path / "small" / "config.json").unlink()  # a saved drafter stands alone
    loaded = hub.load(tmp_path / "s", target.shape)
    assert all(torch.equal(loaded.state_dict()[f"lm.{k}"], v) for k, v in small.model.state_dict().items())


def truncated(target: Target, layers: int) -> Any:
    """The target with the first layers alone, made by leaving tensors out of its file's names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = target.model.config.to_dict() | {"num_hidden_layers": layers}
    if theirs.get("layer_types"):
        theirs["layer_types"] = theirs["layer_types"][:layers]
    attention = target.model.config._attn_implementation
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**theirs), attn_implementation=attention, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(target.model.state_dict(), strict=False)
    assert not missing and all(int(name.split(".")[2]) >= layers for name in unexpected) and unexpected
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "mixtral", "gpt_oss"])
def test_the_targets_first_layers(architecture: str, tmp_path: Path) -> None:
    """They say what the target with so many layers would say, and their folder is an ordinary model."""
    from transformers import AutoModelForCausalLM

    target, tokens = tiny_target(architecture), random_tokens(40, 1)  # longer than a window of 16
    drafter = fitting(target, layers=2)
    expected = truncated(target, 2)(torch.tensor([tokens])).logits[0, 1:]
    torch.testing.assert_close(guesses(drafter, target, tokens), expected, rtol=0, atol=1e-4)
    theirs = {id(p) for p in target.model.parameters()}
    assert all(p.requires_grad and id(p) not in theirs for p in drafter.parameters())
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "s", dtype=torch.float32, attn_implementation="eager")
    assert plain.config.num_hidden_layers == 2
    torch.testing.assert_close(plain(torch.tensor([tokens])).logits[0, 1:], expected, rtol=0, atol=1e-4)
    loaded = hub.load(tmp_path / "s", target.shape)
    loaded.attach(TargetEnds(target.ends.embed, target.ends.head_VD))  # a saved one needs no model of the target
    torch.testing.assert_close(guesses(loaded.eval(), target, tokens), expected, rtol=0, atol=1e-4)


EXPERTS = {
    "mixtral": ("block_sparse_moe.experts.{}.w2.weight", 4),
    "qwen3_moe": ("mlp.experts.{}.down_proj.weight", 4),
    "deepseek_v3": ("mlp.experts.{}.down_proj.weight", 8),
}


@pytest.mark.parametrize(("architecture", "names"), [*((name, None) for name in EXPERTS), ("mixtral", ["q_proj"])])
def test_experts_are_saved_one_by_one(architecture: str, names: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As published folders have them and engines look for them, though transformers 5 has all of a layer in one tensor."""
    target, (name, count) = tiny_target(architecture), EXPERTS[architecture]
    drafter, tokens = fitting(target, layers=2, lora=names and LORA | {"names": names}), random_tokens(20, 1)
    for parameter in (p for n, p in drafter.named_parameters() if ".lora_B" in n):  # as if it had learnt
        torch.nn.init.normal_(parameter)
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    tensors = load_file(tmp_path / "s" / "model.safetensors")
    one = [f"model.layers.1.{name.format(i)}" for i in range(count)]
    assert torch.equal(torch.stack([tensors[n] for n in one]), drafter.state_dict()["lm.model.layers.1.mlp.experts.down_proj"])
    assert not any(n.endswith("experts.down_proj") for n in tensors)
    loaded = hub.load(tmp_path / "s", target.shape)
    torch.testing.assert_close(guesses(loaded, target, tokens), guesses(drafter, target, tokens), rtol=0, atol=1e-5)
    hub.save(loaded, tmp_path / "again", target.card, torch.float32)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[n], tensors[n]) for n in again)

    config = json.loads((tmp_path / "s" / "config.json").read_text())
    del config["headstart"]["sha256"]  # or it would be refused as changed
    (tmp_path / "s" / "config.json").write_text(json.dumps(config))
    save_file({n: t for n, t in tensors.items() if n != one[-1]}, tmp_path / "s" / "model.safetensors")
    with pytest.raises(UserError, match=rf"{one[-1]} is missing \(1 missing, 0 unknown\)"):
        hub.load(tmp_path / "s", target.shape)
    with monkeypatch.context() as patched:  # a folder of earlier versions: as it is in memory
        patched.setattr(hub, "_in_file", lambda fmt, drafter, tensors: tensors)
        hub.save(drafter, tmp_path / "old", target.card, torch.float32)
    old = hub.load(tmp_path / "old", target.shape).state_dict()
    assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in old.items())


@pytest.mark.parametrize("own", [True, False])
def test_lora_trains_little_and_is_saved_merged(own: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    target, tokens = tiny_target(), random_tokens(20, 2)
    start: dict[str, Any] = dict(layers=2) if own else dict(config=SMALL)
    torch.manual_seed(0)
    drafter = fitting(target, **start, lora=LORA)
    trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    layers = 2 if own else 1
    assert len(trained) == layers * 2 * 2 and all(".lora_" in name and 3 in p.shape for name, p in trained.items())
    if own:  # untrained, it is what it starts as
        torch.testing.assert_close(guesses(drafter, target, tokens), guesses(fitting(target, layers=2), target, tokens), rtol=0, atol=1e-6)
    frozen = {name: p.clone() for name, p in drafter.named_parameters() if name not in trained}
    before = guesses(drafter, target, tokens)
    learn_by_heart(drafter, target, [tokens], depth=1, steps=3)
    after = guesses(drafter, target, tokens)
    assert not torch.allclose(before, after, atol=1e-3)
    assert all(torch.equal(p, frozen[name]) for name, p in drafter.named_parameters() if name in frozen)

    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "s", dtype=torch.float32)
    file = load_file(tmp_path / "s" / "model.safetensors")
    assert file.keys() == {name.removeprefix("lm.") for name in fitting(target, **start).state_dict()}
    with torch.no_grad():
        torch.testing.assert_close(plain(torch.tensor([tokens])).logits[0, 1:], after, rtol=0, atol=1e-4)
    for name, module in (("q_proj", "self_attn.q_proj"), ("down_proj", "mlp.down_proj")):  # W + alpha / rank * B A
        w = {k.rsplit(f"{name}.")[-1]: v for k, v in drafter.state_dict().items() if f"layers.0.{module}." in k}
        merged = w["base_layer.weight"] + 6 / 3 * w["lora_B.default.weight"] @ w["lora_A.default.weight"]
        torch.testing.assert_close(file[f"model.layers.0.{module}.weight"], merged, rtol=0, atol=1e-6)
    assert "lora" not in (tmp_path / "s" / "config.json").read_text()
    loaded = hub.load(tmp_path / "s", target.shape)
    loaded.attach(target.ends)
    torch.testing.assert_close(guesses(loaded.eval(), target, tokens), after, rtol=0, atol=1e-4)


def test_a_checkpoint_of_lora_is_whole() -> None:
    """Its tensors, as a checkpoint keeps them, make another the same bit for bit."""
    target, tokens = tiny_target(), random_tokens(20, 2)
    drafter, other = (fitting(target, layers=2, lora=LORA) for _ in range(2))
    learn_by_heart(drafter, target, [tokens], depth=1, steps=3)
    kept = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    assert {name for name, p in drafter.named_parameters() if p.requires_grad} <= kept.keys()
    assert not torch.equal(guesses(other, target, tokens), guesses(drafter, target, tokens))
    other.load_state_dict(kept)
    assert torch.equal(guesses(other, target, tokens), guesses(drafter, target, tokens))


def test_a_model_whose_layers_lie_deeper() -> None:
    """get_decoder of Llama 4 gives the whole model."""
    target = tiny_target()
    drafter = hub.build("draft_lm", target.shape, config={**SMALL, "model_type": "llama4_text", "num_key_value_heads": 2})
    drafter.attach(target.ends)
    assert guesses(drafter, target, random_tokens(6, 1)).isfinite().all()


def test_lora_that_does_not_fit_is_refused() -> None:
    shape = tiny_target().shape
    for changes, message in (
        (
            {"names": ["q_proj", "wide"]},
            "no linear layer called wide: it has down_proj, gate_proj, k_proj, o_proj, q_proj, up_",
        ),
        ({"names": []}, r"no linear layer called \[\]"),
        ({"names": [["q_proj"]]}, r"no linear layer called \['q_proj'\]"),
        ({"names": "q_proj"}, r"head\.lora\.names must be a list \(null for all\), found 'q_proj'"),
        ({"alpha": float("inf")}, "alpha a number above 0"),
        ({"rank": 0}, "rank must be a whole number of at least 1"),
        ({"rank": 17}, r"rank 17 is more than the smallest of these layers has \(16\)"),
        ({"alpha": -1}, "alpha a number above 0"),
        ({"dropout": 0.1}, "must be {rank: 16"),
    ):
        with pytest.raises(UserError, match=message):
            hub.build("draft_lm", shape, config=SMALL, lora=LORA | changes)
    every = hub.build("draft_lm", shape, config=SMALL, lora={"rank": 2, "alpha": 2, "names": None})
    assert sum(p.requires_grad for p in every.parameters()) == 7 * 2


def test_models_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = tiny_target()
    shape = target.shape
    for arguments, message in (
        ({}, "one of head.config, head.folder and head.layers, found none"),
        ({"config": SMALL, "folder": "x"}, "found head.config and head.folder: set the others to null"),
        ({"config": SMALL, "layers": 2}, "found head.config and head.layers"),
        ({"layers": 6}, "head.layers=6 must be fewer than the 6 of the target"),
        ({"config": SMALL | {"vocab_size": 90}}, "a vocabulary of 90, the target 96"),
        ({"config": SMALL | {"model_type": "no_such"}}, "cannot be made"),
        ({"config": SMALL | {"hidden_size": "wide"}}, "cannot be made"),
        ({"config": SMALL | {"model_type": "qwen3_next", "head_dim": 8}}, "layers of kind linear_attention"),
        ({"config": SMALL | {"model_type": "gemma", "final_logit_softcapping": 30.0}}, "caps its logits"),
        ({"config": SMALL | {"model_type": "cohere", "logit_scale": 0.5}}, "scales its logits"),
        ({"config": SMALL | {"model_type": "phi"}}, "output head has a bias"),
        ({"folder": str(tmp_path / "nowhere")}, r"the draft model .*nowhere cannot be made"),
    ):
        with pytest.raises(UserError, match=message) as e:
            hub.build("draft_lm", shape, **arguments)
        assert "\n" not in str(e.value)
    drafter = hub.build("draft_lm", shape, layers=2)
    with pytest.raises(UserError, match="only its embedding and head are at hand"):
        drafter.attach(replace(target.ends, whole=None))


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    target = tiny_target(num_hidden_layers=1)
    target.model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    save_file({k: v for k, v in tensors.items() if "up_proj" not in k}, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks model\.layers\.0\.mlp\.up_proj\.weight"):
        hub.build("draft_lm", target.shape, folder=str(tmp_path))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match="cannot be made"):
        hub.build("draft_lm", target.shape, folder=str(tmp_path))


def test_a_saved_config_cannot_ask_for_another_model(tmp_path: Path) -> None:
    """One that names the target's layers, or LoRA of a size that its tensors do not bear out, is one line."""
    target = tiny_target()
    hub.save(fitting(target, config=SMALL), tmp_path / "s", target.card, torch.float32)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    kept = config["headstart"]["arguments"]
    for arguments in ({"layers": 2}, {"folder": "/"}, kept | {"layers": 2}, kept | {"lora": LORA | {"rank": 10**9}}):
        config["headstart"]["arguments"] = arguments
        (tmp_path / "s" / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=r"config\.json|not a tensor of this drafter"):
            hub.load(tmp_path / "s", target.shape)
