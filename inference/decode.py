"""The decode loop for one sequence: draft, verify, accept; exact at any temperature.

One round: the proposer grows a tree from the last root, the target reads the tree in one pass, the verdict keeps
a path and adds the target's own token. Without a proposer the same loop is plain decoding, one token a pass. This is the
dynamic path: any proposer, caches that grow. The static one, for many sequences at once, is inference/engine.py.

Shape suffixes: T tokens, R rows of one pass, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heads.base import Roots
from heads.errors import UserError
from inference.propose import Proposer, TreePolicy
from inference.target import Context, Target
from inference.tree import Tree, Verdict
from inference.verify import Chance, Sampling, Warp, choose, seen_rows


@dataclass
class Generation:
    """What was made of one prompt, and its rounds. The prompt's own pass is not a round: it drafts nothing."""

    tokens: list[int] = field(default_factory=list)  # new tokens only
    emitted: list[int] = field(default_factory=list)  # tokens of each round, the target's own counted
    asked: list[int] = field(default_factory=list)  # depth of each round's tree
    seconds: float = 0.0  # wall clock, prompt included
    ended: str = ""  # why: "stop" (a stop token) or "length"; empty while it goes on

    @property
    def accepted_length(self) -> float:
        """tau: mean tokens emitted per target pass."""
        return sum(self.emitted) / max(len(self.emitted), 1)

    def take(self, tokens: list[int], most: int, stop: Collection[int]) -> list[int]:
        """Add new tokens, cut after a stop token or where ``most`` are reached; returns those that were added."""
        end = next((i + 1 for i, t in enumerate(tokens) if t in stop), len(tokens) + 1)
        left = most - len(self.tokens)
        tokens = tokens[: min(end, left)]
        self.tokens += tokens
        if end <= left and len(tokens) == end:
            self.ended = "stop"
        elif len(self.tokens) >= most:
            self.ended = "length"
        return tokens


OnTokens = Callable[[list[int]], None]


def check_prompt(target: Target, prompt: Sequence[int], new_tokens: int) -> None:
    """Raises UserError for an empty prompt and for one that does not fit the target's context."""
    limit = target.shape.max_positions
    if not len(prompt):
        raise UserError("the prompt is empty")
    if new_tokens < 0:
        raise UserError(f"new_tokens must be at least 0, found {new_tokens}")
    if len(prompt) + new_tokens > limit:
        raise UserError(f"the prompt's {len(prompt)} tokens and {new_tokens} new ones exceed the target's context of {limit}")
    if target.turn and len(prompt) <= target.turn < len(prompt) + new_tokens:
        raise UserError(
            f"{target.name} changes its rotation at {target.turn} tokens, which this sequence would cross: shorten it, or start beyond"
        )
    if not 0 <= min(prompt) <= max(prompt) < target.shape.vocab_size:
        raise UserError(f"the prompt holds token {max(prompt)}, the target's vocabulary has {target.shape.vocab_size}")


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
    prompt, for one that does not fit the target's context, for a rule that does not go with the tree, and for a proposer without one.
    """
    if proposer is not None and policy is None:
        raise UserError("a proposer needs a tree policy: give policy=TreePolicy()")
    sampling = sampling or Sampling()
    stop = set(target.stop_ids if stop_ids is None else stop_ids)
    check_prompt(target, prompt, new_tokens)
    result, start, device = Generation(), time.perf_counter(), target.device
    warp = Warp.of([sampling], device)
    seen_1V: Tensor | None = None  # tokens so far, where they are penalised

    def verdict_of(final_1RD: Tensor, tree: Tree, root: int, position: int) -> Verdict:
        """``root``: the token of the root row, which stands at ``position``."""
        seen_1RV = None if seen_1V is None else seen_rows(seen_1V, torch.tensor([root], device=device), tree)
        chance = Chance.of(sampling.seed, position, device)
        return choose(target.logits(final_1RD), tree, warp, sampling.rule, chance, seen_1RV, hasty=True)

    def emit(tokens: list[int]) -> None:
        taken = result.take(tokens, new_tokens, stop)
        if seen_1V is not None:
            seen_1V[0, taken] = True
        if on_tokens is not None:
            on_tokens(taken)

    limit = target.turn if target.turn and len(prompt) <= target.turn else target.shape.max_positions
    context = Context(target, proposer.taps if proposer else ())
    tokens_T = torch.as_tensor(prompt, dtype=torch.int64, device=device)
    if warp.penalty:
        seen_1V = torch.zeros(1, target.shape.vocab_size, dtype=torch.bool, device=device).index_fill_(1, tokens_T, True)
    if new_tokens == 0:
        result.ended = "length"
        return result
    states, final = context.read(tokens_T)
    context.keep(len(tokens_T))
    token = int(verdict_of(final[:, -1:], Tree.empty(device), prompt[-1], len(prompt) - 1).token_B)
    emit([token])
    read_T, positions_T = tokens_T, torch.arange(len(tokens_T), device=device)
    if proposer is not None and not result.ended:
        proposer.start(context, len(prompt) + new_tokens)
    while not result.ended:
        root_row = torch.tensor([token], device=device)
        # Guesses beyond the end cannot be kept (the target adds one token itself). Above temperature 0 another tree draws other
        # samples: there it stays whole as far as the context goes, as in the static path.
        left = new_tokens - len(result.tokens) - 1 if not warp.sampled else limit - 1 - context.length
        tree = Tree.empty(device)
        if proposer is not None:
            assert policy is not None
            proposer.absorb(Roots(read_T[None], torch.cat([read_T[1:], root_row])[None], states, positions_T[None]))
            if left > 0:
                tree = proposer.propose(policy.at_most(left), Chance.of(sampling.seed, context.length, device), sampling)
        rows_R = torch.cat([root_row, tree.tokens_BN[0]])
        depths_R = torch.cat([torch.zeros_like(root_row), tree.depths_BN[0]])
        states, final = context.read(rows_R, depths_R, tree.rows()[0])
        verdict = verdict_of(final, tree, token, context.length)
        kept_A = verdict.rows_BA[0, : int(verdict.count_B) + 1]
        context.keep(kept_A)
        read_T, positions_T = rows_R[kept_A], context.length - len(kept_A) + torch.arange(len(kept_A), device=device)
        states = {tap: s[:, kept_A] for tap, s in states.items()}
        token, before = int(verdict.token_B), len(result.tokens)
        emit([*read_T[1:].tolist(), token])
        result.emitted.append(len(result.tokens) - before)
        result.asked.append(int(tree.depths_BN.max()) if len(tree) else 0)
    result.seconds = time.perf_counter() - start
    return result
