"""A healthy drafter with its target, and functions that plant into it each cause that ``python -m inference diagnose`` can name.

A plant takes a healthy case and returns one with a single bug, as it occurs in practice: wrong training rows, a drafter served with other
settings than it was trained with, another target, a batch that mixes up its sequences.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import sqrt
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.data.accepted import Answered
from headstart.data.batch import TokenBatch
from headstart.data.pack import pack
from headstart.data.packed import Document
from headstart.heads import hub
from headstart.heads.base import Drafter, Roots
from headstart.heads.layers import Rope
from headstart.heads.unroll import unroll
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.rounds import Rounds
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.serving.text import asking
from headstart.trainers.diagnosis import Case
from headstart.trainers.diagnosis.wiring import scaled

UNNORMED = "eagle1"  # a drafter that reads the embedding as it is
LENGTH, ANSWER = 160, 64  # tokens of a row, and of an answer in it
STEPS = 150  # of the training in seconds
ASKED = ("def area(width, height):", "import os", "class Stack:", "for line in lines:", "def test_sum(self):", "return self._items",
         "x = {}", "with open(path) as file:")  # fmt: skip
PROSE = """The ferry left at dawn with eleven passengers, two crates of oysters and a piano that nobody had ordered. By noon the fog lay so
thick upon the strait that our captain steered by the smell of heather alone, humming hymns, while my aunt dealt cards to the vicar and won
his umbrella, his watch, and finally the promise of a spring wedding. Gulls followed us like unpaid bills. Somewhere below, a cellist was
tuning; somewhere above, thunder answered in the wrong key. We landed near dusk, wet, merry, three hours late, at an island which none of
the maps aboard would admit existed, and were offered soup, blankets and gossip by a widow whose parrot swore fluently in Portuguese."""


def prompts_of(target: Target, some: Sequence[str] = ASKED) -> list[list[int]]:
    """The texts as prompts, by the chat template."""
    return [asking(target.tokenizer, [{"role": "user", "content": text}]) for text in some]


def rows_of(target: Target, prompts: Sequence[Sequence[int]], seed: int = 0) -> list[TokenBatch]:
    """Training rows of the target's own answers at temperature 1."""
    made = []
    for i, prompt in enumerate(prompts):
        said = generate(target, None, prompt, new_tokens=ANSWER, sampling=SamplingParams(1.0, seed=seed + i), stop_ids=()).tokens
        mask = np.arange(len(prompt) + len(said)) >= len(prompt)
        made.append(Document(np.array([*prompt, *said], dtype=np.int32), mask))
    packed = pack(made, LENGTH, seed=seed)
    return [packed.batch(slice(i, i + 4)) for i in range(0, len(packed), 4)]


def taught(head: str, target: Target, prompts: Sequence[Sequence[int]]) -> Drafter:
    """A drafter that is trained in seconds until it knows the target's greedy answers to these prompts by heart. (After 60 steps, whether a
    cause was named depended on the first weights.)
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        drafter = hub.build(head, target.shape)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    depth, roots = min(3, drafter.max_depth or 3), []
    for prompt in prompts:
        tokens_1T = torch.tensor([[*prompt, *generate(target, None, prompt, new_tokens=ANSWER, stop_ids=()).tokens]])
        states, _ = target.read(tokens_1T, torch.arange(tokens_1T.shape[1])[None], drafter.taps)
        roots.append(Roots(tokens_1T, F.pad(tokens_1T[:, 1:], (0, 1)), states, torch.arange(tokens_1T.shape[1])[None]))
    optimizer = torch.optim.AdamW(drafter.train().parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(STEPS):
        each, loss = roots[step % len(roots)], torch.zeros(())
        for d, draft in enumerate(unroll(drafter, each, None, depth), start=1):
            unembedding = drafter.unembedding(d)
            logits = unembedding.to_target(unembedding.logits(draft.hidden_BNH[0, : -1 - d]), target.shape.vocab_size)
            said_N = each.read_BT[0, 1 + d :]
            there_N = logits.gather(1, said_N[:, None])[:, 0].isfinite()
            loss = loss + F.cross_entropy(logits[there_N], said_N[there_N])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


def twin(drafter: Drafter, target: Target, **changes: Any) -> Drafter:
    """A drafter with the same weights, and the given settings changed."""
    settings = {key: value for key, value in drafter.config.items() if key != "head"} | changes
    other = hub.build(drafter.config["head"], target.shape, **settings).to(next(drafter.parameters()).dtype)
    other.attach(target.ends)
    own = {k: v for k, v in drafter.state_dict().items() if k in other.state_dict() and v.shape == other.state_dict()[k].shape}
    other.load_state_dict(own, strict=False)
    return other.eval()


def trimmed(drafter: Drafter, target: Target, ids: Sequence[int]) -> Drafter:
    """A copy of the drafter whose output head has only the tokens ``ids``."""
    other = twin(drafter, target, draft_vocab=sorted(ids))
    with torch.no_grad():
        other.lm_head.weight.copy_(drafter.lm_head.weight[torch.tensor(sorted(ids))])  # type: ignore[operator, union-attr, index]
    return other


# ---- the plants ----


def mask(case: Case) -> Case:
    """Supervision begins one token late."""
    return replace(case, rows=[replace(batch, loss_mask_BT=batch.loss_mask_BT.roll(1, dims=1)) for batch in case.rows])


def template(case: Case) -> Case:
    """Prompts switch thinking off, which the training rows did not do."""
    off = case.target.tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"]
    return replace(case, prompts=[[*prompt, *off] for prompt in case.prompts])


def positions(case: Case) -> Case:
    """Served with another rope_theta."""
    drafter = twin(case.drafter, case.target)
    for rope in (m for m in drafter.modules() if isinstance(m, Rope)):
        rope.frequencies = rope.frequencies * 0.0002 ** -(torch.arange(len(rope.frequencies)) / len(rope.frequencies))
    return replace(case, drafter=drafter)


def tap(case: Case) -> Case:
    """Served with each tap one layer earlier."""
    drafter = twin(case.drafter, case.target)
    drafter.taps = tuple(tap - 1 for tap in case.drafter.taps)
    return replace(case, drafter=drafter)


def norm(case: Case) -> Case:
    """Served with the feature from the other side of the drafter's final norm."""
    return replace(case, drafter=twin(case.drafter, case.target, norm_output=not case.drafter.norm_output))


def vocabulary(case: Case) -> Case:
    """A trimmed vocabulary whose map is one token off."""
    ids = sorted({*range(0, case.target.shape.vocab_size, 2), *(t for made in case.said for t in made.tokens)})
    drafter = trimmed(case.drafter, case.target, ids)
    drafter.lm_head.ids = (drafter.lm_head.ids + 1).clamp(max=case.target.shape.vocab_size - 1)  # type: ignore[union-attr, operator]
    return replace(case, drafter=drafter)


def policy(case: Case) -> Case:
    """Trained on text that the target did not write."""

    words = case.target.tokenizer(PROSE)["input_ids"]

    def other(batch: TokenBatch) -> TokenBatch:
        tokens_BT = batch.tokens_BT.clone()
        for b in range(len(tokens_BT)):
            said_T = batch.loss_mask_BT[b].nonzero()[:, 0]
            tokens_BT[b, said_T] = torch.tensor((words * 9)[31 * b :][: len(said_T)])
        return replace(batch, tokens_BT=tokens_BT)

    return replace(case, rows=[other(batch) for batch in case.rows])


def target(case: Case) -> Case:
    """Served with a target whose weights are rounded to 5 bits."""
    model = copy.deepcopy(case.target.model)
    with torch.no_grad():
        for p in model.parameters():
            step = p.abs().max() / 15
            p.copy_((p / step).round() * step)
    other = Target(model, case.target.tokenizer, case.target.name)
    return replace(case, target=other, drafter=twin(case.drafter, other))


def tokenizer(case: Case) -> Case:
    """Trained on text from another tokenizer, with one token per letter."""
    made = []
    for prompt in case.prompts:
        text = case.target.tokenizer.decode(list(prompt) + case.target.tokenizer("def f(value): return value + 1\n" * 6)["input_ids"])
        cut = [t for letter in text for t in case.target.tokenizer(letter, add_special_tokens=False)["input_ids"]][: LENGTH - 1]
        made.append(Document(np.array(cut, dtype=np.int32), np.arange(len(cut)) >= 20))
    packed = pack(made, LENGTH)
    return replace(case, rows=[packed.batch(slice(0, len(packed)))])


def embedding(case: Case) -> Case:
    """Served with an embedding that is multiplied by the square root of the hidden size."""
    drafter = twin(case.drafter, case.target)
    way = scaled(drafter, sqrt(case.target.shape.hidden_size))
    way.__enter__()  # and never left
    drafter.__dict__["kept"] = way
    return replace(case, drafter=drafter)


def export(case: Case) -> Case:
    """The exported folder is older than the trained weights."""
    generator = torch.Generator().manual_seed(0)
    live = {k: v + 0.1 * v.float().std() * torch.randn(v.shape, generator=generator) if v.ndim > 1 else v
            for k, v in case.drafter.state_dict().items()}  # fmt: skip
    return replace(case, live=live)


def answers(case: Case) -> list[Answered]:
    """What an engine with this target and this drafter answers, in chains of ``case.guesses``."""
    chain, made = TreePolicy("chain", depth=case.guesses), list[Answered]()
    for prompt in case.prompts:
        said = generate(case.target, Drafting(case.drafter), prompt, new_tokens=case.room(prompt), policy=chain)
        made.append(Answered(list(prompt), said.tokens, len(said.emitted), [], said.seconds))
    return made


def served(case: Case) -> Case:
    """An engine feeds the drafter's feature from the other side of its final norm."""
    return replace(case, answered=answers(norm(case)))


def served_target(case: Case) -> Case:
    """An engine runs a target whose weights are rounded to 5 bits."""
    return replace(case, answered=answers(target(case)))


@contextmanager
def mixed_up(case: Case) -> Iterator[Case]:
    """In a batch, each sequence's drafter reads the states of the next sequence's prompt."""
    follow = Rounds._follow

    def wrong(self: Any, places: Any, tokens: Any, next_n: Any, length: Any, positions: Any, states: dict[int, Tensor], done: Any) -> None:
        follow(self, places, tokens, next_n, length, positions, {k: s.roll(1, dims=0) for k, s in states.items()}, done)

    with patch.object(Rounds, "_follow", wrong):
        yield case


ON_ANOTHER = ("tap", "embedding")  # planted into UNNORMED: eagle norms its inputs, so adjacent layers look alike to it
PLANTS: dict[str, Callable[[Case], Case]] = {
    "mask": mask, "template": template, "positions": positions, "tap": tap, "norm": norm, "vocabulary": vocabulary, "policy": policy,
    "target": target, "tokenizer": tokenizer, "embedding": embedding, "export": export, "served": served, "served_target": served_target,
}  # fmt: skip
