"""How a saved drafter is served: the commands for every engine that loads its folder.

Each module of ``heads/formats`` has a function ``serving(drafter, target, folder, guesses)`` that returns its commands. Cards, reports
and the last lines of a run show them, and ``benchmarks/in_vllm.py`` and ``in_llama_cpp.py`` run them. Engines draft chains of
``guesses`` tokens, unless the drafter fixes their length.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any, NamedTuple

from headstart.heads.base import Drafter
from headstart.heads.engines import serves
from headstart.heads.kinds import reads_images
from headstart.heads.override import typed

OURS = "Headstart"
SERVES, DIAGNOSES = "headstart infer serve ", "headstart infer diagnose "
ASKS = "Whether a running engine accepts as many guesses as it should"
# Words in a drafter's path by which vLLM (0.33: config/speculative.py) chooses the method, unless the command asks for one of KEPT.
GUESSED, KEPT = re.compile("eagle-|eagle3|dflash|dspark"), ("eagle", "eagle3", "dflash", "dspark")
# DeepSeek's yarn with an mscale: earlier releases ignore it in drafters, so that queries and keys become 1.37 times as large.
MSCALE = {"vLLM": "0.32 or newer", "SGLang": "0.5.23 or newer"}
LLAMA_CPP = "b11434 or newer"  # the build that benchmarks/in_llama_cpp.py ran
NOT_IN_LLAMA_CPP = {"beta_fast", "beta_slow", "truncate", "mscale"}  # keys of yarn: it computed other betas; the rest was not run
OUTTYPE = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}  # its converter's names


@dataclass(frozen=True)
class Command:
    """What a user types for one engine: a line of bash, or Python code."""

    engine: str
    text: str
    needs: str = ""  # releases that load the folder, and other requirements
    language: str = "bash"
    speculative: dict[str, Any] | None = None  # vLLM's --speculative-config
    lacks: str = ""  # settings of training without which this command does not serve the folder; "" where it does


class Serving(NamedTuple):
    """The commands that serve a folder, or the reason why no serving engine loads it."""

    commands: list[Command]  # our own are last
    unserved: str  # the reason; "" where some engine loads it
    otherwise: str = ""  # with which settings of training more engines would load it; "" where there are none


def serving(drafter: Drafter, target: str, folder: str, depth: int, attention: str = "sdpa", dtype: str = "auto") -> Serving:
    """The commands that serve a saved drafter. ``target``, ``folder``: a path or a name on the hub, as the commands name it. ``depth``: the
    length of the chains that engines draft, limited to the drafter's. ``attention``: the target's implementation, for our own commands.
    ``dtype``: the type that the target's weights were measured in; auto: as stored, which commands need not say.
    """
    fmt = importlib.import_module(f"headstart.heads.formats.{drafter.format}")
    images = reads_images(drafter.target_config)
    ours = [_in_class(_in_type(command, dtype), images) for command in own(target, folder, attention, dtype)]
    if drafter.unserved:
        return Serving(ours, drafter.unserved)
    known: list[Command] = fmt.serving(drafter, target, folder, min(depth, drafter.max_depth or depth))
    if not known:
        return Serving(ours, fmt.unserved(drafter))
    kind = drafter.target_config.model_type if images else drafter.shape.model_type  # engines choose their class by the whole model
    rope = drafter.shape.rope if hasattr(drafter, "rope") else {}
    found = [command for command in known if serves(command.engine, _asked(command), kind)]
    if not found:
        return Serving(ours, f"none hands the layers of a {kind} target to a drafter")
    if _scaled_otherwise(rope):
        return Serving(ours, "they ignore the attention_factor of the target's yarn, and would scale queries and keys differently")
    if not NOT_IN_LLAMA_CPP.isdisjoint(rope):
        found = [c for c in found if c.engine != "llama.cpp"]
    if "mscale" in rope:
        found = [replace(c, needs=f"{c.needs}; for this rope {MSCALE[c.engine]}") if c.engine in MSCALE else c for c in found]
    if not rope.get("truncate", True):  # gpt-oss's yarn; TensorRT-LLM rounds its bounds all the same
        found = [c for c in found if c.engine != "TensorRT-LLM"]
    served, otherwise = [_in_class(_in_type(command, dtype), images) for command in found if not command.lacks], _with_other_settings(found)
    return Serving(served + ours, "", otherwise) if served else Serving(ours, otherwise)


def _with_other_settings(found: list[Command]) -> str:
    """Which engines would load the drafter if it was trained with other settings, in words; "" where there are none."""
    by_settings: dict[str, list[str]] = {}
    for command in found:
        if command.lacks:
            by_settings.setdefault(command.lacks, []).append(command.engine)
    return "; ".join(
        f"{' and '.join(engines)} {'loads' if len(engines) == 1 else 'load'} such a drafter if it was trained with {settings}"
        for settings, engines in by_settings.items()
    )


def _in_type(command: Command, dtype: str) -> Command:
    """The command with the type of the target's weights; unchanged if they are as stored, or if the engine is not known to take one."""
    if dtype != "auto" and command.engine in ("vLLM", "SGLang"):
        return replace(command, text=f"{command.text} --dtype {dtype}")
    if dtype in OUTTYPE and command.engine == "llama.cpp":
        return replace(command, text=command.text.replace(" --outfile ", f" --outtype {OUTTYPE[dtype]} --outfile "))
    if dtype != "auto" and command.engine == "transformers":
        return replace(command, text=re.sub(r"(?m)^(model = .*)\)$", rf'\1, dtype="{dtype}")', command.text))
    return command


def _in_class(command: Command, images: bool) -> Command:
    """The command with the class of transformers that loads the target; ``images``: it is a multimodal model without a causal LM."""
    if not images or command.engine != "transformers":
        return command
    text = re.sub(r"(?m)^(from transformers import .*)$", r"\1, AutoModelForImageTextToText", command.text)
    return replace(command, text=re.sub(r"(?m)^model = AutoModelForCausalLM", "model = AutoModelForImageTextToText", text))


def _scaled_otherwise(rope: Mapping[str, Any]) -> bool:
    """Whether engines scale queries and keys differently, because they ignore yarn's attention_factor: SGLang (0.5.23:
    rotary_embedding/factory.py), TensorRT-LLM (main branch of 2026: RopeParams.from_config), and vLLM (main branch of 2026: get_rope).
    """
    factor = rope.get("attention_factor") if rope.get("rope_type") == "yarn" else None
    return factor is not None and abs(factor - (0.1 * log(max(rope["factor"], 1.0)) + 1)) > 1e-3


def _asked(command: Command) -> str:
    """The kind of drafting that a command requests: vLLM's method, SGLang's algorithm or llama.cpp's type; "" for other engines."""
    named = re.search(r"--(?:speculative-algorithm|spec-type) (\S+)", command.text)
    return str(command.speculative["method"]) if command.speculative else named[1] if named else ""


def words_of(target: str, folder: str, attention: str, dtype: str = "auto") -> list[str]:
    """The settings that name the speculator and the target in our own commands."""
    words = [f"speculator={typed(folder)}", "target=folder", f"target.path={typed(target)}"]
    words.append("target.name=" + re.sub(r"[^\w.-]", "-", Path(target).name, flags=re.ASCII))  # the name by which clients call the model
    words += [] if attention == "sdpa" else [f"target.attention={attention}"]
    return words + ([] if dtype == "auto" else [f"target.dtype={dtype}"])


def asking_an_engine(report: Mapping[str, Any]) -> str:
    """The command that asks a running engine how many guesses it accepts, for the folder whose commands are in a report; "" where no engine
    loads it.
    """
    if report.get("unserved"):
        return ""
    own = (command["text"] for command in report.get("serving", []) if command["text"].startswith(SERVES))
    return next((f"{text.replace(SERVES, DIAGNOSES, 1)} prompts=FILE.jsonl url=http://127.0.0.1:8000/v1" for text in own), "")


def own(target: str, folder: str, attention: str, dtype: str = "auto") -> list[Command]:
    """The commands for any format: the bundled endpoint, and ``generate`` of transformers."""
    text = SERVES + shlex.join(words_of(target, folder, attention, dtype))
    drafted = f"model.generate(**inputs, max_new_tokens=64, custom_generate=speculate({folder!r}))"
    return [
        Command(OURS, text, "an OpenAI-compatible endpoint that verifies trees"),
        transformers(target, drafted, f"through {OURS}", "from headstart.inference.hf import speculate"),
    ]


def vllm(target: str, folder: str, method: str, guesses: int, needs: str, **more: Any) -> Command:
    """The command for vLLM. It always states the method, because vLLM would otherwise guess it from words in the path. For methods that are
    not in ``KEPT``, vLLM guesses all the same: there the command makes a link to the folder, whose name has no such word.
    """
    misleading = method not in KEPT and GUESSED.search(folder.lower())
    config = {"method": method, "model": "draft" if misleading else folder, "num_speculative_tokens": guesses, **more}
    text = shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(config)])
    linked = f"{shlex.join(['ln', '-sfT', folder, 'draft'])} && " if misleading else ""  # -T: refuses where draft is a folder
    return Command("vLLM", linked + text, needs, speculative=config)


def sglang(target: str, folder: str, algorithm: str, needs: str, **flags: int) -> Command:
    """The command for SGLang. ``flags``: further flags, without their prefix ``--speculative-``."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", algorithm]
    words += ["--speculative-draft-model-path", folder]
    for name, value in flags.items():
        words += [f"--speculative-{name.replace('_', '-')}", str(value)]
    return Command("SGLang", shlex.join(words), needs)


def sglang_chain(target: str, folder: str, algorithm: str, guesses: int, needs: str) -> Command:
    """The command for SGLang to draft chains of ``guesses`` tokens. Its number of draft tokens includes the last known token."""
    return sglang(target, folder, algorithm, needs, num_steps=guesses, eagle_topk=1, num_draft_tokens=guesses + 1)


def llama_cpp(target: str, folder: str, kind: str, guesses: int, lacks: str = "") -> Command:
    """The command for llama.cpp: it converts the target and the drafter, and serves both. A drafter that reads the target is converted with
    the target's tokenizer and layers; an independent draft model (``kind`` draft-simple) has its own.
    """
    convert = ["python", "convert_hf_to_gguf.py"]
    beside = [] if kind == "draft-simple" else ["--target-model-dir", target]
    lines = [
        [*convert, target, "--outfile", "target.gguf"],
        [*convert, folder, *beside, "--outfile", "draft.gguf"],
        ["llama-server", "-m", "target.gguf", "-md", "draft.gguf", "--spec-type", kind, "--spec-draft-n-max", str(guesses)],
    ]
    needs = f"{LLAMA_CPP}, in the folder of its source; both models as local folders; it drafts greedily at every temperature"
    return Command("llama.cpp", " && ".join(map(shlex.join, lines)), needs, lacks=lacks)


def tensorrt_llm(target: str, folder: str, guesses: int, needs: str, kind: str = "Eagle", **more: Any) -> Command:
    """The command for TensorRT-LLM to draft with an EAGLE-3 folder, or one of another ``kind``. It reads its settings from a file, which
    the command writes first. The decoding type and the folder's key have older names here, which newer releases accept too: 1.2.1 refuses
    the type ``Eagle3``.
    """
    asked = {"speculative_config": {"decoding_type": kind, "max_draft_len": guesses, "speculative_model_dir": folder, **more}}
    file = "speculative.yaml"  # JSON is valid YAML
    serve = shlex.join(["trtllm-serve", target, "--extra_llm_api_options", file])
    return Command("TensorRT-LLM", f"echo {shlex.quote(json.dumps(asked))} > {file} && {serve}", needs)


def transformers(target: str, call: str, needs: str, imported: str = "") -> Command:
    """A Python program. ``call``: the expression that generates; ``imported``: one more import line."""
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        *([imported] if imported else []),
        "",
        f"model = AutoModelForCausalLM.from_pretrained({target!r})",
        f"tokenizer = AutoTokenizer.from_pretrained({target!r})",
        'inputs = tokenizer("def main(", return_tensors="pt")',
        f"print(tokenizer.decode({call}[0]))",
    ]
    return Command("transformers", "\n".join(lines), needs, "python")


def near(path: str | Path) -> str:
    """A path as a user would type it: relative where it lies below the current folder. A name on the hub is returned as it is."""
    given = Path(path)
    if not given.exists():
        return str(path)
    here, there = Path.cwd(), given.resolve()
    return str(there.relative_to(here)) if here in there.parents else str(there)
