"""Self-speculation: the target drafts for itself, with some of its layers, attentions or MLPs skipped.

The drafter reads the keys and values of the target's cache, and writes those of its own rows to a separate memory, so the cache stays as
it is. In all decoder layers of transformers, attention and MLP add their output to their input (a residual connection). So a skipped layer
returns its input, and a skipped attention or MLP returns zeros.

Shape suffixes: B = 1 sequence, N nodes (or rows of any kind), M rows in memory, D target hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.base import Draft, Drafter, Roots
from headstart.heads.errors import UserError
from headstart.heads.kinds import check_kinds
from headstart.heads.memory import AsCache, Memory, Segment
from headstart.heads.visibility import MaskSees, Sees
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.counter_rng import CounterRNG
from headstart.inference.decoding.growth import grow
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import LogitsWarper, SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree

PARTS = ("self_attn", "mlp")  # the parts of a layer, as nearly all models of transformers call them


class Borrowed(Memory):
    """A memory of the first ``rows`` rows of the target's cache, followed by rows of its own."""

    def __init__(self, context: Context, rows: int) -> None:
        super().__init__()
        self.theirs, self.borrowed = context.memory, rows

    def write(self, layer: int, k: Tensor, v: Tensor) -> list[Segment]:
        """Append rows to the memory's own. Returns two segments: the borrowed rows, then the memory's own."""
        keys, values = (x[:, :, : self.borrowed] for x in self.theirs.layers[layer][0])
        return [(keys, values), *super().write(layer, k, v)]

    def rows(self, layer: int = 0) -> int:
        """How many rows a pass sees besides its own: borrowed ones and the memory's own."""
        own = next(iter(self.layers), 0)  # any layer that is not skipped (layer 0 may be skipped)
        return self.borrowed + super().rows(own)


class SomeLayers(Drafter):
    """A drafter made of the target, with the modules of ``left_out`` skipped. It does not apply the target's softcap to its logits.

    ``returns``: how many values each module returns, from ``values_returned``.
    """

    def __init__(self, target: Target, returns: Mapping[nn.Module, int]) -> None:
        super().__init__(target.shape)
        self.attach(target.ends)
        self.target, self.returns = target, returns
        self.left_out: dict[nn.Module, bool] = {}  # skipped module -> True: returns its input (a layer); False: zeros (a part)

    def begin(self, roots: Roots, memory: Memory, sees: Sees, ask: Tensor | None = None) -> Draft:
        """Read the tokens that the target chose at these roots, after the rows of its cache that ``memory`` borrows."""
        self.keys_BM = torch.arange(memory.rows(), device=roots.read_BT.device)[None]
        return self._read(roots.chosen_BT, roots.positions_BT + 1, memory, sees).at(ask)

    def step(self, depth: int, tokens_BN: Tensor, parent: Draft, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        """Read draft tokens after the roots."""
        return self._read(tokens_BN, positions_BN + 1, memory, sees)

    def _read(self, tokens_BN: Tensor, positions_BN: Tensor, memory: Memory, sees: Sees) -> Draft:
        before, self.keys_BM = self.keys_BM.shape[1], torch.cat([self.keys_BM, positions_BN], dim=1)
        inputs = {"input_ids": tokens_BN, "position_ids": positions_BN, "past_key_values": AsCache(memory), "use_cache": True}
        with self._without():
            return Draft(self.target.reader.run_by(sees, before, self.keys_BM, (), **inputs)[1])

    @contextmanager
    def _without(self) -> Iterator[None]:
        """A context in which ``forward`` of the skipped modules is replaced. (accelerate sets one on some modules; it is restored.)"""
        before = {module: module.__dict__.get("forward") for module in self.left_out}
        for module, passes_on in self.left_out.items():
            module.forward = _instead(passes_on, self.returns[module])
        try:
            yield
        finally:
            for module, forward in before.items():
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward


def _instead(passes_on: bool, returns: int) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        x = x if passes_on else torch.zeros_like(x)
        return (x, *[None] * (returns - 1)) if returns else x

    return forward


@torch.inference_mode()
def values_returned(target: Target, kind: str, parts: tuple[str, ...]) -> dict[nn.Module, int]:
    """How many values each layer, and each of its ``parts``, returns as a tuple (0: it returns a tensor). Found by reading one token.

    ``kind``: the proposer, for errors. Raises UserError where the target's layers cannot be skipped.
    """
    check_kinds(target.config, f"proposer {kind}: {target.name}", drafts=True)
    if getattr(target.config, "num_kv_shared_layers", 0):
        raise UserError(f"proposer {kind}: layers of {target.name} share keys and values, none can be left out")
    modules: list[nn.Module] = []
    for layer in target.layers:
        if missing := [part for part in parts if not isinstance(getattr(layer, part, None), nn.Module)]:
            raise UserError(f"proposer {kind}: a layer of {target.name} ({type(layer).__name__}) has no part {missing[0]} to be left out")
        modules += [layer, *(getattr(layer, part) for part in parts)]
    found: dict[nn.Module, int] = {}

    def see(module: nn.Module, args: Any, out: Any) -> None:
        found[module] = len(out) if isinstance(out, tuple) else 0

    hooks = [module.register_forward_hook(see) for module in modules]
    try:
        target.body(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=target.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class Itself:
    """The proposer for self-speculation, under any tree policy."""

    taps: tuple[int, ...] = ()

    def __init__(self, drafter: SomeLayers) -> None:
        self.drafter = drafter

    def start(self, context: Context, tokens: int) -> None:
        """Begin a sequence. Raises UserError where its target is not the one that the drafter is made of."""
        if context.target is not self.drafter.target:
            raise UserError(f"a proposer made of the layers of {self.drafter.target.name} cannot serve {context.target.name}")
        self.context = context

    def absorb(self, roots: Roots) -> None:
        """Keep the last root. The drafter does not need the others, because the target's cache holds them."""
        self.root = roots[-1:]  # the cache only lacks the token chosen at it

    @torch.inference_mode()
    def propose(self, policy: TreePolicy, rng: CounterRNG, sampling: SamplingParams) -> Tree:
        """Grow the policy's tree after the rows of the target's cache, which stays as it is."""
        rule = policy.check(sampling.rule) if sampling.temperature > 0 else "top_plus_one"
        memory, warp = Borrowed(self.context, self.context.length), LogitsWarper.of([sampling], self.context.target.device)
        draft = self.drafter.begin(self.root, memory, MaskSees())
        return grow(self.drafter, draft, self.root.positions_BT, memory, policy, warp, rule, rng, hasty=True)
