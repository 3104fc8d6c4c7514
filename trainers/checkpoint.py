"""Checkpoints of a run: everything that an exact resume needs, in safetensors and JSON, written whole or not at all.

RUN/checkpoints/step-00000100/ holds drafter.safetensors (fp32 master weights), optimizer.safetensors (moments of whole parameters,
however they were sharded: trainers/parallel.py), rng.safetensors (one for all processes, which all draw the same random numbers),
on_policy.safetensors if the drafter learns from its own text (trainers/on_policy.py; the rows of all processes), and state.json: step,
seconds, tokens, settings, the guard's figures (trainers/guard.py), the figures of an evaluation at this step, the evaluations after it
that an interrupt prevented (``due``), the SHA-256 of every file, and its own. Everything is written into a temporary folder, which is then
renamed. So a folder with the name of a checkpoint was complete when it was written. The checksums show later damage before anything is
restored.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from headstart.heads.errors import UserError
from headstart.heads.files import put_folder, sealed, sha256
from headstart.heads.renamed import settings_of_now
from headstart.heads.stored import read_json, read_tensors
from headstart.trainers.optimizer import Optimizer, parameters

STATE = {"step": int, "seconds": float, "tokens": int, "settings": dict, "files": dict}  # required keys of state.json
BEST = "best.safetensors"  # in the run folder: the weights that decoded best, with their step (trainers/gate.py)
NAME = re.compile(r"step-(\d{8,})")
Parts = dict[str, dict[str, Tensor]]  # file -> name -> tensor


def folders(*runs: Path) -> list[Path]:
    """The checkpoints in these run folders together, oldest first. Raises UserError if they cannot be listed, which is not the same as
    having none.
    """
    found: list[Path] = []
    for place in (run / "checkpoints" for run in runs):
        try:
            if os.path.lexists(place):
                found += [path for path in place.iterdir() if NAME.fullmatch(path.name)]
        except OSError as e:
            raise UserError(f"{place} cannot be read ({e.strerror}): mend that, or choose another folder (out=DIR)") from e
    return sorted(found, key=step_of)


def newest(*runs: Path) -> Path | None:
    """The newest checkpoint in these run folders; None if there is none. Raises UserError if they cannot be listed."""
    return max(folders(*runs), key=step_of, default=None)


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    name = NAME.fullmatch(folder.name)
    assert name is not None
    return int(name[1])


def remove(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that a kill leaves nothing that still looks like a checkpoint. Raises OSError."""
    away = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(away, ignore_errors=True)
    folder.rename(away)
    shutil.rmtree(away)


def clear(run: Path, after: int = 0) -> int:
    """Remove the checkpoints of steps after ``after``, oldest first, so that a kill leaves the newest. Returns how many. Raises OSError."""
    old = [folder for folder in folders(run) if step_of(folder) > after]
    for folder in old:
        remove(folder)
    return len(old)


def prune(run: Path, keep: int, *also: int | None) -> None:
    """Remove all checkpoints but the newest ``keep`` and those of the steps ``also``. Raises OSError."""
    for old in folders(run)[:-keep]:
        if step_of(old) not in also:
            remove(old)


def best(places: Iterable[Path]) -> int | None:
    """The step of the checkpoint with the highest ``heldout_expected_length`` in its ``state.json``; the first of equal ones. None if no
    checkpoint was evaluated.
    """
    found = []
    for folder in folders(*places):
        with suppress(UserError):  # skip damaged ones
            figures = read_json(folder / "state.json").get("figures")
            if isinstance(figures, dict) and isinstance(length := figures.get("heldout_expected_length"), float):
                found.append((length, -step_of(folder)))
    return -max(found)[1] if found else None


def best_of(place: Path) -> tuple[int, float]:
    """The step of the weights kept at ``place`` and their accepted length; 0 and 0.0 if there are none. Raises UserError for a damaged
    file.
    """
    if not place.is_file():
        return 0, 0.0
    try:
        with safe_open(place, framework="pt") as file:
            about = file.metadata()
        return int(about["step"]), float(about["decoded"])
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as e:
        raise UserError(f"{place} is damaged ({e}): remove it, and what is trained last is exported") from e


def copied(x: Any) -> Tensor:
    """A contiguous copy on the CPU, so that training may continue while it is written."""
    return torch.as_tensor(x).detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def save(run: Path, step: int, parts: Parts, state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of a step and return its folder. ``parts``: the tensors of each file. ``state``: the rest of state.json. Only
    the main process calls this. Raises OSError (for example, disk full); earlier checkpoints stay whole.
    """
    final = run / "checkpoints" / f"step-{step:08d}"
    for unfinished in final.parent.glob(".step-*"):  # left over from a run killed while writing or removing
        shutil.rmtree(unfinished, ignore_errors=True)

    def write(beside: Path) -> None:
        for name, tensors in parts.items():
            save_file(tensors, beside / f"{name}.safetensors")
        files = {f"{name}.safetensors": sha256(beside / f"{name}.safetensors") for name in parts}
        (beside / "state.json").write_text(json.dumps(sealed({"step": step, **state, "files": files}), indent=2) + "\n")

    put_folder(final, write)
    return final


def read_state(folder: Path) -> dict[str, Any]:
    """Read and verify state.json. Raises UserError if it is damaged, belongs to another checkpoint, or has no checksums."""
    path = folder / "state.json"
    with _advice(folder):
        state = read_json(path)
        if "sha256" not in state and "files" not in state:
            raise UserError(f"{path} has no checksums, an earlier version of Headstart wrote it: finish the run with that version")
        wrong = [key for key, kind in STATE.items() if type(state.get(key)) is not kind]
        if wrong:
            raise UserError(f"{path}: {wrong[0]} is missing or of the wrong type")
        if sealed(state)["sha256"] != state.get("sha256"):
            raise UserError(f"{path} is damaged: its content does not have the checksum that it names")
        if state["step"] != step_of(folder):
            raise UserError(f"{path} is of another checkpoint, that of step {state['step']}")
    return state | {"settings": settings_of_now(state["settings"], "config", quiet=True)}


def check_files(folder: Path, state: Mapping[str, Any]) -> None:
    """Raises UserError naming a file that is missing or whose checksum differs from the one in ``state`` (see ``read_state``)."""
    with _advice(folder):
        for name in ("drafter.safetensors", "optimizer.safetensors", "rng.safetensors", "on_policy.safetensors"):
            path = folder / name
            if (name in state["files"] or name != "on_policy.safetensors") and not path.is_file():
                raise UserError(f"{path} does not exist")
            if path.is_file() and sha256(path) != state["files"].get(name):
                raise UserError(f"{path} is damaged: it does not have the checksum that state.json names")


def load(folder: Path, drafter: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Restore the weights from files that ``check_files`` has checked. Returns the optimizers' moments (for ``parallel.Parallel.restore``)
    and the random state. Raises UserError naming a file that does not belong to this drafter; nothing is restored then.
    """
    with _advice(folder):
        weights, flat, rng = (read_tensors(folder / f"{name}.safetensors") for name in ("drafter", "optimizer", "rng"))
        _fits(folder / "drafter.safetensors", weights, drafter.state_dict())
        # Moments are numbered by the order of the optimizer's parameters. A parameter that never had a gradient has none.
        numbered = {f"{o}.{i}": (x, p) for o, x in enumerate(optimizers) for i, p in enumerate(parameters(x))}
        wanted = {f"{i}.{k}": v for i, (x, p) in numbered.items() for k, v in moments_of(x, p).items()}
        given = {key.rpartition(".")[0] for key in flat}
        _fits(folder / "optimizer.safetensors", flat, {k: v for k, v in wanted.items() if k.rpartition(".")[0] in given})
        here = rng_state()
        both = here.keys() & rng.keys() | {"torch", "python"}  # without a GPU there is no "cuda" state
        _fits(folder / "rng.safetensors", {k: v for k, v in rng.items() if k in both or k != "cuda"}, {k: here[k] for k in both})
    drafter.load_state_dict(weights)
    return flat, rng


def load_own_rows(folder: Path, processes: int, vocab_size: int) -> dict[str, Tensor]:
    """The rows of ``loss.on_policy`` of all processes: tokens [R, T], begin [R], length [R]. Raises UserError if the file is missing or
    malformed, or if R is not a multiple of ``processes``.
    """
    path = folder / "on_policy.safetensors"
    with _advice(folder):
        rows = read_tensors(path)
        found = {k: (x.dtype, x.ndim) for k, x in rows.items()}
        if found != {"tokens": (torch.int64, 2), "begin": (torch.int64, 1), "length": (torch.int64, 1)}:
            raise UserError(f"{path}: tokens, begin and length are not as they were written")
        tokens_RT, begin_R, length_R = rows["tokens"], rows["begin"], rows["length"]
        sizes = len(tokens_RT) == len(begin_R) == len(length_R) and len(length_R) % processes == 0
        live = length_R > 0
        if not sizes or not (((begin_R >= 2) & (begin_R < length_R)) | ~live).all() or (length_R > tokens_RT.shape[1]).any():
            raise UserError(f"{path}: its rows do not fit together")
        if ((tokens_RT < 0) | (tokens_RT >= vocab_size)).any():
            raise UserError(f"{path}: a token is none of the target's {vocab_size}")
    return rows


def moments_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """For each moment that the optimizer keeps of a parameter, by name, a tensor of its shape and dtype. The values mean nothing."""
    if isinstance(optimizer, torch.optim.Muon):
        return {"momentum_buffer": parameter}
    return {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}


@contextmanager
def _advice(folder: Path) -> Iterator[None]:
    try:
        yield
    except (UserError, OSError) as e:
        raise UserError(f"cannot resume: {e}. Delete {folder} to go on from the checkpoint before it, if there is one, "
                        f"or start over with trainer.resume=false") from None  # fmt: skip


def _fits(path: Path, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    wrong = sorted(k for k in given.keys() | wanted.keys() if k not in given or k not in wanted or given[k].shape != wanted[k].shape)
    if wrong:
        raise UserError(f"{path}: {wrong[0]} is not what this drafter has")


def rng_state() -> dict[str, Tensor]:
    """The states of torch's and Python's generators as tensors. (The data order needs none: a batch is a function of seed and step.)"""
    version, words, gauss = random.getstate()
    state = {"torch": torch.get_rng_state(), "python": torch.tensor(words, dtype=torch.int64)}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Tensor]) -> None:
    """Set the generators to a state that ``rng_state`` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate((3, tuple(state["python"].tolist()), None))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
