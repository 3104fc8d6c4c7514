"""Multimodal models without a causal LM in transformers are targets for text: their language model is driven, their vision tower is not."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from headstart.heads import hub
from headstart.heads.base import TargetShape
from headstart.heads.errors import UserError
from headstart.heads.layers import Rope
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.layerwise import every_state
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.stored import NotStored, StoredTarget
from headstart.inference.decoding.target import Target
from headstart.inference.hf import speculate
from headstart.inference.reports.generate import hf_generate
from headstart.inference.serving.hf_asked import check_prepared
from tests.drafters import depth_of, make, random_tokens
from tests.inference.decoding.test_stored_target import check_same, save
from tests.tiny_targets import COMMON

MROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]})
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
LATENT = dict(
    head_dim=8, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
    n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1,
)  # fmt: skip
PIXTRAL = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14, head_dim=8)
QWEN = dict(
    hidden_size=16, intermediate_size=24, depth=1, num_heads=2, patch_size=14, out_hidden_size=32, num_position_embeddings=16,
    fullatt_block_indexes=[0], deepstack_visual_indexes=[0],
)  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # kind -> (kind of its text part, settings of text and of vision)
    "mistral3": ("mistral", dict(sliding_window=None), PIXTRAL | {"model_type": "pixtral"}),
    "qwen2_5_vl": ("qwen2_5_vl_text", MROPE, QWEN),
    "qwen3_vl": ("qwen3_vl_text", MROPE, QWEN),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", MROPE | EXPERTS, QWEN),
    "internvl": ("qwen2", {}, {k: v for k, v in PIXTRAL.items() if k != "head_dim"}),
    "kimi_k25": ("deepseek_v3", LATENT, {k: v for k, v in PIXTRAL.items() if k not in ("head_dim", "image_size")}),
}
FEW = ("mistral3", "qwen2_5_vl", "qwen3_vl_moe")  # the others add little to these
TREE, CHAIN = TreePolicy(depth=4, nodes=10, branch=3, least=0.05), TreePolicy(kind="chain", depth=4, nodes=4, branch=1)
NEW, PROMPTS = 16, [random_tokens(n, seed=n) for n in (13, 3)]


def whole(kind: str) -> Any:
    """The model as transformers builds it, with its vision tower."""
    family, text, vision = KINDS[kind]
    parts = {"text_config": COMMON | text | {"model_type": family, "eos_token_id": None}, "vision_config": vision}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **parts, tie_word_embeddings=False), dtype=torch.float32)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.25)
    return model.eval()


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=() if kind in FEW else pytest.mark.slow) for kind in KINDS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save(path)  # for its tokenizer
    whole(request.param).save_pretrained(path)
    return path


LOAD = functools.cache(functools.partial(Target.load, device="cpu"))


def test_every_state_is_transformers_own(folder: Path) -> None:
    """From input_ids alone, for which a model of Qwen's makes positions for text itself; and packed rows are their documents."""
    target, tokens, here = LOAD(str(folder)), torch.tensor([random_tokens(20, 1)]), torch.arange(20)[None]
    taps = range(target.shape.layers + 1)
    with torch.no_grad():
        expected = AutoModelForImageTextToText.from_pretrained(folder)(input_ids=tokens, output_hidden_states=True)
    states, final = target.read(tokens, here, taps)
    for k in taps:
        torch.testing.assert_close(states[k], expected.hidden_states[k], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.logits(final), expected.logits, rtol=1e-4, atol=1e-4)
    packed = target.read(torch.cat([tokens[:, :7], tokens], dim=1), torch.cat([here[:, :7], here], dim=1), taps)[0]
    for k in taps:
        torch.testing.assert_close(packed[k][:, 7:], states[k], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head", ["eagle", "dflash"])
def test_decoding_is_transformers_own(head: str, folder: Path) -> None:
    target = LOAD(str(folder))
    drafter, expected = make(head, target), [hf_generate(target, prompt, NEW, SamplingParams()).tokens for prompt in PROMPTS]
    assert [generate(target, None, prompt, new_tokens=NEW).tokens for prompt in PROMPTS] == expected
    for policy in (TREE.at_most(depth_of(drafter)), CHAIN.at_most(depth_of(drafter))):
        assert [generate(target, Drafting(drafter), prompt, new_tokens=NEW, policy=policy).tokens for prompt in PROMPTS] == expected
        static = generate_batch(target, drafter, PROMPTS, new_tokens=NEW, policy=policy, sequences=2)
        assert [g.tokens for g in static] == expected


def test_generate_of_the_whole_model_drafts(folder: Path, tmp_path: Path) -> None:
    """For a text transformers prepares an empty place for images; with images it is refused."""
    target, model = LOAD(str(folder)), AutoModelForImageTextToText.from_pretrained(folder)
    hub.save(make("eagle", target), tmp_path, target.card, torch.float32)
    prompt = torch.tensor(PROMPTS[:1])
    how: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    drafted = speculate(str(tmp_path))
    assert torch.equal(model.generate(prompt, custom_generate=drafted, **how), model.generate(prompt, **how))
    with pytest.raises(UserError, match="mm_encoder_outputs is not supported with a drafter: only input_ids"):
        check_prepared({"mm_encoder_outputs": {"image": object()}})


def test_layer_by_layer_the_states_are_the_same(folder: Path) -> None:
    tokens = torch.tensor(random_tokens(9, 1))
    found = every_state(StoredTarget(str(folder), device="cpu"), tokens)
    expected = LOAD(str(folder)).read(tokens[None], torch.arange(9)[None], found)[0]
    for k, state in found.items():
        torch.testing.assert_close(state, expected[k][0], rtol=1e-4, atol=1e-4)


def test_the_vision_tower_is_no_part_of_what_is_stored(folder: Path, tmp_path: Path) -> None:
    """Another tower is the same target for text; another language model is not."""
    loaded, tensors = LOAD(str(folder)), load_file(folder / "model.safetensors")
    check_same(StoredTarget(str(folder), device="cpu"), loaded)
    towers = [name for name in tensors if "vis" in name or "projector" in name]
    texts = [name for name in tensors if name.endswith(".1.input_layernorm.weight") and name not in towers]
    assert towers and len(texts) == 1
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name in towers:
        tensors[name] = tensors[name].new_full([3], float("nan"))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = StoredTarget(str(tmp_path), device="cpu")
    assert found.fingerprint == loaded.fingerprint
    tensors[texts[0]] *= 2
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert StoredTarget(str(tmp_path), device="cpu").fingerprint != loaded.fingerprint
    del tensors[texts[0]]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NotStored, match="its files lack"):
        StoredTarget(str(tmp_path), device="cpu")


def test_a_drafter_rotates_by_one_position(tmp_path: Path) -> None:
    """The config is written as that of Qwen2.5-VL, with the text's keys at the top. Where a drafter's config has sections, engines give
    three positions for each token; vLLM refuses sections that do not fill a head.
    """
    text = {key: value for key, value in COMMON.items() if key != "head_dim"} | {"rope_theta": 1e6}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": QWEN, **text}))
    config = AutoConfig.from_pretrained(tmp_path)
    shape = TargetShape.of(config)
    assert shape.rope == {"rope_type": "default", "rope_theta": 1e6}
    model = AutoModelForImageTextToText.from_config(config)
    own = Rope(shape.rope, shape.head_dim, shape.max_positions)
    torch.testing.assert_close(own.frequencies, model.get_decoder().rotary_emb.inv_freq)
    target = Target(model)
    hub.save(make("eagle", target), tmp_path / "eagle", target.card, torch.float32)
    assert "mrope" not in (tmp_path / "eagle" / "config.json").read_text()
    assert hub.load(tmp_path / "eagle", shape).config["head"] == "eagle"
