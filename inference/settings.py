"""From the settings of conf/target and conf/decode to objects: what every door opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heads import hub
from heads.base import Drafter
from inference.propose import TreePolicy
from inference.target import Target
from inference.verify import Sampling

Settings = dict[str, Any]


def open_target(settings: Settings) -> Target:
    """From conf/target/NAME.yaml. A relative path is looked for in the checkout too, so that any folder is a fine place to start."""
    path = settings["path"]
    beside = Path(__file__).resolve().parents[1] / path
    return Target.load(
        str(beside) if not Path(path).is_dir() and beside.is_dir() else path,
        dtype=settings["dtype"],
        device=settings["device"],
        attention=settings["attention"],
    )


def open_speculator(folder: str | Path, target: Target) -> Drafter:
    """A saved drafter, ready to decode with this target. Raises UserError where it does not fit."""
    drafter = hub.load(folder, target.shape, target.card)
    drafter.attach(target.ends)
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def open_decode(settings: Settings) -> tuple[TreePolicy, Sampling, dict[str, int]]:
    """From conf/decode/NAME.yaml: the tree, how tokens are chosen above temperature 0, and how much to decode."""
    shape = {k: settings[k] for k in ("kind", "depth", "nodes", "branch", "expand")}
    policy = TreePolicy(**shape, paths=tuple(tuple(p) for p in settings["paths"]) if settings["kind"] == "fixed" else ())
    policy.check(settings["rule"])
    sampling = Sampling(top_k=settings["top_k"], top_p=settings["top_p"], rule=settings["rule"], seed=settings["seed"])
    return policy, sampling, {"prompts": settings["prompts"], "new_tokens": settings["new_tokens"]}
