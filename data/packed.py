"""Packed rows, accessed by number. They are laid out in memory, or on demand from documents that may lie on disk.

Shape suffixes: R rows of the data set, T tokens of a row, P pieces of documents, B batch, V vocabulary.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.data.batch import TokenBatch

SHORTEST = 8  # tokens of a piece; a shorter one has nothing to draft from
BLOCK = 256  # rows that are laid out at a time in a pass over all rows


class Document(NamedTuple):
    """The tokens of one text, and which of them are supervised. Both [T], with T the length of the text."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]


class Documents(Protocol):
    """Documents accessed by number, in memory or on disk (data/arrow.py)."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> Document: ...


def sizes_of(documents: Documents) -> NDArray[np.int64]:
    """The number of tokens of each document, an array over documents. Documents on disk need not be read for it."""
    sizes = getattr(documents, "sizes", None)
    return np.array([len(documents[i].tokens) for i in range(len(documents))], dtype=np.int64) if sizes is None else sizes


class Laid(NamedTuple):
    """Rows of documents, each field [R, T]. Padding is unsupervised and counts as a document of its own."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    positions: NDArray[np.int32]  # in the document, from 0
    documents: NDArray[np.int32]  # number of the document in its row


def joined(parts: Sequence[Laid]) -> Laid:
    """The rows of all parts, one after the other."""
    return Laid._make(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


class Packed(ABC):
    """Packed rows, accessed by number, in memory or laid out on demand."""

    length: int  # tokens of a row
    padding: int  # tokens of padding in all rows
    dropped: int  # tokens of windows that are too short to keep
    unsupervised: int  # tokens left out in windows and rows without a supervised guess

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def lay(self, rows: NDArray[np.int64]) -> Laid:
        """Lay out the rows with these numbers."""

    def batch(self, rows: Sequence[int] | NDArray[np.int64] | slice) -> TokenBatch:
        """The rows with these numbers as a batch for training, on the CPU."""
        laid = self.lay(np.arange(len(self))[rows] if isinstance(rows, slice) else np.asarray(rows))
        tokens, positions, documents = (torch.from_numpy(x.astype(np.int64)) for x in (laid.tokens, laid.positions, laid.documents))
        return TokenBatch(tokens, torch.from_numpy(laid.loss_mask), positions, documents)

    def order(self, epoch: int, seed: int) -> NDArray[np.int64]:
        """The row numbers of an epoch, in its order."""
        return np.random.default_rng((seed, epoch)).permutation(len(self))

    def stream(self, batch_size: int, seed: int = 0, start_step: int = 0, rank: int = 0, world: int = 1) -> Iterator[TokenBatch]:
        """Endless batches. Batch k depends only on (seed, k, rank, world), so resuming needs only the step."""
        for rows in places(lambda epoch: self.order(epoch, seed), len(self), batch_size, start_step, rank, world):
            yield self.batch(rows)

    def blocks(self) -> Iterator[Laid]:
        """All rows in the order of their numbers, ``BLOCK`` at a time."""
        for start in range(0, len(self), BLOCK):
            yield self.lay(np.arange(start, min(start + BLOCK, len(self))))

    def counts(self, vocab_size: int) -> Tensor:
        """[V] int64: how often each token is supervised. Questions and padding do not count."""
        total = np.zeros(vocab_size, dtype=np.int64)
        for laid in self.blocks():
            total += np.bincount(laid.tokens[laid.loss_mask], minlength=vocab_size)
        return torch.from_numpy(total)

    @property
    def left_out(self) -> str:
        """A phrase on how many tokens of the documents are not in the rows, and why. Empty if all are."""
        why = {f"in pieces shorter than {SHORTEST}": self.dropped, "where nothing is supervised": self.unsupervised}
        return ", ".join(f"{tokens:,} tokens {where}" for where, tokens in why.items() if tokens)

    def digest(self) -> str:
        """The SHA-256 of all tokens, loss masks and document numbers, which identifies the data."""
        sha = hashlib.sha256(repr((len(self), self.length)).encode())
        for part in ("tokens", "loss_mask", "documents"):
            for laid in self.blocks():
                sha.update(np.ascontiguousarray(getattr(laid, part)).data)
        return sha.hexdigest()


@dataclass
class InMemory(Packed):
    """Rows in memory."""

    tokens_RT: NDArray[np.int32]
    loss_mask_RT: NDArray[np.bool_]
    positions_RT: NDArray[np.int32]
    documents_RT: NDArray[np.int32]
    padding: int = 0
    dropped: int = 0
    unsupervised: int = 0

    def __post_init__(self) -> None:
        self.length = self.tokens_RT.shape[1]

    def __len__(self) -> int:
        return len(self.tokens_RT)

    def lay(self, rows: NDArray[np.int64]) -> Laid:
        return Laid(self.tokens_RT[rows], self.loss_mask_RT[rows], self.positions_RT[rows], self.documents_RT[rows])


class Planned(Packed):
    """Rows described by the pieces of documents in them. The documents may lie on disk.

    ``pieces_P3``: for each piece the number of its document, its first token there, and its size in tokens. Pieces are in the order of the
    rows and of their places in a row. ``first_R`` [R + 1]: the number of each row's first piece, and at the end the number of pieces.
    ``known``: the digest, if it is known already.
    """

    def __init__(
        self, documents: Documents, pieces_P3: NDArray[np.int32], first_R: NDArray[np.int32], length: int, dropped: int, unsupervised: int,
        known: str = "",
    ) -> None:  # fmt: skip
        self.documents, self.pieces_P3, self.first_R, self.length = documents, pieces_P3, first_R, length
        self.dropped, self.unsupervised, self.known = dropped, unsupervised, known
        self.padding = len(self) * length - int(pieces_P3[:, 2].sum(dtype=np.int64))

    def __len__(self) -> int:
        return len(self.first_R) - 1

    def digest(self) -> str:
        return self.known or super().digest()

    def lay(self, rows: NDArray[np.int64]) -> Laid:
        shape, count = (len(rows), self.length), np.arange(self.length, dtype=np.int32)
        tokens, positions, numbers = (np.zeros(shape, dtype=np.int32) for _ in range(3))
        mask = np.zeros(shape, dtype=np.bool_)
        for r, row in enumerate(rows.tolist()):
            at = number = 0
            for document, start, size in self.pieces_P3[self.first_R[row] : self.first_R[row + 1]].tolist():
                there, end = self.documents[document], at + size
                tokens[r, at:end] = there.tokens[start : start + size]
                mask[r, at:end] = there.loss_mask[start : start + size]
                positions[r, at:end], numbers[r, at:end] = count[:size], number
                at, number = end, number + 1
            positions[r, at:], numbers[r, at:] = count[: self.length - at], number
        return Laid(tokens, mask, positions, numbers)


def places(
    order: Callable[[int], NDArray[np.int64]], rows: int, batch_size: int, start_step: int, rank: int, world: int
) -> Iterator[NDArray[np.int64]]:
    """The row numbers [B] of the batches of process ``rank``, without end. ``order(epoch)``: the row numbers of an epoch, in its order.

    The epochs follow each other in one endless line of rows. Each step takes the next ``world * batch_size`` rows of that line, and each
    process its own part of these. So no row is left out at the end of an epoch.
    """
    kept: dict[int, NDArray[np.int64]] = {}
    step = start_step
    while True:
        line = (step * world + rank) * batch_size + np.arange(batch_size)
        epochs = line // rows
        kept = {int(e): kept[int(e)] if int(e) in kept else order(int(e)) for e in np.unique(epochs)}
        yield np.array([kept[e][i] for e, i in zip(epochs.tolist(), (line % rows).tolist(), strict=True)])
        step += 1
