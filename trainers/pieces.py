"""``parallel=zero1``: each process updates its own pieces of the weights and broadcasts them to the others (1910.02054, P_os)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from headstart.trainers.learner import Learner
from headstart.trainers.optimizer import Optimizer
from headstart.trainers.parallel import Moments, Parallel, owners, replace_parameters, set_moments, to_first


class Piece(NamedTuple):
    """The rows of a parameter (``...``: all of it) that one process updates."""

    owner: int
    rows: Any


class Pieces(Parallel):
    """``zero1``: the optimizer of each process updates its own pieces, which share their memory with the parameters."""

    name = "zero1"
    LEAST = 1 << 16  # elements of the smallest parameter that is cut into pieces

    def __init__(self, accelerator: Accelerator, learner: Learner, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(accelerator, learner, optimizers)
        rank, world = accelerator.process_index, accelerator.num_processes
        cut = {id(p) for optimizer, order in zip(optimizers, self.order, strict=True) for p in order
               if not isinstance(optimizer, torch.optim.Muon) and p.numel() >= self.LEAST and len(p) >= world}  # fmt: skip
        whole = [p for order in self.order for p in order if id(p) not in cut]
        owner = dict(zip(map(id, whole), owners([p.numel() for p in whole], world), strict=True))
        self.pieces = [[_cut(p, world) if id(p) in cut else [Piece(owner[id(p)], ...)] for p in order] for order in self.order]
        # per optimizer: number of a parameter -> the rows that this process updates, and their piece of the parameter
        self.own: list[dict[int, tuple[Any, nn.Parameter]]] = []
        for order, pieces, optimizer in zip(self.order, self.pieces, optimizers, strict=True):
            mine = {i: piece.rows for i, several in enumerate(pieces) for piece in several if piece.owner == rank}
            self.own.append({i: (rows, nn.Parameter(order[i].data[rows])) for i, rows in mine.items()})
            replace_parameters(optimizer, {i: piece for i, (_, piece) in self.own[-1].items()})

    def step(self) -> None:
        """Each process updates its pieces and broadcasts them to the others."""
        for order, own, optimizer in zip(self.order, self.own, self.optimizers, strict=True):
            for i, (rows, piece) in own.items():
                grad = order[i].grad
                piece.grad = None if grad is None else grad[rows]
            optimizer.step()
            for _, piece in own.values():
                piece.grad = None
        self.forget()
        sent = [dist.broadcast(p.data[piece.rows], piece.owner, async_op=True)
                for order, pieces in zip(self.order, self.pieces, strict=True)
                for p, several in zip(order, pieces, strict=True) for piece in several]  # fmt: skip
        for each in sent:
            each.wait()

    def moments(self, optimizer: Optimizer, o: int, i: int, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The moments of a parameter, concatenated from the processes that update its pieces."""
        own = self.own[o].get(i)
        state = {} if own is None else optimizer.state[own[1]]
        found: dict[str, Tensor] = {}
        for name, like in names.items():
            pieces = self.pieces[o][i] if like.ndim else [Piece(self.pieces[o][i][0].owner, ...)]  # a step count is the same in all pieces
            parts = [to_first(self.accelerator, piece.owner, state.get(name), like[piece.rows]) for piece in pieces]
            whole = [part for part in parts if part is not None]
            if whole:
                found[name] = torch.cat(whole) if like.ndim else whole[0]
        return found

    def restore(self, moments: Moments) -> None:
        """Each process takes the moments of its own pieces."""
        for o, optimizer in enumerate(self.optimizers):
            own = []
            for i, (rows, piece) in self.own[o].items():
                whole = self.given(moments, o, i)
                own.append((piece, {name: x[rows].clone() if x.ndim else x for name, x in whole.items()}))
            set_moments(optimizer, own)


def _cut(p: Tensor, world: int) -> list[Piece]:
    ends = [len(p) * r // world for r in range(world + 1)]
    return [Piece(r, slice(ends[r], ends[r + 1])) for r in range(world)]
