"""A target read from its files, without its layers: enough for everything that needs no pass, above all training from captured states.

The embedding and the output head are read whole; of every other parameter, only the few values that the fingerprint is made of.
transformers itself determines which stored tensors make up which parameter: the model is built on the meta device, and stored names are
mapped by the renamings and conversions that transformers applies when loading. Where the files alone do not suffice (quantized weights, an
adapter, unknown modules), ``NotStored`` says why; then the model has to be loaded.

Shape suffixes: V vocabulary, D hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from headstart.heads.errors import UserError, first_line
from headstart.heads.kinds import model_class
from headstart.heads.stored import INDEX, model_files, shards
from headstart.inference.decoding.info import DTYPES, FEW, TargetInfo, ends_of, loading, read_names, rope_switch_of, shape_of
from headstart.inference.decoding.placement import check_config, check_device, check_folder, hub_answers, is_main, is_sharded
from headstart.inference.decoding.target import Target


class NotStored(Exception):
    """Raised where the files alone do not determine the target. The message says why."""


class StoredTarget(TargetInfo):
    """A causal LM of transformers in a folder or on the hub, read from its files. ``opened`` loads the model."""

    def __init__(self, path: str, *, dtype: str = "auto", device: str = "auto", attention: str = "sdpa") -> None:
        """Takes the arguments of ``Target.load``. Raises NotStored, and UserError for files that are missing or damaged."""
        from transformers import AutoConfig, AutoTokenizer

        if is_sharded(device):
            raise NotStored(f"target.device={device} shares its layers between processes")
        self.name, self._opened = str(path), list[Target]()
        self._load = partial(Target.load, path, dtype=dtype, device=device, attention=attention)
        self.device = torch.empty(0, device=check_device("auto" if device == "map" else device)).device
        check_folder(path)
        with loading(path):
            folder = _folder(path)
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            check_config(config, attention, self.name)
            self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        try:
            self.files = _Files(folder, config, dtype, attention)
            self.shape, self.dtype = shape_of(self.files.model.config, self.name), self.files.model.dtype
            whole = lambda: self.opened(", of which a drafter is made").model  # noqa: E731
            self.ends = ends_of(config, *self.files.ends(self.device), whole, self.tokenizer)
            _ = self.fingerprint
        except (UserError, NotStored):
            raise
        except Exception as e:  # unexpected files, or another version of transformers: loading the model gives a better error
            raise NotStored(f"{type(e).__name__}, {first_line(e)}") from e

    @property
    def rope_switch(self) -> int | None:
        return rope_switch_of(self.files.model.config.get_text_config())

    def opened(self, why: str = "") -> Target:
        """The target with its layers, loaded at the first call. ``why`` is printed then."""
        if not self._opened:
            if is_main():
                print(f"loading the layers of {self.name}{why} ...", flush=True)
            target = self._load()
            self.ends.embed, self.ends.head_VD = target.ends.embed, target.ends.head_VD  # so that memory holds one copy of each
            self._opened.append(target)
        return self._opened[0]

    def first_values(self) -> Iterable[tuple[str, Tensor]]:
        return self.files.first_values()


def _folder(path: str) -> Path:
    """The folder ``path``, or for a hub id its folder in the hub's cache, with all weight files downloaded into it."""
    from transformers.utils.hub import cached_file, cached_files

    if Path(path).is_dir():
        return Path(path)
    how: Any = {"local_files_only": not hub_answers()}
    config = cached_file(path, "config.json", **how)
    if cached_file(path, "model.safetensors", _raise_exceptions_for_missing_entries=False, **how) is None:
        index = cached_file(path, INDEX, **how)
        cached_files(path, sorted({file.name for file in shards(Path(index)).values()}), **how)
    return Path(config).parent


class _Source(NamedTuple):
    """The stored tensors that make up one parameter, or several parameters where a conversion splits tensors."""

    converter: Any  # transformers' converter; None: the tensor is stored as the parameter
    parts: list[tuple[str, str]]  # (the converter's pattern, name of the stored tensor), in the order of conversion


class _Files:
    """A model on the meta device, and the safetensors files that hold its weights."""

    def __init__(self, folder: Path, config: Any, dtype: str, attention: str) -> None:
        if getattr(config, "quantization_config", None) or getattr(config, "transformers_weights", None):
            raise NotStored("its weights are quantised, or stored in another way")
        if (folder / "adapter_config.json").exists():
            raise NotStored("an adapter lies in its folder")
        kind = config.dtype if dtype == "auto" else DTYPES[dtype]
        if kind not in DTYPES.values():
            raise NotStored("its config does not say its dtype")
        with torch.device("meta"):
            how = {"dtype": kind, "attn_implementation": attention, "trust_remote_code": False}
            self.model: Any = model_class(config).from_config(config, **how)
        if kind == torch.float16 and self.model._get_dtype_plan(kind):
            raise NotStored("some of its layers stay in float32")
        self.files: dict[str, Any] = {}
        for path in model_files(folder):
            file: Any = safe_open(path, framework="pt")
            self.files |= dict.fromkeys(file.keys(), file)
        self.names = read_names(self.model)  # the beginnings of the names of the parameters that are read
        self.parameters = dict(self.model.named_parameters(remove_duplicate=False))
        kept = self.model.state_dict().keys()
        self.parameters |= {name: b for name, b in self.model.named_buffers() if name in kept and b.is_floating_point()}  # routers' buffers
        self.sources = self._sources()
        self.embed, self.head = self._check_ends()
        self.tied = self.parameters[self.embed] is self.parameters[self.head]
        if self.tied and {self.embed, self.head} <= self.sources.keys():  # if both are stored, transformers goes by the files
            self.tied = torch.equal(*(self.read(name)[name] for name in (self.embed, self.head)))

    def _check_ends(self) -> tuple[str, str]:
        """The names of the parameters of the embedding and the output head. Raises NotStored where either is more than a table."""
        embed, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        for module, kind in ((embed, nn.Embedding), (head, nn.Linear)):
            if not (type(module) is kind or hasattr(module, "embed_scale")) or getattr(module, "bias", None) is not None:
                raise NotStored(f"it has a {type(module).__name__}{' with a bias' * hasattr(module, 'bias')} where a table was expected")
        places = {id(module): f"{name}.weight" for name, module in self.model.named_modules()}
        names = places[id(embed)], places[id(head)]
        if others := self.model.all_tied_weights_keys.keys() - names:
            raise NotStored(f"{sorted(others)[0]} is tied to another parameter")
        return names

    def _sources(self) -> dict[str, _Source]:
        """Parameter name -> its stored tensors, by the rules of transformers. Of parameters made of the same tensors, only the first."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        transforms, prefix, state = get_model_conversion_mapping(self.model), self.model.base_model_prefix, self.model.state_dict()
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        found: dict[str, _Source] = {}
        for key in sorted(self.files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = rename_source_key(key, [], [], prefix, state)
            if name in self.parameters and name.startswith(self.names):
                found.setdefault(name, _Source(of_pattern.get(pattern), [])).parts.append((pattern or "", key))
        return found

    def ends(self, device: torch.device) -> tuple[nn.Module, Tensor]:
        """The embedding, and the output head [V, D]. Where they are tied, both share one table."""
        first = self.head if self.tied and self.embed not in self.sources else self.embed
        embed_VD = self.read(first)[first].to(device)
        head_VD = embed_VD if self.tied else self.read(self.head)[self.head].to(device)
        return nn.Embedding.from_pretrained(embed_VD), head_VD

    def first_values(self) -> Iterator[tuple[str, Tensor]]:
        found = {name: values for first in self.sources for name, values in self.read(first, FEW).items()}
        wanted = {name for name, _ in self.model.named_parameters() if name.startswith(self.names)}
        for name in wanted | (set() if self.tied else {self.head}):
            stored = self.head if self.tied and name == self.embed and name not in found else name
            if stored not in found:
                raise NotStored(f"its files lack {name}")
            yield name, found[stored].flatten()[:FEW]

    def read(self, name: str, least: int | None = None) -> dict[str, Tensor]:
        """The parameter as transformers would load it, and all others made of the same tensors, by name. Raises NotStored where its shape
        differs from the config's.

        ``least``: only this many of the first values are needed, so that fewer of the stored tensors need be read.
        """
        converter, parts = self.sources[name]
        wanted = self.parameters[name]
        if converter is None:
            (_, key), *more = parts
            if more or self.files[key].get_slice(key).get_shape() != list(wanted.shape):
                raise NotStored(f"{name} is stored in another shape")
            return {name: self._tensor(key, least).to(wanted.dtype)}
        several = None if least is None or not _stacks(converter) else ceil(least / max(1, prod(wanted.shape[1:])))
        converter, count = copy.deepcopy(converter), dict.fromkeys(converter.source_patterns, 0)
        for pattern, key in parts:
            count[pattern] += 1
            if several is None or count[pattern] <= several:
                converter.add_tensor(name, key, pattern, self._tensor(key).to(wanted.dtype))
        made = converter.convert(name, model=self.model, config=self.model.config)
        made = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        for each, value in made.items():
            if value.shape[1:] != self.parameters[each].shape[1:] or (several is None and len(value) != len(self.parameters[each])):
                raise NotStored(f"{each} is stored in another shape")
        return made

    def _tensor(self, key: str, least: int | None = None) -> Tensor:
        """A stored tensor; with ``least`` only as many first rows as hold that many values. Raises NotStored if it holds no floats."""
        stored = self.files[key].get_slice(key)
        if least is None or not (shape := stored.get_shape()):
            tensor: Tensor = self.files[key].get_tensor(key)
        else:
            tensor = stored[: ceil(least / max(1, prod(shape[1:])))]
        if not tensor.is_floating_point():
            raise NotStored(f"{key} is {tensor.dtype}")
        return tensor


def _stacks(converter: Any) -> bool:
    """Whether the converter stacks tensors (experts), so that the first rows it makes need only the first tensors of each pattern."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    first, *others = converter.operations
    stacked = isinstance(first, MergeModulelist) and first.dim == 0
    return stacked and all(isinstance(op, Concatenate) and op.dim > 0 for op in others)
