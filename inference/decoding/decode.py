"""The decode loop for one sequence: draft, verify, accept; exact at any temperature.

One round: the proposer grows a tree from the last root, the target reads the tree in one pass, and verification accepts
a path and adds the target's own token. Without a proposer the same loop is plain decoding, one token a pass. This is the
dynamic path: any proposer, caches that grow. The static path, for many sequences at once, is inference/decoding/engine.py.

Shape suffixes: T tokens, R rows of one pass, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.heads.base import Roots
from headstart.heads.errors import UserError
from headstart.inference.decoding.auto import WORTH, Auto, Pace, Past, auto_of, key_of, known_of
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.info import TargetInfo
from headstart.inference.decoding.policy import MOST_READS, TreePolicy
from headstart.inference.decoding.propose import Proposer
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams, hold_stops, wide
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree
from headstart.inference.decoding.verify import choose_alone, rule_of, seen_rows


class Guesses(NamedTuple):
    """The tree of a round: tokens and parents of its nodes, as in ``Tree``, and how many nodes were accepted. Tensors stay on the device
    that they were made on.
    """

    tokens: Tensor | list[int]
    parents: Tensor | list[int]
    accepted: int


@dataclass(eq=False)  # compared by identity: an engine looks its rows up in every round, and two of them may say the same
class Generation:
    """The continuation of one prompt, with a record of its rounds. Reading the prompt is no round, because nothing is drafted in it."""

    tokens: list[int] = field(default_factory=list)  # new tokens only
    emitted: list[int] = field(default_factory=list)  # tokens that each round added, the target's own token counted
    asked: list[int] = field(default_factory=list)  # depth of each round's tree as it was grown; 0: nothing was guessed
    shapes: list[TreePolicy | None] = field(default_factory=list)  # the policy of each round; None: no drafting
    guesses: list[Guesses] = field(default_factory=list)  # the tree of each round
    seconds: float = 0.0  # wall clock, prompt included
    ended: str = ""  # why it ended: "stop" (a stop token), "length", "dropped" or "failed"; empty while the sequence goes on

    @property
    def accepted_length(self) -> float:
        """tau: mean tokens emitted per round, which is one target pass; the target's own token is counted."""
        return sum(self.emitted) / max(len(self.emitted), 1)

    def take(self, tokens: list[int], most: int, stop: Collection[int]) -> list[int]:
        """Add new tokens, cut after the first stop token and at ``most`` tokens in all. Returns the tokens that were added."""
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
    """Raises UserError for an empty prompt, a token outside the vocabulary, negative ``new_tokens``, and a length that the target's context
    cannot hold or that crosses the target's ``rope_switch``.
    """
    limit = target.shape.max_positions
    if not len(prompt):
        raise UserError("the prompt is empty")
    if new_tokens < 0:
        raise UserError(f"new_tokens must be at least 0, found {new_tokens}")
    if len(prompt) + new_tokens > limit:
        raise UserError(f"the prompt's {len(prompt)} tokens and {new_tokens} new ones exceed the target's context of {limit}")
    if (switch := target.rope_switch) and len(prompt) <= switch < len(prompt) + new_tokens:
        raise UserError(
            f"{target.name} changes its rotation at {switch} tokens, which this sequence would cross: shorten it, or start beyond"
        )
    if (wrong := next((token for token in prompt if not 0 <= token < target.shape.vocab_size), None)) is not None:
        raise UserError(f"the prompt holds token {wrong}, the target's vocabulary has {target.shape.vocab_size}")


def stops_of(target: Target, given: Sequence[int] | None) -> frozenset[int]:
    """The tokens that end a sequence: the given ones, or the target's own (None). Some configs name ids beyond the vocabulary, or -1 for
    "no token"; these are left out.
    """
    return frozenset(token for token in (target.stop_ids if given is None else given) if 0 <= token < target.shape.vocab_size)


def longest(target: TargetInfo, tokens: int) -> int:
    """The most tokens of a sequence, prompt included, if its prompt has ``tokens`` tokens: the target's context length, or the target's
    ``rope_switch`` for a prompt that ends before it, because no sequence may cross it.
    """
    return target.rope_switch if target.rope_switch and tokens <= target.rope_switch else target.shape.max_positions


Process = Callable[[Tensor, Tensor], Tensor]  # token ids [1, T] so far, the next token's scores [1, V] -> its changed scores


@torch.inference_mode()
def generate(
    target: Target,
    proposer: Proposer | None,
    prompt: Sequence[int],
    *,
    new_tokens: int,
    policy: TreePolicy | None = None,
    sampling: SamplingParams | None = None,
    stop_ids: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
    process: Process | None = None,
) -> Generation:
    """Continue ``prompt`` by up to ``new_tokens`` tokens. ``on_tokens`` is called with the new tokens of every round.

    Stops after the first of ``stop_ids`` (default: the target's own end-of-text ids). ``process`` changes the target's scores of every
    next token, like a LogitsProcessor of transformers. Raises UserError for what ``check_prompt`` refuses, for a rule that cannot verify
    the policy's trees, and for a proposer without a policy.
    """
    check_prompt(target, prompt, new_tokens)
    if new_tokens == 0:
        return Generation(ended="length")
    return run(SequenceState(target, prompt, new_tokens, sampling or SamplingParams(), stop_ids, process, on_tokens), proposer, policy)


@torch.inference_mode()
def run(sequence: SequenceState, proposer: Proposer | None, policy: TreePolicy | None) -> Generation:
    """Decode a new sequence to its end. Raises UserError for a proposer without a policy, and for a rule that cannot verify its trees."""
    if proposer is not None and policy is None:
        raise UserError("a proposer needs a tree policy: give policy=TreePolicy()")
    target, new_tokens, prompt = sequence.target, sequence.new_tokens, sequence.prompt
    result, sampled = sequence.result, sequence.warp.sampled
    policy, auto = _choices(target, proposer, policy, sequence.sampling, new_tokens)
    pace, past, start = Pace(), Past(), time.perf_counter()
    context = Context(target, proposer.taps if proposer else (), len(prompt) + new_tokens + MOST_READS)
    token, read = sequence.begin(context)
    waiting, absorbed = [read], 0  # verified rows that the proposer has not absorbed yet; how many tokens it has absorbed
    if proposer is not None and not result.ended:
        proposer.start(context, len(prompt) + new_tokens)
    while not result.ended:
        # Guesses beyond the last new token are useless (the target adds one token itself), so the tree is cut to what is left. But above
        # temperature 0 a smaller tree would draw other samples: there only the end of the context cuts it, as in the static path.
        left = sequence.limit - 1 - context.length if sampled else new_tokens - len(result.tokens) - 1
        chosen = shape = policy if auto is None else pace.choose(auto, [past], context.length - absorbed)
        if auto is not None and pace.closed >= new_tokens - len(result.tokens):  # no later round will draft
            proposer, policy, auto, context.taps = None, None, None, ()
        tree, root_row = Tree.empty(target.device), torch.tensor([token], device=target.device)
        rng = sequence.rng(context.length, shape)
        if proposer is not None and shape is not None and left > 0:
            proposer.absorb(joined_roots(waiting, root_row))
            waiting, absorbed, shape = [], context.length, shape.at_most(left)
            tree = proposer.propose(shape, rng, sequence.sampling)
        rows_R, first = torch.cat([root_row, tree.tokens_BN[0]]) if len(tree) else root_row, context.length
        states, final = context.read(rows_R, tree)
        kept, token = sequence.verdict(final, tree, rng)
        context.keep(kept)
        if kept != list(range(len(rows_R))):
            index_A = torch.tensor(kept, device=target.device)
            rows_R, states = rows_R[index_A], {tap: s[:, index_A] for tap, s in states.items()}
        if proposer is not None:
            waiting.append(Verified(rows_R, states, first))
        accepted = rows_R[1:].tolist() if len(kept) > 1 else []
        sequence.add([*accepted, token], chosen, tree, len(accepted))
        if auto is not None:
            guesses, parents = (x[0].tolist() if len(tree) else [] for x in (tree.tokens_BN, tree.parents_BN))
            past.see(shape, tree.deepest, guesses, parents, accepted)
    result.seconds = time.perf_counter() - start
    return result


def _choices(
    target: Target, proposer: Proposer | None, policy: TreePolicy | None, sampling: SamplingParams, new_tokens: int
) -> tuple[TreePolicy | None, Auto | None]:
    """The policy of every round; with an auto policy also the costs by which each round's shape is chosen. They are measured before the
    sequence's clock starts. A sequence too short to be worth a measurement does not draft. Raises UserError for a rule that cannot verify
    the policy's trees.
    """
    if policy is not None and sampling.temperature > 0:
        policy.check(sampling.rule)
    if proposer is None or policy is None or policy.kind != "auto":
        return policy, None
    if new_tokens < WORTH and key_of(policy, sampling) not in known_of(target, proposer):
        return None, None
    return policy, auto_of(policy, target, proposer, sampling, generate)


class SequenceState:
    """The state of one sequence that is being decoded. Chooses its next tokens from the target's states."""

    def __init__(
        self, target: Target, prompt: Sequence[int], new_tokens: int, sampling: SamplingParams, stop: Sequence[int] | None,
        process: Process | None, on_tokens: OnTokens | None,
    ) -> None:  # fmt: skip
        self.target, self.sampling, self.process, self.on_tokens = target, sampling, process, on_tokens
        self.stop = stops_of(target, stop)
        self.prompt, self.new_tokens, self.result = list(prompt), new_tokens, Generation()
        self.warp = LogitsWarper.of([sampling], target.device)
        self.limit = longest(target, len(prompt))

    def begin(self, context: Context) -> tuple[int, Verified]:
        """Read the prompt and emit the first new token. Returns that token, and the prompt's rows."""
        tokens_T = torch.as_tensor(self.prompt, dtype=torch.int64, device=self.target.device)
        states, final = context.read_prompt(tokens_T)
        context.keep(len(tokens_T))
        _, token = self.verdict(final[:, -1:], Tree.empty(self.target.device), self.rng(len(tokens_T) - 1))
        self._say([token])
        return token, Verified(tokens_T, states, 0)

    def _say(self, tokens: list[int]) -> int:
        taken = self.result.take(tokens, self.new_tokens, self.stop)
        if self.on_tokens is not None:
            self.on_tokens(taken)
        return len(taken)

    def add(self, tokens: list[int], shape: TreePolicy | None, tree: Tree, accepted: int) -> None:
        """Finish a round: emit its tokens, and record the policy, the tree and how many nodes were accepted."""
        result = self.result
        result.emitted.append(self._say(tokens))
        result.asked.append(tree.deepest)
        result.shapes.append(shape)
        result.guesses.append(Guesses(tree.tokens_BN, tree.parents_BN, accepted))

    def rng(self, position: int, shape: TreePolicy | None = None) -> CounterRNG:
        """The random numbers of the round of this shape whose root row stands at ``position``."""
        return CounterRNG.of(self.sampling.seed, position, self.target.device)

    def verdict(self, final_1RD: Tensor, tree: Tree, rng: CounterRNG) -> tuple[list[int], int]:
        """Verify a tree from the target's final states. Returns the rows of the accepted path, and the target's own token after them."""
        target, sampling, warp = self.target, self.sampling, self.warp
        logits_1RV, seen_1RV = target.logits(final_1RD), None
        if self.process is not None:
            logits_1RV = self._processed(logits_1RV, tree)
        if warp.penalty:
            text = self.prompt + self.result.tokens
            seen_1V = torch.zeros(1, logits_1RV.shape[-1], dtype=torch.bool, device=target.device)
            seen_1V[0, text] = True
            seen_1RV = seen_rows(seen_1V, torch.tensor(text[-1:], device=target.device), tree)
        if len(self.result.tokens) < sampling.min_tokens and self.stop:
            stops_1V = torch.zeros(1, logits_1RV.shape[-1], dtype=torch.bool, device=target.device)
            stops_1V[0, list(self.stop)] = True
            # how many new tokens the text would have before the token that follows each row
            new_1R = len(self.result.tokens) + torch.cat([tree.depths_BN.new_zeros(1, 1), tree.depths_BN], 1)
            logits_1RV = hold_stops(wide(logits_1RV), new_1R < sampling.min_tokens, stops_1V)
        rule = rule_of(sampling.rule, tree)
        return choose_alone(logits_1RV, tree, warp, rule, rng, seen_1RV)

    def _processed(self, logits_1RV: Tensor, tree: Tree) -> Tensor:
        """The scores of every row, changed by ``process`` given the text up to that row. Rows below a guess whose score is -inf are left
        as they are: the guess is never accepted, so their scores do not matter."""
        assert self.process is not None
        text, scores_RV = self.prompt + self.result.tokens, wide(logits_1RV)[0].clone()
        paths: list[list[int] | None] = []
        for row, (token, parent) in enumerate([(-1, -1), *zip(tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist(), strict=True)]):
            above = [] if row == 0 else paths[parent + 1]
            impossible = above is None or (row > 0 and scores_RV[parent + 1, token] == float("-inf"))
            paths.append(None if impossible else [*above, token] if row else [])
            if (path := paths[row]) is not None:
                ids_1T = torch.tensor([text + path], device=scores_RV.device)
                scores_RV[row] = self.process(ids_1T, scores_RV[row][None])[0]
        return scores_RV[None]


class Verified(NamedTuple):
    """Rows that the target has read and kept: their tokens, the target's tapped states, the position of the first row."""

    tokens_A: Tensor
    states: dict[int, Tensor]
    first: int


def joined_roots(parts: list[Verified], token_1: Tensor) -> Roots:
    """Join verified rows, oldest first, as roots. The token chosen at each row is the next row's token, and ``token_1`` at the last one."""
    read_T, states = parts[0].tokens_A, parts[0].states
    if len(parts) > 1:
        read_T = torch.cat([part.tokens_A for part in parts])
        states = {tap: torch.cat([part.states[tap] for part in parts], dim=1) for tap in states}
    positions_T = torch.arange(parts[0].first, parts[0].first + len(read_T), device=read_T.device)
    return Roots(read_T[None], torch.cat([read_T[1:], token_1])[None], states, positions_T[None])
