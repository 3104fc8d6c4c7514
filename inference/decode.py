"""The decode loop: draft, verify, accept; exact at any temperature.

One round: the proposer grows a tree from the last root, the target reads the tree in one pass, the verdict keeps
a path and adds the target's own token. Without a proposer the same loop is plain decoding, one token a pass.

Shape suffixes: T tokens, R rows of one pass, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from heads.base import Roots
from heads.errors import UserError
from inference.propose import Proposer, TreePolicy
from inference.target import Context, Target
from inference.tree import Tree, Verdict
from inference.verify import RULES, Chance, Sampling, greedy, warp


@dataclass
class Generation:
    """What one call of ``generate`` made, and its rounds. The prompt's own pass is not a round: it drafts nothing."""

    tokens: list[int] = field(default_factory=list)  # new tokens only
    emitted: list[int] = field(default_factory=list)  # tokens of each round, the target's own counted
    asked: list[int] = field(default_factory=list)  # depth of each round's tree
    seconds: float = 0.0  # wall clock, prompt included

    @property
    def accepted_length(self) -> float:
        """tau: mean tokens emitted per target pass."""
        return sum(self.emitted) / max(len(self.emitted), 1)


OnTokens = Callable[[list[int]], None]


@torch.no_grad()
def generate(
    target: Target,
    proposer: Proposer | None,
    prompt: Sequence[int],
    *,
    new_tokens: int,
    policy: TreePolicy | None = None,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Continue ``prompt`` by up to ``new_tokens`` tokens; ``on_tokens`` streams each round's tokens as they come.

    Stops after the first of ``stop_ids`` (default: the target's own end-of-text ids). Raises UserError for an empty
    prompt, for one that does not fit the target's context, and for a rule that does not go with the tree.
    """
    sampling = sampling or Sampling()
    stop = set(target.stop_ids if stop_ids is None else stop_ids)
    limit = target.shape.max_positions
    if not len(prompt):
        raise UserError("the prompt is empty")
    if len(prompt) + new_tokens > limit:
        raise UserError(f"the prompt's {len(prompt)} tokens and {new_tokens} new ones exceed the target's context of {limit}")
    chance = Chance(torch.Generator().manual_seed(sampling.seed))
    result, start = Generation(), time.perf_counter()

    def emit(tokens: list[int]) -> bool:
        """Cut at the limit or after a stop token; True when that ends the generation."""
        tokens = tokens[: new_tokens - len(result.tokens)]
        end = next((i for i, t in enumerate(tokens) if t in stop), None)
        tokens = tokens if end is None else tokens[: end + 1]
        result.tokens += tokens
        if on_tokens is not None:
            on_tokens(tokens)
        return end is not None or len(result.tokens) >= new_tokens

    context = Context(target, proposer.taps if proposer else ())
    tokens_T = torch.as_tensor(prompt, dtype=torch.int64, device=target.device)
    states, final = context.read(tokens_T)
    context.keep(len(tokens_T))
    token = _choose(target.logits(final[0, -1:]), Tree.empty(target.device), sampling, chance).token
    done = new_tokens == 0 or emit([token])
    read_T, positions_T = tokens_T, torch.arange(len(tokens_T), device=target.device)
    if proposer is not None and not done:
        proposer.start(len(prompt) + new_tokens)
    while not done:
        root_row = torch.tensor([token], device=target.device)
        left = new_tokens - len(result.tokens) - 1  # the target adds one itself: deeper guesses could not be kept
        tree = Tree.empty(target.device)
        if proposer is not None:
            assert policy is not None
            proposer.absorb(Roots(read_T[None], torch.cat([read_T[1:], root_row])[None], states, positions_T[None]))
            if left > 0:
                tree = proposer.propose(policy.at_most(left), chance, sampling)
        rows_R = torch.cat([root_row, tree.tokens_N])
        depths_R = torch.cat([torch.zeros_like(root_row), tree.depths_N])
        states, final = context.read(rows_R, depths_R, tree.rows())
        verdict = _choose(target.logits(final[0]), tree, sampling, chance)
        kept_R = torch.cat([torch.zeros_like(root_row), verdict.path + 1])
        context.keep(kept_R)
        read_T, positions_T = rows_R[kept_R], context.length - len(kept_R) + torch.arange(len(kept_R), device=target.device)
        states = {tap: s[:, kept_R] for tap, s in states.items()}
        token, before = verdict.token, len(result.tokens)
        done = emit([*tree.tokens_N[verdict.path].tolist(), token])
        result.emitted.append(len(result.tokens) - before)
        result.asked.append(int(tree.depths_N.max()) if len(tree) else 0)
    result.seconds = time.perf_counter() - start
    return result


def _choose(logits_RV: torch.Tensor, tree: Tree, sampling: Sampling, chance: Chance) -> Verdict:
    if sampling.temperature == 0:
        return greedy(tree, logits_RV.argmax(-1))
    p_RV = warp(logits_RV, sampling.temperature, sampling.top_k, sampling.top_p)
    return RULES[sampling.rule].verify(tree, p_RV, chance)
