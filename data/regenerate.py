"""``python -m data regenerate``: the target itself answers the prompts of a data set.

A drafter learns to predict the target, so it learns best from text that the target wrote ("self-distillation", arXiv 2401.10774;
FastMTP, arXiv 2509.18362, measures an acceptance length of 2.73 tokens a pass with it, and 2.54 without).
In conversations, the assistant's turns are replaced in order, so that each later answer has the target's own answers as its history. In
plain text, prefixes are continued. Every line has its own seed, made of ``seed`` and its number, and its random numbers are hashes of that
seed. So an answer depends neither on the other requests under way nor on where an earlier run stopped. (In half precision, rounding
depends on the shape of the batch, and may change an answer.)
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from types import ModuleType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headstart.data.answers import Answer, Answers, ByEngine, Line, Talk, drive
from headstart.data.regenerated import DIGITS, JsonlWriter, vocabulary
from headstart.data.rows import file_path
from headstart.data.source import check_source, find
from headstart.data.talks import Item, Made, converse, first_prompt, proceed, questions
from headstart.heads.errors import UserError, counted, first_line
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.reports.progress import Lines
from headstart.inference.serving.text import BadRow, template_of
from headstart.inference.settings import open_target, path_of
from headstart.inference.speculator import open_speculator

log = logging.getLogger(__name__)


def seed_of(seed: int, number: int) -> int:
    """The seed of a line, a hash of the run's seed and the line's number. It has 31 bits, which every endpoint accepts."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4], "big") >> 1


def run(items: list[Item], talk: Callable[[Item], Talk], answers: Answers, book: JsonlWriter, seed: int, rows: int) -> str:
    """Answer every item that is not in the output file (``book``) yet. Returns a line that sums up the work.

    ``talk``: makes the conversation of an item. ``rows``: the number of conversations answered at once.
    """
    by_number = {item.number: item for item in items}
    todo = [item for item in items if item.number > book.last]
    count, left_out, short = Counter[str](), list[str](), list[str]()

    lines = (Line(item.number, seed_of(seed, item.number), talk(item)) for item in todo)
    speed = TextColumn("{task.fields[tokens]:,} tokens, {task.fields[rate]:,.0f} tokens/s")
    log_file = Lines("answers", len(items))
    with Progress(TextColumn("regenerate"), BarColumn(), MofNCompleteColumn(), speed, TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=len(items), completed=len(items) - len(todo), tokens=0, rate=0.0)

        def rate() -> float:
            return count["tokens"] / max(progress.tasks[0].elapsed or 0.0, 1e-3)

        def told(answer: Answer) -> None:
            count["tokens"] += answer.count
            progress.update(task, tokens=count["tokens"], rate=rate())

        for line in drive(lines, answers, rows, told):
            name, made = by_number[line.number].name, line.result
            if isinstance(made, Made):
                book.add(line.number, made.record, truncated=made.truncated)
                count["truncated"] += made.truncated
                short += [f"{name}: {made.shortened}"] if made.shortened else []
            else:
                left_out.append(f"{name}: {made}")
            progress.advance(task)
            log_file.at(int(progress.tasks[0].completed), f"  {rate():,.0f} tokens/s")
    for what, those in (("left out", left_out), ("shortened", short)):
        if those:
            log.warning("%s %d of %d, first %s", what, len(those), len(todo), "; ".join(those[:3]))
    cut = counted(count["truncated"], "answer")
    return f"{count['tokens']:,} tokens, {cut} cut at new_tokens, {len(short)} shortened, {len(left_out)} left out"


def open_tokenizer(settings: dict[str, Any]) -> Any:
    """Load the target's tokenizer without the target. Raises UserError if it cannot be loaded."""
    from transformers import AutoTokenizer

    path = path_of(settings)
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers, the hub and the tokenizers library raise a dozen kinds
        raise UserError(f"the tokenizer of target {path} cannot be loaded: {first_line(error)}") from error


def _engine(config: dict[str, Any], target: Any, sampling: SamplingParams) -> Answers:
    from headstart.inference.decoding.decoder import Decoder
    from headstart.inference.decoding.policy import AUTO

    sequences, folder, drafter, policy = config["sequences"], config["speculator"], None, None
    if folder is not None:
        drafter = open_speculator(folder, target)
        # Above temperature 0 one kind of tree serves any load: another kind would draw other samples, and a resumed run must repeat them.
        policy = AUTO if sampling.temperature == 0 else replace(AUTO, kind="dynamic")
    max_length = min(config["max_length"], target.rope_switch or target.shape.max_positions)  # no engine crosses the switch
    decoder = Decoder(target, drafter, policy, rule=sampling.rule, max_length=max_length)
    return ByEngine(target, decoder.engine_for(sequences, max_length, decoder.several), sampling, config["new_tokens"])


def _endpoint(config: dict[str, Any], sampling: SamplingParams) -> Answers:
    from headstart.data.endpoint import ByEndpoint, key_in

    how = {k: config[k] for k in ("sequences", "max_length", "new_tokens", "retries")}
    return ByEndpoint(config["url"], config["model"], key_in(config["key"]), sampling=sampling, **how)


def main(config: dict[str, Any]) -> None:
    """Run the command. ``config``: the settings of conf/regenerate.yaml. Raises UserError that names a wrong setting, file or line."""
    module, given = check(config)
    url, out = config["url"], file_path(config["out"], "out")
    sampling = SamplingParams(**{k: config[k] for k in ("temperature", "top_p", "top_k")})

    target = None if url is not None else open_target(config["target"], to_decode=True)
    if target is not None and target.sharded:
        raise UserError("target.device=tp cannot regenerate: take auto or map, or serve it and give url=")
    tokenizer = open_tokenizer(config["target"]) if target is None else target.tokenizer
    if template := given.get("template"):
        tokenizer = module.with_template(tokenizer, template)
    items = questions(module, given, tokenizer, **{k: config[k] for k in ("prefix", "new_tokens", "seed", "limit")})

    with closing(_endpoint(config, sampling) if target is None else _engine(config, target, sampling)) as answers:
        settings = _settings(config, answers, target, tokenizer, by_prefix=hasattr(module, "texts"))
        settings["template"] = hashlib.sha256(template_of(tokenizer).encode()).hexdigest() if template else None  # None: its own
        with closing(JsonlWriter(out, settings, {item.number: item.of for item in items})) as book:
            earlier = book.count
            if book.last == items[-1].number:
                print(f"{out}: done already, {counted(book.count, 'line')}")
            else:
                check_fit(items, tokenizer, config, answers)
                summary = run(items, _talk(config, tokenizer, answers), answers, book, config["seed"], config["sequences"])
                print(f"{out}: {counted(book.count, 'line')} ({earlier} of them from before); {summary}")
    if not book.count:
        raise UserError(f"{out}: nothing was made of {len(items)} lines: see above why")


def _settings(config: dict[str, Any], answers: Answers, target: Any, tokenizer: Any, by_prefix: bool) -> dict[str, Any]:
    """The settings that the answers depend on: a file with others is not continued."""
    if target is None:
        by: dict[str, Any] = {"model": answers.name}
    else:
        by = {"weights": target.fingerprint["weights"][:DIGITS], "dtype": str(target.dtype).removeprefix("torch.")}
        if config["temperature"] > 0:  # at 0 a drafter does not change the answers
            by["drafted"] = config["speculator"] is not None
    kept = ("prefix" if by_prefix else "turns", "temperature", "top_p", "top_k", "seed", "new_tokens")
    about = {"target": config["target"]["name"], **by, "tokenizer": vocabulary(tokenizer), "data": config["data"]["name"]}
    return {**about, **{k: config[k] for k in kept}, "capacity": config["max_length"]}  # "capacity": the key in existing files


def check(config: dict[str, Any]) -> tuple[ModuleType, dict[str, Any]]:
    """Check the settings before a target is loaded. Returns the module of the prompts' source and its settings.

    Raises UserError for a source without prompts, for lengths that fit no prompt, and for a wrong setting or file.
    """
    module, _ = find(config["data"])
    if not hasattr(module, "texts") and not hasattr(module, "conversations"):
        raise UserError(f"data={config['data']['name']} has no prompts to answer: choose data=chat, data=text or data=stdlib")
    if hasattr(module, "texts") and (needed := config["prefix"] + config["new_tokens"]) > config["max_length"]:
        raise UserError(f"no prefix fits: prefix={config['prefix']} and new_tokens={config['new_tokens']} need max_length={needed} "
                        f"or more, found {config['max_length']}")  # fmt: skip
    module, given = check_source(config["data"])
    for key, instead in (("turns", "turns="), ("stream", "limit=")):
        if given.get(key):
            raise UserError(f"data.{key} is for training: here take {instead}")
    return module, given


def check_fit(items: list[Item], tokenizer: Any, config: dict[str, Any], answers: Answers) -> None:
    """Raises UserError if no prompt leaves room for an answer. Otherwise the run would leave out all of them one by one."""
    shortest, why = 0, ""
    for item in items:
        with suppress(BadRow):
            prompt = first_prompt(item, tokenizer, config["turns"])
            if (no := answers.unfit(prompt)) is None:
                return
            if not shortest or len(prompt) < shortest:
                shortest, why = len(prompt), no
    if shortest:
        room, new = answers.max_length - shortest, config["new_tokens"]
        more = f"max_length to {shortest + new} or more" if answers.max_length == config["max_length"] else ""
        less = f"new_tokens to {room} or less" if 0 < room < new else ""
        shorter = f"prefix to {config['prefix'] + room - new} or less" if items[0].prefix and 0 < new - room < config["prefix"] else ""
        ways = " or ".join(way for way in (more, less, shorter) if way)
        raise UserError(f"none of the {len(items)} prompts fits, not even the shortest: {why}" + (f": set {ways}" if ways else ""))


def _talk(config: dict[str, Any], tokenizer: Any, answers: Answers) -> Callable[[Item], Talk]:
    def talk(item: Item) -> Talk:
        if item.prefix:
            return proceed(item, tokenizer, answers.unfit)
        return converse(item, tokenizer, config["turns"], answers.unfit)

    return talk
