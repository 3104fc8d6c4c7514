"""Packing: documents are put into rows of fixed length with little padding.

A document longer than a row is cut into windows. Every window counts as a document of its own: positions restart and attention stops
at its borders. A row repeatedly takes the longest window that still fits ("best-fit packing", Ding et al. 2024, arXiv 2404.10830). If
none fits, the longest window is cut to fill the row. Rows are packed once and shuffled anew in every epoch (data/packed.py).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headstart.data.packed import SHORTEST, Document, Documents, InMemory, Planned, sizes_of
from headstart.heads.errors import UserError

_KEY = "trainer.length (of `python -m data`: length)"
CUT = 16  # tokens; a smaller rest of a row is left empty, because no document is cut for it


class NothingToLearn(UserError):
    """No row can be made of the documents."""


def encode(ids: Sequence[int]) -> Document:
    """A document of plain text: every token is supervised."""
    return Document(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_))


def _fill_rows(starts: NDArray[np.int64], sizes: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], ...]:
    """Put windows into rows of ``length`` tokens. ``starts``: each window's first token, counted over the tokens of all documents.
    ``sizes``: its tokens. Returns the row, first token and size of each piece, in the order of the rows.

    A dictionary from size to windows makes the search for the longest one that fits a bisection.
    """
    shelf: dict[int, array[int]] = {}
    for start, size in zip(reversed(starts.tolist()), reversed(sizes.tolist()), strict=True):
        shelf.setdefault(size, array("q")).append(start)
    known = sorted(shelf)
    of_row, begin, long = array("q"), array("q"), array("q")
    row = 0

    def take(index: int) -> tuple[int, int]:
        size = known[index]
        start = shelf[size].pop()
        if not shelf[size]:
            known.pop(index)
        return start, size

    def put(start: int, size: int) -> None:
        of_row.append(row)
        begin.append(start)
        long.append(size)

    while known:
        room = length
        while known and room >= known[0]:
            start, size = take(bisect_right(known, room) - 1)
            put(start, size)
            room -= size
        if known and room >= CUT:
            start, size = take(len(known) - 1)
            used = min(room, size - SHORTEST)
            put(start, used)
            if not shelf.setdefault(size - used, array("q")):
                insort(known, size - used)
            shelf[size - used].append(start + used)
        row += 1
    return tuple(np.array(part, dtype=np.int64) for part in (of_row, begin, long))


def pack(documents: Sequence[Document], length: int, context: int | None = None, seed: int = 0) -> InMemory:
    """Pack documents as ``plan`` does, and lay the rows out in memory. Raises UserError as ``plan`` does."""
    rows = plan(documents, length, context, seed)
    laid = rows.lay(np.arange(len(rows)))
    return InMemory(*laid, padding=rows.padding, dropped=rows.dropped, unsupervised=rows.unsupervised)


def plan(documents: Documents, length: int, context: int | None = None, seed: int = 0) -> Planned:
    """Pack documents into rows of ``length`` tokens. ``seed`` shuffles the rows.

    A piece without a supervised guess teaches nothing. Windows without one are left out before packing. Rows whose pieces all lack one
    are left out afterwards. Raises ``UserError`` if ``length`` exceeds the target's ``context`` or is too short, and ``NothingToLearn``
    if the documents hold nothing to learn.
    """
    check_length(length, context)
    of = sizes_of(documents)
    first = np.concatenate([[0], np.cumsum(of)])  # each document's first token, counted over all documents
    starts, sizes = _windows(first, of, length)
    if not len(starts):
        raise NothingToLearn(f"no document has {SHORTEST} tokens or more: there is nothing to pack: give more data")
    kept = int(sizes.sum())

    def teaches(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For each window, whether any root in it has a supervised guess. (The first root guesses the third token.)"""
        which, offset = _found(first, starts)
        pieces = zip(which.tolist(), offset.tolist(), sizes.tolist(), strict=True)
        return np.fromiter((documents[d].loss_mask[a + 2 : a + n].any() for d, a, n in pieces), np.bool_, len(which))

    use = teaches(starts, sizes)
    row, starts, sizes = _fill_rows(starts[use], sizes[use], length)
    useful = np.unique(row[teaches(starts, sizes)])
    if not len(useful):
        raise NothingToLearn(f"nothing is supervised in {len(documents)} documents: there is nothing to learn from: give more data")
    use = np.isin(row, useful)
    row, starts, sizes = np.searchsorted(useful, row[use]), starts[use], sizes[use]
    mixed = np.random.default_rng(seed).permutation(len(useful))[row]
    order = np.argsort(mixed, kind="stable")
    which, offset = _found(first, starts[order])
    pieces = np.stack([which, offset, sizes[order]], axis=1).astype(np.int32)
    begins = np.searchsorted(mixed[order], np.arange(len(useful) + 1)).astype(np.int32)
    return Planned(documents, pieces, begins, length, dropped=int(of.sum()) - kept, unsupervised=kept - int(sizes.sum()))


def check_length(length: int, context: int | None) -> None:
    """Raises UserError for rows that are longer than the target's ``context`` (None: unlimited), or shorter than ``CUT`` tokens."""
    if context is not None and length > context:
        raise UserError(f"rows of {length} tokens are longer than the target's context of {context}: set {_KEY} to {context} or less")
    if length < CUT:
        raise UserError(f"rows of {length} tokens are too short: set {_KEY} to {CUT} or more")


def _windows(first: NDArray[np.int64], sizes: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut each document into windows of at most ``length`` tokens. Returns their first tokens, counted over the tokens of all documents,
    and their sizes. Windows with fewer than ``SHORTEST`` tokens are left out.
    """
    cuts = -(-sizes // length)
    which = np.repeat(np.arange(len(sizes)), cuts)
    cut = (np.arange(len(which)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * length
    starts, size = first[which] + cut, np.minimum(length, sizes[which] - cut)
    long = size >= SHORTEST
    return starts[long], size[long]


def _found(first: NDArray[np.int64], starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The document, and the place in it, of each token in ``starts``, which counts over the tokens of all documents. ``first``: each
    document's first token in that count, and the end of the last document.
    """
    which = np.searchsorted(first[:-1], starts, side="right") - 1
    return which, starts - first[which]
