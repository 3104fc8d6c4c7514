"""The tuner without the target: rates every tree by its accepted length over recorded texts, and by costs that another machine measured.

tau, the tokens a round emits, is counted by replaying the texts (inference/reports/recorded.py), at temperature 0. The costs of a round
are measured on a machine that holds the target: they are ``surface`` in a ``decode.json`` that `python -m inference tune` wrote there, for
any drafter of the same kind. v(n, B) is interpolated between the numbers of nodes that were timed; drafting K levels costs K c + o.

B: sequences at once. n: nodes. K: depth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.stored import read_json
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.provenance import provenance
from headstart.inference.reports.figures import acceptance
from headstart.inference.reports.lengths import Lengths
from headstart.inference.reports.progress import watched
from headstart.inference.reports.recorded import Recorded, replay
from headstart.inference.reports.tune import all_trees, plans_of, shares_of


class Cost(NamedTuple):
    """The cost of a round over that of a plain one, for one number of sequences."""

    verify: dict[int, float]  # v(n), by the number of nodes
    level: float  # c
    rest: float  # o

    def of(self, tree: TreePolicy) -> float | None:
        """v(n) + K c + o; None for more nodes than were timed."""
        known = {0: 1.0} | dict(sorted(self.verify.items()))
        for (low, below), (high, above) in pairwise(known.items()):
            if tree.nodes <= high:
                return below + (above - below) * (tree.nodes - low) / (high - low) + tree.depth * self.level + self.rest
        return None


class Costs(NamedTuple):
    """The costs that a machine has measured. ``of``: by the number of sequences."""

    device: str
    dtype: str
    surface: list[dict[str, Any]]
    of: dict[int, Cost]


def read_costs(path: str) -> Costs:
    """Read the costs from a decode.json. Raises UserError for a file that the tuner has not written, or whose costs make no sense."""
    found = read_json(Path(path), 1 << 20)
    try:
        of = {}
        for each in found["surface"]:
            verify = {int(n): float(v) for n, v in each["verify_over_plain_by_nodes"].items()}
            cost = of[int(each["sequences"])] = Cost(verify, float(each["chain_level_over_plain"]), float(each["rest_over_plain"]))
            told = {"chain_level_over_plain": [cost.level], "rest_over_plain": [cost.rest], "verify_over_plain_by_nodes": verify.values()}
            if wrong := [key for key, values in told.items() if not all(map(math.isfinite, values))]:
                raise UserError(f"costs={path}: {wrong[0]} of {each['sequences']} sequences is not finite")
            if cost.level + cost.rest < 0:  # noise may make one of them negative, if the other is large
                both = "chain_level_over_plain and rest_over_plain"
                raise UserError(f"costs={path}: {both} of {each['sequences']} sequences are less than no time")
        costs = Costs(str(found["device"]), str(found["dtype"]), found["surface"], of)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
        why = f"{e} is missing" if isinstance(e, KeyError) else repr(e)
        raise UserError(f"costs={path} is not what `python -m inference tune` writes (decode.json): {why}") from None
    if not of or any(not (v > 0 and n > 0) for cost in of.values() for n, v in cost.verify.items()):
        raise UserError(f"costs={path}: surface is empty, or holds a cost that is not above 0")
    return costs


def expected(drafter: Drafter, texts: Sequence[Recorded]) -> dict[TreePolicy, tuple[Lengths, list[float]]]:
    """For every candidate tree its lengths over the texts at temperature 0, and acceptance by depth. Raises UserError without texts."""
    if not texts:
        raise UserError("shards: no supervised text of a few tokens is in them")
    shares, found = shares_of(drafter, texts), dict[TreePolicy, tuple[Lengths, list[float]]]()
    for tree in watched(all_trees(drafter, shares), "trees drafted over recorded texts"):
        made = [each for text in texts if (each := replay(text, drafter, tree, SamplingParams())).emitted]
        lengths = Lengths()
        for each in made:
            lengths.add(len(each.emitted), sum(each.emitted))
        found[tree] = (lengths, acceptance(made, tree.depth)["acceptance_by_depth"])
    return found


def tune_recorded(
    target: str, drafter: Drafter, found: Mapping[TreePolicy, tuple[Lengths, list[float]]], costs: Costs, texts: int
) -> dict[str, Any]:
    """The content of decode.json for the machine that measured the costs. ``found``: from ``expected``; ``texts``: how many there were."""
    taus = {tree: lengths.length for tree, (lengths, _) in found.items()}
    depths = {tree: shares for tree, (_, shares) in found.items()}
    known = {B: {tree: c for tree in taus if (c := cost.of(tree)) is not None and c > 0} for B, cost in costs.of.items()}
    plans = {str(B): plan for B, plan in plans_of(taus, known, depths).items()}
    return {
        "drafter": drafter.config["head"], "target": Path(target).name, "device": costs.device, "dtype": costs.dtype,
        "recorded_texts": texts, "plans": {"alone": plans[min(plans, key=int)], **plans}, "surface": costs.surface, **provenance(),
    }  # fmt: skip
