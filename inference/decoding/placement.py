"""Where a target is loaded from (folders, the hub), and on which devices it is placed."""

from __future__ import annotations

import atexit
import functools
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headstart.heads.errors import UserError, first_line
from headstart.heads.kinds import check_kinds, model_class
from headstart.heads.stored import check_model, named
from headstart.inference.decoding.meeting import meet

LOADING = 7200.0  # seconds within which all processes must have loaded their shards: disks and machines differ in speed
SHARED = re.compile(r"tp(:[1-9]\d*)?|fsdp")


def is_sharded(device: str) -> bool:
    """Whether this setting shards the target's layers over several processes."""
    return bool(SHARED.fullmatch(device))


def tensor_size(device: str) -> int:
    """How many neighboring processes compute every layer together: all for ``tp``, four for ``tp:4``, one for anything else."""
    if not is_sharded(device) or device == "fsdp":
        return 1
    return int(device.partition(":")[2] or processes())


def is_main() -> bool:
    """Whether this is the first of the run's processes, which prints for all. Works before torch.distributed is initialized."""
    return int(os.environ.get("RANK", 0)) == 0


def say(line: str) -> None:
    """Print a line once for all processes of a run. (``accelerator.print`` prints it once on every machine.)"""
    if is_main():
        print(line, flush=True)


def processes() -> int:
    """How many processes the run has, from torchrun's WORLD_SIZE."""
    return int(os.environ.get("WORLD_SIZE", 1))


def placement(device: str, config: Any) -> dict[str, Any]:
    """The arguments that make ``from_pretrained`` place a model. (It is placed at loading: a quantized model cannot be moved afterwards.)

    ``config``: the model's; with several groups its ``base_model_fsdp_plan`` is set. Where the layers are sharded, groups of neighboring
    processes compute each layer together. The weights are divided among the groups, and each layer is gathered when a pass reaches it.
    The processes meet here then.
    """
    if is_sharded(device):
        from transformers.distributed import DistributedConfig

        _check_heads(device, config.get_text_config())
        meet(torch.device(check_device("auto")), LOADING)
        atexit.register(_leave)  # otherwise the process group's threads outlive the interpreter
        tensor = tensor_size(device)
        groups = processes() // tensor
        how = {"tp_plan": "auto", "tp_size": tensor} if tensor > 1 else {}
        if groups > 1:
            config.base_model_fsdp_plan = _gathered(config)
        return {"distributed_config": DistributedConfig(**how, fsdp_size=groups), "config": config}
    return {"device_map": "auto" if device == "map" else {"": device}}


def wait_for_all(device: str) -> None:
    """Wait until every process of a sharded target has loaded its part, for at most LOADING. The groups that transformers makes among them
    have a shorter timeout (10 minutes with NCCL), which a first pass would exceed where machines read files at different speeds.
    """
    if is_sharded(device):
        torch.distributed.barrier()


def _check_heads(device: str, config: Any) -> None:
    """Raises UserError where tensor parallelism would cut through a head of attention."""
    among, plan = tensor_size(device), getattr(config, "base_model_tp_plan", None) or {}
    if not any(name.endswith(".k_proj") and how == "colwise" for name, how in plan.items()):
        return
    for key in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, key, None)
        if count and count % among:
            raise UserError(f"target.device={device}: {among} processes cannot share {key}={count} equally: take tp:N with a number that "
                            "divides it, or fsdp")  # fmt: skip


def _gathered(config: Any) -> dict[str, str]:
    """The modules that are gathered one at a time, as a pass reaches them: each layer, and the modules before and after the layers."""
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    decoder, found = model.get_decoder(), {}
    inside = next(name for name, m in model.base_model.named_modules() if m is decoder)
    for name, child in decoder.named_children():
        if any(True for _ in child.parameters()):
            found[f"{inside}.{name}".lstrip(".") + ".*" * isinstance(child, nn.ModuleList)] = "free_full_weight"
    return found


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        time.sleep(0.1)  # its threads may still hold Python's tensors; freeing one later would end the process with SIGABRT


def check_device(device: str, key: str = "target.device") -> str:
    """The device with ``auto`` resolved (to the GPU of this process, else the CPU). Raises UserError for a device that cannot be used."""
    if device == "auto":
        return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    sharded = key == "target.device" and is_sharded(device)
    if sharded and processes() < 2:
        raise UserError(
            f"target.device={device} shares every layer between processes: start them with torchrun --nproc-per-node=GPUS -m inference ..."
        )
    if sharded and processes() % tensor_size(device):
        raise UserError(f"target.device={device}: {processes()} processes are not groups of {tensor_size(device)}")
    try:
        if not sharded and (device != "map" or key != "target.device"):
            torch.zeros(0, device=device)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"{key}={device} is not usable here: {first_line(e)}") from None
    return device


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 in hardware. On others (CPUs with AVX2 alone; GPUs before Ampere,
    which emulate it) a product takes several times as long as in fp32."""
    return torch.cuda.is_bf16_supported(including_emulation=False) if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()


@functools.cache  # a process that decided twice could take its config from the hub and its weights from the cache
def hub_answers() -> bool:
    """Whether the hub can be reached. If not, only downloaded files are used, instead of trying the hub again and again for a minute."""
    from huggingface_hub import constants, get_session

    for _ in range(2):  # one answer may be slow or lost, as when all processes of a cluster ask at once
        with suppress(Exception):  # offline by setting, no network, no DNS, a proxy that refuses: each raises another type
            get_session().head(constants.ENDPOINT, timeout=5)
            return True
    return False


def check_config(config: Any, attention: str, path: str) -> None:
    """Raises UserError for a model that cannot be a target by its kind, and where ``sdpa`` would leave out a part of its attention.
    (transformers 5.23 refuses the latter too, 5.19 does not.)
    """
    if model_class(config) is None:
        raise UserError(f"target {path}: transformers has no language model for models of kind {config.model_type}: take another target")
    check_kinds(config.get_text_config(), path)
    if attention == "sdpa" and getattr(config.get_text_config(), "attn_logit_softcapping", None):
        raise UserError(f"target {path} caps its attention scores, which target.attention=sdpa leaves out: take target.attention=eager")


def check_folder(path: str) -> None:
    """Raises UserError naming what a local target folder lacks, or which part of it cannot be read. A hub id is not checked here."""
    folder = Path(path)
    try:
        if not folder.is_dir():
            if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not folder.parent.exists():
                return
            if folder.is_file():
                raise UserError(f"target folder {named(path)} is a file: give its folder in target.path, or a hub id (owner/name)")
            raise UserError(f"target folder {named(path)} does not exist: set target.path to a model folder or a hub id (owner/name)")
        wanted = {"config.json": ["config.json"], "tokenizer": ["tokenizer.json", "tokenizer.model", "vocab.json"]}
        for what, names in wanted.items():
            if not any((folder / n).is_file() for n in names):
                raise UserError(f"target folder {path} has no {what}: expected {' or '.join(names)}")
    except OSError as e:  # a name that no file system takes, a folder that may not be read
        raise UserError(f"target folder {named(path)} cannot be read ({e.strerror}): set target.path to another") from None
    try:
        check_model(folder)
    except UserError as e:
        raise UserError(f"target {path} cannot be loaded: {e}") from None
