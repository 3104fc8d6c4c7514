"""A target's own MTP module in its own kind of layer: taken over bit-equal, against transformers' layers called plainly, saved for vLLM."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.own_mtp import one_layer
from headstart.heads.serving import serving
from headstart.heads.unroll import unroll
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.info import TargetInfo
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.stored import StoredTarget
from headstart.inference.decoding.target import Target
from tests.doors import ROOT
from tests.drafters import learn_by_heart, make, random_tokens, roots_of
from tests.heads.test_mtp import folder_with
from tests.heads.test_recurrent import MORE
from tests.tiny_targets import COMMON, OTHERS, tiny_target

# kind of target -> (vLLM's class, the key that counts the modules)
QWEN = {
    "qwen3_5_text": ("Qwen3_5MTP", "mtp_num_hidden_layers"),
    "qwen3_5_moe_text": ("Qwen3_5MoeMTP", "mtp_num_hidden_layers"),
    "qwen3_next": ("Qwen3NextMTP", "num_nextn_predict_layers"),
}
DEEPSEEK = OTHERS["deepseek_v3"] | dict(num_nextn_predict_layers=1)
ENDS = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}


def bare(architecture: str) -> Target:
    return tiny_target(architecture, **(MORE | {"deepseek_v3": DEEPSEEK}).get(architecture, {}))


def like(target: Target) -> Any:
    """The target's last layer with full attention."""
    kinds = getattr(target.config, "layer_types", None) or ["full_attention"] * target.shape.layers
    return [layer for layer, kind in zip(target.model.model.layers, kinds, strict=True) if kind == "full_attention"][-1]


def stored(architecture: str, parted: bool = True, place: str = "mtp.") -> dict[str, Tensor]:
    """Random tensors of a module, named as in the target's file."""
    dice, layer = torch.Generator().manual_seed(1), like(bare(architecture)).state_dict()
    behind = not place.endswith("mtp.")
    sizes = {part: [32, 64] if part == "eh_proj" else [32] for part in ENDS}
    ends = {"norm": "shared_head.norm", "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj"} if behind else ENDS
    found = {f"{place}{ends[part]}.weight": size for part, size in sizes.items()}
    found |= {f"{place}{'' if behind else 'layers.0.'}{name}": list(x.shape) for name, x in layer.items()}
    made = {name: 0.3 * torch.randn(size, generator=dice) for name, size in found.items()}
    return by_expert(made) if parted else made


def by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As published files have them: three matrices for each expert."""
    made: dict[str, Tensor] = {}
    for name, x in tensors.items():
        for e, matrix in enumerate(x) if ".experts." in name else ():
            place, _, kind = name.rpartition(".")
            gates = kind == "gate_up_proj"
            parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)) if gates else {"down_proj": matrix}
            made |= {f"{place}.{e}.{part}.weight": m.contiguous() for part, m in parts.items()}
        made |= {} if ".experts." in name else {name: x}
    return made


def opened(target: TargetInfo, **arguments: Any) -> Drafter:
    drafter = hub.build("own_mtp", target.shape, **arguments)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    return drafter.eval()


def plain_guess(target: Target, w: dict[str, Tensor], tokens: Tensor, states: Tensor, t: int, depth: int) -> Tensor:
    """The logits of one guess, by calling a layer of the target's class over everything that it sees. ``w``: of one tensor per matrix."""
    decoder, layer, norm = target.model.model, like(target), target.model.model.norm
    layer.load_state_dict({k.removeprefix("mtp.layers.0."): v for k, v in w.items() if k.startswith("mtp.layers.0.")})

    def normed(x: Tensor, name: str) -> Tensor:
        norm.load_state_dict({"weight": w[f"mtp.{name}.weight"]})
        return norm(x)  # type: ignore[no-any-return]

    line = states[: t + 1]  # the state beside each token: the target's, then the module's own
    for d in range(1, depth + 1):
        e, here = normed(decoder.embed_tokens(tokens[1 : t + 1 + d]), "pre_fc_norm_embedding"), torch.arange(t + d)[None]
        x = torch.cat([e, normed(line, "pre_fc_norm_hidden")], -1) @ w["mtp.fc.weight"].T
        mask = torch.full((t + d, t + d), -torch.inf).triu(1)[None, None]
        x = layer(x[None], position_embeddings=decoder.rotary_emb(x[None], here), attention_mask=mask, position_ids=here)[0]
        line = torch.cat([line, normed(x[-1:], "norm")])
    return target.model.lm_head(line[-1])  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.parametrize("parted", [True, False], ids=["each expert", "experts joined"])
@pytest.mark.parametrize("architecture", QWEN)
def test_the_targets_own_module_guesses_as_transformers_layers(architecture: str, parted: bool, tmp_path: Path) -> None:
    tensors, tokens = stored(architecture, parted), torch.tensor(random_tokens(12, 1))
    target, reference = folder_with(tmp_path / "t", tensors, architecture, **MORE.get(architecture, {})), bare(architecture)
    reference.model.load_state_dict(target.model.state_dict())
    drafter = opened(target)
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    saved = load_file(tmp_path / "s" / "model.safetensors")
    whole = stored(architecture, parted=False)
    assert saved.keys() == by_expert(whole).keys() and all(torch.equal(x, saved[name]) for name, x in by_expert(whole).items())
    (tmp_path / "t" / "model-2.safetensors").unlink()  # a saved drafter stands alone
    loaded = hub.load(tmp_path / "s", target.shape, target.card).eval()
    loaded.attach(replace(target.ends, whole=None, config=None))
    states = target.model.model(tokens[None]).last_hidden_state[0]
    roots = roots_of(target, drafter, tokens[None])
    for depth, (draft, again) in enumerate(zip(unroll(drafter, roots, None, 3), unroll(loaded, roots, None, 3), strict=True), start=1):
        assert torch.equal(draft.hidden_BNH, again.hidden_BNH)
        for t in range(12 - depth):
            found, expected = (
                drafter.unembedding(depth).logits(draft.hidden_BNH)[0, t],
                plain_guess(reference, whole, tokens, states, t, depth),
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_layer_behind_the_others_is_taken_over_too(tmp_path: Path) -> None:
    """DeepSeek's layout, with latent attention and experts: the layer counts as one behind the dense ones."""
    tensors = stored("deepseek_v3", place="model.layers.6.")
    target = folder_with(tmp_path, tensors | {"model.layers.6.embed_tokens.weight": torch.zeros(96, 32)}, "deepseek_v3", **DEEPSEEK)
    drafter = opened(target)
    own = drafter.state_dict()
    whole = stored("deepseek_v3", parted=False, place="model.layers.6.")
    assert len(own) == len(whole) and "model.layers.6.mlp.experts.gate_up_proj" in whole
    for name, x in whole.items():
        part = name.removeprefix("model.layers.6.")
        ours = "decoder.norm.weight" if "shared_head" in part else part if part.split(".")[0] in ENDS else f"decoder.layers.0.{part}"
        assert torch.equal(own[ours], x), name
    assert serving(drafter, "T", "DIR", 3).unserved == "none takes the MTP module of a deepseek_v3 target from a folder of its own"


def test_the_files_of_a_multimodal_folder_are_found_without_loading_it(tmp_path: Path) -> None:
    """As they are published: the text model's config within another. Neither way of opening it needs the target's layers for the module."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    vision = dict(hidden_size=16, intermediate_size=24, depth=1, num_heads=2, out_hidden_size=32, num_position_embeddings=16)
    text = COMMON | OTHERS["qwen3_5_text"] | dict(model_type="qwen3_5_text", mtp_num_hidden_layers=1)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision))
    model.save_pretrained(tmp_path)
    save_file(load_file(tmp_path / "model.safetensors") | stored("qwen3_5_text"), tmp_path / "model.safetensors", metadata={"format": "pt"})
    for file in (ROOT / "assets" / "tiny").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    target = StoredTarget(str(tmp_path), device="cpu")
    drafter, other = opened(target), opened(Target.load(str(tmp_path), device="cpu"))
    assert not target._opened and drafter.unserved == "" and drafter.config == other.config
    assert torch.equal(drafter.state_dict()["eh_proj.weight"], stored("qwen3_5_text")["mtp.fc.weight"])
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in drafter.state_dict().items())


@pytest.mark.parametrize("architecture", QWEN)
def test_what_vllm_is_told(architecture: str, tmp_path: Path) -> None:
    target, (name, count) = bare(architecture), QWEN[architecture]
    drafter = make("own_mtp", target)
    hub.save(drafter, tmp_path / "s", target.card, torch.bfloat16)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert config["architectures"] == [name] and config["model_type"] == architecture and config[count] == 1
    assert config["num_hidden_layers"] == 1 and config["layer_types"] == ["full_attention"] and config["vocab_size"] == 96
    made = serving(drafter, "TARGET", "DIR", depth=4)
    assert made.unserved == "" and [c.engine for c in made.commands] == ["vLLM", "Headstart", "transformers"]
    assert made.commands[0].speculative == {"method": "mtp", "model": "DIR", "num_speculative_tokens": 4}
    setattr(target.config, count, 3)
    several = serving(make("own_mtp", target), "TARGET", "DIR", depth=4)
    assert several.unserved == "vLLM would make 3 modules, as many as the target's config says"


@pytest.mark.parametrize("architecture", QWEN)
def test_it_learns_and_decodes_losslessly(architecture: str) -> None:
    """Trained a little, so that some guesses are right and some wrong; then a tree, chains, and two sequences at once."""
    target, prompts = bare(architecture), [random_tokens(n, seed=n) for n in (13, 3)]
    expected = [generate(target, None, prompt, new_tokens=16).tokens for prompt in prompts]
    drafter = learn_by_heart(make("own_mtp", target), target, [(p + s)[:19] for p, s in zip(prompts, expected, strict=True)], 2, 8)
    emitted = []
    for policy in (TreePolicy(depth=4, nodes=10, branch=3, least=0.05), TreePolicy("chain", depth=3)):
        alone = [generate(target, Drafting(drafter), prompt, new_tokens=16, policy=policy) for prompt in prompts]
        together = generate_batch(target, drafter, prompts, new_tokens=16, policy=policy, sequences=2)
        assert [g.tokens for g in alone] == [g.tokens for g in together] == expected
        emitted += [n for g in (*alone, *together) for n in g.emitted]
    assert max(emitted) > 1, "nothing was accepted: this tested nothing"


def test_the_layer_is_of_the_targets_kind() -> None:
    """A dense or a mixed MLP as vLLM builds it for the module: as the first layer where a list of dense ones says so (Qwen3-Next)."""
    experts = MORE["qwen3_next"]
    for dense, kind in (([0, 1], "Qwen3NextMLP"), ([1, 5], "Qwen3NextSparseMoeBlock"), ([0, 1, 2, 3, 4, 5], "Qwen3NextMLP")):
        drafter: Any = make("own_mtp", tiny_target("qwen3_next", **experts | {"mlp_only_layers": dense}))
        layer = drafter.decoder.layers[0]
        assert type(layer.mlp).__name__ == kind and type(layer.self_attn).__name__ == "Qwen3NextAttention"
    keys = one_layer(tiny_target("gemma3_text", sliding_window=16).config)
    assert keys["layer_types"] == ["full_attention"] and keys["num_hidden_layers"] == 1


def test_weights_that_cannot_be_taken_are_refused(tmp_path: Path) -> None:
    whole, one = stored("qwen3_5_text"), torch.ones(1)
    cases: list[tuple[dict[str, Tensor], str]] = [
        ({"unrelated": one}, "has no MTP weights in a layout known here"),
        ({k: v for k, v in whole.items() if "q_norm" not in k}, r"lacks mtp\.layers\.0\.self_attn\.q_norm\.weight"),
        ({k: v for k, v in whole.items() if "pre_fc_norm_hidden" not in k}, r"lacks mtp\.pre_fc_norm_hidden\.weight"),
        (whole | {"mtp.layers.0.mlp.experts.0.up_proj.weight": one}, r"has mtp\.layers\.0\.mlp\.experts\.0\.up_proj\.weight"),
        (whole | {"mtp.layers.0.mlp.up_proj.weight_scale_inv": one}, "up_proj.weight_scale_inv: quantised weights"),
        (whole | {"mtp.embed_tokens.weight": torch.ones(96, 32)}, r"has mtp\.embed_tokens\.weight"),
        (whole | {"mtp.fc.weight": torch.ones(32, 32)}, r"has mtp\.fc\.weight of \[32, 32\], not \[32, 64\]"),
    ]
    for i, (tensors, message) in enumerate(cases):
        target = folder_with(tmp_path / str(i), tensors, "qwen3_5_text")
        with pytest.raises(UserError, match=message) as e:
            opened(target)
        assert "\n" not in str(e.value) and "head.from_target=false trains a fresh module" in str(e.value)


def test_targets_without_such_a_layer_are_refused() -> None:
    with pytest.raises(UserError, match="the MTP layer: layers of kind linear_attention keep a state"):
        make("own_mtp", tiny_target("falcon_h1"))
    with pytest.raises(UserError, match=r"no MTP layer can be made of the target's config: `per_layer_config` keys"):
        make("own_mtp", tiny_target("gemma4_text"))
    from transformers import AutoConfig, AutoModelForCausalLM

    gpt = Target(AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", vocab_size=96, n_embd=32, n_head=2, n_layer=2)))
    with pytest.raises(
        UserError, match=r"layers of gpt2 cannot be an MTP module: their decoder has wpe\.weight beside them. Take head=mtp"
    ):
        make("own_mtp", gpt)
    target = tiny_target()
    with pytest.raises(UserError, match="the target's config is not at hand"):
        hub.build("own_mtp", target.shape).attach(replace(target.ends, config=None))
    with pytest.raises(UserError, match=r"head\.config has hidden_size=16 and vocab_size=96, the target 32 and 96"):
        hub.build("own_mtp", target.shape, config=one_layer(target.config) | {"hidden_size": 16})
    with pytest.raises(UserError, match="no MTP layer can be made of the target's config"):
        hub.build("own_mtp", target.shape, config={"hidden_size": 32})
