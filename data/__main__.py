"""The door to data.

python -m data target=NAME data=NAME head=NAME out=DIR                       capture what the target says: training without its passes
python -m data regenerate target=NAME data=chat path=FILE.jsonl out=FILE     the target answers the prompts itself
"""

from __future__ import annotations

import sys
from typing import Any

from door import enter


def capture_states(config: dict[str, Any]) -> None:
    from data.live import capture  # here, so that --help need not wait for torch
    from data.source import open_source
    from heads import hub
    from heads.errors import UserError
    from inference.settings import open_target

    if config["taps"] is not None and not (isinstance(config["taps"], list) and all(type(tap) is int for tap in config["taps"])):
        raise UserError(f"taps must be a list of layers or null, found {config['taps']!r}")
    target = open_target(config["target"])
    head = {k: v for k, v in config["head"].items() if k not in ("name", "draft_vocab")}
    taps = config["taps"] or hub.build(config["head"]["name"], target.shape, **head).taps
    source = open_source(config["data"], target, length=config["length"], seed=config["seed"])
    if source.packed is None:
        raise UserError("data=shards is captured already: choose data=stdlib or data=chat")
    shards = capture(source.packed, target, taps, config["out"], batch_size=config["rows"])
    print(f"{len(shards)} rows of {config['length']} tokens, taps {list(taps)} and the final state")
    print(f"train with: python train.py data=shards path={config['out']} trainer.length={config['length']}")


def regenerate(config: dict[str, Any]) -> None:
    from data import regenerate

    regenerate.main(config)


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "regenerate":
        del sys.argv[1]
        return enter("regenerate", regenerate)
    enter("capture", capture_states)


if __name__ == "__main__":
    main()
