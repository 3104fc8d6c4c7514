"""Prefetching: a background thread makes the items of an iterator before they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_END = object()


def ahead(made: Iterator[T], count: int = 2) -> Iterator[T]:
    """Yield the same items, with up to ``count`` of them made ahead by a thread. An exception is raised in the place of its item."""
    with ThreadPoolExecutor(1, "ahead") as pool:
        try:
            waiting = deque(pool.submit(next, made, _END) for _ in range(count))
            while (item := waiting.popleft().result()) is not _END:
                waiting.append(pool.submit(next, made, _END))
                yield item  # type: ignore[misc]
        finally:
            pool.shutdown(cancel_futures=True)
