"""How the training of one drafter is spread over the processes. Only this interface knows what each process holds.

ddp        every process holds all weights, gradients and moments. Gradients are averaged (torch's DistributedDataParallel, by accelerate)
zero1      as ddp, but moments are sharded: each process updates its pieces of the weights and broadcasts them (1910.02054, P_os)
fsdp       weights, gradients and moments are sharded; weights are gathered for the forward and backward pass (torch's ``fully_shard``)
deepspeed  DeepSpeed shards the moments, or gradients too, and keeps the moments on the CPU if wanted

Steps and checkpoints are the same as those of a single process. So a run may resume with another of these, and with another number of
processes. Muon orthogonalizes a matrix as a whole, so each of its matrices has one owner, which computes the whole update.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from headstart.heads.errors import UserError
from headstart.trainers.checkpoint import Parts, copied, moments_of
from headstart.trainers.learner import Learner
from headstart.trainers.optimizer import Optimizer, parameters

DDP: dict[str, Any] = {"name": "ddp"}
BUCKET = 1 << 26  # elements in a bucket of gradients under DeepSpeed, whose default takes 2 GB
Moments = Mapping[str, Tensor]  # "optimizer.parameter.name" -> moment of the whole parameter, numbered as in a single process


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


def spread(parallel: Mapping[str, Any], accelerator: Accelerator, learner: Learner, optimizers: Sequence[Optimizer]) -> Parallel:
    """Spread the learner and its optimizers as ``parallel`` (conf/parallel) says. Load weights before and ``restore`` moments afterwards.
    A single process always uses ``ddp``, except with DeepSpeed, which can keep the moments on the CPU.
    """
    name, how = parallel["name"], {k: v for k, v in parallel.items() if k != "name"}
    if name == "ddp" or (accelerator.num_processes == 1 and name != "deepspeed"):
        return Parallel(accelerator, learner, optimizers)
    module, kind = {"zero1": ("pieces", "Pieces"), "fsdp": ("sharded", "Sharded"), "deepspeed": ("zero", "Zero")}[name]
    made: Parallel = getattr(importlib.import_module(f"headstart.trainers.{module}"), kind)(accelerator, learner, optimizers, **how)
    return made


class Parallel:
    """``ddp``, and training in a single process. The other kinds override what differs."""

    name = "ddp"
    cuts_gradients = False  # whether each process holds a part of the gradients, not all of them

    def __init__(self, accelerator: Accelerator, learner: Learner, optimizers: Sequence[Optimizer]) -> None:
        self.accelerator, self.learner, self.optimizers = accelerator, learner, optimizers
        # parameters of each optimizer in the order in which a checkpoint numbers them
        self.order: list[list[Any]] = [parameters(x) for x in optimizers]
        self.wanted = [[{k: like.to("meta") for k, like in moments_of(x, p).items()} for p in order]
                       for x, order in zip(optimizers, self.order, strict=True)]  # fmt: skip
        self.checked = accelerator.num_processes == 1
        self.module: nn.Module = self._wrap()  # the wrapped learner, which is called with a batch

    def _wrap(self) -> nn.Module:
        module: nn.Module = self.accelerator.prepare(self.learner)
        return module

    # ---- a step ----

    def together(self, last: bool) -> AbstractContextManager[Any]:
        """Around the passes of a micro-batch: gradients are reduced over processes only with the ``last`` one of a step."""
        return nullcontext() if last else self.accelerator.no_sync(self.module)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a micro-batch's loss, which the caller has divided. Called within ``together``."""
        loss.backward()

    @property
    def trained(self) -> list[Tensor]:
        """The trained parameters, in the form in which this process holds them."""
        return [p for p in self.learner.trained.parameters() if p.requires_grad]

    def clip(self, most: float) -> float:
        """Scale the gradients down to the norm ``most`` (0: leave them). Returns the norm before, over the whole drafter. The first call
        also runs ``check``, which raises UserError.
        """
        if not self.checked:
            self.check()
            self.checked = True
        here = self.gradients()
        # in fp64: a sum in fp32 would round differently depending on how the gradients are sharded
        squares = sum((torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in here), torch.zeros((), dtype=torch.float64))
        squares = squares.to(self.accelerator.device)
        if self.cuts_gradients:
            squares = self.accelerator.reduce(squares, "sum")
        norm = float(squares.sqrt())
        if most and norm > most:
            self.scale(here, most / (norm + 1e-6))
        return norm

    def gradients(self) -> list[Tensor]:
        """The gradients, or with ``cuts_gradients`` the parts of them, that this process holds."""
        return [p.grad for p in self.trained if p.grad is not None]

    def scale(self, gradients: list[Tensor], by: float) -> None:
        """Multiply the gradients by ``by``."""
        for x in gradients:
            x.mul_(by)

    def step(self) -> None:
        """Run the optimizers' step, then drop the gradients."""
        for optimizer in self.optimizers:
            optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Drop the gradients of a step, whether it was taken or skipped. Those in the buckets of DistributedDataParallel become zero there:
        without them, the next gradients would be added up outside the buckets, in memory of their own.
        """
        kept = isinstance(self.module, DistributedDataParallel)
        for p in self.trained:
            p.grad = p.grad.zero_() if kept and p.grad is not None else None

    def drop(self) -> None:
        """End the training of this drafter, and free the device memory that it holds."""
        for p in self.learner.trained.parameters():
            p.grad = None
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self.module = self.learner  # drops the wrapper, which holds the process group
        self.learner.trained.to("cpu")

    def check(self) -> None:
        """In the first step, check that the processes really train together. After the backward pass all must have the same weights and
        the same gradients, although each has read other rows. Raises UserError in every process if not.
        """
        pairs = [(p.detach(), p.grad) for p in self.trained]
        here = torch.stack([x.sum(dtype=torch.float64) if x is not None else p.new_zeros((), dtype=torch.float64)
                            for p, grad in pairs for x in (p, grad)])  # fmt: skip
        all_PN = self.accelerator.gather(here[None].nan_to_num())
        if not (all_PN == all_PN[0]).all():
            self.refuse("after the first batch their weights or gradients differ")

    def refuse(self, why: str) -> None:
        """Raises UserError that this kind of ``parallel`` does not take effect."""
        world = self.accelerator.num_processes
        raise UserError(f"parallel={self.name} is not what runs in these {world} processes: {why}. Start them with torchrun, and with "
                        "no settings of accelerate's own (accelerate config, ACCELERATE_* variables), or take parallel=ddp")  # fmt: skip

    # ---- what is kept ----

    def snapshot(self) -> Parts:
        """Whole weights and moments for a checkpoint, copied to the first process's CPU; empty in the others. All processes call this."""
        weights = {k: whole for k, v in self.learner.trained.state_dict().items() if (whole := self.whole(v)) is not None}
        moments = {}
        for o, optimizer in enumerate(self.optimizers):
            for i, names in enumerate(self.wanted[o]):
                for name, x in self.moments(optimizer, o, i, names).items():
                    moments[f"{o}.{i}.{name}"] = copied(x)
        return {"drafter": weights, "optimizer": moments}

    def whole(self, x: Tensor) -> Tensor | None:
        """A whole weight, copied to the CPU of the first process; None in the others."""
        return copied(x) if self.accelerator.is_main_process else None

    def moments(self, optimizer: Optimizer, o: int, i: int, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole moments of the i-th parameter of optimizer ``o`` in the first process; {} in the others. ``names``: name -> a tensor
        of the same shape and dtype. A parameter that never had a gradient has no moments.
        """
        if not self.accelerator.is_main_process:
            return {}
        return dict(optimizer.state.get(self.order[o][i], {}))

    def restore(self, moments: Moments) -> None:
        """Restore the moments that ``snapshot`` returned, possibly in a run with another ``parallel``."""
        for o, optimizer in enumerate(self.optimizers):
            set_moments(optimizer, ((p, self.given(moments, o, i)) for i, p in enumerate(self.order[o])))

    def given(self, moments: Moments, o: int, i: int) -> dict[str, Tensor]:
        """The entries of ``moments`` for the i-th parameter of optimizer ``o``, by name."""
        return {name: moments[key] for name in self.wanted[o][i] if (key := f"{o}.{i}.{name}") in moments}

    def close(self) -> None:
        """End the training: release the process group and leave the whole drafter in the first process. All processes call this."""
        self.module = self.learner


def set_moments(optimizer: Optimizer, moments: Iterable[tuple[Tensor, Mapping[str, Tensor]]]) -> None:
    """Load moments into an optimizer. ``moments``: parameters that it updates, in any order, each with its moments by name."""
    number = {id(p): i for i, p in enumerate(parameters(optimizer))}
    known = {number[id(p)]: dict(own) for p, own in moments if own}
    optimizer.load_state_dict({"state": known, "param_groups": optimizer.state_dict()["param_groups"]})


def replace_parameters(optimizer: Optimizer, new: Mapping[int, Tensor]) -> None:
    """Let an optimizer update other tensors. ``new``: the number of a parameter -> the tensor to update in its place. Parameters whose
    number is not in ``new`` are no longer updated by this process.
    """
    numbers = itertools.count()
    for group in optimizer.param_groups:
        group["params"] = [new[i] for i in itertools.islice(numbers, len(group["params"])) if i in new]


def owners(sizes: Sequence[int], world: int) -> list[int]:
    """For each size the process that gets it, so that all processes get about the same total. The largest size comes first; each goes to
    the process that has least so far.
    """
    has, found = [0] * world, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        found[i] = has.index(min(has))
        has[found[i]] += sizes[i]
    return found


def to_first(accelerator: Accelerator, owner: int, x: Tensor | None, like: Tensor) -> Tensor | None:
    """Send a moment from process ``owner`` to the first process. Returns it there on the CPU, elsewhere None. ``like`` has its shape and
    dtype, perhaps on the meta device. Both processes must call this. If the owner has none yet (no step was taken), zeros are sent, with
    which optimizers begin.
    """
    rank, device = accelerator.process_index, accelerator.device
    if rank == owner and x is None:
        x = torch.zeros(like.shape, dtype=like.dtype, device=device)
    if x is not None and rank == owner == 0:
        return x.detach().cpu()
    if x is not None and rank == owner:
        _exchange(dist.P2POp(dist.isend, x.detach().to(device).contiguous(), 0))
    elif rank == 0:
        found = torch.empty(like.shape, dtype=like.dtype, device=device)
        _exchange(dist.P2POp(dist.irecv, found, owner))
        return found.cpu()
    return None


def _exchange(one: dist.P2POp) -> None:
    """Send or receive. As a batch of one: NCCL warns of single operations, and may open a communicator for each pair of processes."""
    for work in dist.batch_isend_irecv([one]):
        work.wait()
