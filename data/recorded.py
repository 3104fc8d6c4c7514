"""Captured rows as recordings, text by text: enough to measure any drafter with any tree without running the target's layers.

Shape suffixes: B batch (here 1), T tokens, D target hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

from headstart.data.batch import spans
from headstart.data.shards import Shards
from headstart.inference.decoding.info import TargetInfo
from headstart.inference.reports.recorded import Recorded

LEAST = 4  # tokens; a shorter continuation is not worth measuring


def recordings(folder: str | Path, target: TargetInfo, taps: Collection[int], count: int | None = None) -> Iterator[Recorded]:
    """The first ``count`` runs of supervised tokens in a captured folder (None: all). The prompt of a run is everything before it in its
    document. Raises UserError as ``Shards`` does.
    """
    return islice(_all(Shards(folder, target.fingerprint, sorted(taps)), target), count)


def _all(shards: Shards, target: TargetInfo) -> Iterator[Recorded]:
    for row in range(len(shards)):
        batch = shards.batch([row]).to(target.device, target.dtype)
        tokens, mask, documents = (x[0].tolist() for x in (batch.tokens_BT, batch.loss_mask_BT, batch.documents_BT))
        for start, stop in spans(documents):
            for begin, end in _runs(mask[start:stop]):
                part = slice(start, start + end)
                states = {tap: state[:, part] for tap, state in batch.states.items()}
                text = tokens[part]
                yield Recorded(target, text[:begin], text[begin:], states, batch.final_BTD[:, part])


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """(begin, end) of the supervised runs of a document. The first token is left out, because it has no prompt before it."""
    runs = [(max(begin, 1), end) for begin, end in spans(mask) if mask[begin]]
    return [(begin, end) for begin, end in runs if end - begin >= LEAST]
