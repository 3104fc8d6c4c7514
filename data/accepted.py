"""How many guesses a running engine accepts: it answers prompts, one after the other, and its rounds are counted.

vLLM and `python -m inference serve` add up the rounds of all requests at /metrics, so the sums are read before and after each answer.
SGLang and llama.cpp tell the rounds of an answer in the answer itself, at endpoints of their own.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp

from headstart.data.endpoint import AGAIN, Again, Endpoint, Unfit
from headstart.heads.engines import SGLANG_BRANCHES
from headstart.heads.errors import UserError
from headstart.heads.serving import OURS

Told = tuple[list[int], int, list[int]]  # the first fields of ``Answered`` behind the prompt
RETRIES = 3
LATE, PAUSE, LOOK = 10.0, 0.02, 30.0  # seconds: the longest wait until an answer is counted at /metrics; between two looks; for a look
SLACK = 16  # guesses of a last round that was cut, which an engine may count beyond an answer where it does not say how many it makes


class Answered(NamedTuple):
    """An engine's answer to a prompt."""

    prompt: list[int]
    tokens: list[int]
    rounds: int  # passes of the target after the prompt's
    accepted: list[int]  # how many of these accepted a guess at depth 1, 2, ...; empty: the engine does not tell
    seconds: float


class Counters(NamedTuple):
    """The names of an engine's sums at /metrics; those of accepted guesses have the label ``place`` for their depth."""

    tokens: str
    rounds: str
    accepted: str
    place: str


PUBLISHED = {
    "vLLM": Counters("vllm:generation_tokens_total", "vllm:spec_decode_num_drafts_total",
                     "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"),
    OURS: Counters("headstart_tokens_total", "headstart_target_passes_total", "headstart_accepted_total", "depth"),
}  # fmt: skip
HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")  # SGLang's: how many rounds accepted 0, 1, 2 ... guesses


def summed(metrics: str, name: str, label: str = "") -> dict[str, float]:
    """The values of a sum in Prometheus' text, by ``label`` ("" where it has none), added up over all other labels."""
    found: dict[str, float] = {}
    labelled = rf'^{re.escape(name)}(?:\{{((?:[^"}}]|"[^"]*")*)\}})? (\d+(?:\.\d+)?(?:e[+-]?\d+)?)\b'
    for labels, value in re.findall(labelled, metrics, re.MULTILINE):
        of = re.search(rf'\b{label}="([^"]*)"', labels) if label else None
        key = of[1] if of else ""
        found[key] = found.get(key, 0.0) + float(value)
    return found


class Accepting(Endpoint):
    """A connection to an engine that drafts. ``engine``: which one; ``guesses``: of a round, if the engine tells (else None).

    Raises UserError if it cannot be reached, is none of the engines that are known here, or does not draft.
    """

    advice, anew = "", True

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        self.root, self.seconds = url.rstrip("/").removesuffix("/v1"), 0.0
        super().__init__(f"{self.root}/v1", model, key, sequences=1, retries=RETRIES)
        try:
            self.engine, self.guesses = self._recognised()
        except BaseException:
            self.close()
            raise

    def answer(self, prompt: Sequence[int], new_tokens: int, stop_ids: Sequence[int], temperature: float = 0.0) -> Answered:
        """Let the engine continue a prompt by up to ``new_tokens`` tokens, or up to a stop token.

        Raises UserError if it refuses, fails too often, or does not tell its tokens and rounds; and above temperature 0 for an engine that
        draws its guesses, because rounds and text then do not determine each other.
        """
        if temperature and self.engine == OURS:
            raise UserError(f"{self.said}: our endpoint draws its guesses above temperature 0: compare it at temperature=0")
        how = {"SGLang": self._by_sglang, "llama.cpp": self._by_llama_cpp}.get(self.engine, self._by_sums)
        try:
            tokens, rounds, accepted = how(list(prompt), new_tokens, list(stop_ids), temperature)
        except UserError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(f"{self.said}: {self.engine} answers without tokens and rounds ({type(error).__name__}: {error})") from None
        except Unfit as error:
            raise UserError(f"{self.said} does not take {len(prompt)} tokens: {error}") from None
        if len(tokens) > new_tokens:
            raise UserError(f"{self.said}: {len(tokens)} tokens came where at most {new_tokens} were asked for")
        if len(tokens) > 1 and not 0 < rounds < len(tokens):
            raise UserError(f"{self.said}: {rounds} rounds are counted for {len(tokens)} tokens: it does not draft, was restarted, or "
                            "answers others at the same time")  # fmt: skip
        return Answered(list(prompt), tokens, rounds, accepted, self.seconds)

    # ---- what it is ----

    def _recognised(self) -> tuple[str, int | None]:
        metrics = self._text("/metrics") or ""
        for engine, names in PUBLISHED.items():
            if summed(metrics, names.tokens):
                if engine == OURS:
                    return engine, self._of_ours(summed(metrics, "headstart_guesses"))
                if not summed(metrics, names.rounds):
                    raise self._drafts_not(engine)
                return engine, len(summed(metrics, names.accepted, names.place)) or None
        about = self._json("/server_info") or self._json("/get_server_info")  # by SGLang's newer and older versions
        if "speculative_algorithm" in about:
            if about["speculative_algorithm"] is None:
                raise self._drafts_not("SGLang")
            if (about.get(SGLANG_BRANCHES) or 1) != 1:
                flag = f"--{SGLANG_BRANCHES.replace('_', '-')} 1"
                raise UserError(f"{self.said}: this SGLang drafts trees, and chains are compared: start it with {flag}")
            nodes = about.get("speculative_num_draft_tokens")
            return "SGLang", nodes - 1 if type(nodes) is int and nodes > 1 else None  # a node is the token before the guesses
        if "default_generation_settings" in self._json("/props"):
            return "llama.cpp", None
        raise UserError(f"{self.said}: no vLLM, SGLang, llama.cpp or `python -m inference serve`, whose accepted guesses can be counted")

    def _of_ours(self, guesses: dict[str, float]) -> int:
        if not guesses:
            raise UserError(f"{self.said}: our endpoint drafts trees, or what pays, and chains are compared: start it with decode=chain")
        if not guesses[""]:
            raise self._drafts_not("endpoint")
        return round(guesses[""])

    def _drafts_not(self, engine: str) -> UserError:
        return UserError(f"{self.said}: this {engine} does not draft: start it with the drafter, by the command of its model card")

    # ---- how it answers ----

    def _by_sums(self, prompt: list[int], new_tokens: int, stop_ids: list[int], temperature: float) -> Told:
        names, before = PUBLISHED[self.engine], self._sums()
        body = {"model": self.name, "prompt": prompt, "max_tokens": new_tokens, "temperature": temperature, "repetition_penalty": 1.0,
                "stop_token_ids": stop_ids, "return_token_ids": True}  # fmt: skip
        tokens = _tokens(self._ask("/completions", body)["choices"][0]["token_ids"])
        counted, until = before[names.tokens][""] + len(tokens), time.monotonic() + LATE
        while (after := self._sums())[names.tokens][""] < counted:
            if time.monotonic() > until:
                raise UserError(f"{self.said}: its /metrics does not count the answer")
            time.sleep(PAUSE)
        if after[names.tokens][""] > counted + (self.guesses or SLACK):
            raise UserError(f"{self.said} answers others at the same time, and counts their guesses too: ask it while it is idle")

        def more(name: str, key: str = "") -> int:
            return round(after[name].get(key, 0.0) - before[name].get(key, 0.0))

        return tokens, more(names.rounds), [more(names.accepted, place) for place in sorted(after[names.accepted], key=int)]

    def _sums(self) -> dict[str, dict[str, float]]:
        names, metrics = PUBLISHED[self.engine], self._text("/metrics") or ""
        labels = {names.tokens: "", names.rounds: "", names.accepted: names.place}
        return {name: summed(metrics, name, label) for name, label in labels.items()}

    def _by_sglang(self, prompt: list[int], new_tokens: int, stop_ids: list[int], temperature: float) -> Told:
        sampling = {"temperature": temperature, "max_new_tokens": new_tokens, "stop_token_ids": stop_ids}
        found = self._ask("/generate", {"input_ids": prompt, "sampling_params": sampling}, self.root)
        about = found["meta_info"]
        counts: list[int] = next((about[name] for name in HISTOGRAMS if about.get(name)), [])
        return _tokens(found["output_ids"]), int(about["spec_verify_ct"]), [sum(counts[d:]) for d in range(1, len(counts))]

    def _by_llama_cpp(self, prompt: list[int], new_tokens: int, stop_ids: list[int], temperature: float) -> Told:
        body = {"prompt": prompt, "n_predict": new_tokens, "temperature": temperature, "cache_prompt": False, "return_tokens": True}
        found = self._ask("/completion", body, self.root)
        counts = found["timings"]
        rounds = int(counts["predicted_n"]) - 1 - int(counts.get("draft_n_accepted", 0))  # each emits one token beside the accepted guesses
        if "draft_n" not in counts and rounds > 1:  # it guesses nothing before the last token
            raise self._drafts_not("llama.cpp")
        return _tokens(found["tokens"]), rounds, []

    # ---- requests ----

    def _ask(self, path: str, body: dict[str, Any], root: str | None = None) -> Any:
        """Send a request for an answer, and keep the seconds that it took. It is not repeated: the rounds of a failed answer may count."""
        began = time.perf_counter()
        try:
            found = self.loop.run_until_complete(self.once("POST", path, body, root=root))
        except Again as error:
            raise UserError(f"{self.said} failed: {error}") from None
        self.seconds = time.perf_counter() - began
        return found

    def _text(self, path: str) -> str | None:
        """What is at a path beside /v1; None if there is nothing. Raises UserError where a key is missing, and if it fails repeatedly."""

        async def look() -> str | None:
            try:
                async with self.session.get(self.root + path, timeout=aiohttp.ClientTimeout(total=LOOK)) as response:
                    if response.status in AGAIN:
                        raise Again(f"status {response.status}")
                    if response.status in (401, 403):
                        raise UserError(f"{self.said}: {path} wants a key (status {response.status}): key=VARIABLE names what holds it")
                    return await response.text(errors="replace") if response.status == 200 else None
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise Again(" ".join(str(error).split()) or type(error).__name__) from None

        return self.loop.run_until_complete(self.patiently(look))

    def _json(self, path: str) -> dict[str, Any]:
        """The JSON object at a path beside /v1; empty if there is none."""
        try:
            found = json.loads(self._text(path) or "null")
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def _tokens(found: Any) -> list[int]:
    """``found`` if it is a list of tokens. Raises ValueError for anything else."""
    if not (isinstance(found, list) and all(type(token) is int and token >= 0 for token in found)):
        raise ValueError("no list of tokens")
    return found
