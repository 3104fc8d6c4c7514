"""Checkpoints of a run: everything an exact resume needs, in safetensors and JSON, written at once or not at all.

RUN/checkpoints/step-00000100/: drafter.safetensors (fp32 master weights), optimizer.safetensors, rng-RANK.safetensors,
state.json (step, seconds, and the settings and provenance of the run). A folder without state.json is incomplete
and is ignored: state.json is written last, into a temporary folder that is then renamed.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from heads.errors import UserError
from heads.hub import read_json, read_tensors


def folders(run: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p.parent for p in (run / "checkpoints").glob("step-*/state.json"))


def save(run: Path, step: int, drafter: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], keep: int) -> Path:
    """Called by the main process. Raises OSError (a full disk, say), after which earlier checkpoints are still whole."""
    final = run / "checkpoints" / f"step-{step:08d}"
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in drafter.state_dict().items()}, temporary / "drafter.safetensors")
        moments = optimizer.state_dict()["state"]
        flat = {f"{i}.{name}": torch.as_tensor(x).cpu().contiguous() for i, s in moments.items() for name, x in s.items()}
        save_file(flat, temporary / "optimizer.safetensors")
        save_file(rng_state(), temporary / "rng.safetensors")
        (temporary / "state.json").write_text(json.dumps({"step": step, **state}, indent=2) + "\n")
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
    except Exception as e:  # safetensors reports a full disk as an error of its own
        shutil.rmtree(temporary, ignore_errors=True)
        raise e if isinstance(e, OSError) else OSError(str(e)) from e
    for old in folders(run)[:-keep]:
        shutil.rmtree(old)
    return final


def load(folder: Path, drafter: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore weights, optimiser and random state; returns state.json. Raises UserError naming a damaged file."""
    state = read_json(folder / "state.json")
    weights = read_tensors(folder / "drafter.safetensors")
    own = drafter.state_dict()
    wrong = [k for k in own.keys() | weights.keys() if k not in own or k not in weights or own[k].shape != weights[k].shape]
    if wrong:
        raise UserError(f"{folder}: {wrong[0]} does not fit this drafter; start over with trainer.resume=false or another out=DIR")
    drafter.load_state_dict(weights)
    moments: dict[int, dict[str, Tensor]] = {}
    for key, tensor in read_tensors(folder / "optimizer.safetensors").items():
        i, name = key.split(".", 1)
        moments.setdefault(int(i), {})[name] = tensor
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    set_rng_state(read_tensors(folder / "rng.safetensors"))
    return state


def rng_state() -> dict[str, Tensor]:
    """torch's and Python's generators as tensors. (Data order needs none: a batch is a function of seed and step.)"""
    version, words, gauss = random.getstate()
    state = {"torch": torch.get_rng_state(), "python": torch.tensor(words, dtype=torch.int64)}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate((3, tuple(state["python"].tolist()), None))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
