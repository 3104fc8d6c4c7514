"""Measures what a drafter gains: decodes held-out prompts with the exported folder and without a drafter, in the same run.

Every prompt is decoded by all alternatives in turn, so that a noisy machine disturbs them alike. ``accepted_length`` is counted while
decoding; ``expected_length`` is computed for a chain, from one teacher-forced pass over the decoded text (see inference/reports/walk.py).
The pass over the prompt is not counted as a round: it drafts nothing.

Shape suffixes: K depths, T positions, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.spelling import spelling_of
from headstart.inference.decoding.auto import WORTH, found_of
from headstart.inference.decoding.decode import Generation
from headstart.inference.decoding.decoder import Decoder
from headstart.inference.decoding.policy import TreePolicy, fit_depth
from headstart.inference.decoding.propose import Proposer
from headstart.inference.decoding.sampling import SamplingParams, heat_of
from headstart.inference.decoding.target import Target
from headstart.inference.provenance import provenance, ran_on
from headstart.inference.reports.confidence import confidences, probabilities
from headstart.inference.reports.figures import decoding_figures, rounds_of, tokens_per_second
from headstart.inference.reports.generate import hf_generate
from headstart.inference.reports.lossless import differs
from headstart.inference.reports.progress import watched
from headstart.inference.reports.report import Report, Text
from headstart.inference.reports.several import Together, batches, check_decoders, decode_together, greedy_of, sizes_of
from headstart.inference.reports.truth import Truth
from headstart.inference.reports.verdict import NOT_TRIED

TEMPERATURES = (0, 1)  # at which everything is decoded
SETTLES = 16  # tokens decoded untimed before each timed text


class Contender:
    """A drafter with a tree policy, or another ``proposer`` called ``name``, and all it decoded from the prompts.

    With an auto policy, its tree is decoded too: drafters are compared by their guesses, which auto leaves out in some rounds. With a
    drafter, a chain as deep is decoded too (except under a repetition penalty, which depends on the path), and the accepted length that
    is expected over the decoded texts is computed: ``truth`` in the report. Another proposer has no chain of its own.
    """

    def __init__(
        self, drafter: Drafter | None, policy: TreePolicy, *, proposer: Proposer | None = None, name: str = "", extra: Any = None
    ) -> None:
        self.drafter, self.policy, self.name, self.extra = drafter, policy, name, extra or {}
        self.guesser: Drafter | Proposer | None = proposer
        if proposer is None:
            assert drafter is not None
            self.policy, self.name, self.guesser = fit_depth(policy, drafter), name or drafter.config["head"], drafter
        self.made: dict[tuple[str, int], list[Generation]] = {}  # (shape, temperature) -> texts; shapes: tree, chain, auto
        self.together: Together = {}
        self.truth: Truth | None = None
        self.untried = False  # decode=auto was asked for, but no text is long enough for it to be tried

    def open(self, target: Target, longest: int, sampling: SamplingParams) -> None:
        """Open the decoder for the shapes to be measured. ``longest``: most tokens of a sequence, prompt included."""
        own_chain = self.guesser is self.drafter and sampling.repetition_penalty == 1
        self.shapes = {("tree", t): self.policy.own_shape(sampling.rule, heat_of(t)) for t in TEMPERATURES}
        self.shapes |= {("chain", t): TreePolicy("chain", depth=self.policy.depth) for t in TEMPERATURES if own_chain}
        self.shapes |= {("auto", t): self.policy for t in TEMPERATURES if self.policy.kind == "auto"}
        self.decoder = Decoder(target, self.guesser, self.policy, trees=[*self.shapes.values()], rule=sampling.rule, max_length=longest)
        self.made = {key: [] for key in self.shapes}
        self.truth = Truth(target, self.drafter) if self.drafter is not None and self.guesser is self.drafter else None

    def warm_up(self, plain: Plain, new_tokens: int) -> None:
        """Decode a text untimed: first calls are slow, and decode=auto measures its rounds, if the text is long enough."""
        self.decode(plain, 0, new_tokens)
        self.untried = self.policy.kind == "auto" and not self.auto()
        self.made = {(kind, t): [] for kind, t in self.shapes if not (self.untried and kind == "auto")}

    def decode(self, plain: Plain, i: int, new_tokens: int) -> None:
        """Decode prompt ``i`` by every shape, each at its temperature, and keep the texts in ``made``."""
        for (kind, temperature), made in self.made.items():
            shape, sampling = self.shapes[kind, temperature], plain.how(i)[temperature]
            plain.settle(i)
            made.append(self.decoder.timed(plain.prompts[i], new_tokens=new_tokens, policy=shape, sampling=sampling)[0])

    def auto(self) -> dict[int, dict[TreePolicy, float]]:
        """For an auto policy, temperature -> shape -> measured cost of a round over a plain one."""
        hows = {t: SamplingParams(t, rule=self.decoder.rule) for t in TEMPERATURES}
        found = {t: found_of(self.decoder.target, self.guesser, self.policy, how) for t, how in hows.items()}
        return {t: dict(zip(auto.shapes, auto.costs, strict=True)) for t, auto in found.items() if auto is not None}

    def expect(self, prompt: Sequence[int], new_tokens: int, how: Mapping[int, SamplingParams]) -> None:
        """Add the texts just decoded to ``truth``, for their expected lengths. Not auto's: its rounds have the shapes of the others."""
        for (kind, temperature), made in self.made.items():
            if self.truth is not None and kind != "auto":
                self.truth.add(kind, self.shapes[kind, temperature], prompt, made[-1], how[temperature], new_tokens)

    def expected_length(self, temperature: int) -> float:
        """The expected accepted length of a chain; 0 where there is no ``truth``."""
        return self.truth.walks[temperature > 0].expected_length if self.truth is not None else 0.0


def make_report(
    target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], policy: TreePolicy, sampling: SamplingParams, *,
    new_tokens: int, sequences: Sequence[int] = (), proposer: Proposer | None = None, name: str = "", extra: dict[str, Any] | None = None,
) -> Report:  # fmt: skip
    """Decode ``prompts`` at temperature 0 and 1, one at a time, then as many at once as each number in ``sequences`` says. ``sampling``
    gives the filters, rule and seed; ``extra`` is added to the report. Raises UserError as ``make_reports`` does.
    """
    contender = Contender(drafter, policy, proposer=proposer, name=name, extra=extra)
    return make_reports(target, [contender], prompts, sampling, new_tokens=new_tokens, sequences=sequences)[0]


def make_reports(
    target: Target, contenders: Sequence[Contender], prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, new_tokens: int,
    sequences: Sequence[int] = (),
) -> list[Report]:  # fmt: skip
    """One report for each contender, from one run: each prompt is decoded plainly, by transformers, and by all contenders in turn.

    Raises UserError without prompts, for fewer prompts than ``sequences`` asks for, and where a contender cannot decode several at once.
    """
    if not prompts:
        raise UserError("no prompts to decode: raise decode.prompts, or give another prompts file")
    plain, sizes = Plain(target, prompts, sampling, new_tokens), sizes_of(sequences, len(prompts))
    few = min(WORTH + 1, new_tokens)  # in a text this long decode=auto measures its rounds
    for sampled in plain.how(0).values():
        plain.decoder.generate(prompts[0], new_tokens=few, sampling=sampled)
    hf_generate(target, prompts[0], min(8, new_tokens), plain.how(0)[0])
    with ExitStack() as held:
        held.callback(plain.decoder.close)
        for c in contenders:
            c.open(target, plain.longest, sampling)
            held.callback(c.decoder.close)
        check_decoders({c.name: c.decoder for c in contenders} if sizes else {}, plain.longest)
        for c in contenders:
            c.warm_up(plain, few)
        for i, prompt in enumerate(watched(prompts, "prompts decoded")):
            plain.decode(i)
            for c in contenders:
                c.decode(plain, i, new_tokens)
                c.expect(prompt, new_tokens, plain.how(i))
        _together(plain, contenders, sizes)
    return [_report(plain, c) for c in contenders]


def _together(plain: Plain, contenders: Sequence[Contender], sizes: Sequence[int]) -> None:
    """Decode ``size`` prompts at once, for each size: plainly and by every contender. Stops with a printed line when memory runs out."""
    sides: list[Plain | Contender] = [plain, *(c for c in contenders if not c.untried)]
    for size in watched(sizes, "numbers of prompts decoded at once") if sizes else ():
        try:
            for temperature in TEMPERATURES:
                how = lambda i, temperature=temperature: plain.how(i)[temperature]  # noqa: E731
                found = decode_together([side.decoder for side in sides], plain.prompts, how, size, plain.new_tokens)
                for side, units in zip(sides, found, strict=True):
                    side.together[size, temperature] = units
        except torch.OutOfMemoryError:
            print(f"{size} sequences do not fit into the device's memory: not measured, nor are more")
            return


class Plain:
    """The baseline of every contender: the prompts decoded plainly, and by transformers' ``generate``."""

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], sampling: SamplingParams, new_tokens: int) -> None:
        self.target, self.prompts, self.sampling, self.new_tokens = target, prompts, sampling, new_tokens
        self.longest = max(map(len, prompts)) + new_tokens
        self.decoder = Decoder(target, rule=sampling.rule, max_length=self.longest)
        self.said: dict[int, list[Generation]] = {temperature: [] for temperature in TEMPERATURES}
        self.together: Together = {}
        self.hf: list[Generation] = []
        self.probabilities: dict[int, list[list[float]]] = {temperature: [] for temperature in TEMPERATURES}

    def how(self, i: int) -> dict[int, SamplingParams]:
        return {t: replace(self.sampling, temperature=float(t), seed=self.sampling.seed + i) for t in TEMPERATURES}

    def settle(self, i: int) -> None:
        """Decode a few untimed tokens: after another model's passes, a small one needs about so many until the caches hold its weights."""
        self.decoder.generate(self.prompts[i], new_tokens=min(SETTLES, self.new_tokens), sampling=self.how(i)[0])

    def decode(self, i: int) -> None:
        how = self.how(i)
        for temperature, each in self.said.items():
            self.settle(i)
            each.append(self.decoder.timed(self.prompts[i], new_tokens=self.new_tokens, sampling=how[temperature])[0])
        self.hf.append(hf_generate(self.target, self.prompts[i], self.new_tokens, how[0]))
        for temperature, each in self.said.items():
            self.probabilities[temperature].append(probabilities(self.target, self.prompts[i], each[-1].tokens))


def _report(plain: Plain, c: Contender) -> Report:
    target, prompts, said, sampling = plain.target, plain.prompts, plain.said, plain.sampling
    differences, depth = _differences(plain, c), c.policy.depth
    settings = {key: value for key, value in asdict(sampling).items() if key != "temperature"}

    def figures(kind: str, temperature: int) -> dict[str, Any]:
        expected = c.expected_length(temperature) if kind != "auto" else 0.0
        return decoding_figures(c.made[kind, temperature], said[temperature], depth, expected)

    others = {f"{kind}_temperature_{t}": figures(kind, t) for kind, t in c.made if kind != "tree"}
    served = "auto" if ("auto", 0) in c.made else "tree"
    several = batches({t: figures(served, t) for t in TEMPERATURES}, c.together, plain.together, depth) if c.together else None
    more = {"passes": target.reader.passes, **_auto(c), **_trimmed(plain, c), **({"truth": c.truth.table()} if c.truth else {})}
    more |= ({"auto_not_tried": NOT_TRIED} if c.untried else {}) | c.extra
    keys = {
        "head": c.name,
        "target": Path(target.name).name,
        "temperature_0": figures("tree", 0) | {"repetition_penalty": sampling.repetition_penalty},
        "temperature_1": figures("tree", 1) | settings,
        **others,
        "batches": several,
        "hf_generate_tokens_per_second": tokens_per_second(plain.hf),
        "lossless": all(x["tie"] for x in differences),
        "differing_prompts": len(differences),
        "differences": differences,
        "prompts": len(prompts),
        "new_tokens": plain.new_tokens,
        "prompt_tokens": sum(map(len, prompts)),
        "prompts_from": "these prompts",  # the doors name the file in ``extra``
        **{"tree" + "_temperature_1" * t: asdict(c.shapes["tree", t]) for t in TEMPERATURES},
        "proposer": {"kind": "drafter"},  # ``extra`` describes any other proposer
        "drafter_parameters": 0 if c.drafter is None else c.drafter.size,
        **ran_on(target.device, target.dtype),
        **provenance(),
    }
    decoded = _texts(plain, c)
    lists = [*prompts, *(t.tokens for t in decoded), *(r.guesses for t in decoded for r in t.rounds)]
    return replace(Report.of(keys | more), texts=decoded, asked=prompts, spelling=spelling_of(target.tokenizer, lists))


def _differences(plain: Plain, c: Contender) -> list[dict[str, Any]]:
    """The prompts whose greedy texts are not all equal to plain decoding's, as ``differs`` describes them."""
    greedy, found = [plain.hf, *(made for (_, temperature), made in c.made.items() if temperature == 0)], []
    how: dict[str, Any] = {"new_tokens": plain.new_tokens, "penalty": plain.sampling.repetition_penalty}
    for i, prompt in enumerate(plain.prompts):
        texts = [made[i].tokens for made in greedy] + greedy_of(plain.together, i) + greedy_of(c.together, i)
        found.append(differs(plain.target, prompt, plain.said[0][i].tokens, texts, **how))
    return [each for each in found if each is not None]


def _trimmed(plain: Plain, c: Contender) -> dict[str, Any]:
    """For a trimmed vocabulary its size, and the share of the target's tokens outside it, which can never be guessed."""
    if c.drafter is None or (ids_V := c.drafter.unembedding(1).ids_V) is None:
        return {}
    known, lost = set(ids_V.tolist()), {}
    for temperature, texts in plain.said.items():
        tokens = [token for made in texts for token in made.tokens]
        lost[f"temperature_{temperature}"] = sum(token not in known for token in tokens) / len(tokens)
    return {"draft_vocabulary": len(known), "lost_by_trimming": lost}


def _texts(plain: Plain, c: Contender) -> list[Text]:
    """All decoded texts, prompt by prompt: the plain one, then one for each shape."""
    found = []
    for i in range(len(plain.prompts)):
        for temperature in TEMPERATURES:
            alone, known = plain.said[temperature][i], plain.probabilities[temperature][i]
            found.append(Text(i, temperature, "plain", alone.tokens, probabilities=known, seconds=round(alone.seconds, 6)))
            for kind in (kind for kind, t in c.made if t == temperature):
                said = c.made[kind, temperature][i]
                text = Text(i, temperature, kind, said.tokens, rounds_of(said), seconds=round(said.seconds, 6))
                found.append(_explained(plain, c, text, known if said.tokens == alone.tokens else None) if kind == "tree" else text)
    return found


def _explained(plain: Plain, c: Contender, text: Text, known: Sequence[float] | None) -> Text:
    """``text`` with the target's probabilities of its tokens (``known``: those, if computed before) and the drafter's of its guesses."""
    target, prompt, rounds = plain.target, plain.prompts[text.prompt], text.rounds
    if c.guesser is c.drafter and c.drafter is not None:
        sure = confidences(target, c.drafter, prompt, text.tokens, rounds)
        rounds = [replace(r, probabilities=q) for r, q in zip(rounds, sure, strict=True)]
    return replace(text, rounds=rounds, probabilities=known or probabilities(target, prompt, text.tokens))


def _auto(c: Contender) -> dict[str, Any]:
    """For an auto policy: the cost of a round of each shape over a plain one, and the share of rounds for which each was chosen."""
    found = {}
    for temperature, costs in c.auto().items():
        chosen = Counter(str(shape or "no guesses") for made in c.made["auto", temperature] for shape in made.shapes)
        shares = {name: n / chosen.total() for name, n in chosen.most_common()}
        found[f"temperature_{temperature}"] = {"costs": {str(shape): cost for shape, cost in costs.items()}, "rounds": shares}
    return {"auto": found} if found else {}
