"""Does vLLM accept the exported folder as often as we do? A chain at temperature 0, the same prompts, token by token.

    python benchmarks/in_vllm.py RUN --vllm PYTHON     # PYTHON: the interpreter of an environment that has vLLM (CPU or GPU)

RUN is the folder of a finished run on the tiny target. vLLM is no dependency: it runs in an environment of its own, in a
process that gets prompts on its standard input and answers with tokens and its own acceptance counters.
Writes benchmarks/results/in_vllm.json, one entry per drafter. (vLLM counts accepted guesses behind the last token that was
asked for, so its accepted length is a little higher; the target passes are the same.)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "result: "


def inside(request: dict) -> None:
    """In vLLM's environment."""
    from vllm import LLM, SamplingParams, __version__

    speculative = {"method": request["method"], "model": request["speculator"], "num_speculative_tokens": request["depth"]}
    llm = LLM(
        request["target"], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=1024,
        speculative_config=speculative, disable_log_stats=False,
    )  # fmt: skip
    asked = SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], detokenize=False, stop_token_ids=request["stop"])
    said = [llm.generate({"prompt_token_ids": p}, asked, use_tqdm=False)[0].outputs[0].token_ids for p in request["prompts"]]
    counters = {m.name: m for m in llm.get_metrics() if "spec_decode" in m.name}
    result = {
        "tokens": [list(s) for s in said],
        "drafts": counters["vllm:spec_decode_num_drafts"].value,
        "accepted": counters["vllm:spec_decode_num_accepted_tokens"].value,
        "accepted_by_depth": list(counters["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
        "version": __version__,
    }
    print(MARK + json.dumps(result), flush=True)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("run", type=Path)
    cli.add_argument("--vllm", required=True, help="the Python of an environment with vLLM")
    cli.add_argument("--method", default="eagle3", help="vLLM's name of the format: eagle3, eagle, draft_model")
    args = cli.parse_args()
    sys.path.insert(0, str(ROOT))
    from data.source import open_source
    from inference.decode import generate
    from inference.propose import Drafting, TreePolicy
    from inference.provenance import provenance
    from inference.settings import open_decode, open_speculator, open_target

    settings = json.loads((args.run / "config.json").read_text())
    target = open_target(settings["target"] | {"dtype": "float32"})
    drafter = open_speculator(args.run / "speculator", target)
    decoding = open_decode(settings["decode"])
    trainer = settings["trainer"]
    source = open_source(settings["data"], target, length=trainer["length"], seed=trainer["seed"])
    prompts = source.prompts(decoding.prompts, decoding.new_tokens)
    depth, new_tokens = settings["decode"]["depth"], decoding.new_tokens
    policy = TreePolicy("chain", depth=depth)
    ours = [generate(target, Drafting(drafter), p, new_tokens=new_tokens, policy=policy, sampling=decoding.sampling) for p in prompts]
    rounds = [n for g in ours for n in g.emitted]
    request = {
        "target": str((ROOT / settings["target"]["path"]).resolve()), "speculator": str((args.run / "speculator").resolve()),
        "method": args.method, "depth": depth, "new_tokens": new_tokens, "prompts": prompts, "stop": list(target.stop_ids),
    }  # fmt: skip
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run([args.vllm, __file__, "--inside"], input=json.dumps(request), env=env, capture_output=True, text=True)
    answer = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if answer is None:
        sys.exit(f"vLLM gave no result (exit status {done.returncode}):\n{done.stderr[-4000:]}")
    theirs = json.loads(answer.removeprefix(MARK))
    result = {
        "vllm": theirs["version"], "method": args.method, "depth": depth, "prompts": len(prompts),
        "new_tokens": sum(map(len, theirs["tokens"])),
        "target_passes_in_vllm": theirs["drafts"],
        "target_passes_here": len(rounds),
        "accepted_length_in_vllm": 1 + theirs["accepted"] / theirs["drafts"],
        "accepted_length_here": sum(rounds) / len(rounds),
        "acceptance_by_depth_in_vllm": [n / theirs["drafts"] for n in theirs["accepted_by_depth"]],
        "acceptance_by_depth_here": [sum(n > d for n in rounds) / len(rounds) for d in range(1, depth + 1)],
        "prompts_with_the_same_tokens": sum(a.tokens == b for a, b in zip(ours, theirs["tokens"], strict=True)), **provenance(),
    }  # fmt: skip
    path = ROOT / "benchmarks" / "results" / "in_vllm.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | {drafter.config["head"]: result}, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    if sys.argv[1:] == ["--inside"]:
        inside(json.load(sys.stdin))
    else:
        main()
