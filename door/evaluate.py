"""``python -m inference evaluate``: measures a drafter, plain decoding and others on a suite of prompts; can be stopped and resumed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstart.door import values
from headstart.door.frame import compose_again
from headstart.door.idle import of_trees, refuse, said_of
from headstart.door.places import called, check_file, check_speculator, name_of
from headstart.door.sweep import Done, overrides, swept
from headstart.heads.errors import UserError, counted

ASSISTED, OWN = "assisted", "file"
FILES = (".jsonl", ".json", ".gz")


def name_the_file() -> None:
    """Replace ``suite=FILE.jsonl`` on the command line by ``suite=file path=FILE.jsonl``, the suite that reads the user's own file."""
    for at, word in enumerate(sys.argv):
        if word.startswith("suite=") and word.endswith(FILES):
            sys.argv[at : at + 1] = [f"suite={OWN}", f"path={word.removeprefix('suite=')}"]


def compare_evaluations(runs: Sequence[Done], folder: Path) -> None:
    """Compare the evaluations of a --multirun: print a table, and write comparison.json."""
    from headstart.inference.reports.evaluation import NAME, compare

    compare({run.label: Path(run.config["out"]) / NAME for run in runs if not run.error}, folder)


def suite_name(config: dict[str, Any]) -> str:
    """The name of the suite; for a file of one's own, the file's name."""
    name = config["suite"]["name"]
    return Path(config["path"]).name.split(".")[0] if name == OWN and config["path"] is not None else str(name)


def check_evaluate(config: dict[str, Any]) -> None:
    """Raises UserError for files and folders that are not there, and for settings that an evaluation would ignore."""
    suite = config["suite"]
    if config["path"] is not None:
        check_file(config["path"], "path")
    elif suite["hub"] is None:
        raise UserError(f"suite={suite['name']} is read from a file: give path=FILE.jsonl ({suite['where'] or 'your own'})")
    for word in config["against"]:
        if word != ASSISTED and word not in values.choices("decode"):
            if not Path(word).is_dir():
                raise UserError(f"against={word}: neither {ASSISTED}, a choice of decode= nor the folder of a drafter")
            check_speculator(word, "against")
    if config["assistant"] is not None:
        check_speculator(config["assistant"], "assistant")
        if ASSISTED not in config["against"]:
            raise UserError(f"assistant={config['assistant']}: it is not used: add against=[{ASSISTED}]")
    for key in ("against", "temperatures", "sequences"):
        if len(set(config[key])) < len(config[key]):
            raise UserError(f"{key} names something twice: {config[key]}")
    said, others = said_of(overrides()), [word for word in config["against"] if word in values.choices("decode")]
    if any(each.key in said for each in of_trees([config["decode"]])):  # else nothing need be composed
        refuse(of_trees([config["decode"], *map(decode_of, others)]), said, swept())


def decode_of(choice: str) -> dict[str, Any]:
    """The settings of ``decode=choice`` with everything else of the command line."""
    words = [argument for argument in overrides() if not argument.startswith(("decode=", "decode@"))]
    found: dict[str, Any] = compose_again("evaluate", [*words, f"decode={choice}"])["decode"]
    return found


def evaluate(config: dict[str, Any]) -> None:
    """Decode the prompts that have no results yet, and write evaluate.json, evaluate.html and Spec-Bench's files."""
    from headstart.data.lock import locked
    from headstart.data.suite import fitting, questions, words
    from headstart.inference.reports.evaluate import How, units
    from headstart.inference.reports.evaluate import evaluate as run
    from headstart.inference.reports.evaluation import show, write
    from headstart.inference.reports.results import Results
    from headstart.inference.settings import open_decode, open_target

    decode, new_tokens = open_decode(config["decode"]), config["new_tokens"]
    config["suite"]["name"] = suite_name(config)
    found = questions(config["suite"], config["path"], config["count"])
    target = open_target(config["target"], to_decode=True)
    spoken = words(target.tokenizer, config["raw"])
    where = config["path"] or config["suite"]["hub"]
    kept_questions, longest = fitting(found, spoken, target, new_tokens, config["on_long"], where)
    how = How(config["temperatures"], config["sequences"], decode.sampling, new_tokens, config["on_long"] == "cut")
    units(kept_questions, how)  # what cannot be measured is said before anything is written
    sides, depth, folders = opened(config, decode, target, longest)
    folder = Path(config["out"])
    with locked(folder):
        results = Results(folder, settings(config, target, kept_questions, folders))
        if results.lines:
            print(f"{folder} has {counted(len(results.lines), 'line')} of results already: not decoded again", flush=True)
        run(target, sides, kept_questions, spoken, how, results)
        untried = len(sides) < 2 + len(config["against"])  # 2: plain decoding and the speculator
        made = write(results, kept_questions, folder, depth, about(config, target, len(found) - len(kept_questions), untried))
    show(made)
    print(f"evaluation: {folder / 'evaluate.json'}, evaluate.html, results.jsonl; as Spec-Bench has it: {folder / 'spec_bench'}")


def opened(config: dict[str, Any], decode: Any, target: Any, longest: int) -> tuple[list[Any], int, list[str]]:
    """The sides to compare, plain decoding first; the largest depth of their trees; and the folders of their drafters. Raises UserError
    where two sides have the same name, and for decode=tuned where drafting did not pay.
    """
    from headstart.inference.decoding.policy import fit_depth
    from headstart.inference.reports.generate import assistant_of
    from headstart.inference.reports.sides import PLAIN, is_tried, ours, transformers
    from headstart.inference.settings import NO_GAIN, open_decode, open_guesser

    engine: dict[str, Any] = {"rule": decode.sampling.rule, "longest": longest}
    sides, depth, folders = [ours(PLAIN, target, None, None, **engine)], 1, list[str]()
    for word in [config["speculator"], *config["against"]]:
        taken = {side.name for side in sides}
        if word == ASSISTED:
            sides.append(
                transformers(ASSISTED if config["assistant"] else "prompt_lookup", target, assistant_of(config["assistant"], target))
            )
            folders += [config["assistant"]] if config["assistant"] else []
            continue
        theirs, folder = decode, word
        if word != config["speculator"] and word in values.choices("decode"):
            theirs, folder = open_decode(decode_of(word)), config["speculator"]
        drafter, proposer, policy = open_guesser(theirs, folder, target)
        if policy is None:
            raise UserError(NO_GAIN)
        policy = policy if drafter is None or proposer is not None else fit_depth(policy, drafter)
        name = word if folder != word else name_of(theirs.proposer["kind"], drafter, proposer)
        if name in taken:  # another drafter of the same kind is named by its run
            at = Path(word).absolute()
            name = at.parent.name if at.name == "speculator" else at.name
        if name in taken:
            raise UserError(f"against: {word} and another one are both called {name}: rename a folder")
        if is_tried(policy, config["new_tokens"]):
            sides.append(ours(name, target, proposer or drafter, policy, **engine))
        depth = max(depth, policy.depth)
        folders += [folder] if folder not in folders else []
    return sides, depth, folders


def settings(config: dict[str, Any], target: Any, questions: Any, folders: list[str]) -> dict[str, Any]:
    """The settings that must be the same for an evaluation to be resumed: all that change the answers, or their speed."""
    from headstart.door.sweep import digest
    from headstart.heads.files import sha256
    from headstart.inference.provenance import machine

    own = ("against", "temperatures", "sequences", "new_tokens", "raw", "on_long")
    kinds = (".safetensors", ".json")  # decode.json and acceptance.json decide which trees are drafted
    drafters = {folder: sha256(*sorted(file for file in Path(folder).iterdir() if file.suffix in kinds))[:16] for folder in folders}
    asked = digest(repr([(q.name, q.category, list(q.turns)) for q in questions]), 16)
    return {
        **{key: config[key] for key in own},
        "decode": {key: value for key, value in config["decode"].items() if key != "sequences"},  # only for reports
        "suite": config["suite"]["name"], "questions": f"{len(questions)} {asked}",
        "target": config["target"]["name"], "target_is": digest(repr(sorted(target.fingerprint.items())), 16), "dtype": str(target.dtype),
        "attention": config["target"]["attention"],
        "drafters": drafters, "machine": machine(target.device),
    }  # fmt: skip


def about(config: dict[str, Any], target: Any, skipped: int, untried: bool) -> dict[str, Any]:
    """The keys of evaluate.json that hold for all its rows. ``untried``: whether the answers are too short for decode=auto."""
    from headstart.inference.provenance import provenance, ran_on
    from headstart.inference.reports.verdict import NOT_TRIED

    return {
        "suite": config["suite"]["name"], "target": called(config["target"]), "speculator": config["speculator"], "skipped": skipped,
        "new_tokens": config["new_tokens"], "raw": config["raw"] or not target.tokenizer.chat_template,
        **ran_on(target.device, target.dtype), "passes": target.reader.passes, "auto": config["decode"]["kind"] == "auto", **provenance(),
        **({"auto_not_tried": NOT_TRIED} if untried else {}),
    }  # fmt: skip
