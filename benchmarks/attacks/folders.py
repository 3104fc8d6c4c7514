"""Attacks on files that were changed on disk: speculators, checkpoints, shards. They are refused in a line, or change nothing."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from benchmarks.attacks.outcome import TRACE, Outcome, door
from benchmarks.attacks.world import World, equal, weights
from headstart.data.shards import Shards
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.inference.decoding.target import Target
from headstart.inference.settings import open_target
from headstart.inference.speculator import open_speculator
from headstart.trainers import checkpoint
from tests import mutations
from tests.drafters import guesses
from tests.hostile import EAGLE, ROOT
from tests.mutations import WEIGHTS, Mutation
from tests.trainers.mutations import HARMLESS, MUTATIONS
from tests.trainers.test_bad_input import settings


def flips(file: Path, dice: random.Random, count: int) -> Iterator[Mutation]:
    """Flipped bits at random places, every third one in the header."""
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little") if file.suffix == ".safetensors" else len(whole)
    for i in range(count):
        place, bit = dice.randrange(header if i % 3 == 0 else len(whole)), dice.randrange(8)
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        yield Mutation(f"{file.name}: bit {bit} of byte {place} flipped", file.name, bytes(flipped))


def pieces(file: Path, dice: random.Random, count: int) -> Iterator[Mutation]:
    """Pieces of a file lost, doubled, zeroed or swapped, as by a bad copy."""
    whole = file.read_bytes()
    for i in range(count):
        a, b, c = sorted(dice.randrange(len(whole) + 1) for _ in range(3))
        changed = {
            "lost": whole[:a] + whole[b:],
            "doubled": whole[:b] + whole[a:],
            "zeroed": whole[:a] + bytes(b - a) + whole[b:],
            "exchanged": whole[:a] + whole[b:c] + whole[a:b] + whole[c:],
        }
        kind = list(changed)[i % len(changed)]
        yield Mutation(f"{file.name}: bytes {a} to {b} {kind}", file.name, changed[kind])


def changes(folder: Path, dice: random.Random, count: int) -> Iterator[Mutation]:
    """``count`` changes of each kind: those of tests/mutations.py (0: all of them), flipped bits, pieces."""
    known = list(mutations.mutations(folder))
    yield from known if not count else dice.sample(known, min(count, len(known)))
    for file in (folder / WEIGHTS, folder / "config.json"):
        yield from flips(file, dice, count or 40)
        yield from pieces(file, dice, count or 12)


def outcome(of: str, mutation: Mutation, came: str, said: str) -> Outcome:
    return Outcome(f"{of}: {mutation.name}", came, said)


def speculators(world: World, every: int, seed: int) -> Iterator[Outcome]:
    """Speculators of every format, and the shipped one with its target. ``every``: fewer kinds of drafters, and few changes of each."""
    from tests.heads.test_mutations import SMALL, opened, saved

    dice, scratch = random.Random(seed), world.folder / "speculators"
    few = 0 if every == 1 else 3
    for head in list(SMALL)[::every]:
        folder = scratch / head
        same = saved(head, folder)
        for mutation, came, said in mutations.outcomes(folder, changes(folder, dice, few), opened, same, scratch / "copy"):
            yield outcome(head, mutation, came, said)
        shutil.rmtree(folder)
    if every == 1:
        target = open_target(settings(ROOT / "assets" / "tiny"))
        wanted = guesses(open_speculator(EAGLE, target), target)
        found = itertools.chain(flips(EAGLE / WEIGHTS, dice, 60), pieces(EAGLE / WEIGHTS, dice, 20), flips(EAGLE / "config.json", dice, 40))

        def alike(other: Drafter) -> bool:
            return all(torch.equal(a, b) for a, b in zip(guesses(other, target), wanted, strict=True))

        for mutation, came, said in mutations.outcomes(EAGLE, found, lambda path: open_speculator(path, target), alike, scratch / "copy"):
            yield outcome(EAGLE.name, mutation, came, said)


# ---- checkpoints ----


def checkpoints(world: World, every: int, seed: int) -> Iterator[Outcome]:
    """A run loses its last step, its newest remaining checkpoint is changed, and the same command runs again."""
    dice, copy, cut = random.Random(seed), world.folder / "copy", world.folder / "cut"
    wanted = weights(world.folder / "run")
    shutil.copytree(world.folder / "run", cut)
    shutil.rmtree(checkpoint.folders(cut)[-1])
    newest = checkpoint.folders(cut)[-1]
    more = [m for file in sorted(newest.iterdir()) for m in (*flips(file, dice, 10), *pieces(file, dice, 4))]
    found: list[tuple[str, Callable[[Path, Path], object]]] = [*MUTATIONS.items()]
    found += [(m.name, lambda folder, _, m=m: (folder / m.file).write_bytes(m.content)) for m in more]  # type: ignore[misc]
    found = found if every == 1 else [(HARMLESS[0], MUTATIONS[HARMLESS[0]]), *dice.sample(found, len(found) // every)]
    for name, mutate in found:
        shutil.copytree(cut, copy)
        earlier, newest = checkpoint.folders(copy)[-2:]
        mutate(newest, earlier)
        called = door("train", world.run(copy), world.folder)
        if TRACE in called.said or called.code not in (0, 2) or (called.code and not called.err.startswith("error: ")):
            came = "traceback"
        else:
            came = "refused" if called.code else "same" if equal(weights(copy), wanted) else "silent"
        yield Outcome(f"checkpoint: {name}", came, called.said)
        shutil.rmtree(copy)
    shutil.rmtree(cut)


# ---- shards ----


def rows_of(folder: Path, target: Target) -> list[torch.Tensor]:
    """All rows that a training would read."""
    shards = Shards(folder, target.fingerprint)
    batch = shards.batch(list(range(len(shards))))
    states = [batch.states[tap] for tap in sorted(batch.states)]
    return [batch.tokens_BT, batch.loss_mask_BT, batch.positions_BT, batch.documents_BT, batch.final_BTD, *states]


def shards(world: World, every: int, seed: int) -> Iterator[Outcome]:
    """A file of captured states is changed; the rows that a training reads must be refused or the same."""
    dice, copy, whole = random.Random(seed), world.folder / "copy", world.folder / "shards"
    target = open_target(settings(world.folder / "target"))
    wanted = rows_of(whole, target)
    files = sorted(path for path in whole.iterdir() if path.is_file())
    found: list[tuple[str, Callable[[Path], object]]] = []
    for mutation in (m for file in files for m in (*flips(file, dice, 20), *pieces(file, dice, 8))):
        found.append((mutation.name, lambda folder, m=mutation: (folder / m.file).write_bytes(m.content)))  # type: ignore[misc]
    for name, tensors in of_tensors(files[-1], dice):
        found.append((f"{files[-1].name}: {name}", lambda folder, name=files[-1].name, t=tensors: (folder / name).write_bytes(t)))  # type: ignore[misc]
    for name, index in of_index(json.loads((whole / "index.json").read_text())):
        found.append((f"index.json: {name}", lambda folder, t=index: (folder / "index.json").write_text(t)))  # type: ignore[misc]
    names = [file.name for file in files if file.suffix == ".safetensors"]
    found += [(f"{name} gone", lambda folder, name=name: (folder / name).unlink()) for name in names]  # type: ignore[misc]
    found.append(("two shards exchanged", lambda folder: exchange(folder / names[0], folder / names[1])))
    found.append(("a shard twice", lambda folder: shutil.copyfile(folder / names[0], folder / names[1])))
    for name, mutate in found if every == 1 else dice.sample(found, len(found) // every):
        shutil.copytree(whole, copy)
        mutate(copy)
        try:
            same = [torch.equal(a, b) for a, b in zip(rows_of(copy, target), wanted, strict=True)]
            came, said = "same" if all(same) else "silent", ""
        except UserError as e:
            came, said = "refused" if str(copy) in str(e) and "\n" not in str(e) and len(str(e)) < 2000 else "traceback", str(e)
        except Exception:
            came, said = "traceback", traceback.format_exc()
        yield Outcome(f"shards: {name}", came, said)
        shutil.rmtree(copy)


def of_tensors(file: Path, dice: random.Random) -> Iterator[tuple[str, bytes]]:
    tensors = load(file.read_bytes())
    for name, tensor in tensors.items():
        changed = {
            "rolled": tensor.roll(1, -1),
            "reversed": tensor.flip(0),
            "a row shorter": tensor[:-1].clone(),
            "zeros": torch.zeros_like(tensor),
        }
        changed |= {"as float32": tensor.float()} | ({"NaN": torch.full_like(tensor, torch.nan)} if tensor.is_floating_point() else {})
        kind = dice.choice(list(changed))
        yield f"{name} {kind}", save(tensors | {name: changed[kind].contiguous()})


def of_index(index: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Changes of the index: every key missing or with another value, and the shards in another order."""
    for path in mutations.paths(index):
        *above, key = path
        for value in [None, *mutations.others(index if not path else at(index, path))[:4]]:
            changed = json.loads(json.dumps(index))
            place = at(changed, tuple(above))
            if value is None:
                del place[key]
            else:
                place[key] = value
            yield f"{'.'.join(map(str, path))} {'gone' if value is None else f'= {str(value)[:40]!r}'}", json.dumps(changed)
    files = index["files"]
    others = [files[1], files[0], *files[2:]]  # of as many rows each
    yield "files in another order", json.dumps(index | {"files": others})
    yield "a file twice", json.dumps(index | {"files": [files[0], *files[:1], *files[2:]]})
    for keys in (("name",), ("sha256", "bytes"), ("name", "bytes")):
        changed = [file | {key: other[key] for key in keys} for file, other in zip(files, others, strict=True)]
        yield f"{' and '.join(keys)} exchanged", json.dumps(index | {"files": changed})
    yield "other spaces", json.dumps(index)


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def exchange(a: Path, b: Path) -> None:
    one, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(other)
    b.write_bytes(one)
