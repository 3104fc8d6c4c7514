"""The door to data.

python -m data target=NAME data=NAME head=NAME out=DIR                       capture what the target says: training without its passes
python -m data regenerate target=NAME data=chat path=FILE.jsonl out=FILE     the target answers the prompts itself
"""

from __future__ import annotations

import shlex
import sys
from typing import Any

from door import enter, overrides


def capture_states(config: dict[str, Any]) -> None:
    from data.live import capture  # here, so that --help need not wait for torch
    from data.source import open_source
    from heads import hub
    from heads.errors import UserError
    from inference.settings import check_given, open_target

    check_given(config, "taps")
    check_given(config["data"], "prompts_file", where="data.")
    if config["taps"] is not None and not (isinstance(config["taps"], list) and all(type(tap) is int for tap in config["taps"])):
        raise UserError(f"taps must be a list of layers or null, found {config['taps']!r}")
    target = open_target(config["target"])
    head = {k: v for k, v in config["head"].items() if k not in ("name", "draft_vocab")}
    taps = config["taps"] or hub.build(config["head"]["name"], target.shape, **head).taps
    source = open_source(config["data"], target, length=config["length"], seed=config["seed"])
    if source.packed is None:
        raise UserError("data=shards is captured already: choose data=stdlib, data=chat or data=regenerated")
    shards = capture(source.packed, target, taps, config["out"], batch_size=config["rows"])
    print(f"{len(shards)} rows of {config['length']} tokens, taps {list(taps)} and the final state")


def capture(config: dict[str, Any]) -> None:
    capture_states(config)
    say_next(["data=shards", f"path={config['out']}", f"trainer.length={config['length']}"], "target", "head")


def regenerate(config: dict[str, Any]) -> None:
    from data import regenerate

    regenerate.main(config)
    say_next(["data=regenerated", f"path={config['out']}"], "target")


def say_next(words: list[str], *groups: str) -> None:
    """How to train with it: what this command line says of those groups holds there too."""
    given = [o for o in overrides() if o.lstrip("+").partition("=")[0].partition(".")[0] in groups]
    print("train with:", shlex.join(["python", "train.py", *given, *words]))


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "regenerate":
        del sys.argv[1]
        return enter("regenerate", regenerate)
    enter("capture", capture)


if __name__ == "__main__":
    main()
