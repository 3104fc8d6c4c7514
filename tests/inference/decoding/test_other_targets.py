"""Experts beside dense layers, latent attention, chunks: every drafter learns from such targets and decodes losslessly with them.

(The families that have experts, windows or sinks, but nothing of this, are in test_lossless.py and test_engine.py.)
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from headstart.heads.base import Drafter
from headstart.heads.unroll import unroll
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.target import Target
from tests.drafters import FEW_HEADS, HEADS, depth_of, judged, learn_by_heart, make, random_tokens, roots_of
from tests.tiny_targets import ARCHITECTURES, COMMON, OTHERS, tiny_target

NEW, PROMPTS = 16, [random_tokens(n, seed=n) for n in (13, 3)]  # past windows and chunks of 16
TARGET = functools.cache(tiny_target)
TREE = TreePolicy(depth=4, nodes=10, branch=3, least=0.05)


@functools.cache
def plain(family: str) -> list[list[int]]:
    return [generate(TARGET(family), None, prompt, new_tokens=NEW).tokens for prompt in PROMPTS]


@torch.no_grad()
def loss_of(drafter: Drafter, target: Target, texts: list[list[int]]) -> float:
    """Cross-entropy of the first guesses, teacher-forced."""
    roots = roots_of(target, drafter, torch.tensor(texts))
    logits = judged(drafter, 1, unroll(drafter, roots, None, 1)[0].hidden_BNH[:, :-2])
    return float(F.cross_entropy(logits.flatten(0, 1), roots.read_BT[:, 2:].flatten()))


REFUSED = {("falcon_h1", "own_mtp"), ("gemma4_text", "own_mtp"), ("gemma4_text", "exit_head")}  # test_own_mtp.py, test_exit_head.py
PAIRS = [pytest.param(family, *head.values, marks=head.marks) for family in OTHERS for head in FEW_HEADS
         if (head.values != ("exit_head",) or not TARGET(family).reader.mixers)  # refused: test_recurrent.py
         and (family, *head.values) not in REFUSED]  # fmt: skip


@pytest.mark.parametrize(("family", "head"), PAIRS)
def test_every_drafter_learns_and_is_lossless(family: str, head: str) -> None:
    """Trained a little, so that some guesses are right and some wrong; then the dynamic path and the static one."""
    target, expected = TARGET(family), plain(family)
    texts = [(prompt + said)[: 3 + NEW] for prompt, said in zip(PROMPTS, expected, strict=True)]
    drafter = make(head, target)
    before = loss_of(drafter, target, texts)
    learn_by_heart(drafter, target, texts, depth=2, steps=5)
    assert loss_of(drafter, target, texts) < before < float("inf")
    policy = TREE.at_most(depth_of(drafter))
    found = generate(target, Drafting(drafter), PROMPTS[0], new_tokens=NEW, policy=policy)
    assert found.tokens == expected[0]
    static = generate_batch(target, drafter, PROMPTS, new_tokens=NEW, policy=policy, sequences=2)
    assert [g.tokens for g in static] == expected
    assert any(n > 1 for g in (found, *static) for n in g.emitted), "nothing was accepted: this tested nothing"


def test_mended_scales_are_the_models_own_in_plain_reading() -> None:
    """Queries scaled by position, not by row: the same where rows are read in order (trees and packs: test_target.py)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama4_text", **COMMON | OTHERS["llama4_text"]), dtype=torch.float32)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    tokens = torch.tensor([random_tokens(30, 1)])
    with torch.no_grad():
        before = model(tokens).logits
        Target(model)
        torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=1e-5)
        later = model(tokens, position_ids=torch.arange(16, 46)[None]).logits  # a whole chunk on: rotations are relative, scales are not
    assert (later - before).abs().max() > 1e-3


@pytest.mark.parametrize(("wrapper", "family"), [("gemma3", "gemma3_text"), ("llama4", "llama4_text"), ("qwen3_5", "qwen3_5_text")])
def test_the_text_part_of_a_multimodal_folder_is_a_target(wrapper: str, family: str, tmp_path: Path) -> None:
    """As they are published: text and vision in one config, loaded as a causal LM."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

    text = COMMON | (ARCHITECTURES | OTHERS)[family] | {"model_type": family}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        **({"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16} if wrapper == "qwen3_5" else {}),
    }
    config = AutoConfig.for_model(wrapper, text_config=text, vision_config=vision, tie_word_embeddings=wrapper == "gemma3")
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for p in model.get_decoder().parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), device="cpu")
    assert target.shape.model_type == family and target.shape.layers == COMMON["num_hidden_layers"]
    tokens = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[0]
    found = target.logits(target.read(tokens, torch.arange(tokens.shape[1])[None], ())[1][0])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    said = generate(target, None, PROMPTS[0], new_tokens=NEW, stop_ids=[]).tokens
    drafted = generate(target, Drafting(make(HEADS[0], target)), PROMPTS[0], new_tokens=NEW, policy=TREE, stop_ids=[])
    assert drafted.tokens == said
