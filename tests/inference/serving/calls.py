"""``model.generate`` on tiny targets, without a drafter and with one by both entry points, for the tests of transformers' conventions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from headstart.heads.base import Drafter
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.target import Target
from headstart.inference.hf import generate, speculate
from tests.drafters import learn_by_heart, make, random_tokens
from tests.tiny_targets import tiny_target

NEW, PAD = 16, 0
PROMPTS = [random_tokens(n, seed=n) for n in (9, 17, 1, 12)]
LONGEST = max(map(len, PROMPTS))


@functools.cache
def target_of(architecture: str = "llama") -> Target:
    return tiny_target(architecture)


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(p)) + p for p in prompts])
    return {"input_ids": ids, "attention_mask": torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])}


@functools.cache
def plain(architecture: str = "llama") -> tuple[tuple[int, ...], ...]:
    """What the model says by itself to each of PROMPTS."""
    said = target_of(architecture).model.generate(**padded(PROMPTS), max_new_tokens=NEW, pad_token_id=PAD)
    return tuple(map(tuple, said[:, LONGEST:].tolist()))


@functools.cache
def trained(head: str, architecture: str = "llama") -> Drafter:
    """A drafter that guesses right often enough that some chains are accepted in part."""
    target = target_of(architecture)
    texts = [[*p, *s][-NEW - 1 :] for p, s in zip(PROMPTS, plain(architecture), strict=True)]
    return learn_by_heart(make(head, target), target, texts, depth=3, steps=12)


def both_doors(model: Any, drafter: Any, inputs: dict[str, Tensor], policy: TreePolicy | None = None, **how: Any) -> list[Tensor]:
    return [
        generate(model, drafter, policy=policy, **inputs, **how),
        model.generate(**inputs, **how, custom_generate=speculate(drafter, policy=policy)),
    ]


def some_ends() -> list[int]:
    """Stop tokens that end some of the rows early, not all of them."""
    said = plain()
    ends = [said[0][5], said[1][9]]
    assert any(not set(row) & set(ends) for row in said), "all rows end early: choose others"
    return ends


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:70]
    bpe.train_from_iterator(
        ["the cat sat on the mat"] * 9, trainers.BpeTrainer(vocab_size=90, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe)
