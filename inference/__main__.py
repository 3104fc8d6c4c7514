"""The door to decoding.

python -m inference speculator=DIR target=NAME prompts=FILE.jsonl          a report for any exported folder
python -m inference tune speculator=DIR target=NAME prompts=FILE.jsonl     the tree that is fastest on this machine
python -m inference chat speculator=DIR target=NAME                        in a terminal
python -m inference serve speculator=DIR target=NAME                       an OpenAI-compatible endpoint
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from door import command_of, enter, overrides
from heads.errors import UserError

NAMES = ("speculator", "drafter_device", "prompts", "out")  # of folders, files, a device; null: none
ALONE = {  # of several processes each would do it for itself
    "tune": "each process would choose by its own clock",
    "chat": "what is typed reaches one process only",
    "serve": "requests reach one process only",
}
TREE = ("decode", "decode.kind", "decode.depth", "decode.nodes", "decode.branch", "decode.expand", "decode.least", "decode.paths")


def report(config: dict[str, Any]) -> None:
    need(config, prompts="FILE.jsonl")
    from data.prompts import check_prompts, prompts  # here, so that --help need not wait for torch
    from inference.card import served, write_card
    from inference.render import show, show_serving, write_report
    from inference.report import make_report
    from inference.settings import open_decode, open_guesser, open_target

    decode = open_decode(config["decode"])
    target = open_target(config["target"], to_decode=True)
    found = prompts(config["prompts"], decode.prompts, target.tokenizer)
    asked = [p["tokens"] for p in found]
    say_limit(asked, "decode.prompts", decode.prompts)
    check_prompts(asked, decode.new_tokens, target, [p["id"] for p in found])
    elsewhere = config["drafter_device"]
    drafter, proposer, policy = open_guesser(decode, config["speculator"], target, decode.tuned and not chosen(), elsewhere)
    if policy is None:
        print("decode.json: speculation did not pay on this machine for one sequence; decoding with the tree of the settings")
        policy = decode.policy
    kind = decode.proposer["kind"]
    stem = Path(config["prompts"]).stem
    beside = Path(config["speculator"]).parent / f"report-{stem}" if proposer is None else f"runs/{kind}-{config['target']['name']}-{stem}"
    folder = writable(Path(config["out"] or beside))
    serving = {} if drafter is None or proposer is not None else served(drafter, target, config["speculator"], policy.depth)
    made = make_report(
        target,
        drafter,
        asked,
        policy,
        decode.sampling,
        new_tokens=decode.new_tokens,
        proposer=proposer,
        name=name_of(kind, drafter, proposer),
        extra={"proposer": decode.proposer, "prompts_from": stem, **serving},
    )
    if os.environ.get("RANK", "0") != "0":  # of several processes that share the target
        return
    write_report(made, folder)
    show(made)
    show_serving(made)
    print(f"report: {folder / 'report.md'}, report.json, report.png")
    if serving and (said := write_card(config["speculator"], made, target)):
        print(said)


def tune(config: dict[str, Any]) -> None:
    need(config, speculator="DIR, the folder of a trained drafter", prompts="FILE.jsonl: what it is to be fast on")
    from data.prompts import prompts
    from inference import plans, tune
    from inference.settings import open_speculator, open_target

    if config["count"] is not None and config["count"] < 1:
        raise UserError(f"count must be at least 1, found {config['count']}")
    target = open_target(config["target"], to_decode=True)
    drafter = open_speculator(config["speculator"], target)
    asked = [p["tokens"] for p in prompts(config["prompts"], config["count"], target.tokenizer)]
    say_limit(asked, "count", config["count"])
    folder = writable(Path(config["out"] or config["speculator"]))
    tuned = tune.tune(target, drafter, asked, sequences=config["sequences"], new_tokens=config["new_tokens"])
    plans.write(tuned, folder)
    print(*plans.summary(tuned), f"written: {folder / plans.NAME}, decode.png", sep="\n")


def name_of(kind: str, drafter: Any, proposer: Any) -> str:
    """Of a drafter its head's, wherever it lives; of any other proposer its kind."""
    proposer = getattr(proposer, "inner", proposer)  # of a drafter on another device
    drafter = getattr(proposer, "drafter", drafter)
    return kind if kind != "drafter" or drafter is None else drafter.config["head"]


def need(config: dict[str, Any], **keys: str) -> None:
    for key, what in keys.items():
        if config[key] is None:
            raise UserError(f"give {key}={what}")


def writable(folder: Path) -> Path:
    """Made where it is not there. Raises UserError where nothing can be written into it: now, not after minutes of decoding."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as e:
        raise UserError(f"{folder} cannot be written ({e}): give out=DIR") from e


def say_limit(asked: list[list[int]], key: str, most: int | None) -> None:
    if len(asked) == most:
        print(f"the first {most} prompts of the file, as {key} says")


def check(config: dict[str, Any]) -> None:
    """Names of digits become text. Raises UserError for what is no name, or null where a value is needed."""
    from inference.settings import check_given

    check_given(config, *NAMES, "count")
    for key in NAMES:
        if isinstance(config.get(key), list | dict | bool):
            raise UserError(f"{key} must be one word, found {config[key]!r}")
        if config.get(key) is not None:
            config[key] = str(config[key])


def check_alone(command: str, config: dict[str, Any]) -> None:
    """Raises UserError where processes would share the target of a command that is for one."""
    if command in ALONE and config["target"]["device"] == "tp":
        raise UserError(f"target.device=tp cannot {command}: {ALONE[command]}; target.device=map spreads the layers over all GPUs instead")


def main() -> None:
    command = command_of("tune", "chat", "serve")

    def run(config: dict[str, Any]) -> None:
        check(config)
        check_alone(command, config)
        if "decode" in config:
            config["decode"]["tuned"] = config["decode"]["tuned"] and not chosen()
        door = {"": report, "tune": tune}.get(command) or importlib.import_module(f"inference.{command}").main
        door(config)

    commands = "" if command else (__doc__ or "").partition("\n\n")[2]
    enter(command or "inference", run, commands)


def chosen() -> bool:
    """Whether the command line says something of the tree: it wins over decode.json."""
    return any(o.partition("=")[0] in TREE for o in overrides())


if __name__ == "__main__":
    main()
