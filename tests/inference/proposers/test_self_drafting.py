"""Early exit and layer skipping: against models of transformers that lack the layers, or whose parts add zero."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from headstart.heads.base import Roots
from headstart.heads.errors import UserError
from headstart.heads.visibility import MaskSees
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.early_exit import EarlyExit
from headstart.inference.proposers.layers import Borrowed, Itself
from headstart.inference.proposers.swift import Swift
from tests.drafters import random_tokens
from tests.inference.decoding.test_lossless import TARGET
from tests.tiny_targets import ARCHITECTURES, tiny_target

TEXT = random_tokens(24, seed=3)  # past the sliding window of 16
A, B, C, D = 7, 8, 9, 10


def read(target: Target, proposer: Itself, tokens: list[int]) -> Context:
    """A context that has read ``tokens``, the last one chosen but not read yet."""
    context = Context(target, proposer.taps)
    states, _ = context.read(torch.tensor(tokens[:-1]))
    context.keep(len(tokens) - 1)
    proposer.start(context, 256)
    ids = torch.tensor([tokens])
    proposer.absorb(Roots(ids[:, :-1], ids[:, 1:], states, torch.arange(len(tokens) - 1)[None]))
    return context


def tree_of_logits(proposer: Itself, context: Context) -> dict[tuple[int, ...], torch.Tensor]:
    """Logits behind the last root's chosen token, and behind the nodes A, B, (A, C), (B, D)."""
    drafter, memory, root = proposer.drafter, Borrowed(context, context.length), proposer.root
    head = drafter.unembedding(1)
    with torch.no_grad():
        first = drafter.begin(root, memory, MaskSees())
        own = torch.tensor([[[1, 0], [0, 1]]]).bool()
        below = first.at(torch.zeros(1, 2, dtype=torch.int64))
        second = drafter.step(
            2, torch.tensor([[A, B]]), below, root.positions_BT + torch.ones(1, 2).long(), memory, memory.sees_nodes(own, False)
        )
        own = torch.tensor([[[1, 0, 1, 0], [0, 1, 0, 1]]]).bool()
        third = drafter.step(
            3, torch.tensor([[C, D]]), second, root.positions_BT + 2 * torch.ones(1, 2).long(), memory, memory.sees_nodes(own, False)
        )
    rows = [head.logits(x.hidden_BNH)[0] for x in (first, second, third)]
    return {(): rows[0][0], (A,): rows[1][0], (B,): rows[1][1], (A, C): rows[2][0], (B, D): rows[2][1]}


def shallow(target: Target, layers: int) -> Any:
    """The model with fewer layers, as transformers itself makes it."""
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    model = type(target.model)(config).eval()
    own = model.state_dict().keys()
    model.load_state_dict({k: v for k, v in target.model.state_dict().items() if k in own})
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_early_exit_is_the_model_with_fewer_layers(architecture: str) -> None:
    target = TARGET(architecture)
    proposer, model = EarlyExit(target, layers=3), shallow(target, 3)
    model.config._attn_implementation = target.model.config._attn_implementation
    found = tree_of_logits(proposer, read(target, proposer, TEXT))
    for path, logits in found.items():
        with torch.no_grad():
            wanted = model(torch.tensor([[*TEXT, *path]])).logits[0, -1]
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_early_exit_of_a_target_in_half_precision_reads_its_cache() -> None:
    exact = tree_of_logits(proposer := EarlyExit(TARGET("llama"), layers=3), read(TARGET("llama"), proposer, TEXT))
    half = Target(copy.deepcopy(TARGET("llama").model).bfloat16(), name="half").prepack()
    assert half.reader.lean is not None
    context = read(half, proposer := EarlyExit(half, layers=3), TEXT)
    assert context.memory.layers[0][0][0].dtype is torch.bfloat16
    for path, logits in tree_of_logits(proposer, context).items():
        assert logits.dtype is torch.bfloat16 and float((logits.float() - exact[path]).norm() / exact[path].norm()) < 0.03


def adding_zero(target: Target, left_out: list[tuple[int, str]]) -> Any:
    """The model with zeros in the last matrices of some parts."""
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        for layer, part in left_out:
            last = [
                p
                for name, p in getattr(model.get_decoder().layers[layer], part).named_parameters()
                if "o_proj" in name or "down_proj" in name
            ]
            assert last
            for p in last:
                p.zero_()
    return model


def reading_on(target: Target, model: Any, before: list[int], after: list[int]) -> torch.Tensor:
    """Logits of ``model`` at ``after``, when the whole target has read ``before``."""
    cache = DynamicCache()
    with torch.no_grad():
        target.model(torch.tensor([before]), past_key_values=cache)
        return model(torch.tensor([after]), past_key_values=cache).logits[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_skipped_adds_nothing(architecture: str) -> None:
    target = TARGET(architecture)
    proposer = Swift(target, search=1, window=5)
    context = read(target, proposer, TEXT)
    proposer._use(frozenset({(1, "self_attn"), (2, "mlp"), (3, "self_attn"), (3, "mlp")}))
    model = adding_zero(target, sorted(proposer.choice))
    for path, logits in tree_of_logits(proposer, context).items():
        torch.testing.assert_close(logits, reading_on(target, model, TEXT[:-1], [TEXT[-1], *path])[-1], rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        whole = target.model(torch.tensor([TEXT[:-1]])).logits[0, -5:].argmax(-1)
    window = reading_on(target, model, TEXT[:-6], TEXT[-6:-1]).argmax(-1)
    assert proposer._matchness(proposer.choice) == pytest.approx((window == whole).float().mean().item())
    assert proposer._matchness(frozenset()) == 1.0


def searched(target: Target, **settings: Any) -> list[Any]:
    """The choice after every round of one sequence, and what every candidate was measured to be."""
    steps: list[Any] = []

    class Recorded(Swift):
        def absorb(self, roots: Roots) -> None:
            self.measured: list[tuple[float, Any]] = []
            super().absorb(roots)
            steps.append((self.choice, self.measured))

        def _matchness(self, choice: Any) -> float:
            found = super()._matchness(choice)
            self.measured.append((found, choice))
            return found

    generate(target, Recorded(target, **settings), TEXT[:9], new_tokens=14, policy=TreePolicy("chain", depth=1))
    return steps


def test_the_search_keeps_the_better_one_and_ends() -> None:
    target = TARGET("llama")
    steps = searched(target, search=6, window=8, seed=1)
    assert len(steps) > 7 and [len(measured) for _, measured in steps] == [2] * 6 + [0] * (len(steps) - 6)
    for choice, measured in steps[:6]:
        assert choice == max(measured, key=lambda x: x[0])[1]  # of equals the first: the best so far
    assert {choice for choice, _ in steps[5:]} == {steps[5][0]}
    assert all(len(choice) == 4 and all(0 < layer < 5 for layer, _ in choice) for choice, _ in steps)
    assert len({candidate for _, measured in steps for _, candidate in measured}) > 3
    assert searched(target, search=6, window=8, seed=1) == steps != searched(target, search=6, window=8, seed=2)


def test_the_search_begins_evenly_spaced_and_ends_with_single_exchanges() -> None:
    target = TARGET("llama")
    pairs = [(measured[0][1], measured[1][1]) for _, measured in searched(target, search=6, window=8, seed=0)[:6]]  # best so far, candidate
    assert pairs[0][0] == {(layer, "self_attn") for layer in (1, 2, 3, 4)}  # every second of the eight parts
    exchanged = [(len(best - candidate), len(candidate - best)) for best, candidate in pairs]
    assert exchanged[3:] == [(1, 1)] * 3 and min(exchanged[:3]) > (1, 1)  # with this seed, no random set is a single exchange away
    all_parts = {choice for choice, _ in searched(target, skip=0.67, search=2, window=4)}  # nothing is left to exchange
    assert all_parts == {frozenset((layer, part) for layer in (1, 2, 3, 4) for part in ("self_attn", "mlp"))}


def test_a_forward_that_another_library_has_set_is_put_back() -> None:
    target = tiny_target("llama")
    skipped = target.layers[4]
    skipped.forward = own = skipped.forward
    proposer = EarlyExit(target, layers=3)
    tree_of_logits(proposer, read(target, proposer, TEXT))
    assert [m for m in target.model.modules() if "forward" in m.__dict__] == [skipped] and skipped.__dict__["forward"] is own


def test_the_same_sequence_again_is_drafted_the_same() -> None:
    target = TARGET("qwen3")
    proposer = Swift(target, search=4, window=8)
    runs = [generate(target, proposer, TEXT[:9], new_tokens=12, policy=TreePolicy(depth=3, nodes=6)).emitted for _ in range(2)]
    assert runs[0] == runs[1]


def test_settings_that_do_not_fit_are_refused() -> None:
    target = TARGET("llama")
    for layers in (0, 6, True, 1.5):
        with pytest.raises(UserError, match="early_exit: layers"):
            EarlyExit(target, layers=layers)  # type: ignore[arg-type]
    for skip in (0.05, 0.9, "half"):
        with pytest.raises(UserError, match="swift: skip"):
            Swift(target, skip=skip)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="swift: window must be a whole number of at least 1, found 0"):
        Swift(target, window=0)
    with pytest.raises(UserError, match="swift: seed"):
        Swift(target, seed="a")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="cannot serve qwen3"):
        generate(TARGET("qwen3"), EarlyExit(target), TEXT[:9], new_tokens=4, policy=TreePolicy())


def test_targets_that_cannot_leave_layers_out_are_refused() -> None:
    target = tiny_target("llama")
    target.config.num_kv_shared_layers = 2
    for make in (EarlyExit, Swift):
        with pytest.raises(UserError, match="layers of llama share keys and values"):
            make(target)
    target = tiny_target("opt", ffn_dim=48, word_embed_proj_dim=32)
    with pytest.raises(UserError, match=r"\(OPTDecoderLayer\) has no part mlp"):
        Swift(target)
