"""Runs vLLM in its own environment: one process per setting, which stays alive and answers requests one after another.

This file is both ends. ``python vllm_side.py``, run by the Python of vLLM's environment, makes an engine from the settings in the first
line of its standard input and answers every further line. Between requests it computes nothing, so that several such processes do not
disturb the one that is asked. ``Vllm`` is the client.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path
from typing import Any

ENVIRONMENT = {  # the engine runs in this one process, without network
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "KMP_BLOCKTIME": "5",
}  # fmt: skip
USUAL = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 256 << 20, "enable_prefix_caching": False}


class Client:
    """A process that answers in lines of JSON. It starts at once. ``env``: further environment variables.

    ``hear`` raises RuntimeError with the end of its output if the process has ended (exit status -9: out of memory).
    """

    def __init__(self, name: str, command: list[str], env: dict[str, str]) -> None:
        self.name, self.said = name, tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True, env=os.environ | env
        )

    def say(self, what: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; ``hear`` raises the error

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            found: dict[str, Any] = json.loads(line)
            return found
        status = self.process.wait()
        self.said.seek(0)
        raise RuntimeError(f"{self.name} gave no result (exit status {status}):\n{self.said.read()[-4000:]}")

    def close(self) -> None:
        try:
            self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.said.close()


class Vllm(Client):
    """An engine with these arguments of ``vllm.LLM``; ``version`` waits until it runs. ``openmp``: a library to preload."""

    def __init__(self, python: str, settings: dict[str, Any], threads: int = 1, openmp: Path | None = None) -> None:
        env = ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)} | ({} if openmp is None else {"LD_PRELOAD": str(openmp)})
        super().__init__("vLLM", [python, __file__], env)
        self.say(USUAL | settings)

    @cached_property
    def version(self) -> str:
        return str(self.hear()["version"])

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Decode ``prompts`` (token ids) one after another at temperature 0, ``new_tokens`` each, or up to a token of ``stop``. Returns
        ``tokens`` and ``seconds``. If the engine keeps statistics (``disable_log_stats=False``), also counters of guesses, and ``guesses``:
        for each prompt what was proposed after each of its passes.
        """
        _ = self.version
        self.say(request)
        return self.hear()

    def __enter__(self) -> Vllm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def intel_openmp(python: str) -> Path | None:
    """Intel's OpenMP, if the environment has it. vLLM recommends to preload it, but does not do so itself."""
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    return library if library.is_file() else None


# In vLLM's environment -----------------------------------------------------------------------------------------------


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # only answers go to standard output, not what vLLM prints
    from vllm import LLM, SamplingParams, __version__

    settings = json.loads(sys.stdin.readline())
    keeps = not settings.get("disable_log_stats", True)
    proposed = proposals() if keeps else []
    llm = LLM(**settings)
    print(json.dumps({"version": __version__}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        asked = SamplingParams(temperature=0.0, max_tokens=request["new_tokens"], detokenize=False, stop_token_ids=request["stop"])
        start, made, guessed = time.perf_counter(), [], []
        for prompt in request["prompts"]:
            proposed.clear()
            made.append(llm.generate({"prompt_token_ids": prompt}, asked, use_tqdm=False)[0].outputs[0].token_ids)
            guessed.append([list(map(int, each)) for each in proposed])
        result = {"seconds": time.perf_counter() - start, "tokens": [list(tokens) for tokens in made]}
        counted = guesses(llm.get_metrics()) | {"guesses": guessed} if keeps else {}
        print(json.dumps(result | counted), file=answers, flush=True)


def proposals() -> list[list[int]]:
    """A list to which vLLM's runner adds what its drafter proposes for the only sequence, from now on."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    found: list[list[int]] = []
    propose = GPUModelRunner.propose_draft_token_ids

    def noted(*given: Any, **named: Any) -> Any:
        made = propose(*given, **named)
        found.extend(each for each in (made.tolist() if hasattr(made, "tolist") else made)[:1] if each)
        return made

    GPUModelRunner.propose_draft_token_ids = noted
    return found


def guesses(metrics: list[Any]) -> dict[str, Any]:
    """The counters of guesses since the engine started."""
    counters = {m.name: m for m in metrics if "spec_decode" in m.name}
    return {
        "drafts": counters["vllm:spec_decode_num_drafts"].value,
        "accepted": counters["vllm:spec_decode_num_accepted_tokens"].value,
        "accepted_by_depth": list(counters["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    }


if __name__ == "__main__":
    serve()
