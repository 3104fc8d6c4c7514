"""Makes objects from the settings of conf/target and conf/decode, for all commands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headstart.heads.base import Drafter, TargetShape
from headstart.heads.errors import UserError
from headstart.heads.kinds import check_kinds, model_class
from headstart.inference.decoding.info import DTYPES, TargetInfo, loading
from headstart.inference.decoding.placement import check_device, say
from headstart.inference.decoding.plans import load_plans
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Proposer
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.stored import NotStored, StoredTarget
from headstart.inference.decoding.target import Target
from headstart.inference.proposers.elsewhere import Elsewhere
from headstart.inference.proposers.open import open_proposer
from headstart.inference.reports.several import sizes_of
from headstart.inference.speculator import load_speculator, open_speculator

Settings = dict[str, Any]
NONE_GIVEN = "give speculator=DIR, the folder of a trained drafter; without one: decode=ngram, suffix, early_exit or swift"
NO_GAIN = "decode=tuned: by decode.json one sequence is fastest without drafting, so there is nothing to measure: take decode=auto"


def open_target(settings: Settings, to_decode: bool = False) -> Target:
    """Load the target that the settings of conf/target/NAME.yaml describe. A relative path is looked for in the working directory, then in
    the checkout. ``to_decode``: the weights serve for decoding only, so they are prepacked (see ``Target.prepack``).

    Raises UserError. Where the model is missing but its shapes are known (``config``), the error says how large it is and what to do.
    """
    with located(settings) as path:
        target = Target.load(path, **how_to_load(settings))
        return target.prepack() if to_decode else target


def read_target(settings: Settings) -> TargetInfo:
    """Read a target from its files alone; ``opened`` loads its layers when a pass is needed. Where the files do not suffice, the target is
    loaded at once, and a printed line says why. Raises UserError as ``open_target`` does.
    """
    with located(settings) as path:
        try:
            return StoredTarget(path, **how_to_load(settings))
        except NotStored as e:
            say(f"target {settings['name']} is loaded with its layers: {e}")
        return Target.load(path, **how_to_load(settings))


def config_of(settings: Settings) -> tuple[str, Any]:
    """The path of a target and its transformers config, without loading anything else. Raises UserError."""
    from transformers import AutoConfig

    with located(settings) as path:
        if (published := settings["config"]) is not None:
            return path, AutoConfig.for_model(**published)
        with loading(path):
            return path, AutoConfig.from_pretrained(path)


def path_of(settings: Settings) -> str:
    """The path of a target. A relative path is looked for in the working directory, then in the checkout."""
    path = str(settings["path"])
    beside = Path(__file__).resolve().parents[1] / path
    return str(beside) if beside.is_dir() and not Path(path).is_dir() else path


@contextmanager
def located(settings: Settings) -> Iterator[str]:
    """A context in which a target is read; it gives the target's path. Where a preset's model is missing, the UserError says what to do."""
    from transformers import AutoConfig

    path = path_of(settings)
    if settings["config"] is not None:  # checked first, so that a model which will be refused need not be downloaded
        check_kinds(AutoConfig.for_model(**settings["config"]).get_text_config(), settings["name"])
    try:
        yield path
    except UserError as e:
        if settings["config"] is None:
            raise
        raise UserError(
            f"target {settings['name']} ({_size(settings['config'], settings['dtype'])}) is not here. {e}. Log in to the hub "
            "(`hf auth login`) and accept the model's licence there, or download it elsewhere and set target.path=DIR, a folder with "
            "config.json, tokenizer.json and model.safetensors or model.safetensors.index.json"
        ) from e


def how_to_load(settings: Settings) -> Settings:
    """The keyword arguments of ``Target.load``."""
    return {key: settings[key] for key in ("dtype", "device", "attention")}


def _size(config: Settings, dtype: str) -> str:
    """A line with a model's shapes and the size of its weights, from its config alone."""
    from transformers import AutoConfig

    hf = AutoConfig.for_model(**config)
    shape = TargetShape.of(hf)
    stored = shape.dtype if dtype == "auto" else dtype
    with torch.device("meta"):
        weights = sum(p.numel() for p in model_class(hf).from_config(hf).parameters())
    gigabytes = weights * DTYPES[stored].itemsize / 1e9
    sizes = f"{shape.layers} layers, hidden size {shape.hidden_size}, vocabulary {shape.vocab_size}"
    return f"{sizes}, {weights / 1e9:.1f} billion weights: {gigabytes:.0f} GB in {stored}"


class Decode(NamedTuple):
    """How to decode, and how much."""

    policy: TreePolicy
    sampling: SamplingParams
    prompts: int
    new_tokens: int
    sequences: Sequence[int]  # how many prompts to decode at once: each of these numbers, besides one
    proposer: Settings  # who guesses: {"kind": "drafter"}, or other settings for ``open_proposer``
    tuned: bool  # take the trees of decode.json


def open_decode(settings: Settings) -> Decode:
    """Read the settings of conf/decode/NAME.yaml: tree policy, sampling, proposer, and how much to decode. Raises UserError."""
    shape, tuned = {k: settings[k] for k in ("kind", "depth", "nodes", "branch", "expand", "least")}, settings["kind"] == "tuned"
    if tuned:
        shape["kind"] = "auto"  # stands in until ``open_guesser`` reads decode.json
    policy = TreePolicy(**shape, paths=_paths(settings["paths"]) if settings["kind"] == "fixed" else ())
    sampling = SamplingParams(**{k: settings[k] for k in ("top_k", "top_p", "min_p", "repetition_penalty", "rule", "seed")})
    if not tuned:  # those of decode.json are checked when they are opened
        policy.check(sampling.rule)
    sequences = sizes_of(settings.get("sequences") or (), settings["prompts"])
    return Decode(policy, sampling, settings["prompts"], settings["new_tokens"], sequences, settings["proposer"], tuned)


def _paths(given: Any) -> Any:
    """The paths of a fixed tree as child ranks. A string names a JSON file that holds them. Raises UserError for a bad file."""
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(Path(given).read_text())
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(
            f"decode.paths={given} cannot be read ({e}): give a JSON file with a list like [[0], [1], [0, 0]], or the list"
        ) from e
    if not isinstance(found, list) or not all(isinstance(p, list) and all(type(rank) is int for rank in p) for p in found):
        raise UserError(f"decode.paths={given}: the file must hold a list of lists of child ranks, like [[0], [1], [0, 0]]")
    return found


def open_guesser(
    decode: Decode, speculator: str | None, target: Target, elsewhere: str | None = None
) -> tuple[Drafter | None, Proposer | None, TreePolicy | None]:
    """Open the drafter and proposer of the settings. Returns the drafter of the folder ``speculator``; the proposer, or None where the
    drafter guesses by its own trees; and the trees' shape, or None where decode.json says that one sequence is faster without drafting.

    ``elsewhere``: the device of the drafter, if it is not the target's. Raises UserError where something is missing or does not fit.
    """
    if elsewhere is not None:
        return None, *_open_elsewhere(decode, speculator, target, check_device(elsewhere, "drafter_device"))
    if decode.tuned and decode.proposer != {"kind": "drafter"}:
        raise UserError(f"decode.kind=tuned takes the trees of decode.json, which are a drafter's: with decode.proposer.kind="
                        f"{decode.proposer['kind']} take decode.kind=auto")  # fmt: skip
    drafter = None if speculator is None else open_speculator(speculator, target)
    if decode.proposer != {"kind": "drafter"}:
        return drafter, open_proposer(decode.proposer, target, drafter, "decode.proposer"), decode.policy
    if drafter is None or speculator is None:
        raise UserError(NONE_GIVEN)
    if not decode.tuned:
        return drafter, None, decode.policy
    policy = next(iter(load_plans(speculator, target, drafter).values()))
    if policy is not None:
        policy.check(decode.sampling.rule)
        say(f"tree of decode.json: {policy}")
    return drafter, None, policy


def _open_elsewhere(decode: Decode, speculator: str | None, target: Target, device: str) -> tuple[Proposer, TreePolicy]:
    settings = {key: value for key, value in decode.proposer.items() if key != "folder"}
    kind, folder = settings["kind"], decode.proposer.get("folder") or speculator
    if kind not in ("drafter", "pipelined"):
        raise UserError(f"drafter_device={device} is not for decode.proposer.kind={kind}: it places a drafter that guesses alone (decode="
                        "dynamic, best_first, chain, fixed) or pipelined; set it to null")  # fmt: skip
    if folder is None:
        raise UserError(NONE_GIVEN)
    if decode.tuned:
        raise UserError(f"decode=tuned measures the drafter on the target's device, not on drafter_device={device}: take decode=auto")
    drafter = load_speculator(folder, target).to(device, target.dtype).eval()
    proposer: Proposer = Elsewhere(drafter, target)  # attaches the drafter on its device
    if settings != {"kind": "drafter"}:
        proposer = open_proposer(settings, target, drafter, "decode.proposer")
    drafter.prepack()
    return proposer, decode.policy.at_most(drafter.max_depth or decode.policy.depth)
