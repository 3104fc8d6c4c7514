"""Trains the tiny target: a byte-level BPE and a small Llama on Python source that is already installed.

    python assets/train_tiny.py                     # everything, into assets/tiny/
    python assets/train_tiny.py --minutes 90        # shortens itself to end in time
    python assets/train_tiny.py --resume            # goes on from the newest checkpoint
    python assets/train_tiny.py --export-only DIR   # writes the newest checkpoint as a model folder

The standard library's training split is seen a few times, the packages of tiny_corpus.py at most once.
"""

import argparse
import fcntl
import json
import math
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_corpus import CONTEXT, END, ROLES, ROOT, VOCABULARY, prepare
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.heads.files import put_folder

# `length` holds until the linear decay begins (the last `decay` of the steps), then CONTEXT; shares are of rows.
RUN: dict[str, Any] = {
    "hidden": 160, "mlp": 448, "layers": 12, "batch_tokens": 4096, "length": 512, "warmup": 100, "decay": 0.25,
    "muon_lr": 5e-3, "adam_lr": 5e-3, "library_share": 0.5, "chat_share": 0.05, "seed": 0,
}  # fmt: skip


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


def moments(optims: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    found = ((o, i, name, x) for o, optim in enumerate(optims) for i, s in optim.state_dict()["state"].items() for name, x in s.items())
    return {f"{o}.{i}.{name}": x for o, i, name, x in found}


def restore(optims: list[torch.optim.Optimizer], saved: dict[str, torch.Tensor]) -> None:
    for o, optim in enumerate(optims):
        content = optim.state_dict()
        for key, tensor in saved.items():
            number, i, name = key.split(".")
            if int(number) == o:
                content["state"].setdefault(int(i), {})[name] = tensor
        optim.load_state_dict(content)


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
Made by `python assets/train_tiny.py --steps {facts["steps"]}`; `training.json` has every number of the run.

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
    saved = args.cache / "checkpoint"
    state: dict[str, Any] = {"step": 0, "tokens": 0, "scale": 1.0, "hours": 0.0, "steps": 6000, "pace": []}
    resuming = args.resume or args.export_only
    if resuming:  # the shape and the data order are the run's, not the command line's
        record = json.loads((saved / "run.json").read_text())
        state |= record["state"]
        vars(args).update(record["run"])
    run = {name: getattr(args, name) for name in RUN}
    model = make_model(args, eos=0)
    parameters = sum(p.numel() for p in model.parameters())
    optims = optimisers(model, args.muon_lr, args.adam_lr)
    if resuming:
        with torch.no_grad():
            for name, tensor in load_file(saved / "model.safetensors").items():
                model.get_parameter(name).copy_(tensor)
        restore(optims, load_file(saved / "optimisers.safetensors"))
    most = steps = args.steps or state["steps"]

    def facts(held: dict[str, float]) -> dict[str, Any]:
        names = ("torch", "transformers", "tokenizers", "numpy")
        versions = {"python": sys.version.split()[0], **{name: version(name).partition("+")[0] for name in names}}
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
        def write(new: Path) -> None:
            save_file(dict(model.named_parameters()), new / "model.safetensors")
            save_file(moments(optims), new / "optimisers.safetensors")
            (new / "run.json").write_text(json.dumps({"state": state, "run": run}))

        put_folder(saved, write)

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
