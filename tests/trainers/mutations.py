"""Ways to damage the newest checkpoint of a run on disk. Each must be refused in one line, or have no effect on the resumed training.

``MUTATIONS`` maps a name to a function of the newest checkpoint's folder and an earlier one's; a benchmark may import it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headstart.heads.files import sealed, sha256

Mutation = Callable[[Path, Path], None]
TENSORS = ("drafter.safetensors", "optimizer.safetensors", "rng.safetensors")
FILES = (*TENSORS, "state.json")
HARMLESS = ("state.json: other spaces", "state.json: the last byte lost", "a file beside them")  # what is read is unchanged


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Mutation:
    def mutate(newest: Path, _: Path) -> None:
        path = newest / name
        path.write_bytes(change(path.read_bytes()))

    return mutate


def _flip(place: float) -> Callable[[bytes], bytes]:
    """One bit; ``place``: a share of the file."""

    def change(data: bytes) -> bytes:
        i = min(int(place * len(data)), len(data) - 1)
        return data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :]

    return change


def _tensors(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Mutation:
    def mutate(newest: Path, _: Path) -> None:
        tensors = load_file(newest / name)
        change(tensors)
        save_file({k: v.contiguous() for k, v in tensors.items()}, newest / name)

    return mutate


def _swap_alike(tensors: dict[str, torch.Tensor]) -> None:
    """Two tensors of one shape."""
    names = sorted(tensors)
    a, b = next((a, b) for a in names for b in names if a < b and tensors[a].shape == tensors[b].shape and not tensors[a].equal(tensors[b]))
    tensors[a], tensors[b] = tensors[b].clone(), tensors[a].clone()


def _state(change: Callable[[dict[str, Any]], object]) -> Mutation:
    def mutate(newest: Path, _: Path) -> None:
        state = json.loads((newest / "state.json").read_text())
        change(state)
        (newest / "state.json").write_text(json.dumps(state, indent=2))

    return mutate


def _from_earlier(*names: str) -> Mutation:
    def mutate(newest: Path, earlier: Path) -> None:
        for name in names:
            shutil.copyfile(earlier / name, newest / name)

    return mutate


def _renamed(newest: Path, _: Path) -> None:
    newest.rename(newest.with_name("step-00000007"))


def _as_folder(newest: Path, _: Path) -> None:
    (newest / "drafter.safetensors").unlink()
    (newest / "drafter.safetensors").mkdir()


def _emptied(newest: Path, _: Path) -> None:
    for path in newest.iterdir():
        path.unlink()


def reseal(folder: Path, **changes: Any) -> None:
    """Write the checksums of the files as they are now, so that tests reach the checks that follow the checksums."""
    state = json.loads((folder / "state.json").read_text()) | changes
    state["files"] = {path.name: sha256(path) for path in folder.glob("*.safetensors")}
    (folder / "state.json").write_text(json.dumps(sealed(state)))


def _all() -> dict[str, Mutation]:
    found: dict[str, Mutation] = {}
    for name in FILES:
        for place in (0.0, 0.01, 0.3, 0.6, 1.0):
            found[f"{name}: a bit at {place:.0%}"] = _bytes(name, _flip(place))
        found[f"{name}: the last byte lost"] = _bytes(name, lambda data: data[:-1])
        found[f"{name}: half lost"] = _bytes(name, lambda data: data[: len(data) // 2])
        found[f"{name}: empty"] = _bytes(name, lambda data: b"")
        found[f"{name}: more behind it"] = _bytes(name, lambda data: data + b"{}")
        found[f"{name}: gone"] = lambda newest, _, name=name: (newest / name).unlink()  # type: ignore[misc]
        found[f"{name}: the earlier one's"] = _from_earlier(name)
    for name in TENSORS:
        found[f"{name}: zeros"] = _bytes(name, lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
        found[f"{name}: one tensor less"] = _tensors(name, lambda tensors: tensors.popitem())
        found[f"{name}: one tensor more"] = _tensors(name, lambda tensors: tensors.update(more=torch.ones(2)))
    found["drafter.safetensors: two tensors swapped"] = _tensors("drafter.safetensors", _swap_alike)
    found["optimizer.safetensors: two tensors swapped"] = _tensors("optimizer.safetensors", _swap_alike)
    found["drafter.safetensors: NaN"] = _tensors("drafter.safetensors", lambda tensors: [x.fill_(torch.nan) for x in tensors.values()])
    found["drafter.safetensors: a folder"] = _as_folder
    found["weights and moments of the earlier one"] = _from_earlier("drafter.safetensors", "optimizer.safetensors")
    found["all of the earlier one"] = _from_earlier(*FILES)
    found["all but the weights of the earlier one"] = _from_earlier(*FILES[1:])
    found["renamed"] = _renamed
    found["nothing in it"] = _emptied
    keys: dict[str, Any] = {"step": 3, "seconds": 0.5, "tokens": 1, "settings": {}, "files": {}, "sha256": "0" * 64, "why": "other"}
    for key, value in keys.items():
        found[f"state.json: another {key}"] = _state(lambda state, key=key, value=value: state.update({key: value}))  # type: ignore[misc]
        found[f"state.json: no {key}"] = _state(lambda state, key=key: state.pop(key, None))  # type: ignore[misc]
        found[f"state.json: {key} is null"] = _state(lambda state, key=key: state.update({key: None}))  # type: ignore[misc]
    found["state.json: without checksums"] = _state(lambda state: [state.pop(key, None) for key in ("files", "sha256")])
    found["state.json: a file more"] = _state(lambda state: state.setdefault("files", {}).update({"../x": "0"}))
    found["state.json: a key more"] = _state(lambda state: state.update(more=1))
    found["state.json: other settings"] = _state(lambda state: state["settings"].update(x=2))
    found["state.json: a list"] = _bytes("state.json", lambda data: b"[" + data + b"]")
    found["state.json: other spaces"] = _bytes("state.json", lambda data: data.replace(b"\n", b"\n\n"))
    found["a file beside them"] = lambda newest, _: (newest / "notes.txt").write_text("mine") and None  # type: ignore[func-returns-value]
    return found


MUTATIONS = _all()
