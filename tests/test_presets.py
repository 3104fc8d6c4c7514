"""The targets of conf/target and the recipes of conf/experiment, without any weights: on the meta device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from headstart.heads import hub
from headstart.heads.base import Roots, TargetEnds, TargetShape
from headstart.heads.errors import UserError
from headstart.heads.unroll import unroll
from headstart.inference.settings import open_decode
from headstart.trainers.divergences import names
from headstart.trainers.learner import Learner
from headstart.trainers.shapes import one_expert
from headstart.trainers.terms import BESIDE
from tests.drafters import HEADS

CONF = Path(__file__).resolve().parent.parent / "conf"
BILLIONS = {  # of parameters, as published; of the multimodal ones the text part, which is nearly all
    "deepseek_v3": 671, "gemma3_27b": 27.0, "gpt_oss_120b": 116.8, "gpt_oss_20b": 20.9, "llama405b": 405, "llama4_maverick": 400,
    "llama4_scout": 109, "llama70b": 70.6, "llama8b": 8.03, "mixtral_8x7b": 46.7, "qwen3_235b": 235, "qwen3_30b_a3b": 30.5,
    "qwen3_32b": 32.8, "qwen3_5_35b_a3b": 35, "qwen3_next_80b": 79.7, "qwen3_8b": 8.2, "smollm2_135m": 0.1345,
}  # fmt: skip
OUTWEIGHED = {("smollm2_135m", head) for head in ("hydra", "medusa")}  # by five output heads: a drafter wants a larger target


def target_yaml(name: str) -> dict[str, Any]:
    """With what it is based on."""
    own: Any = OmegaConf.load(CONF / "target" / f"{name}.yaml")
    bases = [target_yaml(base) for base in own.pop("defaults", ()) if base != "_self_"]
    found: Any = OmegaConf.to_container(OmegaConf.merge(*bases, own))
    return found


PRESETS = sorted(p.stem for p in (CONF / "target").glob("*.yaml") if target_yaml(p.stem)["config"])


@functools.cache
def model_of(name: str) -> Any:
    """The target without memory for its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = target_yaml(name)
    hf = AutoConfig.for_model(**settings["config"])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf, attn_implementation=settings["attention"], dtype=torch.bfloat16).requires_grad_(False)


def settings_of(head: str, target: dict[str, Any]) -> dict[str, Any]:
    """conf/head/NAME.yaml beside this target, whose ``drafter`` it refers to."""
    both = OmegaConf.create({"head": OmegaConf.load(CONF / "head" / f"{head}.yaml"), "target": target})
    found: Any = OmegaConf.to_container(both.head, resolve=True)
    return {key: value for key, value in found.items() if key not in ("name", "defaults")}


def test_every_preset_is_counted() -> None:
    assert set(PRESETS) == BILLIONS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_the_shapes_are_those_of_the_config(name: str) -> None:
    config, model = target_yaml(name)["config"], model_of(name)
    shape = TargetShape.of(model.config)
    found = (shape.model_type, shape.hidden_size, shape.layers, shape.heads, shape.kv_heads, shape.vocab_size, shape.max_positions)
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    assert found == tuple(config[key] for key in (*keys, "max_position_embeddings"))
    assert shape.head_dim == config.get("head_dim", config.get("qk_rope_head_dim"))
    assert shape.norm_eps == config["rms_norm_eps"] and shape.dtype == "bfloat16"
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {"rope_type": "default"})}
    sections = {key for key in rope if key.startswith("mrope_")}  # of images, which drafters do not read
    assert {key: shape.rope.get(key) for key in rope} == rope | dict.fromkeys(sections)
    assert [type(model).__name__] == config["architectures"]
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    assert abs(billions / BILLIONS[name] - 1) < 0.03, f"{billions:.2f} billion parameters"
    said = (CONF / "target" / f"{name}.yaml").read_text().split(" GB of weights")[0].split()[-1]
    assert abs(2 * billions / float(said) - 1) < 0.03, f"{2 * billions:.0f} GB in bfloat16, the comment says {said}"


def one_of_each_kind() -> list[Any]:
    """The larger siblings of a target are slow."""
    kinds = [target_yaml(name)["config"]["model_type"] for name in PRESETS]
    return [pytest.param(name, marks=pytest.mark.slow if kinds[i] in kinds[:i] else ()) for i, name in enumerate(PRESETS)]


@pytest.mark.parametrize("name", one_of_each_kind())
def test_every_drafter_fits_every_target(name: str) -> None:
    """Built with the settings of its YAML and those that the target gives, attached and started, without memory for any weight."""
    target, model = target_yaml(name), model_of(name)
    shape, given = TargetShape.of(model.config), target.get("drafter") or {}
    ends = TargetEnds(model.get_input_embeddings(), model.get_output_embeddings().weight, None, model, config=model.config)
    for head in HEADS:
        settings = settings_of(head, target)
        assert settings.get("kv_heads", given.get("kv_heads")) == given.get("kv_heads"), f"{head} does not ask the target for kv_heads"
        assert settings.get("intermediate_size", given.get("intermediate_size")) == given.get("intermediate_size"), head
        words = settings.get("draft_vocab") or shape.vocab_size
        assert words == given.get("draft_vocab") or words == shape.vocab_size, f"{head} does not ask the target for draft_vocab"
        settings |= {"draft_vocab": list(range(words))} if words < shape.vocab_size else {}
        with torch.device("meta"), one_expert():
            drafter = hub.build(head, shape, **settings)
            try:
                drafter.attach(ends)
            except UserError:  # shares layers that it cannot read by itself (windows, chunks): says so
                continue
            tokens_12, states_12D = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, shape.hidden_size)
            roots = Roots(tokens_12, tokens_12, dict.fromkeys(drafter.taps, states_12D), tokens_12)
            for depth, draft in enumerate(unroll(drafter, roots, None, 1), start=1):
                unembedding = drafter.unembedding(depth)
                assert unembedding.logits(draft.hidden_BNH).shape == (1, 2, words)
        weights = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
        fits = weights < 0.75 * sum(p.numel() for p in model.parameters())
        assert weights > 0 and fits != ((name, head) in OUTWEIGHED), head


def test_no_preset_is_refused_by_its_kind() -> None:
    from headstart.heads.kinds import check_kinds

    for name in PRESETS:
        check_kinds(model_of(name).config, name)


RECIPES = sorted(p.stem for p in (CONF / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_changes_only_what_there_is(recipe: str) -> None:
    """Its drafter fits its target, its loss is known and goes with the drafter, its tree can be verified."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [f"experiment={recipe}"])
        trainer = compose("config").trainer.keys()
    if OmegaConf.is_missing(config, "path"):
        config.path = "FILE.jsonl"
    assert not OmegaConf.missing_keys(config)
    found: Any = OmegaConf.to_container(config, resolve=True)
    assert found["trainer"].keys() == trainer
    assert {"steps", "lr", "warmup"} <= found["trainer"].keys() and found["trainer"]["warmup"] < found["trainer"]["steps"]
    decode = open_decode(found["decode"])
    head = {key: value for key, value in found["head"].items() if key != "name"}
    trimmed = head.get("draft_vocab")
    if isinstance(trimmed, int):  # a number of tokens: the data say which
        head["draft_vocab"] = list(range(trimmed))
    shape = TargetShape.of(model_of(found["target"]["name"] if found["target"]["config"] else "llama8b").config)
    with torch.device("meta"):
        drafter = hub.build(found["head"]["name"], shape, **head)
    if trimmed is None or isinstance(trimmed, int):
        assert drafter.max_depth is None or decode.policy.depth <= drafter.max_depth
    Learner(drafter, **found["loss"])
    terms = {name: weight for name, weight in found["loss"]["terms"].items() if weight}
    assert terms.keys() <= {*names(), *BESIDE}
    source = (CONF / "experiment" / f"{recipe}.yaml").read_text()
    ours = ("smoke", "chat8b", "compare", "compare_quick", "in_llama_cpp", "in_vllm", "laptop")
    assert recipe in ours or "Source: " in source, "a published recipe says where it was published"
