"""``python -m inference expect``: a drafter's expected accepted length, from captured rows alone: the target is not loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headstart.heads.errors import UserError, counted


def tune_over_shards(config: dict[str, Any]) -> None:
    """`python -m inference tune shards=DIR`: rate all trees over recorded texts; with a machine's costs, choose the best for each load."""
    from pathlib import Path

    from headstart.data.recorded import recordings
    from headstart.inference.decoding import plans
    from headstart.inference.reports.lengths import error_text
    from headstart.inference.reports.tune_recorded import expected, read_costs, tune_recorded
    from headstart.inference.settings import read_target
    from headstart.inference.speculator import load_attached

    costs = None if config["costs"] is None else read_costs(config["costs"])
    target = read_target(config["target"])
    drafter = load_attached(config["speculator"], target)
    texts = list(recordings(config["shards"], target, drafter.taps, config["count"]))
    found = expected(drafter, texts)
    print(f"{drafter.config['head']} for {config['target']['name']}, over {counted(len(texts), 'recorded text')}, tokens a pass at "
          "temperature 0 (as in decoding, where the target said them itself, so)")  # fmt: skip
    for tree, (lengths, _) in sorted(found.items(), key=lambda pair: -pair[1][0].length):
        print(f"{lengths.length:.3f} ({error_text(lengths.standard_error)})  {tree}, {tree.reads} read by the drafter")
    if costs is None:
        return print("which of them is fastest depends on what rounds cost: costs=FILE, the decode.json of a machine that holds the target")
    tuned = tune_recorded(config["target"]["name"], drafter, found, costs, len(texts))
    folder = Path(config["out"] or config["speculator"])
    plans.write(tuned, folder)
    print(f"by what rounds cost on {costs.device} in {costs.dtype}:", *plans.summary(tuned), f"written: {folder / plans.NAME}", sep="\n")


def expect(config: dict[str, Any]) -> None:
    """Print the expected accepted length of the tree of ``decode``, and of a chain as deep, at temperature 0 and 1."""
    from headstart.data.recorded import recordings
    from headstart.inference.decoding.policy import TreePolicy, fit_depth
    from headstart.inference.reports.lengths import Lengths, error_text
    from headstart.inference.reports.progress import watched
    from headstart.inference.reports.recorded import replay
    from headstart.inference.settings import open_decode, read_target
    from headstart.inference.speculator import load_attached

    decode, target = open_decode(config["decode"]), read_target(config["target"])
    if decode.proposer != {"kind": "drafter"} or decode.policy.kind == "auto":
        raise UserError("expect takes the drafter's own trees, of one shape: decode=dynamic, best_first, chain or fixed")
    drafter = load_attached(config["speculator"], target)
    tree = fit_depth(decode.policy, drafter)
    shapes = dict.fromkeys([tree, TreePolicy("chain", depth=tree.depth)])
    made = {(shape, temperature): Lengths() for shape in shapes for temperature in (0.0, 1.0)}
    texts, found = 0, recordings(config["path"], target, drafter.taps, config["count"])
    for i, recorded in enumerate(watched(found, "recorded texts", config["count"])):
        texts += 1
        for (shape, temperature), lengths in made.items():
            if temperature and decode.sampling.repetition_penalty != 1:
                continue
            how = replace(decode.sampling, temperature=temperature, seed=decode.sampling.seed + i)
            if temperature:
                how = replace(how, rule=how.rule if shape is tree else "auto")
            said = replay(recorded, drafter, shape, how)
            if said.emitted:
                lengths.add(len(said.emitted), sum(said.emitted))
    if not texts:
        raise UserError(f"path={config['path']} holds no supervised text of a few tokens")
    print(f"{drafter.config['head']} for {config['target']['name']}, over {counted(texts, 'recorded text')} (as in decoding where the "
          "target said them itself, at this temperature; over other text mostly too low at temperature 0, and too high at 1)")  # fmt: skip
    for (shape, temperature), lengths in made.items():
        if lengths.tokens:
            print(f"{shape}, temperature {temperature:g}: {lengths.length:.3f} tokens a pass ({error_text(lengths.standard_error)})")
