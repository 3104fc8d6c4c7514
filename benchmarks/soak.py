"""Does the server stay correct, and its memory constant? Sends thousands of mixed requests to a real `serve` process on the tiny target.

    python benchmarks/soak.py [SPECULATOR] [--requests 2000]

Eight clients run at once, more than the server has rows. Most ask for greedy answers, which are compared with plain decoding token by
token. Others sample, disconnect during a stream or while they wait, or send malformed requests. This runs without a drafter, then with
the exported folder SPECULATOR. Memory is that of the server process: the median between a tenth and a third of the requests is compared
with that of the last fifth. Writes benchmarks/results/soak.json (--out); exit status 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.frame import ROOT, keep, origin, parser

CLIENTS, ROWS, TEXTS, CONTEXT = 8, 6, 100, 1024
SAMPLES = 30  # samples of memory
GROWTH = 0.02  # as a share of the memory after warm-up; more counts as a leak
KINDS = {"greedy": 0.35, "greedy_stream": 0.35, "sampled": 0.1, "leaves": 0.15, "bad": 0.05}
BAD: list[dict[str, Any]] = [
    {"prompt": ""}, {"prompt": [1, 2], "max_tokens": CONTEXT}, {"prompt": "a", "temperature": "hot"}, {"prompt": "a", "beams": 3}, {},
    {"prompt": ["a", 3]}, {"prompt": "a" * (1 << 20)},
]  # fmt: skip


def prompts(tokenizer: Any) -> list[tuple[list[int], int]]:
    """Prompts: pieces of Python source of 1 to 600 tokens, each with the number of new tokens to ask for, 1 to 200."""
    dice = random.Random(0)
    tokens = tokenizer("".join(inspect.getsource(m) for m in (argparse, inspect, json, random)), verbose=False)["input_ids"]
    made = []
    for _ in range(TEXTS):
        length, at = int(600 ** dice.random()), dice.randrange(len(tokens) - 600)
        made.append((tokens[at : at + length], int(200 ** dice.random())))
    return made


async def ask(http: aiohttp.ClientSession, url: str, kind: str, number: int, texts: list[Any], truth: list[list[int]]) -> str:
    """Send a request. Returns what was seen: "right", or something else."""
    dice = random.Random(number)
    which = dice.randrange(len(texts))
    prompt, new = texts[which]
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "return_token_ids": True, "stream": kind in ("greedy_stream", "leaves")}
    if kind == "sampled":
        body |= {"temperature": 0.8, "top_p": 0.9, "seed": number}
    if kind == "bad":
        body = dice.choice(BAD)
    if kind == "leaves":
        try:
            async with asyncio.timeout(dice.random() / 2), http.post(url, json=body) as answer:
                await answer.content.readline()
        except TimeoutError:
            pass
        return "left"
    async with http.post(url, json=body) as answer:
        if kind == "bad":
            return "refused" if 400 <= answer.status < 500 and (await answer.json())["error"]["message"] else "wrong: not refused"
        if answer.status != 200:
            return f"wrong: status {answer.status}"
        if body["stream"]:
            events = [line[6:] for line in (await answer.text()).split("\n\n") if line]
            choices = [json.loads(e)["choices"][0] for e in events[:-1]]
            if events[-1] != "[DONE]":
                return "wrong: the stream was cut"
        else:
            choices = (await answer.json())["choices"]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    if kind == "sampled":
        return "sampled" if 0 < len(tokens) <= new else "wrong: length"
    return "right" if tokens == truth[which] else "wrong: tokens"


async def figures(http: aiohttp.ClientSession, base: str) -> dict[str, float]:
    async with http.get(base + "/metrics") as answer:
        lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0].removeprefix("headstart_"): float(line.rpartition(" ")[2]) for line in lines}


async def load(base: str, server: psutil.Process, requests: int, texts: list[Any], truth: list[list[int]]) -> dict[str, Any]:
    dice = random.Random(1)
    kinds = dice.choices([*KINDS], [*KINDS.values()], k=requests)
    left, seen, memory, began = iter(range(requests)), Counter[str](), list[float](), time.perf_counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:

        async def one() -> None:
            for number in left:
                seen[await ask(http, base + "/v1/completions", kinds[number], number, texts, truth)] += 1
                if (done := seen.total()) % (requests // SAMPLES) == 0:
                    memory.append(server.memory_info().rss / 1e6)
                    if len(memory) % (SAMPLES // 6) == 0:
                        print(f"  {done} requests, {memory[-1]:.0f} MB, {dict(seen)}", flush=True)

        await asyncio.gather(*(one() for _ in range(CLIENTS)))
        seconds = time.perf_counter() - began
        for _ in range(100):  # a round for a client that left may still run
            end = await figures(http, base)
            if end["requests_running"] == end["requests_waiting"] == 0 and end["rows_free"] == ROWS:
                break
            await asyncio.sleep(0.1)
    warm, late = median(memory[SAMPLES // 10 : SAMPLES // 3]), median(memory[-SAMPLES // 5 :])
    compared = [truth[random.Random(n).randrange(TEXTS)] for n in range(requests) if kinds[n].startswith("greedy")]
    statuses = {re.findall(r'status="(\d+)"', k)[0]: int(v) for k, v in end.items() if k.startswith("requests_total")}
    return {
        "requests": requests, "clients": CLIENTS, "rows": ROWS, "seconds": seconds, "seen": dict(sorted(seen.items())),
        "compared_tokens": sum(map(len, compared)), "wrong": sum(n for what, n in seen.items() if what.startswith("wrong")),
        "statuses": statuses, "clients_that_left_early": statuses.get("499", 0),
        "rows_free_at_the_end": int(end["rows_free"]), "running_at_the_end": int(end["requests_running"]),
        "waiting_at_the_end": int(end["requests_waiting"]), "engine_restarts": int(end["engine_restarts_total"]),
        "tokens": int(end["tokens_total"]), "accepted_length": end["accepted_length"],
        "memory_mb": [round(m, 1) for m in memory], "memory_warm_mb": round(warm, 1), "memory_growth_mb": round(late - warm, 1),
    }  # fmt: skip


def run(speculator: Path | None, requests: int, texts: list[Any], truth: list[list[int]]) -> dict[str, Any]:
    command = [sys.executable, "-m", "inference", "serve", "target=tiny", "target.device=cpu", "port=0", f"sequences={ROWS}"]
    command += [] if speculator is None else [f"speculator={speculator.resolve()}"]
    print(f"serve {'without a drafter' if speculator is None else 'with a drafter'}: {requests} requests", flush=True)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            base = next((found[0] for line in server.stdout if (found := re.search(r"http://\S+", line))), None)
            if base is None:
                raise SystemExit("the server did not start")
            result = asyncio.run(load(base, psutil.Process(server.pid), requests, texts, truth))
            server.send_signal(signal.SIGTERM)
            result["exit_status"] = server.wait(timeout=60)
        finally:
            server.kill()
    steady = result["memory_growth_mb"] <= GROWTH * result["memory_warm_mb"]
    free = result["rows_free_at_the_end"] == ROWS and not result["running_at_the_end"] and not result["waiting_at_the_end"]
    left = result["clients_that_left_early"] > 0 and result["seen"].get("refused", 0) > 0
    return result | {"passed": steady and free and left and result["wrong"] == result["exit_status"] == result["engine_restarts"] == 0}


def main() -> None:
    cli = parser(__doc__, "soak.json")
    cli.add_argument("speculator", type=Path, nargs="?")
    cli.add_argument("--requests", type=int, default=2000)
    args = cli.parse_args()
    if args.requests < 100:
        cli.error("--requests: at least 100, or there is no warm-up to speak of")
    if args.speculator is not None and not (args.speculator / "config.json").is_file():
        cli.error(f"{args.speculator} is no folder of an exported drafter: it has no config.json")
    from headstart.inference.decoding.decode import generate
    from headstart.inference.decoding.target import Target

    target = Target.load(str(ROOT / "assets" / "tiny"), dtype="float32", device="cpu")
    texts = prompts(target.tokenizer)
    truth = [generate(target, None, prompt, new_tokens=new).tokens for prompt, new in texts]
    result = {"plain": run(None, args.requests, texts, truth)}
    if args.speculator is not None:
        result["drafted"] = run(args.speculator, args.requests, texts, truth)
    named = " SPECULATOR" if args.speculator else ""
    keep(args.out, result | origin(f"python benchmarks/soak.py{named} --requests {args.requests}"))
    print(json.dumps(result, indent=1))
    sys.exit(0 if all(r["passed"] for r in result.values()) else 1)


if __name__ == "__main__":
    main()
