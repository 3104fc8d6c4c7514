"""``acceptance.json``, beside a drafter's weights: how often its guesses are right. decode=auto starts every sequence from these shares.

They are measured by depth, at temperature 0 and 1: at the end of a training over the target's answers to held-out prompts that the report
does not use, and by the tuner over its prompts. They only decide which shape a sequence begins with. They do not depend on the machine:
rounds are timed where they run.

Shape suffixes: K depths.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.files import put_text
from headstart.heads.stored import read_json
from headstart.inference.decoding.decode import longest
from headstart.inference.decoding.decoder import Decoder
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.reports.expected import expected_walk
from headstart.inference.reports.walk import Walk

NAME = "acceptance.json"
PROMPTS, NEW_TOKENS, DEPTH = 8, 128, 8  # as long as the answers of a report: at temperature 0 the later part of a text repeats more
FEW = 4.0  # smoothing, as deep guesses are few: so many pseudo-guesses at each depth, right at the share over all depths
Shares = dict[bool, list[float]]  # sampled (above temperature 0) -> by depth: accepted share of guesses whose ancestors were accepted


def measure(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]]) -> Shares:
    """Measure the shares: decode the first few prompts plainly, then walk over each text by one teacher-forced pass of the drafter. A
    temperature at which no text has a round is left out.
    """
    depth, found, plain = min(DEPTH, drafter.max_depth or DEPTH), Shares(), Decoder(target)
    for sampled in (False, True):
        walks = Walk()
        for seed, prompt in enumerate(prompts[:PROMPTS]):
            how = SamplingParams(float(sampled), seed=seed)
            new_tokens = min(NEW_TOKENS, longest(target, len(prompt)) - len(prompt))
            said = plain.generate(prompt, new_tokens=new_tokens, sampling=how)
            walks.add(expected_walk(target, drafter, prompt, said.tokens, depth, how))
        tried, right = walks.tried, walks.reached
        overall = sum(right) / max(sum(tried), 1.0)
        if walks.rounds:  # else every text ended with its first token
            found[sampled] = [(r + FEW * overall) / (n + FEW) for n, r in zip(tried, right, strict=True)]
    return found


def write(folder: str | Path, shares: Shares) -> None:
    """Write ``acceptance.json`` into a folder that this package exported. Nothing is written into any other folder, or if the shares of a
    temperature are missing. Raises OSError if the file cannot be written.
    """
    if (weights := _weights(folder)) is not None and len(shares) == 2:
        told = {f"temperature_{int(sampled)}": [round(x, 4) for x in by_depth] for sampled, by_depth in shares.items()}
        put_text(Path(folder) / NAME, json.dumps({"weights": weights} | told, indent=2) + "\n")


def read(folder: str | Path) -> Shares:
    """The shares in a folder; empty where it has none, or they were measured with other weights. Raises UserError naming a damaged file."""
    path = Path(folder) / NAME
    if not path.is_file():
        return {}
    found = read_json(path)
    if found.get("weights") is None or found["weights"] != _weights(folder):
        return {}
    shares = {sampled: found.get(f"temperature_{int(sampled)}") for sampled in (False, True)}
    if not all(map(_are_shares, shares.values())):
        raise UserError(f"{path} must hold shares by depth for temperature_0 and temperature_1: remove it, or tune again")
    return shares  # type: ignore[return-value]


def _are_shares(x: Any) -> bool:
    return isinstance(x, list) and 0 < len(x) <= 64 and all(isinstance(y, int | float) and 0 <= y <= 1 for y in x)


def _weights(folder: str | Path) -> Any:
    block = read_json(Path(folder) / "config.json").get("headstart")
    digests = block.get("sha256") if isinstance(block, dict) else None
    return digests.get("model.safetensors") if isinstance(digests, dict) else None
