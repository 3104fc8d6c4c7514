"""``parallel=deepspeed``: DeepSpeed's ZeRO-1 and 2. (``parallel=fsdp`` shards the weights too.)

DeepSpeed's optimizer updates one flat partition of the parameters of each group. The moments of a single parameter are read and written
through the addresses that DeepSpeed attaches to it (``_hp_mapping``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import patch_environment
from torch import Tensor, nn

from headstart.trainers.learner import Learner
from headstart.trainers.optimizer import Optimizer
from headstart.trainers.parallel import BUCKET, Moments, Parallel


class Zero(Parallel):
    """``deepspeed``. ``stage``: 1 shards the moments, 2 the gradients too. ``offload``: moments and optimizer step are on the CPU."""

    name = "deepspeed"
    cuts_gradients = True

    def __init__(self, accelerator: Accelerator, learner: Learner, optimizers: Sequence[Optimizer], stage: int, offload: bool) -> None:
        self.stage, self.offload = stage, offload
        super().__init__(accelerator, learner, optimizers)

    def _wrap(self) -> nn.Module:
        device = self.accelerator.device
        if device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        deepspeed.logger.setLevel("WARNING")
        if not dist.is_initialized():  # a single process (used for its offload)
            dist.init_process_group("gloo" if device.type == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else "nccl")
        self.accelerator.prepare_model(self.learner, evaluation_mode=True)  # moves it to the device and sets its precision
        (self.optimizer,) = self.optimizers
        self.optimizer.param_groups[:] = [group for group in self.optimizer.param_groups if group["params"]]
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device.type == "cuda"}
        settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
        settings |= {"zero_allow_untested_optimizer": True, "steps_per_print": 1 << 40}
        if self.accelerator.mixed_precision == "bf16":
            # no modules: DeepSpeed would add up the gradients of theirs in bf16
            settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        what: dict[str, Any] = {"model": self.learner, "optimizer": self.optimizer, "config": settings, "dist_init_required": False}
        with patch_environment(LOCAL_RANK=device.index or 0 if device.type == "cuda" else self.accelerator.local_process_index):
            # DeepSpeed requires LOCAL_RANK, which a single process lacks, and uses the GPU of that number
            self.engine: Any = deepspeed.initialize(**what)[0]
        module: nn.Module = self.engine
        return module

    def together(self, last: bool) -> AbstractContextManager[Any]:
        """Tell DeepSpeed whether this is the ``last`` micro-batch of a step; otherwise it would count them itself."""
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def clip(self, most: float) -> float:
        self.engine.optimizer.clip_grad = most
        return super().clip(most)

    def gradients(self) -> list[Tensor]:
        """The gradient fragments of this process."""
        if self.offload and self.accelerator.device.type == "cuda":  # their copies to the CPU may still be running
            torch.cuda.synchronize(self.accelerator.device)
        mine: list[Any] = [p for p in self.trained if p._hp_mapping is not None]  # type: ignore[attr-defined]
        return [p._hp_mapping.get_lp_grad_fragment(p._index_in_param_group) for p in mine]

    def scale(self, gradients: list[Tensor], by: float) -> None:
        """Nothing: DeepSpeed scales the gradients within its step."""

    def step(self) -> None:
        """DeepSpeed's step, which also clips and drops the gradients."""
        self.engine.step()

    def forget(self) -> None:
        zero = self.engine.optimizer  # what follows is what DeepSpeed does after an overflow
        zero.zero_grad(set_to_none=True)
        if self.offload:
            return zero.reset_cpu_buffers()
        for there in (zero.averaged_gradients, zero.all_grad_tensors):
            there.update(dict.fromkeys(there))

    def check(self) -> None:
        """Check that the fragments of all processes make up all parameters. Raises UserError in every process if not."""
        addresses: list[Any] = [p._hp_mapping for p in self.trained]  # type: ignore[attr-defined]
        pieces = sum(there.lp_fragment_address.numel for there in addresses if there is not None)
        held = self.accelerator.reduce(torch.tensor(pieces, device=self.accelerator.device), "sum")
        if self.engine.world_size != self.accelerator.num_processes or held != sum(p.numel() for p in self.trained):
            self.refuse("after the first batch its moments are not shared out")

    def moments(self, optimizer: Optimizer, o: int, i: int, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
        p: Any = self.order[o][i]
        flat = self._flat(p)
        found = {}
        for name, like in names.items():
            if not like.ndim:
                found[name] = torch.as_tensor(optimizer.state[flat][name]).cpu().clone()  # a step count, shared by the whole group
                continue
            whole = torch.zeros(like.shape, dtype=like.dtype, device=self.accelerator.device)
            if (own := _fragment(p)) is not None:
                in_whole, in_flat = own
                whole.flatten()[in_whole] = optimizer.state[flat][name][in_flat]
            dist.reduce(whole, 0)
            found[name] = whole.cpu()
        return found if self.accelerator.is_main_process else {}

    def _flat(self, p: Tensor) -> Tensor:
        """This process's flat partition of the parameter's group: the tensor under which the optimizer keeps its state."""
        group = next(g for g, group in enumerate(self.engine.optimizer.bit16_groups) if any(p is q for q in group))
        flat: Tensor = self.engine.optimizer.single_partition_of_fp32_groups[group]
        return flat

    def restore(self, moments: Moments) -> None:
        (order,), (wanted,) = self.order, self.wanted
        p: Any
        for i, (p, names) in enumerate(zip(order, wanted, strict=True)):
            flat = self._flat(p)
            for name, like in names.items():
                if (x := moments.get(f"0.{i}.{name}")) is None:
                    continue
                state = self.optimizer.state[flat]
                if not like.ndim:
                    state[name] = x.to(flat.device)
                    continue
                moment = state.setdefault(name, torch.zeros_like(flat))
                if (own := _fragment(p)) is not None:
                    in_whole, in_flat = own
                    moment[in_flat] = x.flatten()[in_whole].to(flat.device)

    def close(self) -> None:
        super().close()
        self.engine.destroy()


def _fragment(p: Any) -> tuple[slice, slice] | None:
    """The part of a parameter that this process updates: its place in the flattened parameter, and in the flat partition. None: no part."""
    if p._hp_mapping is None:
        return None
    in_whole, in_flat = p._hp_mapping.lp_fragment_address, p._hp_mapping.hp_fragment_address
    return slice(in_whole.start, in_whole.start + in_whole.numel), slice(in_flat.start, in_flat.start + in_flat.numel)
