"""Ways to damage an exported folder: each changes one file in one way. They are always the same, in the same order.

``outcomes`` tries them. A changed folder must be refused in one line, or behave the same to the last bit.
"""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from headstart.heads.errors import UserError

WEIGHTS, CONFIG = "model.safetensors", "config.json"
REFUSED, SAME, SILENT, TRACE = "refused", "same", "silent", "traceback"
CASTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int8, torch.uint8, torch.bool)
# Keys that engines know and that our folders do not have (or have with another value).
ADDED: dict[str, list[Any]] = {
    "architectures": [[5], 5, "LlamaForCausalLM", [], ["\ud800"], {"a": 1}],
    "attention_bias": [True],
    "bias": [True],
    "draft_vocab_size": [7],
    "dspark_config": [{"markov_rank": 3}],
    "dtype": ["float16", "int64"],
    "eagle_aux_hidden_state_layer_ids": [[0, 1], [], "all"],
    "eagle_config": [{"norm_before_fc": True}, {"unheard_of": 1}, [], 5],
    "fc_norm": ["true", 1],
    "hidden_act": ["gelu"],
    "hot_vocab_size": [8],
    "layer_types": [["sliding_attention"]],
    "logit_scale": [0.5],
    "mlp_bias": [True],
    "model_type": ["qwen3", "\ud800", 5],
    "norm_before_fc": [True],
    "norm_before_residual": [True],
    "num_aux_hidden_states": [9],
    "original_lm_head": [True],
    "partial_rotary_factor": [0.5],
    "quantization_config": [{"quant_method": "fp8"}],
    "rope_parameters": [{"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}],
    "rope_scaling": [{"type": "yarn", "factor": 2.0}],
    "rope_theta": [5e5],
    "target_hidden_size": [64],
    "tie_word_embeddings": [True],
    "truncated_vocab_size": [8],
    "unheard_of": [1],
    "use_sliding_window": [True],
}


class Mutation(NamedTuple):
    name: str
    file: str
    content: bytes


def mutations(folder: Path) -> Iterator[Mutation]:
    """All mutations of an intact folder."""
    yield from of_bytes((folder / WEIGHTS).read_bytes())
    yield from of_tensors(load((folder / WEIGHTS).read_bytes()))
    yield from of_config(folder)


def of_bytes(whole: bytes, flips: int = 24) -> Iterator[Mutation]:
    """The weights' file, changed as plain bytes."""
    header = 8 + int.from_bytes(whole[:8], "little")
    for where, start, stop in (("header", 0, header), ("data", header, len(whole))):
        for i, place in enumerate(range(start, stop, max(1, (stop - start) // flips))):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << i % 8
            yield Mutation(f"{where}: bit {i % 8} of byte {place} flipped", WEIGHTS, bytes(flipped))
    for cut in (0, 1, 8, header - 1, header, (header + len(whole)) // 2, len(whole) - 1):
        yield Mutation(f"cut to {cut} bytes", WEIGHTS, whole[:cut])
    yield Mutation("a byte more", WEIGHTS, whole + b"\0")
    yield Mutation("a header of 2^64 bytes", WEIGHTS, b"\xff" * 8 + whole[8:])


def of_tensors(tensors: dict[str, Tensor]) -> Iterator[Mutation]:
    """The weights' file, rewritten with other tensors."""

    def changed(name: str, **changes: Tensor | None) -> Mutation:
        found = {key: value for key, value in (tensors | changes).items() if value is not None}
        return Mutation(name, WEIGHTS, save({key: value.contiguous() for key, value in found.items()}, metadata={"format": "pt"}))

    first = next(iter(tensors))
    for key, tensor in tensors.items():
        yield changed(f"{key} missing", **{key: None})
        yield changed(f"{key} renamed", **{key: None, f"{key}.other": tensor})
        yield changed(f"{key} a row shorter", **{key: tensor[:-1].clone()})
        flat = tensor.flatten().clone()
        flat[-1] = flat[-1] + 1 if tensor.dtype != torch.bool else ~flat[-1]
        yield changed(f"{key} changed by one", **{key: flat.view_as(tensor)})
        if tensor.dim() > 1:
            yield changed(f"{key} rolled by a column", **{key: tensor.roll(1, -1)})
        for kind in CASTS if key == first or not tensor.is_floating_point() else CASTS[:6:2]:
            if kind != tensor.dtype:
                yield changed(f"{key} as {kind}", **{key: tensor.to(kind)})
        for value in (float("nan"), float("inf"), -float("inf")) if tensor.is_floating_point() else ():
            planted = tensor.clone()
            planted.view(-1)[planted.numel() // 2] = value
            yield changed(f"{key} with {value}", **{key: planted})
    alike = [(a, b) for a, b in combinations(tensors, 2) if tensors[a].shape == tensors[b].shape and tensors[a].dtype == tensors[b].dtype]
    for a, b in alike[:12]:
        yield changed(f"{a} and {b} swapped", **{a: tensors[b].clone(), b: tensors[a].clone()})
    yield changed("a stranger", stranger=torch.zeros(3))
    yield changed("the first tensor in two spellings", **{f"model.{first}": tensors[first].clone()})
    yield changed("an embedding", **{"embed_tokens.weight": torch.ones(96, 32)})
    yield Mutation("no tensors", WEIGHTS, save({}))


def of_config(folder: Path) -> Iterator[Mutation]:
    """config.json: every key (the engines' and those of our own block) changed, keys added, and files that are not a config."""
    whole = (folder / CONFIG).read_bytes()
    config = json.loads(whole)

    def written(name: str, value: Any) -> Mutation:
        return Mutation(name, CONFIG, json.dumps(value, indent=2).encode())

    for path in paths(config):
        *above, key = path
        changed = json.loads(whole)
        place = changed
        for part in above:
            place = place[part]
        old = place.pop(key)
        if path != ("headstart",):  # without our block it would be a folder of another program
            yield written(f"{'.'.join(map(str, path))} removed", changed)
        for value in others(old):
            if value == old and type(value) is type(old):
                continue
            place[key] = value
            yield written(f"{'.'.join(map(str, path))} = {str(value)[:60]!r}", changed)
    for key, values in ADDED.items():
        for value in values:
            if config.get(key) != value:
                yield written(f"{key} = {value!r}", config | {key: value})
    texts = {"empty": b"", "half": whole[: len(whole) // 2], "a list": b"[]", "no UTF-8": b"\xff" + whole, "one brace more": whole + b"}"}
    texts |= {"a number": b"5", "100,000 brackets": b"[" * 100_000, "50,000 levels": b'{"a":' * 50_000 + b"1" + b"}" * 50_000}
    texts |= {"100 levels": b'{"a":' * 100 + b"1" + b"}" * 100, "an endless number": b'{"a": 1' + b"0" * 5000 + b"}"}
    for name, text in texts.items():
        yield Mutation(f"config.json: {name}", CONFIG, text)


def paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all keys, in nested dictionaries too."""
    for key in value if isinstance(value, dict) else ():
        yield (*above, key)
        yield from paths(value[key], (*above, key))


def others(value: Any) -> list[Any]:
    """Values to put in place of this one: similar, far off, or of another type."""
    if isinstance(value, bool):
        return [not value, "false", None]
    if isinstance(value, int | float):
        return [value + 1, value * 2, 0, -1, 10**9, 1e400, str(value), None, [value]]
    if isinstance(value, str):
        return [value + "x", value.upper(), "", "\ud800", "x" * 10_000, 5, None]
    if isinstance(value, list):
        return [value[::-1], value[:-1], [*value, *value[-1:]], [], [None], "all", 5]
    if isinstance(value, dict):
        return [{}, [], {**value, "unheard_of": 1}, None]
    return [1, 0.5, True, "x", [1], {"a": 1}]


Loaded = TypeVar("Loaded")


def outcomes(
    folder: Path, found: Iterator[Mutation], open_folder: Callable[[Path], Loaded], same: Callable[[Loaded], bool], scratch: Path
) -> Iterator[tuple[Mutation, str, str]]:
    """Try each mutation in a fresh copy of the folder at ``scratch``. Yields (mutation, outcome, message)."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(folder, scratch)
    for mutation in found:
        (scratch / mutation.file).write_bytes(mutation.content)
        try:
            yield mutation, SAME if same(open_folder(scratch)) else SILENT, ""
        except UserError as e:
            yield mutation, REFUSED if "\n" not in str(e) and str(scratch) in str(e) and len(str(e)) < 1000 else TRACE, str(e)
        except Exception:
            yield mutation, TRACE, traceback.format_exc()
        shutil.copy(folder / mutation.file, scratch / mutation.file)
