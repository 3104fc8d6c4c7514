"""Documents in, rows of fixed length out: packed, not padded.

A document longer than a row is cut into windows; every window counts as a document of its own, so positions
restart and attention stops at it. A row takes the longest window that still fits, again and again ("best-fit
packing", Ding et al. 2024, arXiv 2404.10830); only where none fits is the longest one cut. Rows are packed once and
shuffled anew in every epoch.

Shape suffixes: R rows of the data set, T tokens of a row, B batch.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headstart.data.batch import TokenBatch
from headstart.heads.errors import UserError

SHORTEST = 8  # tokens; less has nothing to draft from
_KEY = "trainer.length (of `python -m data`: length)"
CUT = 16  # tokens; a smaller rest of a row is left empty rather than cut a document for it


class Document(NamedTuple):
    """The tokens of one text, and which of them are supervised. Both [T]."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


def encode(ids: Sequence[int]) -> Document:
    """Of plain text: every token is supervised."""
    return Document(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_))


@dataclass
class Packed:
    """Rows of documents. Padding is unsupervised and a document of its own."""

    tokens_RT: NDArray[np.int32]
    loss_mask_RT: NDArray[np.bool_]
    positions_RT: NDArray[np.int32]
    documents_RT: NDArray[np.int32]
    padding: int = 0  # tokens, of all rows
    dropped: int = 0  # tokens of windows too short to keep
    unsupervised: int = 0  # tokens of windows, and of rows, without a guess to learn

    def __len__(self) -> int:
        return len(self.tokens_RT)

    def batch(self, rows: Sequence[int] | NDArray[np.int64] | slice) -> TokenBatch:
        """The rows with these numbers."""
        tokens, positions, documents = (
            torch.from_numpy(array[rows].astype(np.int64)) for array in (self.tokens_RT, self.positions_RT, self.documents_RT)
        )
        return TokenBatch(tokens, torch.from_numpy(self.loss_mask_RT[rows].copy()), positions, documents)

    def order(self, epoch: int, seed: int) -> NDArray[np.int64]:
        """The order of the rows in an epoch."""
        return np.random.default_rng((seed, epoch)).permutation(len(self))

    def stream(self, batch_size: int, seed: int = 0, start_step: int = 0, rank: int = 0, world: int = 1) -> Iterator[TokenBatch]:
        """Batches for ever. The k-th is a function of (seed, k, rank, world) alone: resuming needs only the step."""
        for rows in places(lambda epoch: self.order(epoch, seed), len(self), batch_size, start_step, rank, world):
            yield self.batch(rows)

    @property
    def left_out(self) -> str:
        """What is in the documents and not in the rows, for people."""
        why = {f"in pieces shorter than {SHORTEST}": self.dropped, "where nothing is supervised": self.unsupervised}
        return ", ".join(f"{tokens:,} tokens {where}" for where, tokens in why.items() if tokens)

    def digest(self) -> str:
        """Names the data: SHA-256 of everything in the rows."""
        sha = hashlib.sha256(repr(self.tokens_RT.shape).encode())
        for array in (self.tokens_RT, self.loss_mask_RT, self.documents_RT):
            sha.update(np.ascontiguousarray(array).data)
        return sha.hexdigest()


def places(
    order: Callable[[int], NDArray[np.int64]], rows: int, batch_size: int, start_step: int, rank: int, world: int
) -> Iterator[NDArray[np.int64]]:
    """Row numbers of a rank's batches, for ever.

    The epochs' orders, one after the other, are one endless line of rows; step k takes the next ``world * batch_size``
    of it, each rank its own part. So no row is left out at the end of an epoch.
    """
    kept: dict[int, NDArray[np.int64]] = {}
    step = start_step
    while True:
        line = (step * world + rank) * batch_size + np.arange(batch_size)
        epochs = line // rows
        kept = {int(e): kept[int(e)] if int(e) in kept else order(int(e)) for e in np.unique(epochs)}
        yield np.array([kept[e][i] for e, i in zip(epochs.tolist(), (line % rows).tolist(), strict=True)])
        step += 1


class _Piece(NamedTuple):
    """Tokens [start, start + length) of all documents' tokens, put into a row at ``place``."""

    row: int
    place: int
    start: int
    length: int


def _fill_rows(windows: list[tuple[int, int]], length: int) -> list[_Piece]:
    """Put windows (start, length) into rows. A dictionary from length to windows makes "the longest that fits" a bisection."""
    shelf: dict[int, list[int]] = defaultdict(list)
    for start, size in reversed(windows):
        shelf[size].append(start)
    sizes = sorted(shelf)
    pieces, row = [], 0

    def take(index: int) -> tuple[int, int]:
        size = sizes[index]
        start = shelf[size].pop()
        if not shelf[size]:
            sizes.pop(index)
        return start, size

    while sizes:
        room = length
        while sizes and room >= sizes[0]:
            start, size = take(bisect_right(sizes, room) - 1)
            pieces.append(_Piece(row, length - room, start, size))
            room -= size
        if sizes and room >= CUT:
            start, size = take(len(sizes) - 1)
            used = min(room, size - SHORTEST)
            pieces.append(_Piece(row, length - room, start, used))
            if not shelf[size - used]:
                insort(sizes, size - used)
            shelf[size - used].append(start + used)
        row += 1
    return pieces


def pack(documents: Sequence[Document], length: int, context: int | None = None, seed: int = 0) -> Packed:
    """Pack documents into rows of ``length`` tokens, in an order that ``seed`` mixes.

    What has no guess to learn teaches nothing and is left out: windows before they are packed, and rows of which only
    such pieces are left once windows were cut. Raises ``UserError`` for rows longer than the target's ``context``, rows too
    short, and documents without anything to learn.
    """
    if context is not None and length > context:
        raise UserError(f"rows of {length} tokens are longer than the target's context of {context}: set {_KEY} to {context} or less")
    if length < CUT:
        raise UserError(f"rows of {length} tokens are too short: set {_KEY} to {CUT} or more")
    windows = _windows(documents, length)
    if not windows:
        raise UserError(f"no document has {SHORTEST} tokens or more: there is nothing to pack: give more data")
    tokens, mask = (np.concatenate([getattr(document, name) for document in documents]) for name in Document._fields)
    long = sum(size for _, size in windows)
    spoken = np.concatenate([[0], np.cumsum(mask)])

    def teaches(start: Any, size: Any) -> Any:
        """Some root of the tokens [start, start + size) has a guess: the first one's is its third token."""
        return spoken[start + size] > spoken[start + 2]

    windows = [window for window in windows if teaches(*window)]
    table = np.array(_fill_rows(windows, length), dtype=np.int64).reshape(-1, 4)  # in the order of rows, then of places
    useful = np.unique(table[teaches(table[:, 2], table[:, 3]), 0])
    if not len(useful):
        raise UserError(f"nothing is supervised in {len(documents)} documents: there is nothing to learn from: give more data")
    table = table[np.isin(table[:, 0], useful)]
    table[:, 0] = np.searchsorted(useful, table[:, 0])
    packed = _laid_out(table, tokens, mask, np.random.default_rng(seed).permutation(len(useful)), length)
    packed.dropped, packed.unsupervised = len(tokens) - long, long - int(table[:, 3].sum())
    return packed


def _windows(documents: Sequence[Document], length: int) -> list[tuple[int, int]]:
    """(start among all documents' tokens, length) of the pieces of at most ``length`` tokens that each is cut into; none too short."""
    sizes = [len(document.tokens) for document in documents]
    starts = accumulate(sizes, initial=0)
    cuts = ((start + cut, min(length, size - cut)) for start, size in zip(starts, sizes, strict=False) for cut in range(0, size, length))
    return [(start, size) for start, size in cuts if size >= SHORTEST]


def _laid_out(
    table: NDArray[np.int64], tokens: NDArray[np.int32], mask: NDArray[np.bool_], mixed: NDArray[np.int64], length: int
) -> Packed:
    """The pieces of ``table`` (a line each, as in ``_Piece``, in the order of rows and places) in their rows, which are ``mixed``."""
    piece_row, place, start, size = table.T
    rows, total = len(mixed), int(size.sum())
    first = np.searchsorted(piece_row, np.arange(rows))  # number of each row's first piece
    number = np.arange(len(table)) - first[piece_row]
    within = np.arange(total) - np.repeat(np.cumsum(size) - size, size)
    source = np.repeat(start, size) + within
    goal = np.repeat(mixed[piece_row] * length + place, size) + within

    def spread(values: NDArray[Any], empty: Any, dtype: Any) -> NDArray[Any]:
        flat = np.full(rows * length, empty, dtype=dtype)
        flat[goal] = values
        return flat.reshape(rows, length)

    numbers = spread(np.repeat(number, size), -1, np.int32)
    return Packed(
        tokens_RT=spread(tokens[source], 0, np.int32),
        loss_mask_RT=spread(mask[source], False, np.bool_),
        positions_RT=_pad_positions(spread(within, 0, np.int32), numbers),
        documents_RT=np.where(numbers < 0, numbers.max(axis=1, keepdims=True) + 1, numbers).astype(np.int32),
        padding=rows * length - total,
    )


def _pad_positions(positions_RT: NDArray[np.int32], numbers_RT: NDArray[np.int32]) -> NDArray[np.int32]:
    """Padding (number -1) is always a row's end: it counts from 0 as any document does."""
    pad_RT = numbers_RT < 0
    return np.where(pad_RT, np.cumsum(pad_RT, axis=1) - 1, positions_RT).astype(np.int32)
