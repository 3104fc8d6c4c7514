"""``parallel=fsdp``: torch's FSDP2. Each matrix that Muon updates has an owner process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import SUPPORTED_NODES, register_dataclass

from headstart.trainers.losses import LossOut
from headstart.trainers.optimizer import Optimizer
from headstart.trainers.parallel import Moments, Parallel, owners, replace_parameters, set_moments, to_first


class Sharded(Parallel):
    """``fsdp``: torch's FSDP2. A step runs a drafter's few layers once per depth, so all of them are gathered together, once. If the
    drafter is a whole language model, its layers are gathered one by one as they run.
    """

    name = "fsdp"
    cuts_gradients = True

    def _wrap(self) -> nn.Module:
        if LossOut not in SUPPORTED_NODES:  # else FSDP would find no tensors in the output and reduce no gradients
            register_dataclass(LossOut)
        accelerator, learner = self.accelerator, self.learner
        accelerator.prepare_model(learner, evaluation_mode=True)  # moves it to the device and sets its precision
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        name_of = {id(p): name for name, p in learner.named_parameters()}
        names = [[name_of[id(p)] for p in order] for order in self.order]
        for unit in units(learner):
            fully_shard(unit, mesh=mesh)
        fully_shard(learner, mesh=mesh)
        shards = dict(learner.named_parameters())
        self.order = [[shards[name] for name in each] for each in names]
        rank, world = accelerator.process_index, accelerator.num_processes
        self.owner: dict[int, list[int]] = {}  # number of a Muon optimizer -> owner of each parameter
        # number of a Muon optimizer -> number of a parameter that this process owns -> the whole parameter, filled during a step
        self.own: dict[int, dict[int, nn.Parameter]] = {}
        for o, (optimizer, order) in enumerate(zip(self.optimizers, self.order, strict=True)):
            updated: dict[int, Any] = dict(enumerate(order))
            if isinstance(optimizer, torch.optim.Muon):
                self.owner[o] = owners([p.numel() for p in order], world)
                mine = [i for i, owner in enumerate(self.owner[o]) if owner == rank]
                updated = self.own[o] = {i: nn.Parameter(torch.empty(0, dtype=order[i].dtype, device=accelerator.device)) for i in mine}
            replace_parameters(optimizer, updated)
        return learner

    def gradients(self) -> list[Tensor]:
        """The gradient shards of this process."""
        return [p.grad.to_local() for p in self.trained if isinstance(p.grad, DTensor)]

    def together(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are reduced with every micro-batch. Otherwise each process would have to hold whole ones until the last."""
        return nullcontext()

    def check(self) -> None:
        """Check that every weight and gradient is sharded over all processes. Raises UserError in every process if not."""
        bad = [not isinstance(p, DTensor) or p.device_mesh.size() != self.accelerator.num_processes or not isinstance(p.grad, DTensor)
               for p in self.trained]  # fmt: skip
        if self.accelerator.reduce(torch.tensor(float(any(bad)), device=self.accelerator.device), "sum"):
            self.refuse("after the first batch weights or gradients are not shared out")

    def step(self) -> None:
        """Each process updates its shards. Muon's matrices are gathered, updated by their owners, and sharded again."""
        for o, own in self.own.items():
            for i, p in enumerate(self.order[o]):
                weight, grad = p.detach().full_tensor(), p.grad.full_tensor()
                if i in own:
                    own[i].data, own[i].grad = weight, grad
                p.grad = None
        super().step()
        for o, own in self.own.items():
            for i, (p, owner) in enumerate(zip(self.order[o], self.owner[o], strict=True)):
                moved = own[i].data if i in own else torch.empty(p.shape, dtype=p.dtype, device=p.device)
                shard = distribute_tensor(moved, p.device_mesh, p.placements, src_data_rank=owner)
                p.detach().to_local().copy_(shard.to_local())
                if i in own:
                    own[i].data, own[i].grad = moved.new_empty(0), None

    def whole(self, x: Tensor) -> Tensor | None:
        """As in ``Parallel``; all processes take part in gathering the shards."""
        return super().whole(x.full_tensor() if isinstance(x, DTensor) else x)

    def moments(self, optimizer: Optimizer, o: int, i: int, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor | None]
        if o in self.own:
            own = self.own[o].get(i)
            state = {} if own is None else optimizer.state[own]
            found = {k: to_first(self.accelerator, self.owner[o][i], state.get(k), like) for k, like in names.items()}
        else:
            found = {k: self.whole(torch.as_tensor(x)) for k, x in optimizer.state.get(self.order[o][i], {}).items()}
        return {k: x for k, x in found.items() if x is not None}

    def restore(self, moments: Moments) -> None:
        """Each process takes its shards of the moments."""
        for o, optimizer in enumerate(self.optimizers):
            mine = self.own.get(o, dict(enumerate(self.order[o])))
            set_moments(optimizer, ((p, {k: _as_shard(x, p) for k, x in self.given(moments, o, i).items()}) for i, p in mine.items()))

    def close(self) -> None:
        """Turn the sharded modules back into plain ones, so that nothing holds the process group. Then the first process has whole weights,
        the others have empty ones.
        """
        for module in self.learner.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        shards = {id(p): p for p in self.learner.parameters()}
        whole = {key: torch.empty(0) if (x := self.whole(p)) is None else x for key, p in shards.items()}
        plain = {key: nn.Parameter(whole[key], p.requires_grad) for key, p in shards.items()}
        for module in self.learner.modules():
            module._parameters.update({name: plain[id(p)] for name, p in module._parameters.items() if p is not None})
            for hooks in (
                module._forward_pre_hooks,
                module._forward_hooks,
                module._state_dict_pre_hooks,
                module._load_state_dict_pre_hooks,
            ):
                for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook).__module__.startswith("torch.distributed.")]:
                    del hooks[key]
            if isinstance(module, FSDPModule):
                module.__class__ = type(module).__mro__[2]  # FSDP's class and FSDPModule come before the original
                for name in [name for name in vars(module) if name.startswith("__composable_api")]:
                    delattr(module, name)
        for optimizer in self.optimizers:
            optimizer.state.clear()
            optimizer.param_groups.clear()
        self.order, self.own = [], {}
        super().close()


def _as_shard(x: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor) or not x.ndim:
        return x
    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def units(learner: nn.Module) -> list[nn.Module]:
    """The modules that FSDP gathers one by one: the layers of a drafter that is a transformers model."""
    kinds = {name for m in learner.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    return [m for m in learner.modules() if type(m).__name__ in kinds]
