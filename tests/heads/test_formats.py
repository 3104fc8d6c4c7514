"""The folders as serving engines read them: exact tensors and keys, and what engines compute from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.heads import hub
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.seal import digests
from headstart.heads.unroll import unroll
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.target import Target
from tests.drafters import make, random_tokens, roots_of
from tests.heads.reference import Reference
from tests.tiny_targets import COMMON, tiny_target

DRAFT_VOCAB = [0, 2, 3, 5, 8, 13, 21, 34, 55, 89, 90, 95]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": dict(fc_norm=False, norm_output=False),
    "3.1": dict(fc_norm=True, norm_output=True),
    "trimmed": dict(draft_vocab=DRAFT_VOCAB, norm_output=False),
    "two layers": dict(layers=2, draft_vocab=DRAFT_VOCAB, taps=[1, 2, 4, 5]),
    "wide": dict(intermediate_size=80, taps=[3], fc_norm=False),
    "speculators": dict(fc_norm=False, norm_before_fc=True, norm_before_residual=True),
    "one norm": dict(fc_norm=False, norm_before_fc=True, layers=2),
}
LAYER = [
    *(f"self_attn.{x}_proj.weight" for x in "qkvo"),
    *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
]  # fmt: skip
EAGLE3 = {"fc.weight", "norm.weight", "lm_head.weight", "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"}
EAGLE3 |= {f"midlayer.{x}" for x in LAYER}
EAGLE1 = {"fc.weight", "fc.bias", *(f"layers.0.{x}" for x in LAYER)}


@torch.no_grad()
def compare(reference: Reference, kind: str, drafter: Drafter, target: Target, taps: list[int]) -> None:
    """Depth 1 at every slot, and depth 2 after each, grown as an engine does: one more slot with the drafted token."""
    tokens = torch.tensor(random_tokens(20, 6))
    T = len(tokens)
    states = target.model(tokens[None], output_hidden_states=True).hidden_states
    aux = [states[k][0] for k in taps]
    x = reference.features(aux) if kind == "eagle3" else aux[0]
    forward = getattr(reference, kind)
    ids, positions = tokens[1:], torch.arange(T - 1)  # slot i: the token at i+1 with the target's states at i
    logits, fed = forward(ids, x[:-1], positions, torch.ones(T - 1, T - 1, dtype=torch.bool).tril())
    roots = roots_of(target, drafter, tokens[None])
    drafts = unroll(drafter, roots, None, 2)
    unembedding = drafter.unembedding(1)
    one, two = (unembedding.to_target(unembedding.logits(d.hidden_BNH), 96)[0] for d in drafts)
    torch.testing.assert_close(one[: T - 1], logits, rtol=0, atol=1e-5)
    for t in range(T - 2):
        one_more = (ids, ids[t + 1 : t + 2]), (x, fed[t : t + 1]), (positions, positions[t : t + 1] + 1)
        longer = [torch.cat([a[: t + 1], b]) for a, b in one_more]
        deeper, _ = forward(*longer, torch.ones(t + 2, t + 2, dtype=torch.bool).tril())
        torch.testing.assert_close(two[t], deeper[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rope", [None, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_eagle3_as_engines_compute_it(variant: str, rope: dict[str, Any] | None, tmp_path: Path) -> None:
    target = tiny_target(**({} if rope is None else {"rope_parameters": rope}))
    drafter = make("eagle", target, **VARIANTS[variant])
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    compare(Reference(tmp_path / "s", target.model), "eagle3", drafter, target, list(drafter.taps))


def test_eagle1_as_engines_compute_it(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = make("eagle1", target)
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    compare(Reference(tmp_path / "s", target.model), "eagle1", drafter, target, [6])


def check_llama_keys(config: dict[str, Any], target: Target) -> None:
    c, hf = config, target.config
    assert c["model_type"] == "llama" and c["hidden_act"] == "silu" and c["vocab_size"] == 96 and c["hidden_size"] == 32
    assert not (c["tie_word_embeddings"] or c["attention_bias"] or c["mlp_bias"] or c.get("bias"))
    assert c["rope_theta"] == c["rope_parameters"]["rope_theta"] == hf.rope_parameters["rope_theta"]
    assert c["rope_parameters"] == hf.rope_parameters and c["max_position_embeddings"] == 256
    if c["rope_parameters"]["rope_type"] == "default":
        assert c["rope_scaling"] is None
    else:
        assert c["rope_scaling"] == {k: v for k, v in hf.rope_parameters.items() if k != "rope_theta"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_eagle3_folder_is_exactly_the_format(variant: str, tmp_path: Path) -> None:
    settings, target = VARIANTS[variant], tiny_target(rope_parameters=LLAMA3)
    hub.save(make("eagle", target, **settings), tmp_path / "s", target.card, torch.bfloat16)
    w, config = load_file(tmp_path / "s" / "model.safetensors"), json.loads((tmp_path / "s" / "config.json").read_text())
    taps, layers, trimmed = settings.get("taps", [2, 3]), settings.get("layers", 1), "draft_vocab" in settings
    keys = set(EAGLE3)
    keys |= {f"fc_norm.{i}.weight" for i in range(len(taps))} if settings.get("fc_norm", True) else set()
    keys |= {f"layers.1.{x}" for x in [*LAYER, "input_layernorm.weight", "hidden_norm.weight"]} if layers == 2 else set()
    keys |= {"d2t", "t2d"} if trimmed else set()
    keys |= {"input_norm.weight"} if "norm_before_fc" in settings else set()
    assert w.keys() == keys
    assert all(t.isfinite().all() for t in w.values()) and all((t != 0).any() for k, t in w.items() if "norm" in k)
    V, D = len(DRAFT_VOCAB) if trimmed else 96, 32
    assert w["midlayer.self_attn.q_proj.weight"].shape == (32, 2 * D) and w["midlayer.self_attn.v_proj.weight"].shape == (16, 2 * D)
    assert w["fc.weight"].shape == (D, len(taps) * D) and w["lm_head.weight"].shape == (V, D) and w["norm.weight"].shape == (D,)
    assert w["midlayer.mlp.gate_proj.weight"].shape == (settings.get("intermediate_size", 48), D)
    if layers == 2:
        assert w["layers.1.self_attn.q_proj.weight"].shape == (32, D)
        assert torch.equal(w["layers.1.input_layernorm.weight"], w["layers.1.hidden_norm.weight"])
    if trimmed:
        ids = torch.arange(V) + w["d2t"]
        assert w["d2t"].dtype == torch.int64 and w["t2d"].dtype == torch.bool and ids.tolist() == DRAFT_VOCAB
        assert w["t2d"].sum() == V and w["t2d"][ids].all() and w["t2d"].shape == (96,)
    check_llama_keys(config, target)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == layers
    assert config["draft_vocab_size"] == V and config["num_aux_hidden_states"] == len(taps)
    assert config["eagle_aux_hidden_state_layer_ids"] == taps  # six layers: never the default of three
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [k - 1 for k in taps]
    assert config["norm_before_residual"] is settings.get("norm_before_residual", False)
    assert config["fc_norm"] is settings.get("fc_norm", True) and config.get("norm_before_fc", False) is ("norm_before_fc" in settings)


def test_default_layers_are_not_written(tmp_path: Path) -> None:
    target = tiny_target(num_hidden_layers=8)
    hub.save(make("eagle", target), tmp_path / "s", target.card, torch.float32)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert "eagle_config" not in config and "eagle_aux_hidden_state_layer_ids" not in config and config["num_aux_hidden_states"] == 3
    assert hub.load(tmp_path / "s", target.shape).taps == (2, 4, 5)


def test_the_eagle1_folder_is_exactly_the_format(tmp_path: Path) -> None:
    target = tiny_target()
    hub.save(make("eagle1", target), tmp_path / "s", target.card, torch.float32)
    w, config = load_file(tmp_path / "s" / "model.safetensors"), json.loads((tmp_path / "s" / "config.json").read_text())
    assert w.keys() == EAGLE1 and not w["fc.bias"].any() and w["fc.weight"].shape == (32, 64)
    check_llama_keys(config, target)
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == 1


def foreign(folder: Path, rename: dict[str, str], **config: Any) -> None:
    """Make the folder another tool's: without our block, with other spellings, with the target's embedding."""
    theirs = json.loads((folder / "config.json").read_text())
    del theirs["headstart"]
    theirs = {k: v for k, v in (theirs | config).items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(theirs))
    w = load_file(folder / "model.safetensors")
    for old, new in rename.items():
        w = {k.replace(old, new, 1): v for k, v in w.items()}
    embedding = tiny_target().ends.embed(torch.arange(96)).detach().to(torch.float16)  # in another precision than ours
    save_file(w | {"embed_tokens.weight": embedding}, folder / "model.safetensors")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_foreign_eagle3_folder_loads(variant: str, tmp_path: Path) -> None:
    target = tiny_target()
    drafter = make("eagle", target, **VARIANTS[variant])
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    foreign(tmp_path / "s", {"midlayer.": "layers.0."}, architectures=["Eagle3LlamaForCausalLM"], eagle_aux_hidden_state_layer_ids=...)
    loaded = hub.load(tmp_path / "s", target.shape, target.card)  # the layers it reads are found in the engines' second spelling
    assert loaded.taps == drafter.taps and type(loaded) is type(drafter)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    loaded.attach(target.ends)
    compare(Reference(tmp_path / "s", target.model), "eagle3", loaded, target, list(drafter.taps))


@pytest.mark.parametrize("said", [{}, {"norm_before_residual": None}, {"norm_before_residual": False}], ids=["true", "absent", "false"])
def test_a_folder_of_the_speculators_library_loads(said: dict[str, Any], tmp_path: Path) -> None:
    """As it publishes them: the layer's keys in a dictionary of their own. vLLM takes the norm for one before the residual unless told."""
    target, inside = tiny_target(rope_parameters=LLAMA3), said.get("norm_before_residual", True) is not False
    drafter = make("eagle", target, draft_vocab=[3, 5, 8, 90], fc_norm=False, norm_output=False, norm_before_residual=inside)
    hub.save(drafter, tmp_path / "s", target.card, torch.float16)
    foreign(tmp_path / "s", {"midlayer.": "layers.0."})
    path = tmp_path / "s" / "config.json"
    flat = json.loads(path.read_text())
    outside = {"draft_vocab_size": 4, "norm_before_residual": inside, "torch_dtype": "float16", "target_hidden_size": None} | said
    others = (*outside, "architectures", "fc_norm", "norm_output", "num_aux_hidden_states")
    layer = {key: value for key, value in flat.items() if key not in others}
    about = {"speculators_model_type": "eagle3", "speculators_version": "0.3.0", "speculators_config": {"algorithm": "eagle3"}}
    outside |= {"architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"}, "transformer_layer_config": layer}
    path.write_text(json.dumps(outside | about))
    loaded = hub.load(tmp_path / "s", target.shape)
    for key in ("head", "draft_vocab", "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"):
        assert loaded.config[key] == drafter.config[key], key
    assert loaded.taps == drafter.taps
    assert all(torch.equal(loaded.state_dict()[k], v.half()) for k, v in drafter.state_dict().items())
    path.write_text(json.dumps(outside | about | {"speculators_model_type": "mtp"}))
    with pytest.raises(UserError, match=r"of the kind 'mtp': only its eagle3, peagle, dflash, dflash2, dspark, xpress are read here"):
        hub.load(tmp_path / "s", target.shape)


def test_a_foreign_eagle1_folder_loads(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = make("eagle1", target)
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    foreign(tmp_path / "s", {}, architectures=["LlamaForCausalLMEagle"])
    loaded = hub.load(tmp_path / "s", target.shape)
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in drafter.state_dict().items())
    w = load_file(tmp_path / "s" / "model.safetensors")
    save_file(w | {"fc.bias": torch.ones(32)}, tmp_path / "s" / "model.safetensors")
    with pytest.raises(UserError, match=r"fc.bias has values that this drafter cannot have"):
        hub.load(tmp_path / "s", target.shape)


def test_foreign_folders_that_compute_otherwise_are_refused(tmp_path: Path) -> None:
    target = tiny_target()
    changes: dict[str, dict[str, Any]] = {
        "input_norm.weight": dict(norm_before_fc=True, fc_norm=False),
        "hidden size 64": dict(hidden_size=64),
        "vocabulary 100": dict(vocab_size=100),
        "rope_theta 5000.0": dict(rope_parameters=..., rope_scaling=None, rope_theta=5000.0),
        "rope_type 'linear', expected 'default'": dict(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        "rms_norm_eps 0.1": dict(rms_norm_eps=0.1),
        "self_attn.q_proj.weight": dict(num_attention_heads=4),
        "missing or of the wrong kind": dict(intermediate_size=...),
        "num_hidden_layers|layers=1000000000": dict(num_hidden_layers=10**9),
        "known speculator format": dict(architectures=["LlamaForCausalLM"], draft_vocab_size=...),
    }
    for message, change in changes.items():
        hub.save(make("eagle", target), tmp_path / "s", target.card, torch.float32)
        foreign(tmp_path / "s", {}, **change)
        with pytest.raises(UserError, match=message):
            hub.load(tmp_path / "s", target.shape)


def test_a_foreign_folder_with_an_embedding_or_a_mask_of_its_own_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    hub.save(make("eagle", target), tmp_path / "s", target.card, torch.float32)
    foreign(tmp_path / "s", {})
    hub.load(tmp_path / "s", target.shape).attach(target.ends)
    w = load_file(tmp_path / "s" / "model.safetensors")
    w["embed_tokens.weight"][7] = 0  # one token was trained along
    save_file(w, tmp_path / "s" / "model.safetensors")
    with pytest.raises(UserError, match="an embedding of its own"):
        hub.load(tmp_path / "s", target.shape).attach(target.ends)
    (tmp_path / "s" / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"mask_embedding\.pt"):
        hub.load(tmp_path / "s", target.shape)


def test_the_last_layer_is_another_state_to_engines(tmp_path: Path) -> None:
    """They capture it before the final norm: such a drafter is ours alone, and theirs is refused."""
    target = tiny_target()
    assert make("eagle", target, taps=[2, 6]).format == "native" and make("eagle", target, taps=[2, 5]).format == "eagle3"
    hub.save(make("eagle", target, taps=[2, 5]), tmp_path / "s", target.card, torch.float32)
    foreign(tmp_path / "s", {}, eagle_aux_hidden_state_layer_ids=[2, 6], eagle_config=...)
    with pytest.raises(UserError, match="before the final norm"):
        hub.load(tmp_path / "s", target.shape)
    with pytest.raises(UserError, match=r"head\.taps .*end before layer 6"):
        make("peagle", target, taps=[2, 6], mask_token=5)


def test_a_drafter_rotates_whole_heads(tmp_path: Path) -> None:
    """Whatever share of them the target rotates: the folder says what the drafter does."""
    target = tiny_target("glm4", partial_rotary_factor=0.5)
    assert target.shape.rope["partial_rotary_factor"] == 0.5
    hub.save(make("eagle", target), tmp_path / "s", target.card, torch.float32)
    assert "partial_rotary_factor" not in json.dumps(json.loads((tmp_path / "s" / "config.json").read_text())["rope_parameters"])
    foreign(tmp_path / "s", {}, partial_rotary_factor=0.5)
    with pytest.raises(UserError, match=r"partial_rotary_factor 0\.5"):
        hub.load(tmp_path / "s", target.shape)


@pytest.mark.parametrize("head", ["mtp", "hydra", "dflash", "exit_head"])
def test_what_no_tensor_reveals_is_that_of_the_target(head: str, tmp_path: Path) -> None:
    """A target whose rotation was changed since (YaRN switched on) would draft with another than was trained, and nothing would say so."""
    target = tiny_target()
    settings: dict[str, Any] = {"dflash": {"taps": [2, 6]}, "mtp": {"modules": 2}}.get(head, {})  # ours alone
    drafter = make(head, target, **settings)
    assert drafter.format == "native"
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    hub.load(tmp_path / "s", target.shape)
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    for changes, said in ({"rope": yarn}, "rope_parameters"), ({"norm_eps": 1e-3}, "rms_norm_eps"):
        with pytest.raises(UserError, match=f"the drafter was trained with {said}"):
            hub.load(tmp_path / "s", replace(target.shape, **changes))
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    for key in ("rope_parameters", "rms_norm_eps"):  # a folder of before
        del config[key]
    config["headstart"]["sha256"] = digests(config, tmp_path / "s" / "model.safetensors")
    (tmp_path / "s" / "config.json").write_text(json.dumps(config))
    hub.load(tmp_path / "s", target.shape)


def test_layers_of_several_sizes_and_drafters_for_them(tmp_path: Path) -> None:
    """gemma4: heads of full attention are wider. A drafter has those, and rotates all of each."""
    changes = dict(global_head_dim=32, sliding_window=16, hidden_size_per_layer_input=0, vocab_size_per_layer_input=96)
    target = tiny_target("gemma4_text", **changes)
    assert target.shape.head_dim == 32 and target.shape.rope["rope_type"] == "default"
    drafter = make("eagle", target)
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    assert json.loads((tmp_path / "s" / "config.json").read_text())["rope_scaling"] is None
    prompt = random_tokens(30, 1)
    said = target.model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)[0, 30:].tolist()
    assert generate(target, None, prompt, new_tokens=16).tokens == said
    assert generate(target.prepack(), Drafting(drafter), prompt, new_tokens=16, policy=TreePolicy(depth=2)).tokens == said


def test_a_copy_of_a_model_with_wide_experts_is_loaded_back(tmp_path: Path) -> None:
    """Widths are no counts, whatever they are of."""
    target = tiny_target()
    experts = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=512)
    drafter = hub.build("draft_lm", target.shape, config={"model_type": "qwen2_moe", **COMMON, "num_hidden_layers": 1, **experts})
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    hub.load(tmp_path / "s", target.shape)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    config["headstart"]["arguments"]["config"]["num_experts"] = 100_000
    (tmp_path / "s" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="num_experts=100000 does not fit"):
        hub.load(tmp_path / "s", target.shape)


def test_drafters_read_the_embedding_without_the_targets_scale() -> None:
    """So engines share it: gemma multiplies it by the root of the width, but only for itself."""
    target = tiny_target("gemma3_text")
    table, tokens = target.model.get_input_embeddings(), torch.arange(96)
    assert torch.equal(target.ends.embed(tokens), table.weight)
    torch.testing.assert_close(table(tokens), table.weight * 32**0.5, rtol=0.01, atol=0)


@pytest.mark.parametrize("head", ["medusa", "mlp_speculator"])
def test_a_folder_names_its_target_where_engines_look_for_it(head: str, tmp_path: Path) -> None:
    target = tiny_target()
    hub.save(make(head, target), tmp_path / "s", target.card, torch.float32, base="org/model")
    assert json.loads((tmp_path / "s" / "config.json").read_text())["base_model_name_or_path"] == "org/model"


def test_a_vocabulary_map_of_zeros_is_no_map(tmp_path: Path) -> None:
    target = tiny_target()
    hub.save(make("eagle", target), tmp_path / "s", target.card, torch.float32)
    foreign(tmp_path / "s", {})
    w = load_file(tmp_path / "s" / "model.safetensors")
    save_file(w | {"d2t": torch.zeros(96, dtype=torch.int64), "t2d": torch.ones(96).bool()}, tmp_path / "s" / "model.safetensors")
    assert hub.load(tmp_path / "s", target.shape).unembedding(1).ids_V is None
    save_file(w | {"d2t": torch.full((96,), 3)}, tmp_path / "s" / "model.safetensors")
    with pytest.raises(UserError, match="ascending ids within"):
        hub.load(tmp_path / "s", target.shape)


def test_a_map_that_contradicts_the_settings_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    hub.save(make("eagle", target, draft_vocab=DRAFT_VOCAB), tmp_path / "s", target.card, torch.float32)
    w = load_file(tmp_path / "s" / "model.safetensors")
    save_file(w | {"d2t": w["d2t"].clone().fill_(1)}, tmp_path / "s" / "model.safetensors")
    with pytest.raises(UserError, match="d2t has values"):
        hub.load(tmp_path / "s", target.shape)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_draft_model_is_an_ordinary_model(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    target = tiny_target()
    small = dict(model_type="llama", hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2)
    drafter = make("draft_lm", target, config=small | {"num_key_value_heads": 1, "head_dim": 12, "tie_word_embeddings": tied})
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "s", dtype=torch.float32)
    tokens = torch.tensor([random_tokens(15, 3)])
    with torch.no_grad():
        logits = lm(tokens).logits[0]
        drafts = unroll(drafter, roots_of(target, drafter, tokens), None, 3)
        for d, draft in enumerate(drafts, start=1):  # depth d of root t is what the model says after x[t+d]
            ours = drafter.unembedding(d).logits(draft.hidden_BNH)[0, : 15 - d]
            torch.testing.assert_close(ours, logits[d:], rtol=0, atol=1e-5)
    assert replace(target.shape).vocab_size == lm.config.vocab_size and lm.config.max_position_embeddings == 256
    assert ("lm_head.weight" in load_file(tmp_path / "s" / "model.safetensors")) is not tied


@pytest.mark.parametrize(("name", "architecture"), [("eagle", "LlamaForCausalLMEagle3"), ("eagle1", "LlamaForCausalLMEagle")])
def test_a_drafter_has_heads_of_its_own(name: str, architecture: str, tmp_path: Path) -> None:
    target = tiny_target()
    drafter = make(name, target, heads=4, kv_heads=2)
    hub.save(drafter, tmp_path / "s", target.card, torch.float32)
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    foreign(tmp_path / "s", {}, architectures=[architecture])
    loaded = hub.load(tmp_path / "s", target.shape)
    assert {k: v.shape for k, v in loaded.state_dict().items()} == {k: v.shape for k, v in drafter.state_dict().items()}
    with pytest.raises(UserError, match=r"head\.heads=4 must be a multiple of head\.kv_heads=3"):
        make(name, target, heads=4, kv_heads=3)
