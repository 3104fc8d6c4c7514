"""How the training of one drafter is spread over the processes: the one place that knows what each of them holds.

ddp        every process holds all: weights, gradients, moments. Gradients are averaged (torch's DistributedDataParallel, by accelerate)
zero1      the same, but the moments are shared out: each process moves its pieces of the weights and tells the others (1910.02054)
fsdp       weights, gradients and moments are shared out; the weights are gathered while a batch passes (torch's ``fully_shard``)
deepspeed  moments, or gradients too, are shared out by DeepSpeed, with the moments on the CPU if wanted

Steps and checkpoints are those of one process: a run may go on in another way, and with another number of processes. Muon makes a
matrix orthogonal as a whole, so a matrix of Muon's has one owner, which computes all of its update.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from headstart.heads.errors import UserError
from headstart.trainers.checkpoint import Parts, copied, moments_of
from headstart.trainers.learner import Learner
from headstart.trainers.optimizer import Optimizer

DDP: dict[str, Any] = {"name": "ddp"}
BUCKET = 1 << 26  # numbers of gradients that travel together under DeepSpeed, whose default is 2 GB of them
Moments = Mapping[str, Tensor]  # "optimizer.parameter.name" -> of the whole parameter, numbered as one process has them


def check_parallel(parallel: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises UserError for arms (name -> head, loss, trainer) that this ``parallel`` cannot train, saying what to take instead."""
    name = parallel["name"]
    for arm in own.values():
        if name in ("fsdp", "deepspeed") and arm["trainer"]["lora"] is not None:
            raise UserError(f"parallel={name} shares out the drafter alone, trainer.lora trains the target too: take parallel=zero1")
        if name in ("fsdp", "deepspeed") and arm["loss"]["on_policy"]:
            raise UserError(f"parallel={name}: loss.on_policy decodes with the drafter in each process by itself: take parallel=zero1")
        if name == "deepspeed" and arm["trainer"]["optimizer"] != "adamw":
            raise UserError("parallel=deepspeed cuts matrices up, which Muon moves as a whole: trainer.optimizer=adamw, or parallel=zero1")
    if name == "deepspeed" and len(own) > 1:
        raise UserError("parallel=deepspeed trains one drafter: for several arms take parallel=zero1 or fsdp")
    if name == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise UserError("parallel=deepspeed needs the package deepspeed, which is not installed: install it, or take parallel=fsdp")


def spread(parallel: Mapping[str, Any], accelerator: Accelerator, learner: Learner, optimizers: Sequence[Optimizer]) -> Parallel:
    """The learner and its optimisers, spread as ``parallel`` (of conf/parallel) says. Weights may have been loaded before; moments
    are ``restore``d afterwards. One process holds all whatever is asked for, but for what DeepSpeed can put on the CPU.
    """
    name, how = parallel["name"], {k: v for k, v in parallel.items() if k != "name"}
    if name == "ddp" or (accelerator.num_processes == 1 and name != "deepspeed"):
        return Parallel(accelerator, learner, optimizers)
    module, kind = {"zero1": ("pieces", "Pieces"), "fsdp": ("sharded", "Sharded"), "deepspeed": ("zero", "Zero")}[name]
    made: Parallel = getattr(importlib.import_module(f"headstart.trainers.{module}"), kind)(accelerator, learner, optimizers, **how)
    return made


class Parallel:
    """``ddp``, and one process alone."""

    name = "ddp"

    def __init__(self, accelerator: Accelerator, learner: Learner, optimizers: Sequence[Optimizer]) -> None:
        self.accelerator, self.learner, self.optimizers = accelerator, learner, optimizers
        # parameters as a checkpoint numbers them
        self.order: list[list[Any]] = [[p for group in x.param_groups for p in group["params"]] for x in optimizers]
        self.wanted = [[{k: like.to("meta") for k, like in moments_of(x, p).items()} for p in order]
                       for x, order in zip(optimizers, self.order, strict=True)]  # fmt: skip
        self.checked = accelerator.num_processes == 1
        self.module: nn.Module = self._wrap()  # what a batch passes through

    def _wrap(self) -> nn.Module:
        module: nn.Module = self.accelerator.prepare(self.learner)
        return module

    # ---- a step ----

    def together(self, last: bool) -> AbstractContextManager[Any]:
        """Around the pass of a micro-batch: gradients travel with the ``last`` one of a step alone."""
        return nullcontext() if last else self.accelerator.no_sync(self.module)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a micro-batch's loss, which is divided already. Called within ``together``."""
        loss.backward()

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that are trained, in the form in which this process holds them."""
        return [p for p in self.learner.trained.parameters() if p.requires_grad]

    def clip(self, most: float) -> float:
        """Scale the gradients down to this norm (0: leave them); returns what it was, of the whole drafter."""
        if not self.checked:
            self.check()
            self.checked = True
        here = self.gradients()
        # in float64: summed in fp32, its rounding would hang on how the gradients are cut
        squares = sum((torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in here), torch.zeros((), dtype=torch.float64))
        norm = float(self.over_all(squares.to(self.accelerator.device)).sqrt())
        if most and norm > most:
            self.scale(here, most / (norm + 1e-6))
        return norm

    def gradients(self) -> list[Tensor]:
        """The gradients, or parts of them, that this process holds."""
        return [p.grad for p in self.trained if p.grad is not None]

    def over_all(self, x: Tensor) -> Tensor:
        """``x`` summed over the processes where each holds a part of the gradients, else ``x`` itself."""
        return x

    def scale(self, gradients: list[Tensor], by: float) -> None:
        """Multiply the gradients by ``by``."""
        for x in gradients:
            x.mul_(by)

    def step(self) -> None:
        """The optimisers' step; the gradients are gone after it."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Drop the gradients of a step, whether it was taken or skipped."""
        for p in self.trained:
            p.grad = None

    def drop(self) -> None:
        """End the training of this drafter, and free the device memory that it holds."""
        for p in self.learner.trained.parameters():
            p.grad = None
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self.module = self.learner  # what held the group of processes goes
        self.learner.trained.to("cpu")

    def check(self) -> None:
        """In the first step, check that the processes really train together: after the backward pass all of them must have the same
        gradients, though each has read other rows, and the same weights. Raises UserError in every process.
        """
        pairs = [(p.detach(), p.grad) for p in self.trained]
        here = torch.stack([x.sum(dtype=torch.float64) if x is not None else p.new_zeros((), dtype=torch.float64)
                            for p, grad in pairs for x in (p, grad)])  # fmt: skip
        all_PN = self.accelerator.gather(here[None].nan_to_num())
        if not (all_PN == all_PN[0]).all():
            self.refuse("after the first batch their weights or gradients differ")

    def refuse(self, why: str) -> None:
        world = self.accelerator.num_processes
        raise UserError(f"parallel={self.name} is not what runs in these {world} processes: {why}. Start them with torchrun, and with "
                        "no settings of accelerate's own (accelerate config, ACCELERATE_* variables), or take parallel=ddp")  # fmt: skip

    # ---- what is kept ----

    def snapshot(self) -> Parts:
        """Weights and moments for a checkpoint, as copies of the first process; empty in the others. Called by all of them."""
        weights = {k: whole for k, v in self.learner.trained.state_dict().items() if (whole := self.whole(v)) is not None}
        moments = {}
        for o, optimizer in enumerate(self.optimizers):
            for i, names in enumerate(self.wanted[o]):
                for name, x in self.moments(optimizer, o, i, names).items():
                    moments[f"{o}.{i}.{name}"] = copied(x)
        return {"drafter": weights, "optimizer": moments}

    def whole(self, x: Tensor) -> Tensor | None:
        """A weight on the CPU of the first process; None in the others."""
        return copied(x) if self.accelerator.is_main_process else None

    def moments(self, optimizer: Optimizer, o: int, i: int, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The moments of the i-th parameter of optimiser ``o``, whole, in the first process; {} in the others. ``names``: name -> a tensor
        of the shape and dtype. A parameter that never had a gradient has none.
        """
        if not self.accelerator.is_main_process:
            return {}
        return {k: torch.as_tensor(x).cpu().contiguous() for k, x in optimizer.state.get(self.order[o][i], {}).items()}

    def restore(self, moments: Moments) -> None:
        """Take over the moments that ``snapshot`` gave, here or in a run with another ``parallel``."""
        for o, optimizer in enumerate(self.optimizers):
            put(optimizer, {i: self.given(moments, o, i) for i in range(len(self.wanted[o]))})

    def given(self, moments: Moments, o: int, i: int) -> dict[str, Tensor]:
        """Those of ``moments`` that belong to the i-th parameter of optimiser ``o``."""
        return {name: moments[key] for name in self.wanted[o][i] if (key := f"{o}.{i}.{name}") in moments}

    def close(self) -> None:
        """Training is over: nothing of the group of processes is held any more, and the first process has the whole drafter.
        Called by all of them.
        """
        self.module = self.learner


def put(optimizer: Optimizer, state: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Put moments into an optimiser. ``state``: the number of a parameter -> name -> moment."""
    known = {i: dict(moments) for i, moments in state.items() if moments}
    optimizer.load_state_dict({"state": known, "param_groups": optimizer.state_dict()["param_groups"]})


def owners(sizes: Sequence[int], world: int) -> list[int]:
    """For each size the process that gets it, so that all have about as much: the largest first, each to the process that has least."""
    has, found = [0] * world, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        found[i] = has.index(min(has))
        has[found[i]] += sizes[i]
    return found


def to_first(accelerator: Accelerator, owner: int, x: Tensor | None, like: Tensor) -> Tensor | None:
    """Send a tensor of process ``owner`` to the first process. Returns it on the CPU there, None elsewhere. ``like`` has its shape and
    dtype. Called by both processes.
    """
    rank, device = accelerator.process_index, accelerator.device
    if rank == owner == 0:
        assert x is not None
        return x.detach().cpu()
    if rank == owner:
        assert x is not None
        dist.send(x.detach().to(device).contiguous(), 0)
    elif rank == 0:
        found = torch.empty(like.shape, dtype=like.dtype, device=device)
        dist.recv(found, owner)
        return found.cpu()
    return None
