"""Build a drafter by its name, save it as a folder that serving engines load, load it back, and refuse folders that do not fit.

config.json holds the keys that engines read (heads/formats/) and one block of ours, ``headstart``: the head's name, its arguments, its
target, and the digests of the weights and of config.json itself (heads/seal.py).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from safetensors.torch import save_file
from torch import Tensor

import headstart.heads.formats as formats_package
from headstart.heads import seal
from headstart.heads.base import Drafter, TargetShape
from headstart.heads.errors import UserError
from headstart.heads.files import put_folder
from headstart.heads.formats import causal_lm, speculators
from headstart.heads.formats.keys import architecture, shown
from headstart.heads.renamed import arguments_of_now
from headstart.heads.seal import OURS
from headstart.heads.seal import check_target as check_target
from headstart.heads.seal import target_card as target_card
from headstart.heads.stored import check_weights, finite, read_json, read_tensors

WORDS = {int: "a whole number of at least {}", float: "a number", bool: "true or false", str: "a word", NoneType: "null"}
WORDS |= {list: "a list of whole numbers", dict: "a dictionary"}  # how error messages name the types of settings
MOST = 256  # a larger count in a file that its number of tensors does not confirm is refused: it could cost any amount of memory


def drafter_class(name: str) -> type[Drafter]:
    """The one Drafter class that heads/NAME.py defines. Raises UserError for a name without one."""
    names = (path.stem for path in sorted(Path(__file__).parent.glob("[a-z]*.py")) if path.stem != "base")
    modules = {stem: importlib.import_module(f"{__package__}.{stem}") for stem in names}
    known = {stem: c for stem, m in modules.items() for c in vars(m).values() if _is_own(c, m.__name__)}
    if name not in known:
        raise UserError(f"no drafter is called {name!r}: there are {', '.join(known)}")
    return known[name]


def _is_own(c: Any, module: str) -> bool:
    return inspect.isclass(c) and issubclass(c, Drafter) and c.__module__ == module


def check_arguments(name: str, arguments: Mapping[str, Any]) -> type[Drafter]:
    """The drafter class called ``name``. Raises UserError for arguments that it does not take, and for values of a wrong type."""
    cls = drafter_class(name)
    accepted = inspect.signature(cls).parameters.keys() - {"shape"}
    for key, value in arguments_of_now(name, arguments).items():
        if key not in accepted:
            raise UserError(f"head {name!r} has no setting {key!r}: it has {', '.join(sorted(accepted)) or 'none'}")
        declared = _declared(cls, key)
        kinds = get_args(declared) if isinstance(declared, UnionType) else (declared,)
        least = 0 if key == "mask_token" else 1
        if not any(_is(value, kind, least) for kind in kinds):
            wanted = " or ".join(WORDS.get(get_origin(kind) or kind, str(kind)) for kind in kinds).format(least)
            raise UserError(f"head.{key} must be {wanted}, found {value!r}")
        if key in ("block", "depth") and value > MOST:  # of which there are no tensors
            raise UserError(f"head.{key} must be at most {MOST}, found {value}: larger ones are refused when the saved folder is read")
    return cls


def _declared(cls: type[Drafter], key: str) -> Any:
    """The type of a setting, as the nearest constructor that names it declares it."""
    for c in cls.__mro__:
        hints = get_type_hints(vars(c).get("__init__", object))
        if key in hints:
            return hints[key]
    return Any


def build(name: str, shape: TargetShape, **arguments: Any) -> Drafter:
    """A fresh drafter. ``drafter.config`` records its name and all arguments. Raises UserError for arguments that do not fit."""
    arguments = arguments_of_now(name, arguments)
    cls = check_arguments(name, arguments)
    drafter = cls(shape, **arguments)
    bound = inspect.signature(cls).bind(shape, **arguments)
    bound.apply_defaults()
    given = getattr(drafter, "arguments", None) or {k: v for k, v in bound.arguments.items() if k != "shape"}
    drafter.config = {"head": name, **given}
    return drafter


def _is(value: Any, kind: Any, least: int) -> bool:
    """Whether a setting has the type that its constructor declares. ``least``: the smallest whole number that is allowed."""
    kind = get_origin(kind) or kind
    if kind is Any:
        return True
    if isinstance(value, bool) or kind is bool:
        return kind is type(value)
    if kind is list:
        return isinstance(value, (list, tuple)) and all(type(x) is int for x in value)
    if kind is int:
        return isinstance(value, int) and value >= least
    return isinstance(value, (int, float) if kind is float else kind)


def _module(name: str) -> Any:
    return importlib.import_module(f"{formats_package.__name__}.{name}")


def _extras(fmt: Any, drafter: Drafter) -> dict[str, Tensor]:
    found: dict[str, Tensor] = fmt.extras(drafter) if hasattr(fmt, "extras") else {}
    return found


def _in_file(fmt: Any, drafter: Drafter, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(fmt.in_file(drafter, tensors)) if hasattr(fmt, "in_file") else tensors


def _recognised(config: dict[str, Any]) -> Any:
    """The module of heads/formats that recognises the config.json of a speculator that others wrote; None where none does."""
    formats = (_module(each.name) for each in pkgutil.iter_modules(formats_package.__path__))
    return next((fmt for fmt in formats if hasattr(fmt, "recognises") and fmt.recognises(config)), None)


def save(
    drafter: Drafter, folder: str | Path, target: Mapping[str, Any], dtype: torch.dtype, tokenizer: Any = None, base: str | None = None
) -> None:
    """Write ``folder`` (config.json, model.safetensors) as a whole or not at all: a temporary folder beside it takes its place.

    ``target``: the complete card of the target (``target_card``). ``dtype``: that of the saved weights. ``tokenizer``: saved too where the
    format needs one. ``base``: the target's folder or name on the hub, for engines that look for it in the drafter's config.
    Raises UserError for weights that are not finite and for disk errors: an earlier folder then stays untouched. Raises ValueError where
    the card is incomplete.
    """
    if absent := set(seal.CARD) - target.keys():
        raise ValueError(f"the target's card lacks {sorted(absent)[0]}: the folder could not be loaded")
    fmt, folder = _module(drafter.format), Path(folder)
    own = drafter.state_dict()
    tensors = _in_file(fmt, drafter, {theirs: own[ours] for ours, theirs in fmt.names(drafter).items()} | _extras(fmt, drafter))
    tensors = {k: (v.to(dtype) if v.is_floating_point() else v).detach().cpu().contiguous().clone() for k, v in tensors.items()}
    if bad := [k for k, v in tensors.items() if v.is_floating_point() and not finite(v)]:
        raise UserError(f"not saved: {bad[0]} holds NaN or infinite values (training diverged; lower trainer.lr)")
    kind = str(dtype).removeprefix("torch.")
    config = fmt.config(drafter) | {"dtype": kind, "torch_dtype": kind}
    if base is not None and getattr(fmt, "names_target", False):
        config["base_model_name_or_path"] = base
    ours = {"head": drafter.config["head"], "arguments": {k: v for k, v in drafter.config.items() if k != "head"}}
    config[OURS] = ours | {"format": drafter.format, "target": dict(target)}
    config = json.loads(json.dumps(config))  # in the form in which it will be read back

    def write(beside: Path) -> None:
        weights = beside / seal.WEIGHTS
        save_file(tensors, weights, metadata={"format": "pt"})
        if tokenizer is not None and getattr(fmt, "with_tokenizer", False):
            tokenizer.save_pretrained(beside)
        for name, text in fmt.beside(drafter).items() if hasattr(fmt, "beside") else ():
            (beside / name).write_text(text, encoding="utf-8")
        config[OURS]["sha256"] = seal.digests(config, weights)
        (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    try:
        put_folder(folder, write)
    except OSError as e:
        raise UserError(f"{folder} cannot be written ({e}): what was there before is untouched") from e


def load(folder: str | Path, shape: TargetShape, target: Mapping[str, Any] | None = None) -> Drafter:
    """The drafter of a folder (ours, or of a recognized foreign format), in the folder's dtype.

    Raises UserError where files are missing, damaged or not what was saved, where tensors do not match the config exactly, where engines
    would compute something else, and where the drafter was trained for another target than ``shape`` and ``target`` (see ``target_card``).
    """
    folder = Path(folder)
    config = _config(folder)
    if (folder / "mask_embedding.pt").exists():
        raise UserError(f"{folder} has mask_embedding.pt, a mask of its own in a pickled file: such a drafter cannot be loaded")
    tensors = read_tensors(folder / seal.WEIGHTS)
    if OURS in config:
        here = {key: value for key, value in target_card(shape, "").items() if key != "tokenizer"}
        name, arguments = seal.block_of(config, folder, {**here, **(target or {})})
    else:
        name, arguments = _foreign(config, tensors, shape, folder)
    _check_sizes(arguments, tensors, folder)
    with torch.device("meta"):  # allocates nothing: a size in config.json may be huge until the file's tensors confirm it
        sketch = _rebuild(name, shape, arguments, folder)
    with seal.as_saved(sketch, config):
        given = _match(sketch, tensors, folder, whole=OURS in config)
    drafter = _rebuild(name, shape, arguments, folder)
    with seal.as_saved(drafter, config):
        _fill(drafter, given, folder)
        if OURS in config:
            seal.check(drafter, _module(drafter.format), config, tensors, folder)
    return drafter


def is_language_model(folder: str | Path) -> bool:
    """Whether a folder is an ordinary causal LM of transformers: not of a speculator format, and not saved by us."""
    config = _config(Path(folder))
    return OURS not in config and causal_lm.is_plain(config) and _recognised(config) is None


def open_language_model(folder: str | Path, shape: TargetShape, transplant: bool = False) -> Drafter:
    """The causal LM of a folder as a draft model. ``transplant``: as in ``heads.draft_lm``. Raises UserError where it cannot be one."""
    name, settings = causal_lm.head_of(_config(Path(folder)))
    return build(name, shape, folder=str(folder), transplant=transplant, **settings)


def _config(folder: Path) -> dict[str, Any]:
    """The folder's config.json as a dictionary. Raises UserError where it cannot be read or is malformed."""
    config = read_json(folder / "config.json")
    with seal.keys_of(folder):
        if "speculators_config" in config and OURS not in config:
            config = speculators.flat(config)
        architecture(config)
    return config


def _foreign(config: dict[str, Any], tensors: dict[str, Tensor], shape: TargetShape, folder: Path) -> tuple[str, dict[str, Any]]:
    """(head, arguments) of a folder that others wrote. Raises UserError for an unknown format and for sizes that do not fit the target."""
    fmt = _recognised(config)
    if fmt is None:
        raise UserError(f"{folder / 'config.json'}: neither saved by Headstart nor a known speculator format nor a causal LM")
    hidden = config.get("hidden_size", config.get("emb_dim"))
    if hidden != shape.hidden_size or config.get("vocab_size") != shape.vocab_size:
        raise UserError(f"{folder} does not fit the target: hidden size {shown(hidden)} and vocabulary "
                        f"{shown(config.get('vocab_size'))}, the target has {shape.hidden_size} and {shape.vocab_size}")  # fmt: skip
    with seal.keys_of(folder):
        found: tuple[str, dict[str, Any]] = fmt.arguments(config, tensors, shape)
    return found


def _check_sizes(arguments: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raises UserError for a count in config.json (of layers, for example) that exceeds the number of tensors, and for arguments that name
    another folder.
    """
    if arguments.get("folder"):
        raise UserError(f"{folder / 'config.json'}: a saved drafter stands alone, but this one names folder={shown(arguments['folder'])}")
    for key, value in arguments.items():
        if isinstance(value, dict):
            _check_sizes(value, tensors, folder)
        counts = key in ("heads", "guesses", "depth") or any(word in key for word in ("layer", "expert", "block"))
        counts = counts and not key.endswith(("_size", "_dim"))  # such as shared_expert_intermediate_size: a width
        if counts and isinstance(value, int) and value > max(len(tensors), MOST):
            raise UserError(f"{folder / 'config.json'}: {key}={value} does not fit the tensors of model.safetensors")


def _rebuild(name: str, shape: TargetShape, arguments: Mapping[str, Any], folder: Path) -> Drafter:
    try:
        return build(name, shape, **arguments)
    except Exception as e:  # any error of a constructor: nobody has checked the values in this file
        raise UserError(f"{folder / 'config.json'}: no drafter can be built from it: {' '.join(str(e).split())[:500]}") from e


def _match(drafter: Drafter, tensors: dict[str, Tensor], folder: Path, whole: bool) -> dict[str, Tensor]:
    """The file's tensors under the format's canonical names. Raises UserError unless they are exactly the tensors of this drafter, with the
    right shapes, the dtypes of weights and finite values. Tensors that are derived from others may be missing, except in a folder of ours
    (``whole``).
    """
    fmt, path = _module(drafter.format), folder / seal.WEIGHTS
    names, own, extras = fmt.names(drafter), drafter.state_dict(), _extras(fmt, drafter)
    given: dict[str, Tensor] = {}
    for spelled, tensor in tensors.items():
        name = getattr(fmt, "canonical", str)(spelled)
        if name in given:
            raise UserError(f"{path}: {name} is there twice, in two spellings: which one is read depends on the engine")
        given[name] = tensor
    likes = {theirs: own[ours] for ours, theirs in names.items()}
    # A file holds the tensors as engines expect them. Earlier versions saved them as the model in memory holds them.
    if (parted := _in_file(fmt, drafter, likes)).keys() & (given.keys() - likes.keys()):
        likes = parted
    wanted = likes.keys() | (extras.keys() if whole else set())
    optional = set(extras) | (set() if whole else {"embed_tokens.weight"})  # others' files may hold a copy of the target's embedding
    missing, unknown = wanted - given.keys(), given.keys() - wanted - optional
    if missing or unknown:
        what = f"{sorted(missing)[0]} is missing" if missing else f"{sorted(unknown)[0]} is not a tensor of this drafter"
        raise UserError(f"{path}: {what} ({len(missing)} missing, {len(unknown)} unknown)")
    for name, like in (likes | extras).items():
        if name in given and given[name].shape != like.shape:
            raise UserError(f"{path}: {name} is {list(given[name].shape)}, expected {list(like.shape)}")
    maps = {name for name, tensor in extras.items() if not tensor.is_floating_point()}
    check_weights({name: tensor for name, tensor in given.items() if name not in maps}, path)
    for name in maps & given.keys():
        if given[name].is_floating_point() or (given[name].dtype == torch.bool) != (extras[name].dtype == torch.bool):
            raise UserError(f"{path}: {name} is {str(given[name].dtype).removeprefix('torch.')}, expected {extras[name].dtype}")
    return given


def _fill(drafter: Drafter, given: dict[str, Tensor], folder: Path) -> None:
    """Load the file's tensors into a rebuilt drafter. Raises UserError where a derived tensor contradicts them."""
    fmt = _module(drafter.format)
    given = fmt.in_memory(drafter, given) if hasattr(fmt, "in_memory") else given
    own = {ours: given[theirs] for ours, theirs in fmt.names(drafter).items()}
    drafter.to(functools.reduce(torch.promote_types, {t.dtype for t in own.values()}))  # a dtype that rounds none of them
    drafter.load_state_dict(own, strict=False)
    drafter.claimed_VD = None if "embed_tokens.weight" in fmt.names(drafter).values() else given.get("embed_tokens.weight")
    for name, tensor in _extras(fmt, drafter).items():  # must equal what follows from the others, or the folder holds another drafter
        if name in given and not torch.equal(given[name].to(tensor.dtype), tensor):
            raise UserError(f"{folder / seal.WEIGHTS}: {name} has values that this drafter cannot have")
