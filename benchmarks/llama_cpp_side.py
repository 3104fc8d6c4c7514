"""Runs llama.cpp: its converter, in a process of its own, and its server, whose log says what was guessed. See in_llama_cpp.py.

This file is both ends of the conversion. ``python llama_cpp_side.py SOURCE FOLDER ...`` runs the converter of SOURCE, a folder with the
source of llama.cpp, with one change: a tokenizer that the converter does not know is accepted. It is then written as GPT-2's. That is
enough here, because prompts are sent as token ids.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

LIMIT = 60  # seconds until the server has to answer
FP32 = [word for flag in ("-ctk", "-ctv", "-ctkd", "-ctvd") for word in (flag, "f32")] + ["-fa", "off"]  # the cache is fp16 by default
DRAFT = re.compile(r"generate_draft: id=\s*(\d+),.*#draft=(\d+)")
TOKEN = re.compile(r"\s(\d+): id =\s+(\d+) \(")
END = "stop processing: "


def convert(source: Path, folder: Path, out: Path, target: Path | None = None) -> None:
    """Write a folder as GGUF, in fp32. ``target``: the target's folder, for a drafter that reads the target. Raises RuntimeError with the
    end of what the converter says.
    """
    words = [str(folder), "--outfile", str(out), "--outtype", "f32", *(["--target-model-dir", str(target)] if target else [])]
    done = subprocess.run([sys.executable, __file__, str(source), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"llama.cpp's converter refuses the folder: {done.stdout.strip().splitlines()[-1]}")


class Server:
    """A llama-server for one sequence on one thread, in fp32. ``words``: further arguments. Use it in a ``with``."""

    def __init__(self, program: Path, model: Path, longest: int, words: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.said = f"http://127.0.0.1:{port}", tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        command = [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-np", "1", "-c", str(longest), "-t", "1"]
        command += ["-td", "1", "-lv", "5", "--no-warmup", "--temp", "0", *FP32, *words]
        env = os.environ | {"LLAMA_BATCH_DEBUG": "1"}  # names the tokens of every batch
        self.process = subprocess.Popen(command, stdout=self.said, stderr=subprocess.STDOUT, env=env)

    def __enter__(self) -> Server:
        until = time.monotonic() + LIMIT
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > until:
                self.__exit__()
                raise RuntimeError(f"llama-server does not start:\n{self.log()[-2000:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def _ready(self) -> bool:
        try:
            return bool(json.load(urllib.request.urlopen(f"{self.url}/health", timeout=5))["status"] == "ok")
        except (urllib.error.URLError, OSError):
            return False

    def complete(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        """The answer to one prompt of token ids: ``tokens`` and ``timings``, which counts guesses."""
        asked = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0, "cache_prompt": False, "return_tokens": True}
        request = urllib.request.Request(f"{self.url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"})
        found: dict[str, Any] = json.load(urllib.request.urlopen(request, timeout=600))
        return found

    def log(self) -> str:
        """What it has said. Complete once it has ended."""
        self.said.seek(0)
        return self.said.read()


def guesses(log: str) -> list[list[list[int]]]:
    """For each prompt, the guesses that each pass of the target checked: the tokens of the pass's batch but the first, which is known."""
    prompts, rounds, left, known = list[list[list[int]]](), list[list[int]](), 0, 0
    for line in log.splitlines():
        if drafted := DRAFT.search(line):
            known, left = int(drafted[1]), int(drafted[2]) + 1
            rounds.append([])
        elif left and (token := TOKEN.search(line)):
            if int(token[1]) == 0 and int(token[2]) != known:
                raise RuntimeError(f"llama-server's log has an unexpected batch: {line}")
            left -= 1
            rounds[-1] += [int(token[2])] if int(token[1]) else []
        elif END in line:
            prompts, rounds = [*prompts, rounds], []
    return prompts


def build_of(program: Path) -> str:
    """The version that llama-server states."""
    done = subprocess.run([str(program), "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return next(line.partition("version: ")[2] for line in done.stdout.splitlines() if "version: " in line)


# In the converter's process ------------------------------------------------------------------------------------------


def accepting(known: Any) -> Any:
    """The converter's look-up of a tokenizer's name, which returns GPT-2's where it finds none."""

    def look_up(self: Any, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    return look_up


def run_converter() -> None:
    source = sys.argv.pop(1)
    sys.path[:0] = [f"{source}/gguf-py", source]
    if importlib.util.find_spec("sentencepiece") is None:  # imported for every Llama, and called only if its tokenizer has such a file
        empty = importlib.util.module_from_spec(ModuleSpec("sentencepiece", None))
        sys.modules["sentencepiece"], empty.SentencePieceProcessor = empty, object  # type: ignore[attr-defined]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    TextModel.get_vocab_base_pre = accepting(TextModel.get_vocab_base_pre)
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    run_converter()
