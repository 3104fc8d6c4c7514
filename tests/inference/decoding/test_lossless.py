"""Greedy decoding with a drafter says exactly what the target says alone, token for token, in fp32."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from headstart.heads.base import Roots
from headstart.heads.errors import UserError
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.decode import Generation, generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting, Proposer
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree
from tests.drafters import FEW, FEW_HEADS, MADE, depth_of, everywhere, learn_by_heart, make, random_tokens
from tests.inference.decoding.trees import validate
from tests.tiny_targets import ARCHITECTURES, OTHERS, tiny_target

NEW, PROMPTS = 30, [random_tokens(n, seed=n) for n in (11, 3)]  # past the sliding window of 16
TARGET = functools.cache(tiny_target)
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0, 0))
POLICIES = {
    "chain": TreePolicy("chain", depth=4),
    "dynamic": TreePolicy(depth=4, nodes=10, branch=3),
    "fixed": TreePolicy("fixed", paths=PATHS),
}


@functools.cache
def plain(architecture: str, prompt: int) -> tuple[int, ...]:
    return tuple(generate(TARGET(architecture), None, PROMPTS[prompt], new_tokens=NEW).tokens)


@dataclass
class Oracle:
    """Proposes the target's own continuation with random mistakes, among random other guesses: trees of all shapes."""

    target: Target
    text: list[int]  # prompt and continuation
    right: float  # chance that the true token is among the guesses of a depth
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    taps: tuple[int, ...] = (0, 3)

    def start(self, context: Context, tokens: int) -> None:
        assert context.target is self.target and context.length + 1 <= tokens <= len(self.text)
        self.known = 0
        self.states, _ = self.target.read(torch.tensor([self.text]), torch.arange(len(self.text))[None], self.taps)

    def absorb(self, roots: Roots) -> None:
        n = roots.read_BT.shape[1]
        assert roots.read_BT[0].tolist() == self.text[self.known : self.known + n], "what the target has read"
        assert roots.chosen_BT[0].tolist() == self.text[self.known + 1 : self.known + 1 + n], "what it chose there"
        assert roots.positions_BT[0].tolist() == list(range(self.known, self.known + n))
        for tap in self.taps:
            torch.testing.assert_close(roots.states[tap], self.states[tap][:, self.known : self.known + n], rtol=0, atol=1e-4)
        self.known += n

    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        tokens, parents, level, true = [], [], [-1], -1
        for depth in range(1, policy.depth + 1):
            at = self.known + depth  # of the guess, in the text
            guesses: dict[int, list[int]] = {}
            for parent in self.dice.sample(level, min(2, len(level))):
                guesses[parent] = self.dice.sample(range(96), self.dice.randint(1, 1 if policy.kind == "chain" else 3))
            if true in level and at < len(self.text) and self.dice.random() < self.right:
                row = guesses.setdefault(true, [])
                if policy.kind == "chain":
                    row[:] = [self.text[at]]
                elif self.text[at] not in row:
                    row.insert(self.dice.randint(0, len(row)), self.text[at])
            level, below = [], -2
            for parent, row in sorted(guesses.items()):
                for token in row:
                    if parent == true and at < len(self.text) and token == self.text[at]:
                        below = len(tokens)
                    level.append(len(tokens))
                    tokens.append(token)
                    parents.append(parent)
            true = below
        tree = Tree.of(tokens, parents)
        validate(tree, 96)
        return tree


def check_rounds(result: Generation) -> None:
    left = len(result.tokens) - 1  # the prompt's own pass gives the first
    for emitted, asked in zip(result.emitted, result.asked, strict=True):
        assert 1 <= emitted <= asked + 1 <= left  # no guess is asked for that could not be kept
        left -= emitted
    assert left == 0


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *OTHERS])
def test_plain_decoding_equals_generate_of_transformers(architecture: str) -> None:
    target = TARGET(architecture)
    for i, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        said = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        assert said[0, len(prompt) :].tolist() == list(plain(architecture, i))
        assert len(set(plain(architecture, i))) >= 8, "a target that repeats itself tests nothing"


@pytest.mark.parametrize("penalty", [0.8, 1.3])
def test_a_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    """Path by path: a guess is penalised for the guesses above it."""
    target, how = TARGET("llama"), SamplingParams(repetition_penalty=penalty)
    for i, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": penalty, "pad_token_id": 0}
        said = target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
        assert said[len(prompt) :] != list(plain("llama", i)), "a penalty without effect tests nothing"
        assert generate(target, None, prompt, new_tokens=NEW, sampling=how).tokens == said[len(prompt) :]
        for policy in POLICIES.values():
            result = generate(target, Oracle(target, said, 0.9), prompt, new_tokens=NEW, policy=policy, sampling=how)
            assert result.tokens == said[len(prompt) :] and result.accepted_length > 1.5


@pytest.mark.parametrize(("head", "architecture"), everywhere(ARCHITECTURES))
def test_untrained_drafters_are_lossless(head: str, architecture: str) -> None:
    check_untrained(head, architecture, "dynamic")


@pytest.mark.parametrize("policy", ["chain", "fixed"])
@pytest.mark.parametrize("head", FEW_HEADS)
def test_untrained_drafters_are_lossless_under_other_trees(head: str, policy: str) -> None:
    check_untrained(head, "llama", policy)


def check_untrained(head: str, architecture: str, policy: str) -> None:
    target = TARGET(architecture)
    drafter = make(head, target)
    shape = POLICIES[policy].at_most(depth_of(drafter))
    result = generate(target, Drafting(drafter), PROMPTS[0], new_tokens=16, policy=shape)
    assert result.tokens == list(plain(architecture, 0)[:16])
    check_rounds(result)


@pytest.mark.parametrize(("head", "architecture"), everywhere(ARCHITECTURES, few=["eagle"]))
def test_trained_drafters_are_lossless_and_accepted(head: str, architecture: str) -> None:
    target = TARGET(architecture)
    texts = [(prompt + list(plain(architecture, i)))[: 3 + NEW] for i, prompt in enumerate(PROMPTS)]
    drafter = learn_by_heart(make(head, target), target, texts, depth=3, steps=15)
    proposer: Proposer = Drafting(drafter)
    for i, policy in enumerate(POLICIES.values()):  # the same proposer again: it forgets the sequence before
        shape = policy.at_most(depth_of(drafter))
        result = generate(target, proposer, PROMPTS[1 - i % 2], new_tokens=NEW, policy=shape)
        assert result.tokens == list(plain(architecture, 1 - i % 2))
        check_rounds(result)
        assert result.accepted_length > 1.2, "nothing was accepted: this tested nothing"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_accepted_paths_of_any_shape_are_lossless(architecture: str, policy: str) -> None:
    """The accepted path is compacted in the cache, through sliding windows, round after round."""
    target, lengths = TARGET(architecture), []
    for i, prompt in enumerate(PROMPTS):
        text = prompt + list(plain(architecture, i))
        for right in (0.5, 0.9, 1.0):
            streamed: list[list[int]] = []
            shape = POLICIES[policy]
            result = generate(target, Oracle(target, text, right), prompt, new_tokens=NEW, policy=shape, on_tokens=streamed.append)
            assert result.tokens == text[len(prompt) :] == [token for part in streamed for token in part]
            assert [len(x) for x in streamed] == [1, *result.emitted]
            check_rounds(result)
            lengths.append(result.accepted_length)
    assert lengths[2] >= 4 and min(lengths) < 3 and len(set(lengths)) > 2


def oracle_text(target: Target) -> tuple[list[int], list[int]]:
    said = list(plain("llama", 0))
    return PROMPTS[0] + said, said


def test_a_stop_token_inside_an_accepted_run_ends_there() -> None:
    target = TARGET("llama")
    text, said = oracle_text(target)
    for end in range(NEW):
        stop = said[end]
        first = said.index(stop)
        streamed: list[int] = []
        result = generate(
            target,
            Oracle(target, text, 1.0),
            PROMPTS[0],
            new_tokens=NEW,
            policy=POLICIES["chain"],
            stop_ids=[stop],
            on_tokens=streamed.extend,
        )
        assert result.tokens == said[: first + 1] == streamed
        assert result.tokens == generate(target, None, PROMPTS[0], new_tokens=NEW, stop_ids=[stop]).tokens


def test_the_length_is_exact_inside_an_accepted_run() -> None:
    target = TARGET("llama")
    text, said = oracle_text(target)
    for n in range(14):
        for policy in POLICIES.values():
            result = generate(target, Oracle(target, text, 1.0), PROMPTS[0], new_tokens=n, policy=policy)
            assert result.tokens == said[:n]


def test_the_targets_own_stop_ids_are_the_default() -> None:
    target = tiny_target("llama")
    _, said = oracle_text(target)
    target.model.generation_config.eos_token_id = [95, said[5]]
    assert target.stop_ids == (95, said[5])
    assert generate(target, None, PROMPTS[0], new_tokens=NEW).tokens == said[: said.index(said[5]) + 1]
    for own, ids in ((7, (95, said[5], 7)), (95, (95, said[5])), (None, (95, said[5]))):
        target.tokenizer = SimpleNamespace(eos_token_id=own)
        assert target.stop_ids == ids


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    target = TARGET("llama")
    with pytest.raises(UserError, match="the prompt is empty"):
        generate(target, None, [], new_tokens=4)
    with pytest.raises(UserError, match="250 tokens and 7 new ones exceed the target's context of 256"):
        generate(target, None, [5] * 250, new_tokens=7)
    with pytest.raises(UserError, match="context of 256"):
        generate(target, None, [5] * 300, new_tokens=0)
    assert len(generate(target, Oracle(target, [5] * 256, 1.0), [5] * 250, new_tokens=1, policy=POLICIES["chain"]).tokens) == 1


@pytest.mark.parametrize("head", MADE)
def test_the_whole_context_can_be_used(head: str) -> None:
    target = TARGET("llama")
    drafter = make(head, target)
    prompt, shape = random_tokens(244, seed=9), POLICIES["dynamic"].at_most(depth_of(drafter))
    result = generate(target, Drafting(drafter), prompt, new_tokens=12, policy=shape)
    assert result.tokens == generate(target, None, prompt, new_tokens=12).tokens and len(result.tokens) == 12


@pytest.mark.parametrize(("head", "policy", "rule"), [
    *((head, "dynamic", "top_plus_one") for head in MADE),
    *((head, *how) for head in FEW for how in (("chain", "block"), ("fixed", "multi_round"))),
])  # fmt: skip
def test_sampling_repeats_with_its_seed(head: str, policy: str, rule: str) -> None:
    target = TARGET("llama")
    drafter = make(head, target)
    shape = POLICIES[policy].at_most(depth_of(drafter))

    def sample(seed: int) -> list[int]:
        how = SamplingParams(0.9, top_k=40, top_p=0.95, rule=rule, seed=seed)
        return generate(target, Drafting(drafter), PROMPTS[0], new_tokens=12, policy=shape, sampling=how).tokens

    first = sample(1)
    assert sample(1) == first and any(sample(other) != first for other in (0, 2, 3))


def test_plain_sampling_repeats_with_its_seed() -> None:
    def sample(seed: int) -> list[int]:
        return generate(TARGET("llama"), None, PROMPTS[0], new_tokens=16, sampling=SamplingParams(1.0, seed=seed)).tokens

    assert sample(3) == sample(3) and len({tuple(sample(seed)) for seed in range(5)}) == 5


@pytest.mark.parametrize("depth", [2, 3])
def test_as_many_nodes_as_levels_are_no_chain(depth: int) -> None:
    """Trees that are cut by value may hold siblings: they must not be read, or verified, as one guess after the other."""
    target = TARGET()
    drafter = make("eagle", target)
    said = [generate(target, Drafting(drafter), p, new_tokens=NEW, policy=TreePolicy(depth=depth, nodes=depth, branch=3)) for p in PROMPTS]
    for i, made in enumerate(said):
        assert tuple(made.tokens) == plain("llama", i)
    parents = [list(torch.as_tensor(g.parents).flatten()) for made in said for g in made.guesses]
    assert any(len(p) == depth and p[1:].count(-1) for p in parents), "no tree had siblings"
