"""The door to decoding.

python -m inference speculator=DIR target=NAME prompts=FILE.jsonl          a report for any exported folder
python -m inference tune speculator=DIR target=NAME prompts=FILE.jsonl     the tree that is fastest on this machine
python -m inference chat speculator=DIR target=NAME                        in a terminal
python -m inference serve speculator=DIR target=NAME                       an OpenAI-compatible endpoint
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from door import enter, overrides
from heads.errors import UserError

TREE = ("decode", "decode.kind", "decode.depth", "decode.nodes", "decode.branch", "decode.expand", "decode.least", "decode.paths")


def report(config: dict[str, Any]) -> None:
    need(config, prompts="FILE.jsonl")
    from data.prompts import check_prompts, prompts  # here, so that --help need not wait for torch
    from inference.report import make_report, show, write_report
    from inference.settings import open_decode, open_guesser, open_target

    decode = open_decode(config["decode"])
    target = open_target(config["target"])
    found = prompts(config["prompts"], decode.prompts, target.tokenizer)
    asked = [p["tokens"] for p in found]
    check_prompts(asked, decode.new_tokens, target, [p["id"] for p in found])
    elsewhere = config["drafter_device"]
    drafter, proposer, policy = open_guesser(decode, config["speculator"], target, decode.tuned and not chosen(), elsewhere)
    name = decode.proposer["kind"]
    stem = Path(config["prompts"]).stem
    beside = Path(config["speculator"]).parent / f"report-{stem}" if proposer is None else f"runs/{name}-{config['target']['name']}-{stem}"
    folder = Path(config["out"] or beside)
    folder.mkdir(parents=True, exist_ok=True)
    made = make_report(target, drafter, asked, policy, decode.sampling, new_tokens=decode.new_tokens, proposer=proposer, name=name)
    if os.environ.get("RANK", "0") != "0":  # of several processes that share the target
        return
    write_report(made, folder)
    show(made)
    print(f"report: {folder / 'report.md'}, report.json, report.png")


def tune(config: dict[str, Any]) -> None:
    need(config, speculator="DIR, the folder of a trained drafter", prompts="FILE.jsonl: what it is to be fast on")
    from data.prompts import prompts
    from inference import plans, tune
    from inference.settings import open_speculator, open_target

    target = open_target(config["target"])
    drafter = open_speculator(config["speculator"], target)
    asked = [p["tokens"] for p in prompts(config["prompts"], config["count"], target.tokenizer)]
    tuned = tune.tune(target, drafter, asked, sequences=config["sequences"], new_tokens=config["new_tokens"])
    folder = Path(config["out"] or config["speculator"])
    plans.write(tuned, folder)
    print(*plans.summary(tuned), f"written: {folder / plans.NAME}, decode.png", sep="\n")


def need(config: dict[str, Any], **keys: str) -> None:
    for key, what in keys.items():
        if config[key] is None:
            raise UserError(f"give {key}={what}")


def main() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command not in ("tune", "chat", "serve"):
        return enter("inference", report)
    del sys.argv[1]

    def run(config: dict[str, Any]) -> None:
        if "decode" in config:
            config["decode"]["tuned"] = config["decode"]["tuned"] and not chosen()
        tune(config) if command == "tune" else importlib.import_module(f"inference.{command}").main(config)

    enter(command, run)


def chosen() -> bool:
    """Whether the command line says something of the tree: it wins over decode.json."""
    return any(o.partition("=")[0] in TREE for o in overrides())


if __name__ == "__main__":
    main()
