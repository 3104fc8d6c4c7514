"""Single sequences: ours against vLLM's CPU build and transformers' ``generate``, which take turns on every prompt. See decode.py.

Four comparisons are with vLLM: plain and drafted decoding, of the tiny target and of the planted pair. Each includes all of vLLM's
settings: as modules and compiled, with its own OpenMP and with Intel's (if its environment has that), drafted by chains of 3, 5 and 7.
All drafters have the same weights. A fifth comparison, above temperature 0, is without vLLM.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks import planted
from benchmarks.alternatives import Run, console, dynamic, over, rates, settings, transformers, turns
from benchmarks.tiny import held_out, open_tiny
from benchmarks.vllm_side import Vllm, intel_openmp
from headstart.inference.decoding.decode import Generation
from headstart.inference.decoding.policy import TreePolicy, fit_depth
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.reports import prior
from headstart.inference.reports.tune import tune
from headstart.inference.settings import open_decode
from headstart.inference.speculator import open_speculator

CHAINS = (3, 5, 7)  # numbers of guesses for vLLM
REST = 0.05  # seconds until the threads of an engine sleep after an answer
INTEL = ", Intel's OpenMP"
Engines = dict[str, dict[str, Any]]  # name -> the arguments of ``vllm.LLM``
Entry = dict[str, Any]


class Asked(NamedTuple):
    """What every side is asked."""

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    stop: Sequence[int]
    rounds: int


def measure(speculator: Path, python: str | None, threads: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the keys of the result after each comparison. ``python``: that of vLLM's environment; None: comparisons with vLLM give None."""
    found: dict[str, Entry] = {}
    both = [False, True] if python is not None and intel_openmp(python) else [False]

    def compared(name: str, ours: dict[str, Run], asked: Asked, engines: Engines) -> Entry:
        found[name] = compare(name, ours, asked, engines, python, threads)
        return found[name]

    def drafted_by(plain: Entry) -> list[bool]:
        """The OpenMP libraries for the drafted engines: with --quick only the one that was faster without drafting."""
        speeds = plain["tokens_per_second"]
        return [max(plain["vllm"], key=speeds.__getitem__).endswith(INTEL)] if quick and plain["vllm"] else both

    count, rounds, tuning = (3, 3, 4) if quick else (8, 7, 16)
    target, stock = open_tiny(True), open_tiny(False)
    drafter, decode = open_speculator(speculator, target), open_decode(settings("inference", "decode=auto")["decode"])
    guesser, auto, new_tokens = Drafting(drafter), fit_depth(decode.policy, drafter), decode.new_tokens
    some = held_out(target, count + tuning)
    asked = Asked(some[:count], new_tokens, target.stop_ids, rounds)
    given = {"model": str(Path(target.name).resolve()), "dtype": "float32", "max_model_len": target.shape.max_positions}
    eagle = {"method": "eagle3", "model": str(speculator.resolve())}

    plain = {"ours": dynamic(target, None, None, new_tokens), "generate": transformers(stock, new_tokens)}
    entry = compared("plain_tiny", plain, asked, dict(engines(given, None, both)))
    yield {"plain_tiny_over_generate": entry["over"]["ours"]["generate"], "plain_tiny_over_vllm": over_vllm(entry), "versus": found}

    best = fixed_by_tuner(tune(target, drafter, some[count:], sequences=1, new_tokens=64))
    ours = {"auto": dynamic(target, guesser, auto, new_tokens), "tuned": dynamic(target, guesser if best else None, best, new_tokens)}
    entry = compared("drafted_tiny", ours, asked, dict(engines(given, eagle, drafted_by(entry))))
    entry["tuned"] = best and vars(best)
    yield {"auto_over_best_fixed": entry["over"]["auto"]["tuned"], "drafted_tiny_over_vllm": over_vllm(entry), "versus": found}

    warm = SamplingParams(temperature=1.0, rule=decode.sampling.rule)
    shapes = {"auto": auto, "chain of 4": TreePolicy("chain", depth=4), "chain of 6": TreePolicy("chain", depth=6)}
    ours = {name: dynamic(target, guesser, shape, new_tokens, warm) for name, shape in shapes.items()}
    ours["plain"] = dynamic(target, None, None, new_tokens, warm)
    entry = compared("sampled_tiny", ours, asked, {})
    best_fixed = min(ratio for name, ratio in entry["over"]["auto"].items() if name != "auto")
    yield {"speedup_tiny_t1": entry["over"]["auto"]["plain"], "auto_over_best_fixed_t1": best_fixed, "versus": found}

    with tempfile.TemporaryDirectory() as folder:
        (model, lm), (target, drafter) = planted.open_pair()
        model.model.save_pretrained(Path(folder, "target"))
        lm.lm.save_pretrained(Path(folder, "drafter"))
        given = {"model": f"{folder}/target", "dtype": "bfloat16", "max_model_len": target.shape.max_positions}
        small = {"method": "draft_model", "model": f"{folder}/drafter"}
        guesser, new_tokens = Drafting(drafter), planted.NEW_TOKENS
        asked = Asked(planted.random_prompts(count), new_tokens, (), rounds)
        others = planted.random_prompts(count + prior.PROMPTS)[count:]
        drafter.acceptance = prior.measure(target, drafter, others)  # as in the folder of a trained drafter

        plain = {"ours": dynamic(target, None, None, new_tokens), "generate": transformers(model, new_tokens)}
        entry = compared("plain_pair", plain, asked, dict(engines(given, None, both)))
        yield {"plain_pair_over_generate": entry["over"]["ours"]["generate"], "plain_pair_over_vllm": over_vllm(entry), "versus": found}

        shapes = {"auto": decode.policy, "chain of 3": TreePolicy("chain", depth=3), "tree of 10": planted.TREES[2]}
        ours = {name: dynamic(target, guesser, shape, new_tokens) for name, shape in shapes.items()}
        entry = compared("drafted_pair", ours, asked, dict(engines(given, small, drafted_by(entry))))
        yield {"drafted_pair_over_vllm": over_vllm(entry), "versus": found}


def engines(given: dict[str, Any], drafter: dict[str, Any] | None, intel: Sequence[bool]) -> Iterator[tuple[str, dict[str, Any]]]:
    """All settings of vLLM that take part."""
    for guesses in CHAINS if drafter is not None else (0,):
        guessing = {} if drafter is None else {"speculative_config": drafter | {"num_speculative_tokens": guesses}}
        for eager in (True, False):
            for which in intel:
                how = f"chain of {guesses}" if guesses else "plain"
                name = f"vLLM: {how}, {'modules' if eager else 'compiled'}{INTEL if which else ''}"
                yield name, given | guessing | {"enforce_eager": eager}


def compare(name: str, ours: dict[str, Run], asked: Asked, theirs: Engines, python: str | None, threads: int) -> Entry:
    """Tokens per second of all sides, which take turns in one run, and the speed of each of ``ours`` over that of each other side."""
    sides, running, failed = dict(ours), dict[str, str](), list[str]()
    with ExitStack() as stack:
        started = {}
        for each, given in theirs.items() if python is not None else ():  # start them in parallel: each start uses one core
            openmp = intel_openmp(str(python)) if each.endswith(INTEL) else None
            started[each] = stack.enter_context(Vllm(str(python), given, threads, openmp))
        for each, engine in started.items():
            try:
                running[each], sides[each] = engine.version, asking(engine, asked)
                sides[each](asked.prompts[0])  # the first call may compile
            except RuntimeError as e:  # the other engines are still compared
                failed.append(each)
                running.pop(each, None)
                sides.pop(each, None)
                console.print(f"{name}: {each} fails: {str(e).strip().splitlines()[-1]}", style="red", markup=False)
        turns(sides, asked.prompts[:1], f"{name}: first calls are slow")
        made = turns(sides, asked.prompts, name, asked.rounds)
    first = made[next(iter(sides))]
    entry = {
        "tokens_per_second": rates(made),
        "over": {mine: {other: over(made[mine], made[other]) for other in sides if other != mine} for mine in ours},
        "prompts_with_the_tokens_of_the_first": {
            each: sum(a[0].tokens == b[0].tokens for a, b in zip(first, runs, strict=True)) for each, runs in made.items()
        },
        "prompts": len(asked.prompts),
        "new_tokens": asked.new_tokens,
        "rounds": asked.rounds,
        "vllm": running,  # engine -> its version
        "failed": failed,
    }
    show(name, entry)
    return entry


def asking(engine: Vllm, asked: Asked) -> Run:
    def run(prompt: Sequence[int]) -> Generation:
        answer = engine.ask({"prompts": [list(prompt)], "new_tokens": asked.new_tokens, "stop": list(asked.stop)})
        time.sleep(REST)
        return Generation(answer["tokens"][0], seconds=answer["seconds"])

    return run


def over_vllm(entry: Entry) -> float | None:
    """The speed of our first side over the fastest of vLLM's engines; None without engines."""
    first = next(iter(entry["over"].values()))
    return min((first[name] for name in entry["vllm"]), default=None)


def fixed_by_tuner(tuned: dict[str, Any]) -> TreePolicy | None:
    """The tree that the tuner found fastest for one sequence; None: no drafting."""
    tree = tuned["plans"]["alone"]["tree"]
    return None if tree is None else TreePolicy(**tree | {"paths": tuple(map(tuple, tree["paths"]))})


def show(name: str, entry: Entry) -> None:
    (first, ratios), *_ = entry["over"].items()
    table = Table(title=name.replace("_", " "), title_justify="left")
    for column in ("", "tokens/s", f"{first} over it"):
        table.add_column(column, justify="right" if column else "left")
    for side, speed in entry["tokens_per_second"].items():
        table.add_row(side, f"{speed:.0f}", f"{ratios[side]:.2f}" if side in ratios else "")
    console.print(table)
