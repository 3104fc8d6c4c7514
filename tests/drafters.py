"""Every drafter, found by listing conf/head, for the tests that run over all of them."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads import hub
from headstart.heads.base import Drafter, Roots, TargetShape
from headstart.heads.unroll import unroll
from headstart.inference.decoding.target import Target

CONF = Path(__file__).resolve().parent.parent / "conf" / "head"
HEADS = sorted(p.stem for p in CONF.glob("*.yaml"))
VARIANTS: dict[str, dict[str, Any]] = {f"dspark,{kind}": {"markov": kind} for kind in ("gated", "rnn")}  # other computations of a drafter
MADE = [*HEADS, *VARIANTS]
FEW = ("dflash", "eagle", "exit_head")  # a block at once, step by step, through the target's own layers
FEW_HEADS = [pytest.param(head, marks=() if head in FEW else pytest.mark.slow) for head in MADE]  # where the others would add little
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
SERVED: dict[str, dict[str, Any]] = {  # small drafters that engines can load, with a mask token that they know
    "eagle1": {},
    "mtp": {},
    "peagle": dict(layers=1, depth=3, mask_token=95),
    "dflare": dict(layers=1, block=4, mask_token=95),
    "dflash2": dict(layers=1, block=4, rank=8, mask_token=95),
    "lilicorr": dict(layers=1, block=4, width=16, factors=8, mask_token=95),
    "xpress": dict(layers=1, block=4, rank=16, mlp_hidden=64, mask_token=95),
    "dspark": dict(layers=1, block=4, rank=8, mask_token=95),
    "domino": dict(layers=1, block=4, rank=8, gru=8, mask_token=95),
    "medusa": dict(guesses=2),
    "mlp_speculator": dict(guesses=3),
}
LARGE = {"layers": 2, "block": 6, "depth": 5, "rank": 16, "mlp_hidden": 64}  # larger settings are lowered to these: five guesses each


def everywhere(architectures: Iterable[str], few: Collection[str] = FEW) -> list[Any]:
    """(head, architecture) for all pairs. All but those on the first architecture and those of ``few`` are marked as slow."""
    first, *others = architectures
    rest = [pytest.param(head, other, marks=() if head in few else pytest.mark.slow) for other in others for head in MADE]
    return [*((head, first) for head in MADE), *rest]


def arguments(name: str) -> dict[str, Any]:
    """The settings of conf/head/NAME.yaml, shrunk to the size of the tiny targets, including the config of a whole model. ``name``: a head,
    or one of VARIANTS.
    """
    from omegaconf import OmegaConf  # imported here, because a machine with a GPU may lack it

    head = name.partition(",")[0]
    settings: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{head}.yaml"), resolve=True)  # null: the target sets it
    settings.pop("defaults", None)  # choices of other groups, not of the drafter
    assert settings.pop("name") == head
    if settings.get("from_target"):  # tiny targets have no weights of their own for it
        settings["from_target"] = False
    for key, value in settings.items():
        if isinstance(value, dict):
            value |= {key: tiny for key, tiny in TINY.items() if key in value}
        elif isinstance(value, int) and key in LARGE:
            settings[key] = min(value, LARGE[key])
    return settings | VARIANTS.get(name, {})


def fresh(name: str, shape: TargetShape, **changes: Any) -> Drafter:
    return hub.build(name.partition(",")[0], shape, **(arguments(name) | changes))


def make(name: str, target: Target, noise: float = 0.1, **changes: Any) -> Drafter:
    """An untrained drafter of this target with noise on every weight. (Without noise a residual block would be the identity.)"""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    torch.manual_seed(zlib.crc32(name.encode()))
    drafter = fresh(name, target.shape, **changes)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    with torch.no_grad():
        for p in drafter.parameters():
            p += noise * torch.randn(p.shape, generator=generator)
    return drafter.eval()


def judged(drafter: Drafter, depth: int, hidden_BNH: Tensor) -> Tensor:
    """The logits that divergences judge: those before a selector, which leaves most tokens -inf."""
    unembedding = drafter.unembedding(depth)
    if unembedding.candidates is None:
        return unembedding.logits(hidden_BNH)
    return unembedding.uncorrected().logits(unembedding.parts(hidden_BNH)[0])


def depth_of(drafter: Drafter, depth: int = 5) -> int:
    """``depth``, or the drafter's greatest depth if that is less."""
    return min(depth, drafter.max_depth or depth)


def random_tokens(count: int, seed: int, vocab_size: int = 96) -> list[int]:
    return torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def roots_of(target: Target, drafter: Drafter, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Roots:
    """Every position as a root, with the states that the target has there. The last root of a row has no chosen token (0)."""
    if positions_BT is None:
        positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    states, _ = target.read(tokens_BT, positions_BT, drafter.taps)
    return Roots(tokens_BT, F.pad(tokens_BT[:, 1:], (0, 1)), states, positions_BT)


@torch.no_grad()
def guesses(drafter: Drafter, target: Target) -> list[Tensor]:
    """The drafter's logits after a few tokens, over the target's vocabulary: [1, 12, V] for each depth."""
    size = target.shape.vocab_size
    out = unroll(drafter, roots_of(target, drafter, torch.tensor([random_tokens(12, 1)])), None, depth_of(drafter))
    return [drafter.unembedding(d).to_target(drafter.unembedding(d).logits(x.hidden_BNH), size) for d, x in enumerate(out, start=1)]


def learn_by_heart(drafter: Drafter, target: Target, texts: list[list[int]], depth: int, steps: int) -> Drafter:
    """Train on these texts until many guesses are right, so that tests see accepted guesses. All texts have the same length."""
    roots, ends = roots_of(target, drafter, torch.tensor(texts)), target.ends
    tokens_BT = roots.read_BT
    optimizer = torch.optim.AdamW(drafter.train().parameters(), lr=5e-3, weight_decay=0.0)
    listed = drafter.unembedding(1).listed  # it learns the candidates first, then their order
    for _ in range(2 * steps if listed else steps):
        loss = torch.zeros(())
        for d, draft in enumerate(unroll(drafter, roots, None, depth), start=1):
            unembedding = drafter.unembedding(d)
            hidden_BNH = draft.hidden_BNH[:, : -1 - d]
            # where scores are listed, only the logits before teach the backbone which tokens to list
            every = [unembedding.logits(hidden_BNH), *([judged(drafter, d, hidden_BNH)] if unembedding.listed else [])]
            for logits in (unembedding.to_target(each, len(ends.head_VD)) for each in every):
                loss = loss + F.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1 + d :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()
