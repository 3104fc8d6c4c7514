"""What the decoding benchmarks share: running alternatives in turn on every prompt, and the settings of conf/."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import track

from benchmarks.frame import ROOT
from headstart.heads.base import Drafter
from headstart.inference.decoding.decode import Generation, generate
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Proposer
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target

Run = Callable[[Any], Generation]  # decodes a prompt, or any other input that the benchmark gives to its alternatives
Name = TypeVar("Name")
console = Console()


def settings(config: str = "inference", *overrides: str) -> dict[str, Any]:
    """conf/CONFIG.yaml, composed. Required settings that are not given stay "???"."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        found: Any = OmegaConf.to_container(compose(config, list(overrides)), resolve=True)
    return found


def for_run(*overrides: str) -> dict[str, Any]:
    """The settings that `python train.py` gives to a run: conf/config.yaml without the keys that only the command line uses."""
    kept = ("launcher", "path", "plan", "nodes", "gpus", "gpu", "gpu_hour")
    return {key: value for key, value in settings("config", *overrides).items() if key not in kept}


def fastest(calls: Mapping[Name, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter) -> dict[Name, float]:
    """The fastest time of each call in seconds. The calls take turns, in both directions, after a round that warms up."""
    found = dict.fromkeys(calls, float("inf"))
    for turn in range(rounds + 1):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            start = clock()
            calls[name]()
            if turn:
                found[name] = min(found[name], clock() - start)
    return found


def turns(alternatives: dict[str, Run], prompts: Sequence[Any], title: str, repeats: int = 1) -> dict[str, list[list[Generation]]]:
    """Run every alternative on every prompt. Returns name -> for every prompt its ``repeats`` generations (all with equal tokens).
    The order starts with another alternative and changes direction each time, so that noise, and caches that the one before has filled,
    affect all alike.
    """
    made: dict[str, list[list[Generation]]] = {name: [] for name in alternatives}
    names = list(alternatives)
    for i, prompt in enumerate(track(prompts, description=title, console=console, transient=True)):
        for runs in made.values():
            runs.append([])
        for repeat in range(repeats):
            at = (i + repeat) % len(names)
            for name in (names[at:] + names[:at])[:: -1 if (i + repeat) % 2 else 1]:
                made[name][i].append(alternatives[name](prompt))
    return made


def in_turn(alternatives: dict[str, Run], prompts: Sequence[Any], title: str, repeats: int = 1) -> dict[str, list[Generation]]:
    """``turns``, but only the fastest repeat, which reduces the noise of the machine."""
    made = turns(alternatives, prompts, title, repeats)
    return {name: [min(runs, key=lambda run: run.seconds) for runs in each] for name, each in made.items()}


def speeds(made: list[list[Generation]]) -> list[float]:
    """Tokens per second over all prompts of ``turns``, for each repeat."""
    return [sum(len(run.tokens) for run in runs) / seconds(runs) for runs in zip(*made, strict=True)]


def over(a: list[list[Generation]], b: list[list[Generation]]) -> float:
    """The speed of the one over that of the other: the median of the ratios of all repeats. Within a repeat the two run side by side, so
    a machine that drifts or is disturbed once does not change it.
    """
    return median(x / y for x, y in zip(speeds(a), speeds(b), strict=True))


def rates(made: dict[str, list[list[Generation]]]) -> dict[str, float]:
    """Tokens per second of every side of ``turns``: the median of its repeats."""
    return {name: median(speeds(each)) for name, each in made.items()}


def dynamic(
    target: Target, proposer: Proposer | None, policy: TreePolicy | None, new_tokens: int, sampling: SamplingParams | None = None
) -> Run:
    return lambda prompt: generate(target, proposer, prompt, new_tokens=new_tokens, policy=policy, sampling=sampling)


def static(target: Target, drafter: Drafter | None, policy: TreePolicy | None, new_tokens: int) -> Run:
    return lambda prompt: generate_batch(target, drafter, [prompt], new_tokens=new_tokens, policy=policy)[0]


def transformers(target: Target, new_tokens: int, assistant: Any = None, how: dict[str, Any] | None = None) -> Run:
    """transformers' own greedy ``generate``, assisted or not. ``emitted`` has an entry per target pass; only their mean is exact."""

    def run(prompt: Sequence[int]) -> Generation:
        passes: list[int] = []
        ids, extra = torch.tensor([list(prompt)]), {}
        if assistant is not None:  # transformers reads these from its generation_config, and the heuristic schedule writes them there
            assistant.generation_config.update(**(how or {}))
            extra = {"assistant_model": assistant}
        hook = target.body.register_forward_pre_hook(lambda *_: passes.append(0))
        start = time.perf_counter()
        out = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, **extra
        )
        took = time.perf_counter() - start
        hook.remove()
        tokens = out[0, len(prompt) :].tolist()
        return Generation(tokens, [len(tokens), *passes[1:]], seconds=took)

    return run


def seconds(runs: Sequence[Generation]) -> float:
    return sum(run.seconds for run in runs)


def accepted_length(runs: Sequence[Generation]) -> float:
    rounds = [n for run in runs for n in run.emitted]
    return sum(rounds) / max(len(rounds), 1)


def jackknife(made: Sequence[Generation]) -> float:
    """The standard error of the accepted length over the prompts."""
    without = [accepted_length([*made[:i], *made[i + 1 :]]) for i in range(len(made))]
    mean = sum(without) / len(without)
    return (sum((x - mean) ** 2 for x in without) * (len(made) - 1) / len(made)) ** 0.5


def figures(runs: dict[str, list[Generation]]) -> dict[str, dict[str, float]]:
    """The raw numbers of all alternatives."""
    return {
        name: {"seconds": seconds(made), "tokens": sum(len(g.tokens) for g in made), "accepted_length": accepted_length(made)}
        for name, made in runs.items()
    }
