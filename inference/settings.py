"""From the settings of conf/target and conf/decode to objects: what every door opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from heads import hub
from heads.base import Drafter, TargetShape
from heads.errors import UserError
from inference.propose import TreePolicy
from inference.target import DTYPES, Target
from inference.verify import Sampling

Settings = dict[str, Any]


def open_target(settings: Settings) -> Target:
    """From conf/target/NAME.yaml. A relative path is looked for in the checkout too, so that any folder is a fine place to start.

    Raises UserError; where the shapes of a model without its weights are known (``config``), it says what would be needed.
    """
    path = settings["path"]
    beside = Path(__file__).resolve().parents[1] / path
    if not Path(path).is_dir() and beside.is_dir():
        path = str(beside)
    try:
        return Target.load(path, dtype=settings["dtype"], device=settings["device"], attention=settings["attention"])
    except UserError as e:
        if settings["config"] is None:
            raise
        raise UserError(
            f"target {settings['name']} ({_size(settings['config'], settings['dtype'])}) is not here. {e}. Log in to the hub "
            "(`hf auth login`) and accept the model's licence there, or download it elsewhere and set target.path=DIR, a folder with "
            "config.json, tokenizer.json and model.safetensors or model.safetensors.index.json"
        ) from e


def _size(config: Settings, dtype: str) -> str:
    """A model's shapes and what its weights take, from its config alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = AutoConfig.for_model(**config)
    shape = TargetShape.of(hf)
    stored = shape.dtype if dtype == "auto" else dtype
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(hf).parameters())
    gigabytes = weights * DTYPES[stored].itemsize / 1e9
    sizes = f"{shape.layers} layers, hidden size {shape.hidden_size}, vocabulary {shape.vocab_size}"
    return f"{sizes}, {weights / 1e9:.1f} billion weights: {gigabytes:.0f} GB in {stored}"


def open_speculator(folder: str | Path, target: Target) -> Drafter:
    """A saved drafter, ready to decode with this target. Raises UserError where it does not fit."""
    drafter = hub.load(folder, target.shape, target.card)
    drafter.attach(target.ends)
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def open_decode(settings: Settings) -> tuple[TreePolicy, Sampling, dict[str, int]]:
    """From conf/decode/NAME.yaml: the tree, how tokens are chosen above temperature 0, and how much to decode."""
    shape = {k: settings[k] for k in ("kind", "depth", "nodes", "branch", "expand", "least")}
    policy = TreePolicy(**shape, paths=tuple(tuple(p) for p in settings["paths"]) if settings["kind"] == "fixed" else ())
    policy.check(settings["rule"])
    sampling = Sampling(top_k=settings["top_k"], top_p=settings["top_p"], rule=settings["rule"], seed=settings["seed"])
    return policy, sampling, {"prompts": settings["prompts"], "new_tokens": settings["new_tokens"]}
