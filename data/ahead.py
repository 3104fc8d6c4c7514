"""Items made by a thread of its own, some of them before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_END = object()


def ahead(made: Iterator[T], count: int = 2) -> Iterator[T]:
    """The same items, ``count`` of them made beforehand. What is raised in making one is raised where it would have come."""
    with ThreadPoolExecutor(1, "ahead") as pool:
        try:
            waiting = deque(pool.submit(next, made, _END) for _ in range(count))
            while (item := waiting.popleft().result()) is not _END:
                waiting.append(pool.submit(next, made, _END))
                yield item  # type: ignore[misc]
        finally:
            pool.shutdown(cancel_futures=True)
