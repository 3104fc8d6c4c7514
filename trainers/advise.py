"""Is speculation worth it for this target, on this GPU, at this load? With which drafter, and with how many guesses per round?

A pass takes the time to read its weights and KV caches, or the time of its operations, whichever is longer (the roofline model). A round
takes the drafter's passes and one pass of the target over all guesses, and yields tau tokens. The speed-up is tau / (v + c + o): v for
verifying, c for drafting, o for overhead, in units of a plain pass of the target (one token per sequence). Acceptance is measured if a
report is given, else published. Costs are computed from shapes.

No shape suffixes. Sizes are bytes, operations floating-point operations, times seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from headstart.heads import hub, seal
from headstart.heads.base import Drafter, TargetShape
from headstart.heads.errors import UserError, counted
from headstart.heads.kinds import WINDOWED, layers_of
from headstart.heads.stored import read_json
from headstart.inference.reports.render import table
from headstart.inference.reports.report import Report
from headstart.inference.settings import config_of
from headstart.trainers.gpus import Gpu, gpu_of
from headstart.trainers.plan import parameters_of
from headstart.trainers.shapes import without_weights

OVERHEAD = (0.05, 0.4)  # engine overhead of a round, in plain passes: with device graphs, and without
BF16 = 2  # bytes of a served weight
WORTH, ENOUGH = 1.1, 0.6  # the least speed-up that counts; the least acceptance of the first guess with which practitioners speculate
MOST = 12  # the most guesses to consider, unless more were measured


@dataclass(frozen=True)
class Model:
    """The parts of a model that decide the time of a pass."""

    dense: float  # bytes that every pass reads
    experts: float  # bytes of all experts
    chosen: float  # share of the experts that one token uses
    active: float  # parameters that one token uses
    cache: float  # bytes of KV cache per token of context, in layers that keep all tokens
    table: float = 0.0  # bytes of the embedding, of which a pass reads only one row per token
    windowed: float = 0.0  # bytes of KV cache per token, in layers with a window
    window: int = 0  # tokens that a window keeps

    def held(self, context: int) -> float:
        """Bytes of the KV cache of a sequence with ``context`` tokens."""
        return context * self.cache + min(context, self.window) * self.windowed

    def seconds(self, gpu: Gpu, gpus: int, sequences: int, tokens: int, context: int) -> float:
        """Seconds of a pass over ``tokens`` tokens of each of ``sequences`` sequences, each with ``context`` tokens of context."""
        rows = sequences * tokens
        read = self.dense + self.experts * (1 - (1 - self.chosen) ** rows) + sequences * self.held(context)
        return max(read / gpu.bandwidth, 2 * self.active * rows / gpu.flops) / gpus


@dataclass(frozen=True)
class Choice:
    """A drafter at a load, with the number of guesses that gains most."""

    head: str
    sequences: int
    guesses: int
    tau: float  # tokens per round
    verify: float  # v, in plain passes
    draft: float  # c, over all guesses of a round, in plain passes
    speedup: tuple[float, float]  # with the larger and the smaller overhead

    @property
    def gain(self) -> float:
        """The number by which choices are compared: the sum of both speed-ups."""
        return sum(self.speedup)


def tokens_per_round(conditional: Sequence[float], guesses: int) -> float:
    """Tau, the mean number of tokens in a round of a chain: 1 plus the sum over depths of the probability that a depth is reached and its
    guess accepted. ``conditional``: the acceptance rate of each depth, given that it is reached; deeper guesses have the last rate.
    """
    total = reached = 1.0
    for depth in range(guesses):
        reached *= conditional[min(depth, len(conditional) - 1)]
        total += reached
    return total


def rate_of(tau: float, guesses: int) -> float:
    """The acceptance rate per guess that yields ``tau`` tokens per round of ``guesses`` guesses (2211.17192, equation 1), by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_round([middle], guesses) < tau else (low, middle)
    return low


def choose(head: str, drafter: Drafter, own: Model, target: Model, conditional: Sequence[float], load: tuple[Gpu, int, int, int]) -> Choice:
    """The number of guesses that gains most; a drafter of blocks always makes a whole block. ``conditional``: see ``tokens_per_round``.
    ``load``: the GPU, the number of GPUs, sequences, tokens of context.
    """
    gpu, gpus, sequences, context = load
    plain = target.seconds(gpu, gpus, sequences, 1, context)
    block, most, found = drafter.config.get("block"), max(MOST, len(conditional)), list[Choice]()
    for guesses in [drafter.max_depth or most] if block else range(1, min(drafter.max_depth or most, most) + 1):
        verify = target.seconds(gpu, gpus, sequences, guesses + 1, context) / plain
        once = own.seconds(gpu, 1, sequences, block or 1, context) / plain
        draft = once if block or drafter.max_depth else guesses * once  # with one head per depth, all weights are read once per round
        tau = tokens_per_round(conditional, guesses)
        slow, fast = (tau / (verify + draft + overhead) for overhead in reversed(OVERHEAD))
        found.append(Choice(head, sequences, guesses, tau, verify, draft, (slow, fast)))
    return max(found, key=lambda choice: choice.gain)


def target_of(where: dict[str, Any]) -> tuple[TargetShape, Model]:
    """Shape and costs of the target, from its config. Raises UserError if that cannot be read."""
    _, hf = config_of(where)
    shape, model = TargetShape.of(hf), without_weights(hf)
    whole = parameters_of(model, hf)
    routed = whole["active"] + whole["idle"]
    table = 0 if getattr(hf.get_text_config(), "tie_word_embeddings", False) else shape.vocab_size * shape.hidden_size
    dense = float(whole["dense"] - table)  # without the embedding, of which a pass reads one row per token
    share = whole["active"] / routed if routed else 0.0
    return shape, Model(dense * BF16, routed * BF16, share, dense + whole["active"], table=table * BF16, **cache_of(hf, shape))


def cache_of(hf: Any, shape: TargetShape) -> dict[str, Any]:
    """The fields of ``Model`` that say what the target's KV cache takes in an engine. Layers with latent attention (DeepSeek) keep one
    vector for the keys and values of all heads. Layers with a window or chunks (Gemma, gpt-oss, Llama 4) keep at most that many tokens.
    Recurrent layers (Qwen3.5) keep none.
    """
    text = hf.get_text_config()
    latent = getattr(text, "kv_lora_rank", None)
    layer = latent + text.qk_rope_head_dim if latent else 2 * shape.kv_heads * shape.head_dim
    kinds = layers_of(text)
    each = shape.layers * layer * BF16 / len(kinds)
    cache = each * sum(kind in ("full_attention", "hybrid") for kind in kinds)
    windowed = each * sum(kind in WINDOWED for kind in kinds)
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None) or 0
    return {"cache": cache, "windowed": windowed, "window": window}


def drafter_of(head: str, shape: TargetShape, **settings: Any) -> tuple[Drafter, Model]:
    """A drafter of the kind ``head`` with ``settings`` (others: defaults), on the meta device, and its costs. They include an output head,
    either its own or the target's. Raises UserError if a setting has no default, or does not fit the target.
    """
    try:
        with torch.device("meta"):
            drafter = hub.build(head, shape, **settings)
    except UserError as e:
        what = "with the settings of the reported one it does not fit this target" if settings else "it is no drafter without settings"
        raise UserError(f"what {head} costs cannot be told: {what} ({e})") from e
    if not list(drafter.parameters()):
        raise UserError(f"what {head} costs cannot be told: it is made of a target; give the report of a run, in the folder of that run")
    inner = (m for m in drafter.modules() if hasattr(getattr(m, "config", None), "get_text_config"))  # a model of transformers
    whole = parameters_of(drafter, getattr(next(inner, None), "config", None))
    dense, routed = whole["dense"], whole["active"] + whole["idle"]
    if not any("lm_head" in name for name, _ in drafter.named_parameters()):
        dense += shape.vocab_size * shape.hidden_size
    layers = sum(1 for module in drafter.modules() if hasattr(module, "k_proj"))
    cache = 2 * layers * shape.kv_heads * shape.head_dim * BF16
    return drafter, Model(dense * BF16, routed * BF16, whole["active"] / routed if routed else 0.0, dense + whole["active"], cache)


def acceptances(report: str | None, published: dict[str, Any], task: str) -> tuple[dict[str, list[float]], str]:
    """Returns drafter -> acceptance of each depth when it is reached, and the source of these rates. ``published``: tokens per round by
    task. Raises UserError for a report without a chain.
    """
    if report is None:
        rates = {head: [rate_of(tau, published["guesses"])] for head, tau in published[task].items()}
        return rates, f"published for {published['source']}"
    read = Report.read(Path(report))
    temperature = 0 if read.chain_temperature_1 is None else 1
    figures = read.chain_temperature_1 or read.chain_temperature_0
    if figures is None or not figures.conditional_acceptance_by_depth:
        raise UserError(f"report={report}: it has no chain, whose acceptance by depth is wanted: report with decode=chain")
    of = f"{counted(read.prompts, 'prompt')} of {read.prompts_from}"
    return {read.head: [*figures.conditional_acceptance_by_depth]}, f"measured for {read.target} at temperature {temperature}, {of}"


def check_measured(report: Path, target: dict[str, Any]) -> None:
    """Print a warning if ``report`` is of another target than the settings ``target`` name. A report names the last part of a path."""
    measured = Report.read(report).target
    if measured not in (target["name"], Path(str(target["path"])).name):
        print(f"the acceptance was measured for {measured}, not for {target['name']}, which accepts other guesses: report on this target")


def reported_settings(report: Path, head: str) -> dict[str, Any] | None:
    """The settings of the drafter that a report is of, from the folder beside it or in it, where runs and reports keep them. None: there is
    no such folder. Raises UserError for a damaged one.
    """
    for folder in (report / "speculator", report.absolute().parent / "speculator"):
        if (folder / "config.json").is_file() and seal.OURS in (config := read_json(folder / "config.json")):
            name, settings = seal.block_of(config, folder, {})
            if name == head:
                return settings
    return None


def advise(config: dict[str, Any]) -> list[Choice]:
    """Print the advice for ``config`` (conf/advise.yaml). Returns the best choice at each load."""
    gpu, gpus = gpu_of(config["gpu"]), config["gpus"]
    known, source = acceptances(config["report"], config["published"], config["task"])
    shape, target = target_of(config["target"])
    settings = {head: reported_settings(Path(config["report"]), head) for head in known if config["report"] is not None}
    made = {head: drafter_of(head, shape, **settings.get(head) or {}) for head in known}
    if config["report"] is not None:  # deeper guesses were not measured: they count as not accepted
        known = {head: [*rates, 0.0] for head, rates in known.items()}
        check_measured(Path(config["report"]), config["target"])
    rows, best = list[list[str]](), list[Choice]()
    for sequences in config["sequences"]:
        load = (gpu, gpus, sequences, config["context"])
        choices = [choose(head, *made[head], target, known[head], load) for head in known]
        choices.sort(key=lambda choice: -choice.gain)
        best.append(choices[0])
        for c in choices:
            speedup = f"{c.speedup[0]:.2f} to {c.speedup[1]:.2f}"
            rows.append([str(sequences), c.head, str(c.guesses), f"{c.tau:.2f}", f"{c.verify:.2f}", f"{c.draft:.2f}", speedup])
    console, head = Console(), ("load", "drafter", "guesses", "tokens", "verify", "draft", "speed-up")
    title = f"{config['target']['name']} on {gpus} x {config['gpu']}, acceptance {source}"
    console.print(table(title, head, rows, left=(1,), whole=range(len(head))))
    for name in (name for name, found in settings.items() if found is None):
        console.print(
            f"{config['report']} is not in a folder with speculator/: the costs are those of {name} with its default settings",
            soft_wrap=True,
        )
    for line in reasons(config, best, target, known, source):
        console.print(line, highlight=False, soft_wrap=True)
    return best


def reasons(config: dict[str, Any], best: Sequence[Choice], target: Model, known: dict[str, list[float]], source: str) -> Iterator[str]:
    """The advice, and the checks that practitioners recommend, line by line."""
    gpu, gpus = gpu_of(config["gpu"]), config["gpus"]
    weights = target.dense + target.experts + target.table
    room = gpus * gpu.memory * 0.9 - weights
    fits = max(room, 0.0) / held if (held := target.held(config["context"])) else float("inf")
    about = f"room for about {fits:,.0f} sequence{'s' * (round(fits) != 1)} of {config['context']:,} tokens"
    pays = [c for c in best if c.speedup[1] >= WORTH]
    yield "load: sequences at a time; tokens: of a round; verify, draft: of a round, in plain passes of the same load; a round also costs "\
          f"{OVERHEAD[0]:g} to {OVERHEAD[1]:g} of one, by the engine"  # fmt: skip
    if room <= 0:
        yield f"first: the weights do not fit into {gpus} x {config['gpu']}: give gpus=N; what follows is as if they did"
    yield from advice(pays, known)
    if room > 0 and (beyond := [str(c.sequences) for c in best if c.sequences > fits]):
        yield f"  but memory has {about}, not for {', '.join(beyond)}"
    if lost := [c for c in best if c not in pays]:
        dear = any(c.verify > 1.5 for c in lost)
        why = "too few guesses are accepted for what drafting costs"
        if dear:
            why = "every guess reads experts of its own" if target.experts and lost[0].sequences < 32 else "the GPU is busy computing"
        yield f"  not at {', '.join(str(c.sequences) for c in lost)}: {why}"
    yield "checks:"
    yield "  baseline first: measure plain decoding in your engine at these loads before anything else; these are computed times"
    for head, rates in known.items():
        state = "enough" if rates[0] >= ENOUGH else f"below {ENOUGH}: train it further first"
        yield f"  acceptance of the first guess, {head}: {rates[0]:.2f}, {state}"
    own = "" if config["report"] is None else f" (here: {source})"
    yield f"  guesses by task: more where what was read is repeated (code, summaries), fewer in chats; report on your own prompts{own}"
    yield f"  batch: verifying costs {', '.join(f'{c.verify:.2f} at {c.sequences} ({c.head})' for c in best)} plain passes"
    state = about if room > 0 else "the target alone does not fit"
    yield f"  memory: the target's weights take {weights / 1e9:.0f} of {gpus * gpu.memory / 1e9:.0f} GB: {state}"
    if config["report"] is None:
        yield f"  where the acceptance is from: {source}; yours will differ: report=DIR takes a measured one"
    yield "  what training one costs: python train.py head=NAME target=NAME trainer=full plan=true gpu=NAME gpu_hour=PRICE"


def advice(pays: Sequence[Choice], known: dict[str, list[float]]) -> Iterator[str]:
    """The advice itself. ``pays``: the best choices at the loads that gain at least with the smaller overhead."""
    if not pays:
        yield "advice: do not speculate here: no load gains; a larger target, a faster drafter or fewer sequences at a time would"
    ready = [c for c in pays if known[c.head][0] >= ENOUGH]
    if pays and not ready:
        yield f"advice: train {' or '.join(dict.fromkeys(c.head for c in pays))} further first: too few of the first guesses are accepted"
    sure = [c for c in ready if c.speedup[0] >= 1]
    for word, choices in (
        ("speculate", sure),
        ("speculation may pay, if your engine's overhead is small,", [c for c in ready if c not in sure]),
    ):
        if choices:
            loads, names = ", ".join(str(c.sequences) for c in choices), " or ".join(dict.fromkeys(c.head for c in choices))
            guesses = ", ".join(
                f"{c.guesses} guess{'es' * (c.guesses != 1)} at {c.sequences}" for c in dict.fromkeys([choices[0], choices[-1]])
            )
            yield f"advice: {word} at {loads} sequence{'s' * (loads != '1')}, with {names}: {guesses}"
