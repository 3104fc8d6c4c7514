"""Checks that a folder is what was saved: the digests of its weights and settings, and the agreement of the two halves of config.json.

config.json describes the drafter twice: in the keys that engines read, and in our own block, from which it is rebuilt here. A folder is
refused where engines would compute something else than we do, and where anything changed since ``heads.hub.save`` wrote it. The
``FREE`` keys and the engines' names of the architecture may change. Folders of earlier versions have no digests. Their two halves must
agree too, but nobody can tell whether the weights are those that were saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from headstart.heads.base import Drafter, TargetShape
from headstart.heads.errors import UserError, warn_once
from headstart.heads.formats.keys import alike, shown
from headstart.heads.renamed import arguments_of_now
from headstart.heads.stored import file_sha

OURS = "headstart"  # our block in config.json
CARD = ("model_type", "hidden_size", "layers", "vocab_size", "tokenizer")  # the fields that identify a target
FREE = ("_name_or_path", "base_model_name_or_path", "transformers_version")  # keys that do not affect what is computed
LATER = ("mtp",)  # drafters whose format came later: earlier versions saved all of them in ours
WEIGHTS, CONFIG = "model.safetensors", "config"  # what is digested: the weights' file, and the content of config.json


def tokenizer_sha(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's vocabulary. Drafters and a target's answers fit only a tokenizer with the same one. "none" for None."""
    if tokenizer is None:
        return "none"
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def tokenizer_file_sha(tokenizer: Any) -> str:
    """SHA-256 of everything that determines a fast tokenizer's tokens (vocabulary, merges, normalizers), for tokens kept on disk."""
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256(f"{tokenizer.backend_tokenizer.to_str()}{special}".encode()).hexdigest()


def target_card(shape: TargetShape, tokenizer: str) -> dict[str, Any]:
    """The fields that identify the target of a drafter. ``tokenizer``: its ``tokenizer_sha``."""
    return {key: tokenizer if key == "tokenizer" else getattr(shape, key) for key in CARD}


def check_target(trained_for: Mapping[str, Any], here: Mapping[str, Any], folder: str | Path) -> None:
    """Raises UserError naming each field in which the target at hand differs from the one that the drafter was trained for."""
    wrong = []
    for key, value in trained_for.items():
        if key in here and not alike(here[key], value):
            said = shown(value).strip("'")
            wrong.append(f"{key} is {here[key]} here, {said} in training")
    if wrong:
        added = ". If tokens were only added to it, such as a pad token, put the earlier tokenizer's files beside the target's weights"
        hint = added if len(wrong) == 1 and wrong[0].startswith("tokenizer ") else ""
        raise UserError(f"{folder} was trained for another target: {'; '.join(wrong)}{hint}")


def digests(config: Mapping[str, Any], weights: Path) -> dict[str, str]:
    """SHA-256 of the weights' file and of config.json's content: keys sorted, without ``FREE`` ones, architectures and our own digests."""
    engines = {k: v for k, v in config.items() if k not in (*FREE, "architectures", OURS)}
    ours = {k: v for k, v in config[OURS].items() if k != "sha256"}
    said = json.dumps({**engines, OURS: ours}, sort_keys=True, separators=(",", ":"))
    return {WEIGHTS: file_sha(weights), CONFIG: hashlib.sha256(said.encode()).hexdigest()}


def block_of(config: Mapping[str, Any], folder: Path, here: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(head, arguments) from our block in config.json. ``here``: the known fields of the card of the target at hand.

    Raises UserError for a malformed block, and for a drafter that was trained for another target.
    """
    ours, path = config[OURS], folder / "config.json"
    kinds = {"head": str, "arguments": dict, "target": dict}
    if not isinstance(ours, dict) or not all(isinstance(ours.get(k), kind) for k, kind in kinds.items()):
        raise UserError(f"{path}: the headstart block needs head (a word), arguments and target (dictionaries)")
    if absent := [key for key in CARD if key not in ours["target"]]:
        raise UserError(f"{path}: headstart.target lacks {absent[0]}: it must say which target the drafter was trained for")
    check_target(ours["target"], here, folder)
    return ours["head"], arguments_of_now(ours["head"], ours["arguments"])


@contextmanager
def as_saved(drafter: Drafter, config: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the drafter has the format in which its folder was saved. Where that is not today's, its ``unserved`` says so afterwards."""
    form, ours = drafter.format, config.get(OURS, {})
    if ours.get("head") in LATER and ours.get("format", "native") == "native":
        drafter.format = "native"
    yield
    if drafter.format != form:
        drafter.format, drafter.unserved = form, "an earlier version saved it, in a form that none reads; load and save it again"


def check(drafter: Drafter, fmt: Any, config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Check a folder of ours. Engines must read the same drafter from its keys as ``drafter``, which was rebuilt from our block, and its
    files must be what was saved. Raises UserError naming the key and both values, or the file that was changed.
    """
    ours, path = config[OURS], folder / "config.json"
    if not alike(ours.get("format", drafter.format), drafter.format):
        raise UserError(f"{path}: headstart.format is {shown(ours['format'])}, the drafter's is {drafter.format!r}")
    kind = config.get("dtype")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and str(tensor.dtype) != f"torch.{kind}":
            raise UserError(f"{folder / WEIGHTS}: {name} is {str(tensor.dtype).removeprefix('torch.')}, config.json says {shown(kind)}")
    with keys_of(folder):
        if hasattr(fmt, "arguments"):
            fmt.arguments(dict(config), dict(tensors), drafter.shape)
        theirs = {"architectures": None, **getattr(fmt, "read", dict)(config)}
        wanted = getattr(fmt, "read", dict)(fmt.config(drafter)) | {"torch_dtype": kind}
    values = {key: [value] for key, value in wanted.items() if key not in FREE}
    values["architectures"] = [[name] for name in getattr(fmt, "ARCHITECTURES", wanted["architectures"])]
    for key, known in values.items():
        if key in theirs and not any(alike(theirs[key], value) for value in known):  # a missing key is found by the digest
            raise UserError(
                f"{path} contradicts itself: {key} is {shown(theirs[key])} for engines, {shown(known[0])} by the headstart block"
            )
    _check_digests(config, folder)


def _check_digests(config: Mapping[str, Any], folder: Path) -> None:
    """Raises UserError naming a file whose digest differs from the saved one. Warns where the folder has no digests."""
    if "sha256" not in config[OURS]:
        return warn_once(
            f"{folder} was saved by an earlier version, without digests: whether its weights were changed since then cannot be checked"
        )
    said, found = config[OURS]["sha256"], digests(config, folder / WEIGHTS)
    if not isinstance(said, dict) or said.keys() != found.keys():
        raise UserError(f"{folder / 'config.json'}: headstart.sha256 must hold the digests of {' and '.join(found)}")
    for what, file in ((WEIGHTS, WEIGHTS), (CONFIG, "config.json")):
        if said[what] != found[what]:
            raise UserError(f"{folder / file} is not what was saved: config.json has another digest of it (headstart.sha256.{what}): "
                            "copy or export the folder again")  # fmt: skip


@contextmanager
def keys_of(folder: Path) -> Iterator[None]:
    """Turn any error that a format raises inside, about keys or tensors of a folder, into a UserError of one line that names the folder."""
    try:
        yield
    except UserError as e:
        raise UserError(f"{folder / 'config.json'}: {e}") from None
    except Exception as e:  # KeyError, TypeError, ..: formats raise them for values of an unexpected type
        why = " ".join(repr(e).split())[:300]
        raise UserError(f"{folder / 'config.json'}: a key is missing or of the wrong kind ({why})") from None
