"""A target's own MTP weights, read from its files because transformers drops them when it loads a model.

Two layouts are known: for each module one more layer after the others (``layers.N.eh_proj`` and so on, as DeepSeek's), and
``mtp.fc`` with ``mtp.layers.i`` (as Qwen's, whose modules share everything but the layer). Both join [embedding; state] in that order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.heads.errors import UserError
from headstart.heads.lm import first_layers, scale_of
from headstart.heads.stored import INDEX, shards

INSTEAD = "head.from_target=false trains a fresh module"
BEHIND = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
INSIDE = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the target's own embedding and head
UNLIKE = {
    "expert": "a mixture of experts",
    "kv_a_proj": "latent attention (MLA)",
    "q_norm": "norms on queries and keys",
    "scale": "quantised weights",
    "bias": "biases",
}


def own_modules(model: Any, wanted: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """The weights of ``count`` modules in fp32, with the names and shapes of ``wanted`` (enorm, hnorm, eh_proj, norm, layer.*).

    Raises UserError where the target has no such weights, fewer modules, or a layer of another kind. The error says what to do instead.
    """
    if model is None:
        raise UserError(f"head.from_target=true reads the target's files, but only its embedding and head are at hand here: {INSTEAD}")
    name, files = model.config._name_or_path, _files(model.config)
    sources = _sources(files, model.config.get_text_config().num_hidden_layers)
    if not sources:
        raise UserError(f"head.from_target=true, but {name} has no MTP weights in a layout known here: {INSTEAD}")
    if len(sources) < count:
        raise UserError(f"head.modules={count}, but {name} has {len(sources)} of its own: lower it (1 serves all depths), or {INSTEAD}")
    norm: Any = first_layers(model, 1)[1]
    less = (scale_of(norm) - norm.weight.detach().float()).mean().round()  # 1 in families that store norm weights less one, else 0
    return [_take(source, files, wanted, name, less) for source in sources[:count]]


def own_module(config: Any) -> tuple[str, dict[str, Tensor]]:
    """The target's name, and the tensors of its first module as its files hold them, under the names of the second layout.

    ``config``: the target's. Raises UserError where the target has no such weights, and where they cannot be read.
    """
    name, files = config._name_or_path, _files(config)
    sources = _sources(files, config.get_text_config().num_hidden_layers)
    if not sources:
        raise UserError(f"head.from_target=true, but {name} has no MTP weights in a layout known here: {INSTEAD}")
    tensors = {}
    for ours, theirs in sources[0].items():
        part, _, rest = ours.partition(".")
        if theirs in files:
            tensors["mtp." + (f"layers.0.{rest}" if part == "layer" else f"{INSIDE[part]}.{rest}")] = _tensor(files[theirs], theirs)
    known = {theirs for source in sources for theirs in source.values()}  # below: an embedding or a head of the modules' own
    return name, tensors | {n: _tensor(files[n], n) for n in files if n.startswith("mtp.") and n not in known}


def _sources(files: Mapping[str, Path], layers: int) -> list[dict[str, str]]:
    """For each module that the files hold: our tensor name -> the file's tensor name."""

    def matches(pattern: str) -> list[re.Match[str]]:
        return [m for name in files if (m := re.match(pattern, name))]

    behind = {int(m[2]): m[1] for m in matches(r"(.*\blayers\.(\d+)\.)eh_proj\.weight$") if int(m[2]) >= layers}
    heads = [(BEHIND, place, place) for _, place in sorted(behind.items())]
    if not heads:
        for place in [m[1] for m in matches(r"((?:.*\.)?mtp\.)fc\.weight$")]:
            numbers = {int(m[1]) for m in matches(rf"{re.escape(place)}layers\.(\d+)\.")}
            heads += [(INSIDE, place, f"{place}layers.{i}.") for i in sorted(numbers)]
    found = []
    for parts, place, layer in heads:
        source = {f"{ours}.weight": f"{place}{theirs}.weight" for ours, theirs in parts.items()}
        known = {*source.values(), *(place + copy for copy in COPIES)}
        source |= {f"layer.{n.removeprefix(layer)}": n for n in files if n.startswith(layer) and n not in known}
        found.append(source)
    return found


def _take(source: Mapping[str, str], files: Mapping[str, Path], wanted: Mapping[str, Tensor], name: str, less: Tensor) -> dict[str, Tensor]:
    """Read the tensors of one module in fp32. ``less``: added to norm weights. Raises UserError where they do not fit ``wanted``."""
    unknown = [theirs for ours, theirs in sorted(source.items()) if ours not in wanted]
    missing = sorted(wanted.keys() - source.keys()) + [theirs for theirs in source.values() if theirs not in files]
    if unknown or missing:
        kinds = [words for part, words in UNLIKE.items() if any(part in theirs for theirs in unknown)]
        has = f"has {unknown[0]}" if unknown else f"lacks {missing[0]}"
        raise UserError(f"the MTP layer of {name} {has}{': ' if kinds else ''}{' and '.join(kinds)}. Only a layer of plain attention and a "
                        f"dense MLP can be taken over. Take head=own_mtp, which has the target's own kind of layer; {INSTEAD}")  # fmt: skip
    weights = {}
    for ours, theirs in source.items():
        tensor = _tensor(files[theirs], theirs).float()
        if tensor.shape != wanted[ours].shape:
            raise UserError(f"{theirs} of {name} is {list(tensor.shape)}, ours {list(wanted[ours].shape)}: set head.heads, head.kv_heads "
                            f"and head.intermediate_size as its MTP layer has them, or {INSTEAD}")  # fmt: skip
        weights[ours] = tensor + less if tensor.ndim == 1 else tensor
    return weights


def _tensor(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as e:
        raise UserError(f"{path} is damaged or truncated ({e}): download it again") from None


def _files(config: Any) -> dict[str, Path]:
    """Tensor name -> file, of the folder (or its copy in the hub's cache) from which the target was loaded. Raises UserError without
    safetensors.
    """
    from transformers.utils import cached_file

    name = config._name_or_path

    def path(file: str) -> Path | None:
        revision = getattr(config, "_commit_hash", None) or "main"
        try:
            found = cached_file(name, file, local_files_only=True, revision=revision, _raise_exceptions_for_missing_entries=False)
        except OSError:  # neither a folder nor in the cache
            return None
        return None if found is None else Path(found)

    index = path(INDEX) if name else None
    if index is not None:
        return shards(index)
    whole = path("model.safetensors") if name else None
    if whole is None:
        what = name or "the target, which was not read from a folder"
        raise UserError(f"head.from_target=true, but there are no safetensors files of {what}: {INSTEAD}")
    try:
        with safe_open(whole, framework="pt") as file:
            return dict.fromkeys(file.keys(), whole)
    except (SafetensorError, OSError) as e:
        raise UserError(f"{whole} is damaged or truncated ({e}): download it again") from None
