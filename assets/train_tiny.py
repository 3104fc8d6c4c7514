"""Trains the tiny target: a byte-level BPE and a small Llama on Python source that is already installed.

    python assets/train_tiny.py                     # everything, into assets/tiny/
    python assets/train_tiny.py --minutes 90        # shortens itself to end in time
    python assets/train_tiny.py --resume            # goes on from the newest checkpoint
    python assets/train_tiny.py --export-only DIR   # writes the newest checkpoint as a model folder

The standard library's training split is seen a few times, the packages below at most once. Held-out
modules (`data.stdlib.HELD_OUT`) and near-copies of them are never seen.
"""

import argparse
import fcntl
import importlib.util
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data import stdlib  # noqa: E402  (run from any folder)

END, ROLES = "<|endoftext|>", ["<|system|>", "<|user|>", "<|assistant|>"]
CONTEXT, VOCABULARY = 1024, 4096
# Licence -> import name -> most megabytes. Absent packages are left out and the card says which were there.
PACKAGES: dict[str, dict[str, float]] = {
    "BSD": {"torch": 6, "sympy": 4, "pandas": 4, "numpy": 3, "scipy": 3, "networkx": 3, "IPython": 2, "prompt_toolkit": 1.5,
            "mpmath": 1, "jinja2": 1, "fsspec": 1, "pygments": 1, "omegaconf": 1, "click": 1, "traitlets": 1, "httpx": 1,
            "dill": 1, "nbformat": 1, "nbclient": 1, "jupyter_client": 1},
    "Apache-2.0": {"transformers": 2.5, "datasets": 2, "huggingface_hub": 2, "deepspeed": 2, "tornado": 2, "accelerate": 1.5,
                   "peft": 1.5, "aiohttp": 1.5, "requests": 1, "sortedcontainers": 1},
    "MIT": {"mypy": 2.5, "pydantic": 2, "_pytest": 2, "fontTools": 2, "rich": 1.5, "setuptools": 1.5, "hydra": 1, "jedi": 1,
            "parso": 1, "urllib3": 1, "anyio": 1, "attr": 1, "typer": 1, "einops": 1, "pyparsing": 1},
}  # fmt: skip
# transformers' models/ is one file sixty times over; the rest is tests, tables and other people's code.
SKIP = frozenset({"test", "tests", "testing", "models", "_vendor", "vendored", "externals", "extern", "pgen2"})
# `length` holds until the linear decay begins (the last `decay` of the steps), then CONTEXT; shares are of rows.
RUN: dict[str, Any] = {
    "hidden": 160, "mlp": 448, "layers": 12, "batch_tokens": 4096, "length": 512, "warmup": 100, "decay": 0.25,
    "muon_lr": 5e-3, "adam_lr": 5e-3, "library_share": 0.5, "chat_share": 0.05, "seed": 0,
}  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|endoftext|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|endoftext|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def chat(doc: str, code: str) -> str:
    """A documented function as a conversation, so that the chat template means something to the model."""
    name = code.split("(")[0].removeprefix("def ")
    return f"<|user|>\nWrite the function `{name}`.\n\n{doc}{END}<|assistant|>\n{code}\n"


def package_documents(seed: int, is_copy: stdlib.CopyCheck) -> Iterator[tuple[str, str]]:
    """(package, text) of the installed packages in the table: a seeded choice of files up to each cap."""
    copies = {*stdlib.HELD_OUT, "tomli"}
    for package, megabytes in ((package, most) for row in PACKAGES.values() for package, most in row.items()):
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        root, left = Path(next(iter(spec.submodule_search_locations))), megabytes * 1e6
        paths = sorted(root.rglob("*.py"))
        random.Random(f"{seed}{package}").shuffle(paths)
        for path in paths:
            parts = path.relative_to(root).with_suffix("").parts
            size = path.stat().st_size
            if not 500 < size < min(1e5, left) or SKIP.intersection(parts) or copies.intersection(parts):
                continue
            text = path.read_text(encoding="utf-8", errors="replace").strip() + "\n"
            head, digits = text[:600].lower(), sum(map(text.count, "0123456789"))
            generated = "generated" in head or "do not edit" in head or digits > 0.15 * len(text)
            if generated or "\ufffd" in text or max(map(len, text.splitlines())) > 500 or is_copy(text):
                continue
            left -= size
            yield package, text


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE; the end of text is also the beginning of the next, and nothing pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"special_tokens": [END, *ROLES], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCABULARY, **options))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, additional_special_tokens=ROLES,
        model_max_length=CONTEXT, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


def prepare(cache: Path, seed: int) -> dict[str, Any]:
    """Fills the cache: tokenizer and uint16 token streams. Returns what went in (sources.json)."""
    record = cache / "sources.json"
    if record.exists():
        return json.loads(record.read_text())
    cache.mkdir(parents=True, exist_ok=True)
    (cache / ".gitignore").write_text("*\n")
    is_copy = stdlib.CopyCheck()
    library = [text for _, text in stdlib.documents("train") if not is_copy(text)]
    held = [text for _, text in stdlib.documents("heldout")]
    packages = list(package_documents(seed, is_copy))
    texts = [text for _, text in packages]
    streams = {
        "stdlib": library,
        "packages": texts,
        "chat": [chat(*pair) for text in library + texts for pair in stdlib.functions(text)],
        "heldout": held,
    }
    tokenizer = make_tokenizer(library + texts)
    tokenizer.save_pretrained(cache / "tokenizer")
    sizes: dict[str, Any] = {}
    for name, stream in streams.items():
        random.Random(seed).shuffle(stream)
        rows = tokenizer.backend_tokenizer.encode_batch([text + END for text in stream])
        # The held-out stream begins with the separator too, so its first token is predicted as well.
        tokens = np.array([tokenizer.eos_token_id, *(i for row in rows for i in row.ids)], dtype=np.uint16)
        np.save(cache / f"{name}.npy", tokens)
        size = sum(len(text.encode()) for text in stream)
        sizes[name] = {"documents": len(stream), "bytes": size, "tokens": len(tokens)}
    used = {name: sum(len(t.encode()) for n, t in packages if n == name) for name in dict(packages)}
    licences = {name: licence for licence, row in PACKAGES.items() for name in row}
    table = {name: {"bytes": size, "licence": licences[name]} for name, size in used.items()}
    sources = {"streams": sizes, "packages": table, "held_out": stdlib.HELD_OUT}
    record.write_text(json.dumps(sources, indent=1))
    return sources


def batch(streams: list[np.ndarray], shares: list[float], seed: int, step: int, rows: int, length: int) -> torch.Tensor:
    """Random windows, a function of (seed, step) alone: resuming needs no generator state."""
    rng = np.random.default_rng((seed, step))
    picked = [streams[k] for k in rng.choice(len(streams), rows, p=shares)]
    starts = [rng.integers(len(stream) - length) for stream in picked]
    windows = [stream[start : start + length + 1] for stream, start in zip(picked, starts, strict=True)]
    return torch.from_numpy(np.stack(windows).astype(np.int64))


def make_model(args: argparse.Namespace, eos: int) -> LlamaForCausalLM:
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=args.hidden, intermediate_size=args.mlp, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64 * 2, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, rms_norm_eps=1e-5,
        bos_token_id=eos, eos_token_id=eos, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def nats(model: torch.nn.Module, window_BT: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=window_BT[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), window_BT[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model: torch.nn.Module, cache: Path, windows: int | None = None) -> dict[str, float]:
    """Held-out loss in non-overlapping windows: nats per token and bits per UTF-8 byte."""
    tokens = torch.from_numpy(np.load(cache / "heldout.npy").astype(np.int64))
    starts = list(range(0, len(tokens) - 1, CONTEXT))
    if windows:
        starts = starts[:: max(1, len(starts) // windows)]
    vocabulary = PreTrainedTokenizerFast.from_pretrained(cache / "tokenizer").get_vocab()
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    # One character of a byte-level token is one byte; the special ones stand for none.
    width = torch.tensor([0 if token in (END, *ROLES) else len(token) for token in ordered])
    total, count, size = 0.0, 0, 0
    for start in starts:
        window = tokens[None, start : start + CONTEXT + 1]
        total += nats(model, window, "sum").item()
        count += window.shape[1] - 1
        size += int(width[window[0, 1:]].sum())
    return {"loss": total / count, "bits_per_byte": total / math.log(2) / size, "tokens": count, "bytes": size}


def optimisers(model: LlamaForCausalLM, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for the embedding and the norms."""
    inside = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": [model.get_input_embeddings().weight], "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(inside, lr=muon_lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=adam_lr, betas=(0.9, 0.95), fused=True),
    ]


def export(model: LlamaForCausalLM, cache: Path, out: Path, facts: dict[str, Any]) -> None:
    """The final folder: bf16 safetensors, tokenizer, card, training.json."""
    out.mkdir(parents=True, exist_ok=True)
    final = LlamaForCausalLM(model.config)
    final.load_state_dict(model.state_dict())
    final.to(torch.bfloat16)
    final.config.use_cache = True
    final.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, do_sample=False)
    final.save_pretrained(out)
    PreTrainedTokenizerFast.from_pretrained(cache / "tokenizer").save_pretrained(out)
    (out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    (out / "README.md").write_text(card(facts))


def card(facts: dict[str, Any]) -> str:
    streams, held = facts["data"]["streams"], facts["held_out"]
    rows = [f"| {name} | {p['licence']} | {p['bytes'] / 1e6:.1f} |" for name, p in facts["data"]["packages"].items()]
    return f"""# Tiny target

A Llama of {facts["parameters"] / 1e6:.1f}M parameters that writes Python, small enough to sit in a repository.
It is a target for tests, examples and measurements of draft heads on a CPU, and good for nothing else.
Made by `python assets/train_tiny.py`; `training.json` has every number of the run.

- Held out ({held["bytes"] / 1e6:.2f} MB of standard library, {len(facts["data"]["held_out"])} modules):
  {held["bits_per_byte"]:.3f} bits a byte, {held["loss"]:.3f} nats a token.
- Seen: {facts["tokens"] / 1e6:.1f}M tokens in {facts["steps_done"]} of {facts["steps"]} steps,
  {facts["hours"]:.2f} hours on {facts["threads"]} CPU threads.
- Context {CONTEXT}, byte-level BPE of {VOCABULARY}, `{END}` between documents, a plain chat template.

| text | licence | MB |
| --- | --- | --- |
| Python standard library (training split) | PSF-2.0 | {streams["stdlib"]["bytes"] / 1e6:.1f} |
{chr(10).join(rows)}
"""


def parse() -> argparse.Namespace:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=Path, default=ROOT / "assets" / "tiny")
    cli.add_argument("--cache", type=Path, default=ROOT / ".cache" / "tiny")
    cli.add_argument("--steps", type=int, help="at most (6000); on --resume as planned, unless given")
    cli.add_argument("--minutes", type=float, help="wall-clock limit of this process: steps shrink to meet it")
    for name, value in RUN.items():
        cli.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    cli.add_argument("--no-compile", action="store_true")
    cli.add_argument("--stop-after", type=int, help="leave after this many steps, with a checkpoint")
    cli.add_argument("--resume", action="store_true")
    cli.add_argument("--export-only", type=Path, metavar="DIR")
    return cli.parse_args()


def main() -> None:
    args, began = parse(), time.time()
    sources = prepare(args.cache, args.seed)
    saved = args.cache / "checkpoint.pt"
    state: dict[str, Any] = {"step": 0, "tokens": 0, "scale": 1.0, "hours": 0.0, "steps": 6000, "pace": []}
    checkpoint = torch.load(saved, weights_only=True) if args.resume or args.export_only else None
    if checkpoint:  # the shape and the data order are the run's, not the command line's
        state |= checkpoint["state"]
        vars(args).update(checkpoint["run"])
    run = {name: getattr(args, name) for name in RUN}
    model = make_model(args, eos=0)
    parameters = sum(p.numel() for p in model.parameters())
    optims = optimisers(model, args.muon_lr, args.adam_lr)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        for optimiser, content in zip(optims, checkpoint["optimisers"], strict=True):
            optimiser.load_state_dict(content)
    most = steps = args.steps or state["steps"]

    def facts(held: dict[str, float]) -> dict[str, Any]:
        names = ("torch", "transformers", "tokenizers", "numpy")
        versions = {"python": sys.version.split()[0], **{name: version(name) for name in names}}
        return {"parameters": parameters, **run, "steps": steps, "steps_done": state["step"], "tokens": state["tokens"],
                "hours": state["hours"], "threads": torch.get_num_threads(), "held_out": held, "versions": versions,
                "data": sources}  # fmt: skip

    if args.export_only:
        export(model, args.cache, args.export_only, facts(evaluate(model, args.cache, 32)))
        return

    log_file = (args.cache / "log.txt").open("a")
    try:  # two runs would overwrite each other's checkpoint; the lock goes with the process
        fcntl.flock(log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"another run is using {args.cache}: give --cache a folder of its own")

    def log(line: str) -> None:
        print(line, flush=True)
        print(line, file=log_file, flush=True)

    def save() -> None:
        content = {"model": model.state_dict(), "optimisers": [o.state_dict() for o in optims], "state": state,
                   "run": run}  # fmt: skip
        torch.save(content, saved.with_suffix(".new"))
        saved.with_suffix(".new").replace(saved)

    shares = [args.library_share, 1 - args.library_share - args.chat_share, args.chat_share]
    streams = [np.load(args.cache / f"{name}.npy") for name in ("stdlib", "packages", "chat")]
    forward = model if args.no_compile else torch.compile(model, dynamic=False)
    pace: list[float] = state["pace"]  # seconds a step, over the last windows of 50
    mark = last_save = time.time()
    losses: list[float] = []
    first = state["step"]
    base = [[args.muon_lr], [args.adam_lr, args.adam_lr]]
    log(f"{parameters / 1e6:.2f}M parameters, from step {first} of {steps}, {torch.get_num_threads()} threads")
    while state["step"] < steps:
        step = state["step"]
        decaying = step >= (1 - args.decay) * steps or state["scale"] < 1
        if decaying:  # linear to zero at `steps`, written as a ratio so that `steps` may still move
            state["scale"] *= (steps - step - 1) / (steps - step) if steps - step > 1 else 0.5
        scale = state["scale"] * min(1.0, (step + 1) / args.warmup)
        for optimiser, rates in zip(optims, base, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * scale
        length = CONTEXT if decaying else args.length
        loss = nats(forward, batch(streams, shares, args.seed, step, args.batch_tokens // length, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optims:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        losses.append(loss.item())
        state["step"], state["tokens"] = step + 1, state["tokens"] + args.batch_tokens
        if state["step"] % 50 == 0 or state["step"] == steps:
            now = time.time()
            pace[:] = [*pace[-7:], (now - mark) / len(losses)]
            state["hours"] += (now - mark) / 3600
            if args.minutes and len(pace) > 1:  # the median forgives a pause
                left = max(0.0, args.minutes * 60 - 60 - (now - began))
                steps = min(most, state["step"] + int(left / statistics.median(pace)))
            state["steps"] = steps
            log(f"step {state['step']}/{steps} tokens {state['tokens']} loss {statistics.mean(losses):.4f} "
                f"lr {scale:.3f} tokens/s {args.batch_tokens / pace[-1]:.0f} {time.strftime('%H:%M:%S')}")  # fmt: skip
            losses = []
            mark = now
        if state["step"] % 500 == 0:
            held = evaluate(model, args.cache, 32)
            log(f"step {state['step']} heldout subset {held['loss']:.4f} nats, {held['bits_per_byte']:.4f} bits a byte")
            mark = time.time()
        leaving = args.stop_after is not None and state["step"] - first >= args.stop_after
        if time.time() - last_save > 180 or leaving or state["step"] == 100:
            save()
            last_save = time.time()
        if leaving:
            return
    save()
    held = evaluate(model, args.cache)
    log(f"heldout {held['loss']:.4f} nats, {held['bits_per_byte']:.4f} bits a byte")
    export(model, args.cache, args.out, facts(held))


if __name__ == "__main__":
    main()
