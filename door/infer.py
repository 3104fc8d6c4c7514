"""The door to decoding.

python -m inference speculator=DIR target=NAME prompts=FILE.jsonl          a report for any exported folder
python -m inference tune speculator=DIR target=NAME prompts=FILE.jsonl     the tree that is fastest on this machine
python -m inference tune speculator=DIR target=NAME shards=DIR             the accepted length of each tree, without the target
python -m inference diagnose speculator=DIR run=DIR target=NAME            why it is accepted less often than its training says
python -m inference diagnose speculator=DIR prompts=FILE target=NAME url=URL   whether a running engine accepts as much as it should
python -m inference expect speculator=DIR path=SHARDS target=NAME          the accepted length to expect, without the target
python -m inference evaluate speculator=DIR suite=spec_bench path=FILE     a suite by category, beside plain decoding and others
python -m inference chat speculator=DIR target=NAME                        in a terminal
python -m inference serve speculator=DIR target=NAME                       an OpenAI-compatible endpoint
python -m inference advise target=NAME gpu=h100 task=chat                  is speculation worth it, with which drafter?
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from headstart.door import enter, load_torch, loading
from headstart.door.arguments import command_of, examples
from headstart.door.diagnose import diagnose, settings_of
from headstart.door.evaluate import check_evaluate, compare_evaluations, evaluate, name_the_file, suite_name
from headstart.door.expect import expect, tune_over_shards
from headstart.door.places import check_file, check_out, check_paths, check_speculator, name_of
from headstart.door.sweep import changed, compare_runs, label, overrides, swept
from headstart.heads.errors import UserError


def report(config: dict[str, Any]) -> None:
    """The door ``python -m inference``: decode, compare with plain decoding, write the report."""
    from headstart.data.prompts import fitting  # imported here: wrong settings are reported before torch is loaded
    from headstart.inference.decoding.placement import is_main
    from headstart.inference.reports.card import serving_keys, write_card
    from headstart.inference.reports.measure import make_report
    from headstart.inference.reports.render import show, show_serving, write_report
    from headstart.inference.settings import NO_GAIN, NONE_GIVEN, open_decode, open_guesser, open_target
    from headstart.trainers.metrics import read_metrics

    decode, speculator, elsewhere = open_decode(config["decode"]), config["speculator"], config["drafter_device"]
    if decode.proposer == {"kind": "drafter"} and speculator is None:
        raise UserError(NONE_GIVEN)
    target = open_target(config["target"], to_decode=True)
    keys = ("prompts", "decode.new_tokens", "on_long")
    asked = fitting(config["prompts"], decode.prompts, target, decode.new_tokens, config["on_long"], keys=keys)
    say_limit(asked, "decode.prompts", decode.prompts)
    drafter, proposer, policy = open_guesser(decode, speculator, target, elsewhere)
    if policy is None:
        raise UserError(NO_GAIN)
    differing = changed("inference", config)
    serving = {} if drafter is None or proposer is not None else serving_keys(drafter, target, speculator, policy)
    made = make_report(
        target,
        drafter,
        asked,
        policy,
        decode.sampling,
        new_tokens=decode.new_tokens,
        sequences=decode.sequences,
        proposer=proposer,
        name=name_of(decode.proposer["kind"], drafter, proposer),
        extra={"proposer": decode.proposer, "prompts_from": Path(config["prompts"]).stem, "changed_settings": differing, **serving},
    )
    if not is_main():  # of several processes that share the target, the first one writes
        return
    show(made)
    show_serving(made)
    folder = report_folder(config)
    try:
        write_report(made, folder, [] if speculator is None else read_metrics(Path(speculator).parent))
    except OSError as e:
        raise UserError(f"the report cannot be written into {folder} ({e.strerror or e}): give another out=DIR") from e
    print(f"report: {folder / 'report.md'}, report.html, report.json, report.png")
    if serving and (said := write_card(config["speculator"], made, target)):
        print(said)


def advise(config: dict[str, Any]) -> None:
    """The door ``python -m inference advise``: an estimate from shapes and tables, without weights."""
    from headstart.trainers.advise import advise as advise_on

    if config["report"] is not None:
        check_file(str(Path(config["report"]) / "report.json"), "report")
    advise_on(config)


def report_folder(config: dict[str, Any]) -> Path:
    """A report's folder: ``out``, or beside the speculator; in runs/ for another proposer, or a drafter on a device of its own."""
    if config["out"] is not None:
        return Path(config["out"])
    proposer, stem = config["decode"]["proposer"], Path(config["prompts"]).stem
    if proposer == {"kind": "drafter"} and config["speculator"] is not None and config["drafter_device"] is None:
        return Path(config["speculator"]).parent / f"report-{stem}"
    return Path("runs") / f"{proposer['kind']}-{config['target']['name']}-{stem}"


def evaluation_folder(config: dict[str, Any]) -> Path:
    """An evaluation's folder: ``out``, or beside the speculator."""
    return Path(config["out"] or Path(config["speculator"]).parent / f"evaluate-{suite_name(config)}")


def own_folder(folder: Path, config: dict[str, Any], command: str) -> Path:
    """The folder of a report or an evaluation; in a --multirun a different one for each run."""
    several = swept()
    if not several or "out" in several:
        return folder
    name = label(command, overrides(), several)
    return folder / name if config["out"] is not None else folder.with_name(f"{folder.name}-{name}")


def tune(config: dict[str, Any]) -> None:
    """The door ``python -m inference tune``: measure which tree is fastest, write decode.json."""
    if config["shards"] is not None:
        return tune_over_shards(config)
    from headstart.data.prompts import fitting
    from headstart.inference.decoding import plans
    from headstart.inference.reports import prior, tune
    from headstart.inference.settings import open_target
    from headstart.inference.speculator import open_speculator

    target = open_target(config["target"], to_decode=True)
    drafter = open_speculator(config["speculator"], target)
    keys = ("prompts", "new_tokens", "on_long")
    asked = fitting(config["prompts"], config["count"], target, config["new_tokens"], config["on_long"], keys=keys)
    say_limit(asked, "count", config["count"])
    tuned = tune.tune(target, drafter, asked, sequences=config["sequences"], new_tokens=config["new_tokens"])
    print(*plans.summary(tuned), sep="\n")
    folder = Path(config["out"] or config["speculator"])
    try:
        plans.write(tuned, folder)
        if config["out"] is None:  # acceptance.json belongs beside its weights
            prior.write(folder, prior.measure(target, drafter, asked))
    except OSError as e:
        raise UserError(f"{folder} cannot be written ({e}): give out=DIR") from e
    print(f"written: {folder / plans.NAME}, decode.png")


def say_limit(asked: list[list[int]], key: str, most: int | None) -> None:
    """Say that only the first prompts were taken, where there may be more."""
    if len(asked) == most:
        print(f"the first {most} prompts of the file, as {key} says")


def check_places(command: str, config: dict[str, Any]) -> None:
    """Raises UserError for files and folders that cannot be used."""
    check_speculator(config["speculator"])
    for folder in folders_within(config.get("decode", {}).get("proposer")):
        check_speculator(folder, "decode.proposer: folder")
    if "decode" in config:
        check_paths(config["decode"])
    if config.get("prompts") is not None:
        check_file(config["prompts"], "prompts")
    if command == "tune" and config["prompts"] is None and config["shards"] is None:
        raise UserError("give prompts=FILE.jsonl, which are decoded, or shards=DIR, captured rows, where the target does not fit")
    if command == "diagnose" and config["temperature"] and config["url"] is None:
        raise UserError("temperature belongs to url=: give url too, or leave it out")
    if config.get("costs") is not None:
        check_file(config["costs"], "costs")
    if config.get("run") is not None:
        check_file(str(Path(config["run"]) / "config.json"), "run")
    if command == "evaluate":
        check_evaluate(config)
    if "out" in config:
        check_out(config["out"] or config["speculator"])


def check_contents(config: dict[str, Any]) -> None:
    """Raises UserError for what can be checked with torch before a target is loaded: settings of proposers, damaged folders."""
    from headstart.heads.stored import read_json
    from headstart.inference.proposers.open import check_proposer, takes_drafter

    proposer = config.get("decode", {}).get("proposer")
    if proposer is not None:
        check_proposer(proposer, "decode.proposer")
        if config["speculator"] is not None and not takes_drafter(proposer):
            raise UserError(f"speculator={config['speculator']} guesses nothing with decode.proposer.kind={proposer['kind']}: leave it "
                            "out, or take decode=hybrid or decode=union, where both guess")  # fmt: skip
    for folder in [config["speculator"], *folders_within(proposer)]:
        if folder is not None:
            read_json(Path(folder) / "config.json")
    if config.get("run") is not None:
        settings_of(Path(config["run"]))


def folders_within(proposer: Any) -> list[str]:
    """The folders of drafters that the settings of a proposer name, those of the proposers within it included."""
    if isinstance(proposer, list):
        return [folder for each in proposer for folder in folders_within(each)]
    if not isinstance(proposer, dict):
        return []
    own = [str(proposer["folder"])] if proposer.get("folder") is not None else []
    return own + [folder for each in proposer.values() for folder in folders_within(each)]


def _as_one(device: str) -> AbstractContextManager[None]:
    """Around the work of a command: if processes share the target, one that fails ends at once, and the others hear of it."""
    from headstart.inference.decoding.placement import is_sharded

    if not is_sharded(device):
        return nullcontext()
    from headstart.trainers.processes import together

    return together()


OWN_FOLDERS = {"": report_folder, "evaluate": evaluation_folder}
COMPARE = {"": compare_runs, "evaluate": compare_evaluations}


def main() -> None:
    """Run the door of inference that the command line names."""
    command = command_of("tune", "diagnose", "expect", "evaluate", "advise", "chat", "serve")
    if command == "advise":
        return enter("advise", advise, examples(__doc__, command))
    if command == "evaluate":
        name_the_file()

    def run(config: dict[str, Any]) -> None:
        if command in OWN_FOLDERS:
            config["out"] = str(own_folder(OWN_FOLDERS[command](config), config, command or "inference"))
        check_places(command, config)
        loading(config, "" if config["speculator"] is None else f" and {config['speculator']}")
        load_torch()
        check_contents(config)
        doors = {"": report, "tune": tune, "diagnose": diagnose, "expect": expect, "evaluate": evaluate}
        door = doors.get(command) or importlib.import_module(f"headstart.inference.serving.{command}").main
        with _as_one(config["target"]["device"]):
            door(config)

    enter(command or "inference", run, examples(__doc__, command), at_end=COMPARE.get(command))


if __name__ == "__main__":
    main()
