"""From the settings of conf/data to batches: what is trained on, what is held out, and prompts to report on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data import chat, prompts, regenerated, stdlib
from data.batch import TargetBatch, TokenBatch
from data.live import fingerprint, look
from data.pack import Document, Packed, encode_texts, pack
from data.shards import Shards
from heads.errors import UserError
from inference.target import Target


@dataclass
class Source:
    """``stream(taps, batch_size, seed, start_step, rank, world)`` yields batches for ever, ``observe`` adds the target's states."""

    stream: Callable[..., Iterator[TokenBatch]]
    observe: Callable[[TokenBatch, Collection[int]], TargetBatch]
    counts: Callable[[], Tensor]  # [V] how often each token occurs
    held_out: Packed | None  # text that is never trained on
    prompts: Callable[[int, int], list[list[int]]]  # (count, new tokens) -> held-out prompts
    packed: Packed | None = None  # the training rows, for capturing
    captured: Callable[[], str] | None = None  # the digest of rows that are captured already
    rows: int = 0  # how many there are, where they are not packed here

    def digest(self) -> str:
        """Names the training rows."""
        if self.packed is not None:
            return self.packed.digest()
        assert self.captured is not None
        return self.captured()


def open_source(settings: dict[str, Any], target: Target, *, length: int, seed: int) -> Source:
    """``settings`` are those of conf/data/NAME.yaml. Raises UserError naming a wrong setting, file or line."""
    if target.shared:
        raise UserError("target.device=tp is for decoding; in training and capturing every process reads rows of its own: take auto or map")
    settings = dict(settings)
    name = settings.pop("name")
    openers: dict[str, Callable[..., Source]] = {"stdlib": _stdlib, "chat": _chat, "regenerated": _regenerated, "shards": _shards}
    if name not in openers:
        raise UserError(f"no data is called {name!r}: there are {', '.join(openers)}")
    return openers[name](target, length=length, seed=seed, **settings)


def _stdlib(target: Target, *, length: int, seed: int) -> Source:
    train = encode_texts(target.tokenizer, stdlib.documents("train"))
    held = encode_texts(target.tokenizer, stdlib.documents("heldout"))
    return _live(target, train, held, length, seed, lambda count, new: _stdlib_prompts(target, count, seed))


def _stdlib_prompts(target: Target, count: int, seed: int) -> list[list[int]]:
    found = stdlib.prompts(count, seed, target.tokenizer)
    return [target.tokenizer(p["text"], add_special_tokens=False)["input_ids"] for p in found]


def _chat(target: Target, *, length: int, seed: int, path: str, split: str, on_bad: str) -> Source:
    documents = chat.documents(path, target.tokenizer, split, on_bad)
    if len(documents) < 2:
        raise UserError(f"{path}: one conversation is held out, so at least two are needed, found {len(documents)}")
    held, train = _split([[d] for d in documents], seed)
    return _live(target, train, held, length, seed, lambda count, new: _beginnings(target, held, count, new))


def _regenerated(target: Target, *, length: int, seed: int, path: str) -> Source:
    groups, plain = regenerated.read(path, target.tokenizer, target.shape.vocab_size)
    if len(groups) < 2:
        raise UserError(f"{path}: one conversation or file is held out, so at least two are needed, found {len(groups)}")
    held, train = _split(groups, seed)

    def ask(count: int, new: int) -> list[list[int]]:
        return _stdlib_prompts(target, count, seed) if plain else _beginnings(target, held, count, new)

    return _live(target, train, held, length, seed, ask)


def _split(groups: list[list[Document]], seed: int) -> tuple[list[Document], list[Document]]:
    """(held out, the rest): a twentieth of the groups, at least one and at most 64, as ``seed`` draws them."""
    order = np.random.default_rng(seed).permutation(len(groups))
    share = max(1, min(64, len(groups) // 20))
    held, rest = ([document for i in part for document in groups[i]] for part in (order[:share], order[share:]))
    return held, rest


def _beginnings(target: Target, held: list[Document], count: int, new: int) -> list[list[int]]:
    """Each held-out conversation up to where the assistant first speaks."""
    starts = [(d, int(d.loss_mask.argmax())) for d in held]
    fitting = [d.tokens[:n].tolist() for d, n in starts if 0 < n <= target.shape.max_positions - new]
    return fitting[:count]


def _live(
    target: Target, train: list[Document], held: list[Document], length: int, seed: int, ask: Callable[[int, int], list[list[int]]]
) -> Source:
    rows, heldout = (pack(d, length, context=target.shape.max_positions, seed=seed) for d in (train, held))

    def counts() -> Tensor:
        return torch.bincount(torch.from_numpy(rows.tokens_RT.reshape(-1)).long(), minlength=target.shape.vocab_size)

    return Source(lambda taps, *place: rows.stream(*place), lambda batch, taps: look(batch, target, taps), counts, heldout, ask, rows)


def _shards(target: Target, *, length: int, seed: int, path: str, prompts_file: str | None) -> Source:
    shards = Shards(path, fingerprint(target))
    if shards.index["length"] != length:
        raise UserError(f"{path} holds rows of {shards.index['length']} tokens, trainer.length is {length}: set it to the same")

    def stream(taps: Collection[int], *place: int) -> Iterator[TokenBatch]:
        return Shards(path, fingerprint(target), taps).stream(*place)

    def observe(batch: TokenBatch, taps: Collection[int]) -> TargetBatch:
        assert isinstance(batch, TargetBatch)

        def move(x: Tensor) -> Tensor:
            return x.to(target.device)

        states = {tap: move(s).to(target.dtype) for tap, s in batch.states.items()}
        return TargetBatch(
            move(batch.tokens_BT),
            move(batch.loss_mask_BT),
            move(batch.positions_BT),
            move(batch.documents_BT),
            states,
            move(batch.final_BTD).to(target.dtype),
        )

    def counts() -> Tensor:
        total = torch.zeros(target.shape.vocab_size, dtype=torch.int64)
        for start in range(0, len(shards), 64):
            tokens = shards.batch(list(range(start, min(start + 64, len(shards))))).tokens_BT
            total += torch.bincount(tokens.reshape(-1), minlength=len(total))
        return total

    def ask(count: int, new: int) -> list[list[int]]:
        if prompts_file is None:
            return _stdlib_prompts(target, count, seed)
        found = prompts.prompts(prompts_file, count, target.tokenizer)
        prompts.check_prompts([p["tokens"] for p in found], new, target, [p["id"] for p in found])
        return [p["tokens"] for p in found]

    return Source(stream, observe, counts, None, ask, captured=shards.digest, rows=len(shards))
