"""What the worker counts and how its events are told, without an engine and without a thread."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.inference.decoding.decode import Guesses
from headstart.inference.decoding.row import Row
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.serving.endpoint import Endpoint
from headstart.inference.serving.fields import Refused
from headstart.inference.serving.worker import EngineFailed, Event, Job, Said, Worker


class Stub:
    """An engine whose rows are filled in by the test."""

    free = 1

    def warm_up(self) -> None:
        """Nothing is to be warmed up."""

    def add_request(self, prompt: list[int], **_: Any) -> Row:
        return Row(prompt=prompt)


def test_a_guess_that_ends_a_text_is_counted_as_accepted() -> None:
    worker: Any = Worker(Stub)  # type: ignore[arg-type]
    job = Job([1], 9, SamplingParams(), lambda event: None)
    worker._enter(job)
    for n, accepted in ((2, 1), (3, 3)):
        job.row.tokens += [0] * n
        job.row.emitted.append(n)
        job.row.guesses.append(Guesses([], [], accepted))
        worker._tell(job)
    assert worker.accepted == {1: 2, 2: 1, 3: 1} and worker.sums["passes"] == 2 and worker.sums["pass_tokens"] == 5


def test_a_prompt_is_counted_once_although_the_engine_failed() -> None:
    """It failed while another prompt was read: this job had no token yet, and enters the new engine."""
    worker: Any = Worker(Stub)  # type: ignore[arg-type]
    job = Job([1, 2, 3], 9, SamplingParams(), lambda event: None)
    worker._enter(job)
    worker._try([Job([4], 9, SamplingParams(), lambda event: None)], lambda: 1 // 0)
    worker._enter(worker.waiting.popleft())
    assert worker.running == [job] and worker.sums["prompt_tokens"] == 3


def pieces_of(*events: tuple[int, Event]) -> list[int]:
    """The answers that got a piece, of two; the first one is ended by a stop string in its first piece."""
    answers: list[Any] = [SimpleNamespace(ended=ended, take=lambda *said: said) for ended in ("stop", "")]
    jobs = [Job([1], 9, SamplingParams(), lambda event: None) for _ in answers]
    told: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
    for event in events:
        told.put_nowait(event)
    endpoint: Any = SimpleNamespace(inside=set(jobs))
    endpoint._leave = lambda gone: Endpoint._leave(endpoint, gone)

    async def read() -> list[int]:
        found = []
        async for answer, _ in Endpoint._pieces(endpoint, answers, jobs, told):
            found.append(answers.index(answer))
            answers[1].ended = "length" * (len(found) == 2)  # with its next piece
        return found

    return asyncio.run(read())


def test_an_answer_that_has_ended_cannot_fail_the_others() -> None:
    said, failed = Said([5], "", []), EngineFailed("the engine failed on this request")
    with pytest.raises(Refused, match="the engine failed"):
        pieces_of((0, said), (1, failed))
    assert pieces_of((0, said), (0, failed), (1, said), (1, said)) == [0, 1, 1]
