"""``decode.json``: the trees that the tuner found fastest on one machine, stored in the speculator folder that they were measured with.

B: sequences at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.files import put, put_text
from headstart.inference.decoding.policy import MOST_READS, TreePolicy, fit_depth
from headstart.inference.decoding.target import Target
from headstart.inference.provenance import ran_on

NAME = "decode.json"
MANY = 1 << 30  # as a number of sequences at once: any number
ALONE = 0  # as a number of sequences: one that is decoded alone, without an engine (on a GPU: by an engine of one place)


def write(tuned: Mapping[str, Any], folder: Path) -> None:
    """Write decode.json and decode.png, each whole or not at all. Raises UserError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        put_text(folder / NAME, json.dumps(tuned, indent=2) + "\n")
        picture(tuned, folder / "decode.png")
    except OSError as e:
        raise UserError(f"{folder} cannot be written ({e}): give out=DIR") from e


def load_plans(folder: str | Path, target: Target, drafter: Drafter) -> dict[int, TreePolicy | None]:
    """Read decode.json. Returns n -> the tree for up to n sequences at once (None: no drafting), ascending. The key ``ALONE``, if present,
    is for a sequence that is decoded alone. The tree found for the most sequences is repeated under ``MANY``.

    Raises UserError naming the file where it is missing or was measured on another device or in another dtype, and naming the key where
    it is damaged.
    """
    path = Path(folder) / NAME
    again = "run `python -m inference tune` for it, or take decode=auto"
    if not path.is_file():
        raise UserError(f"{folder} has no {NAME}: {again}")
    try:
        found = json.loads(path.read_text()) if path.stat().st_size < 1 << 20 else None
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} cannot be read ({e}): {again}") from e
    if not isinstance(found, dict):
        raise UserError(f"{path} is not what the tuner writes: {again}")
    here = ran_on(target.device, target.dtype)
    for key, value in here.items():
        if not isinstance(found.get(key), str):
            raise UserError(f"{path}: {key} is missing or no text: {again}")
        if found[key] != value:
            raise UserError(
                f"{path} was measured on {found['device']} in {found.get('dtype')}, "
                f"and this is {here['device']} in {here['dtype']}: {again}"
            )
    if not isinstance(found.get("plans"), dict) or not found["plans"]:
        raise UserError(f"{path}: plans is missing or empty: {again}")
    plans: dict[int, TreePolicy | None] = {}
    for name, entry in found["plans"].items():
        try:
            if not re.fullmatch(r"alone|[1-9]\d{0,4}", name) or not isinstance(entry, dict):
                raise UserError("not a number of sequences with its plan")
            plans[ALONE if name == "alone" else int(name)] = None if entry["tree"] is None else _tree(entry["tree"], drafter)
        except (KeyError, TypeError, UserError) as e:
            raise UserError(f"{path}: plans.{name}: {str(e) if isinstance(e, UserError) else f'no tree ({e})'}: {again}") from e
    return dict(sorted(plans.items())) | {MANY: plans[max(plans)]}


def _tree(settings: Any, drafter: Drafter) -> TreePolicy:
    if not isinstance(settings, dict) or settings.keys() != {f.name for f in fields(TreePolicy)}:
        raise UserError(f"tree must have the keys {', '.join(f.name for f in fields(TreePolicy))}")
    tree = TreePolicy(**settings | {"paths": tuple(map(tuple, settings["paths"]))})
    if max(tree.nodes, tree.branch) > MOST_READS:
        raise UserError(f"more than {MOST_READS} nodes")
    if fit_depth(tree, drafter) != tree:
        raise UserError(f"depth {tree.depth}, but the drafter guesses {drafter.max_depth} deep at most")
    return tree


# Summary, picture ----------------------------------------------------------------------------------------------------


def summary(tuned: Mapping[str, Any]) -> list[str]:
    """A line for each plan: the tree, and its speed-up as predicted and as measured."""
    lines, plans = [], tuned["plans"]
    sizes = [int(name) for name in plans if name != "alone"]
    off = next((B for i, B in enumerate(sizes) if all(plans[str(b)]["tree"] is None for b in sizes[i:])), None)
    for name, p in plans.items():
        tree, what = p["tree"], "one sequence alone" if name == "alone" else f"{name} at once"
        if tree is not None:
            shape = TreePolicy(**tree)
            gain = f"{p['accepted_length']:.2f} tokens a round, {p['predicted_speedup']:.2f}x plain decoding"
            more = f" (measured {p['measured_speedup']:.2f}x: {p['tokens_per_second']:.0f} tokens/s)" if "measured_speedup" in p else ""
            lines.append(f"{what}: {shape}: {gain}{more}; accepted by depth {' '.join(f'{x:.0%}' for x in p['acceptance_by_depth'])}")
        elif name == "alone" or off is None or int(name) < off:
            lines.append(f"{what}: off")
    return lines if off is None else [*lines, f"at {off} sequences or more: off"]


def by_load(plans: Mapping[int, TreePolicy | None]) -> list[str]:
    """The trees that an engine takes by the number of sequences, a line for each tree."""
    sizes, lines = sorted(plans), list[str]()
    for size, more in zip(sizes, [*sizes[1:], None], strict=True):
        if more is not None and plans[more] == plans[size]:
            continue
        tree, many = plans[size], "any number" if not lines else "more"
        shape = "no drafting" if tree is None else tree
        lines.append(f"{many if more is None else f'up to {size}'} at once: {shape}")
    return lines


def picture(tuned: Mapping[str, Any], path: Path) -> None:
    """Plot v(n, B), the cost of verifying n nodes relative to a plain pass, and the predicted speed-up of the chosen trees."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, s in enumerate(tuned["surface"]):
        v = {int(n): x for n, x in s["verify_over_plain_by_nodes"].items()}
        shade = 0.25 + 0.7 * i / max(len(tuned["surface"]) - 1, 1)
        left.plot([0, *v], [1, *v.values()], ".-", color=(0.12, 0.37, 0.66, shade), label=f"{s['sequences']} at once")
    left.set(xlabel="nodes", ylabel="verification over a plain pass", ylim=(0, None))
    left.legend(frameon=False, fontsize="small")
    gains = {"alone" if name == "alone" else name: p.get("predicted_speedup", 1.0) for name, p in tuned["plans"].items()}
    bars = right.bar(
        list(gains), list(gains.values()), color=["#b5b5b5" if p["tree"] is None else "#1f5fa8" for p in tuned["plans"].values()]
    )
    right.bar_label(bars, ["off" if p["tree"] is None else f"{gains[name]:.2f}" for name, p in tuned["plans"].items()])
    right.axhline(1, color="#8a8a8a", linewidth=0.8)
    right.set(xlabel="sequences at once", ylabel="speed-up with the chosen tree")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{tuned['drafter']} for {tuned['target']}: {tuned['dtype']} on {tuned['device']}", fontsize="medium")
    put(path, lambda beside: figure.savefig(beside, format="png", dpi=130))
