"""Build a drafter by its name, save it as a folder that serving engines load, load it back and refuse what does not fit.

config.json holds the engines' keys (heads/formats/) plus one block of ours, ``headstart``: head, arguments, target.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import heads.formats as formats_package
from heads.base import Drafter, TargetShape
from heads.errors import UserError
from heads.files import put_folder
from heads.formats import causal_lm

WORDS = {int: "a whole number of at least 1", float: "a number", bool: "true or false", str: "a word", NoneType: "null"}
WORDS |= {list: "a list of whole numbers", dict: "a dictionary"}  # what a setting of each type is called
FORMATS = ("peagle", "eagle3", "dflash", "eagle1", "medusa", "mlp_speculator", "causal_lm", "native")


def drafter_class(name: str) -> type[Drafter]:
    """heads/NAME.py defines one Drafter. Raises UserError for a name without one."""
    modules = (importlib.import_module(f"heads.{p.stem}") for p in sorted(Path(__file__).parent.glob("[a-z]*.py")) if p.stem != "base")
    own = {m.__name__.removeprefix("heads."): [c for c in vars(m).values() if _is_own(c, m.__name__)] for m in modules}
    known = {stem: classes[0] for stem, classes in own.items() if classes}
    if name not in known:
        raise UserError(f"no drafter is called {name!r}: there are {', '.join(known)}")
    return known[name]


def _is_own(c: Any, module: str) -> bool:
    return inspect.isclass(c) and issubclass(c, Drafter) and c.__module__ == module


def check_arguments(name: str, arguments: Mapping[str, Any]) -> type[Drafter]:
    """The class of that name. Raises UserError for arguments that its constructor does not take, or not of that kind."""
    cls = drafter_class(name)
    accepted = inspect.signature(cls).parameters.keys() - {"shape"}
    for key, value in arguments.items():
        if key not in accepted:
            raise UserError(f"head {name!r} has no setting {key!r}: it has {', '.join(sorted(accepted)) or 'none'}")
        kinds = get_type_hints(cls.__init__).get(key, Any)
        kinds = get_args(kinds) if isinstance(kinds, UnionType) else (kinds,)
        if not any(_is(value, kind) for kind in kinds):
            wanted = " or ".join(WORDS.get(get_origin(kind) or kind, str(kind)) for kind in kinds)
            raise UserError(f"head.{key} must be {wanted}, found {value!r}")
    return cls


def build(name: str, shape: TargetShape, **arguments: Any) -> Drafter:
    """A fresh drafter; ``drafter.config`` records how to build it again. Raises UserError for an unknown argument."""
    cls = check_arguments(name, arguments)
    drafter = cls(shape, **arguments)
    bound = inspect.signature(cls).bind(shape, **arguments)
    bound.apply_defaults()
    given = getattr(drafter, "arguments", None) or {k: v for k, v in bound.arguments.items() if k != "shape"}
    drafter.config = {"head": name, **given}
    return drafter


def _is(value: Any, kind: Any) -> bool:
    """Whether a setting is what its constructor declares."""
    kind = get_origin(kind) or kind
    if kind is Any:
        return True
    if isinstance(value, bool) or kind is bool:
        return kind is type(value)
    if kind is list:
        return isinstance(value, (list, tuple)) and all(type(x) is int for x in value)
    if kind is int:
        return isinstance(value, int) and value >= 1
    return isinstance(value, (int, float) if kind is float else kind)


def target_card(shape: TargetShape, tokenizer_sha: str) -> dict[str, Any]:
    """What identifies the target a drafter was trained for."""
    keys = ("model_type", "hidden_size", "layers", "vocab_size")
    return {**{k: getattr(shape, k) for k in keys}, "tokenizer": tokenizer_sha}


def check_target(trained_for: Mapping[str, Any], here: Mapping[str, Any], folder: str | Path) -> None:
    """Raises UserError naming what differs between the target a drafter was trained for and the one at hand."""
    wrong = [f"{k} is {here[k]} here, {v} in training" for k, v in trained_for.items() if k in here and here[k] != v]
    if wrong:
        raise UserError(f"{folder} was trained for another target: {'; '.join(wrong)}")


def _format(drafter: Drafter) -> Any:
    return importlib.import_module(f"{formats_package.__name__}.{drafter.format}")


def save(
    drafter: Drafter, folder: str | Path, target: Mapping[str, Any], dtype: torch.dtype, tokenizer: Any = None, base: str | None = None
) -> None:
    """Write ``folder`` (config.json, model.safetensors) at once or not at all: a temporary folder beside it, then a rename.

    ``base``: the target's folder or name on the hub, for engines that look for it in the drafter's config.
    Raises UserError for weights that are not finite, and where the disk refuses; an earlier folder is then untouched.
    """
    fmt, folder = _format(drafter), Path(folder)
    own = drafter.state_dict()
    tensors = {theirs: own[ours] for ours, theirs in fmt.names(drafter).items()} | fmt.extras(drafter)
    tensors = {k: (v.to(dtype) if v.is_floating_point() else v).detach().cpu().contiguous().clone() for k, v in tensors.items()}
    bad = [k for k, v in tensors.items() if not v.isfinite().all()]
    if bad:
        raise UserError(f"not saved: {bad[0]} holds NaN or infinite values (training diverged; lower trainer.lr)")
    kind = str(dtype).removeprefix("torch.")
    config = fmt.config(drafter) | {"dtype": kind, "torch_dtype": kind}
    if base is not None and getattr(fmt, "names_target", False):
        config["base_model_name_or_path"] = base
    config["headstart"] = {"head": drafter.config["head"], "arguments": {k: v for k, v in drafter.config.items() if k != "head"}}
    config["headstart"] |= {"format": drafter.format, "target": dict(target)}

    def write(beside: Path) -> None:
        save_file(tensors, beside / "model.safetensors", metadata={"format": "pt"})
        (beside / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
        if tokenizer is not None and getattr(fmt, "with_tokenizer", False):
            tokenizer.save_pretrained(beside)
        (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    try:
        put_folder(folder, write)
    except (OSError, SafetensorError) as e:  # safetensors reports a full disk as an error of its own
        raise UserError(f"{folder} cannot be written ({e}): what was there before is untouched") from e


def load(folder: str | Path, shape: TargetShape, target: Mapping[str, Any] | None = None) -> Drafter:
    """The drafter of a folder (ours, or a recognised foreign one), in the folder's dtype.

    Raises UserError when files are missing or damaged, when tensors do not match the config exactly, or when it
    was trained for another target than ``target`` (see ``target_card``).
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    tensors = read_tensors(folder / "model.safetensors")
    ours = config.get("headstart")
    if ours is not None:
        kinds = {"head": str, "arguments": dict, "target": dict}
        if not isinstance(ours, dict) or not all(isinstance(ours.get(k), kind) for k, kind in kinds.items()):
            raise UserError(f"{folder / 'config.json'}: the headstart block needs head (a word), arguments and target (dictionaries)")
        check_target(ours["target"], target or {}, folder)
        name, arguments = ours["head"], ours["arguments"]
    else:
        if (folder / "mask_embedding.pt").exists():
            raise UserError(f"{folder} has mask_embedding.pt, a mask of its own in a pickled file: such a drafter cannot be loaded")
        found = [f for f in map(_module, FORMATS) if f.recognises(config)]
        if not found:
            raise UserError(f"{folder / 'config.json'}: neither saved by Headstart nor a known speculator format nor a causal LM")
        hidden = config.get("hidden_size", config.get("emb_dim"))
        if hidden != shape.hidden_size or config.get("vocab_size") != shape.vocab_size:
            raise UserError(f"{folder} does not fit the target: hidden size {hidden} and vocabulary "
                            f"{config.get('vocab_size')}, the target has {shape.hidden_size} and {shape.vocab_size}")  # fmt: skip
        try:
            name, arguments = found[0].arguments(config, tensors, shape)
        except UserError as e:
            raise UserError(f"{folder}: {e}") from None
        except (KeyError, TypeError, AttributeError) as e:
            raise UserError(f"{folder / 'config.json'}: a key is missing or of the wrong kind ({e!r})") from None
    _check_sizes(arguments, tensors, folder)
    with torch.device("meta"):  # nothing is allocated from numbers in a file before the tensors beside it bear them out
        sketch = _rebuild(name, shape, arguments, folder)
    given = _match(sketch, tensors, folder)
    return _fill(_rebuild(name, shape, arguments, folder), given, folder)


def is_language_model(folder: str | Path) -> bool:
    """Whether a folder is an ordinary causal LM of transformers: no format of speculators, and not saved by us."""
    config = read_json(Path(folder) / "config.json")
    return "headstart" not in config and causal_lm.is_plain(config) and not any(_module(f).recognises(config) for f in FORMATS)


def open_language_model(folder: str | Path, shape: TargetShape) -> Drafter:
    """Such a folder as a draft model. Raises UserError where it does not go with the target's vocabulary."""
    return build("draft_lm", shape, folder=str(folder))


def _module(name: str) -> Any:
    return importlib.import_module(f"{formats_package.__name__}.{name}")


def _check_sizes(arguments: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """No module is built for a number in a file (of layers, say) that the tensors beside it cannot bear out."""
    if arguments.get("folder"):
        raise UserError(f"{folder / 'config.json'}: a saved drafter stands alone, but this one names folder={arguments['folder']}")
    for key, value in arguments.items():
        if isinstance(value, dict):
            _check_sizes(value, tensors, folder)
        counts = key == "heads" or any(word in key for word in ("layer", "expert", "block"))
        if counts and isinstance(value, int) and value > max(len(tensors), 256):
            raise UserError(f"{folder / 'config.json'}: {key}={value} does not fit the tensors of model.safetensors")


def _rebuild(name: str, shape: TargetShape, arguments: Mapping[str, Any], folder: Path) -> Drafter:
    try:
        return build(name, shape, **arguments)
    except Exception as e:  # whatever a constructor says of values in a file that no one checked
        raise UserError(f"{folder / 'config.json'}: no drafter can be built from it: {' '.join(str(e).split())}") from e


def _match(drafter: Drafter, tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The file's tensors by the format's own names. Raises UserError unless they are exactly this drafter's."""
    fmt = _format(drafter)
    names, own = fmt.names(drafter), drafter.state_dict()
    optional = set(fmt.extras(drafter)) | {"embed_tokens.weight"}  # files may carry a copy of the target's embedding
    given = {getattr(fmt, "canonical", str)(name): tensor for name, tensor in tensors.items()}
    missing, unknown = set(names.values()) - given.keys(), given.keys() - set(names.values()) - optional
    if missing or unknown:
        what = f"{sorted(missing)[0]} is missing" if missing else f"{sorted(unknown)[0]} is not a tensor of this drafter"
        raise UserError(f"{folder / 'model.safetensors'}: {what} ({len(missing)} missing, {len(unknown)} unknown)")
    for ours, theirs in names.items():
        if own[ours].shape != given[theirs].shape:
            raise UserError(f"{folder / 'model.safetensors'}: {theirs} is {list(given[theirs].shape)}, expected {list(own[ours].shape)}")
    return given


def _fill(drafter: Drafter, given: dict[str, Tensor], folder: Path) -> Drafter:
    fmt = _format(drafter)
    own = {ours: given[theirs] for ours, theirs in fmt.names(drafter).items()}
    drafter.to(next(t.dtype for t in own.values() if t.is_floating_point()))
    drafter.load_state_dict(own, strict=False)
    drafter.claimed_VD = None if "embed_tokens.weight" in fmt.names(drafter).values() else given.get("embed_tokens.weight")
    for name, tensor in fmt.extras(drafter).items():  # what follows from the others must do so, or the folder is another drafter
        if name in given and not torch.equal(given[name].to(tensor.dtype), tensor):
            raise UserError(f"{folder / 'model.safetensors'}: {name} has values that this drafter cannot have")
    return drafter


def read_json(path: Path) -> dict[str, Any]:
    """Raises UserError when the file is missing, larger than 16 MiB, or not a JSON object."""
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    if path.stat().st_size > 16 << 20:
        raise UserError(f"{path} is larger than 16 MiB: not a config")
    try:
        value = json.loads(path.read_text())
    except ValueError as e:
        raise UserError(f"{path} is not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises UserError when it is missing or truncated."""
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    try:
        with safe_open(os.fspath(path), framework="pt") as f:
            return {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as e:
        raise UserError(f"{path} is damaged or truncated ({e}): copy or export it again") from None
