"""The door to data.

python -m data target=NAME data=NAME head=NAME out=DIR                       capture the target's states, to train without its passes
python -m data regenerate target=NAME data=chat path=FILE.jsonl out=FILE     the target answers the prompts itself
python -m data verify DIR                                                    what of a capture is damaged, and how much is usable
python -m data engine target=NAME head=NAME folder=DIR                       how to start a vLLM that computes the target's states
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import closing
from typing import Any

from headstart.door import check_head, enter, load_torch, loading
from headstart.door.arguments import command_of, examples
from headstart.door.places import check_out, check_speculator
from headstart.door.sweep import overrides
from headstart.heads.errors import UserError


def capture_states(config: dict[str, Any]) -> bool:
    """Capture the target's states over the data. Returns whether the capture is complete: other processes may still have parts to do."""
    from headstart.data.capture import capture  # imported here: wrong settings are reported before torch is loaded
    from headstart.data.packed import Packed
    from headstart.data.served import open_served
    from headstart.data.source import check_source, check_to_capture, open_source
    from headstart.inference.settings import open_target

    rank, world = (int(os.environ.get(key, default)) for key, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    if not 0 <= rank < world:
        raise UserError(f"RANK={rank}, WORLD_SIZE={world}: processes are counted from 0 to WORLD_SIZE - 1")
    check_source(config["data"])
    check_to_capture(config["data"])
    check_head(config["head"])
    target = open_target(config["target"]) if config["served"]["url"] is None else open_served(config["target"], config["served"])
    with closing(target):
        source = open_source(config["data"], target, length=config["length"], seed=config["seed"])
        assert source.packed is not None
        assert source.held_out is None or isinstance(source.held_out, Packed)
        taps = taps_of(config, target.shape)
        target.expect(taps, config["length"])
        how: dict[str, Any] = {"storage": config["storage"], "held_out": source.held_out, "rank": rank, "world": world}
        return capture(source.packed, target, taps, config["out"], batch_size=config["batch_size"], **how) is not None


def taps_of(config: dict[str, Any], shape: Any) -> list[int]:
    """The layers to capture: those that are asked for, else those that the drafter taps."""
    import torch

    from headstart.heads import hub

    head = {k: v for k, v in config["head"].items() if k not in ("name", "draft_vocab")}
    with torch.device("meta"):  # no memory for weights: only the taps are needed
        drafter = hub.build(config["head"]["name"], shape, **head)
    return list(drafter.taps if config["taps"] is None else config["taps"])


def capture(config: dict[str, Any]) -> None:
    check_out(config["out"], url=True)
    loading(config, f" for {config['out']}", "loading" if config["served"]["url"] is None else "reading the files of")
    load_torch()
    if capture_states(config):
        say_next(["data=shards", f"path={config['out']}", f"trainer.length={config['length']}"], "target", "head")


def regenerate(config: dict[str, Any]) -> None:
    check_speculator(config["speculator"])
    check_out(config["out"], file=True)
    loading(config, f" for {config['out']}", "loading" if config["url"] is None else "reading the tokenizer of")
    load_torch()
    from headstart.data import regenerate

    regenerate.main(config)
    say_next(["data=regenerated", f"path={config['out']}"], "target")


def verify(config: dict[str, Any]) -> None:
    from headstart.data.verify import verify

    verify(config["path"], config["drop"])


def engine(config: dict[str, Any]) -> None:
    """Print the command that starts a vLLM server for the target's states, and the command that trains with this server."""
    from headstart.data.engine import command
    from headstart.inference.decoding.info import shape_of
    from headstart.inference.settings import config_of

    check_head(config["head"])
    path, hf = config_of(config["target"])
    shape = shape_of(hf, path)
    layers, port, dtype = sorted({*taps_of(config, shape), shape.layers}), config["port"], config["target"]["dtype"]
    dtype = shape.dtype if dtype == "auto" else dtype
    print(shlex.join(command(path, layers, length=config["length"], dtype=dtype, folder=config["folder"], port=port)))
    where = [f"served.url=http://127.0.0.1:{port}/v1", f"served.folder={config['folder']}", f"served.layers={layers}".replace(" ", "")]
    say_next([*where, f"trainer.length={config['length']}", "report=none"], "target", "head")


def say_next(words: list[str], *groups: str) -> None:
    """Print the command that trains with the result: this command line's settings of ``groups``, then ``words``."""
    given = [o for o in overrides() if o.lstrip("+").partition("=")[0].partition(".")[0] in groups]
    print("train with:", shlex.join(["python", "train.py", *given, *words]))


def main() -> None:
    command = command_of("engine", "regenerate", "verify")
    if command == "verify" and len(sys.argv) > 1 and not re.match(r"-|\w+=", sys.argv[1]):
        sys.argv[1] = f"path={sys.argv[1]}"
    if command == "regenerate":  # only torchrun's first process does this: each would write the same file
        if os.environ.get("RANK", "0") != "0":
            return
        if (others := int(os.environ.get("WORLD_SIZE", 1)) - 1) > 0:
            print(f"one process does this: the other {others} of this run end at once", flush=True)
    enter(
        command or "capture",
        {"": capture, "engine": engine, "regenerate": regenerate, "verify": verify}[command],
        examples(__doc__, command),
    )


if __name__ == "__main__":
    main()
