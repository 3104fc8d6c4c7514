"""The thread that owns an engine: it takes jobs from a queue, and reports the new tokens of each job after every round.

Jobs beyond the engine's free rows wait their turn; a job that nobody waits for any more frees its row after the round under way.
Prompts that are to be scored are read in pieces between the rounds, one prompt at a time, before their jobs wait for a row.
If the engine fails, the jobs it failed on end with an error and a new engine is built; the other jobs go on in the new one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch

from headstart.heads.errors import UserError
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.row import Row, told_of
from headstart.inference.decoding.said import likeliest
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.reports.figures import accepted_of

log = logging.getLogger(__name__)

PIECE = 256  # most tokens of a prompt that are scored between two rounds: each has a logit for every token of the vocabulary


class EngineFailed(Exception):
    """The engine failed, through no fault of the request."""


class Said(NamedTuple):
    """New tokens of a job."""

    tokens: list[int]
    ended: str  # why the job has ended; "" while more tokens come
    logprobs: list[Any]  # one entry of ``Row.logprobs`` for each token, where the job asked for them
    prompt: Sequence[Any] = ()  # the same for the prompt's tokens except the first, in one event, where the job asked for them


Event = Said | EngineFailed | UserError


@torch.inference_mode()
def scores_of(target: Target, prompt: Sequence[int], likely: int) -> Iterator[list[Any]]:
    """Yield an entry as in ``Row.logprobs`` for each token of a prompt except the first, which nothing precedes: a list for each pass.
    ``likely``: the number of likeliest tokens in an entry.
    """
    tokens_T, context = torch.tensor(prompt, device=target.device), Context(target, (), len(prompt))
    for read_R, next_R in zip(tokens_T[:-1].split(PIECE), tokens_T[1:].split(PIECE), strict=True):
        if len(read_R):  # a prompt of one token has none to score
            _, final = context.read(read_R)
            context.keep(len(read_R))
            yield [told_of(each, likely) for each in likeliest(target.logits(final), next_R[None], 1 + likely)[0].tolist()]


@dataclass(eq=False)
class Job:
    """A sequence to be generated. ``tell`` is called from the worker's thread and must not block; set ``gone`` when nobody listens anymore.

    ``name``: of the request, for the log. ``logprobs``: the number of likeliest tokens whose log-probabilities are reported with each
    token's own; None: no log-probabilities. ``scored``: the prompt's tokens have log-probabilities too.
    """

    prompt: list[int]
    new_tokens: int
    sampling: SamplingParams
    tell: Callable[[Event], object]
    stop_ids: Sequence[int] | None = None  # None: the target's own
    logprobs: int | None = None
    name: str = ""
    scored: bool = False
    gone: bool = False
    said: list[int] = field(default_factory=list)  # all new tokens, including those from before the engine failed
    scores: list[Any] = field(default_factory=list)  # of the prompt's tokens, until they are reported
    row: Row = field(default_factory=Row)
    told: int = 0  # tokens of the row that were reported
    counted: int = 0  # rounds of the row that were counted


class Worker:
    """Runs the engine that ``make`` builds. Call ``thread.start()``, ``submit`` and, at the end, ``stop``. Any thread may read its figures
    at any time.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self.make, self.engine, self.failed = make, make(), False
        self.engine.warm_up()  # an engine built after a failure is not warmed up: requests are waiting
        self.free = self.engine.free
        self.inbox: SimpleQueue[Job | None] = SimpleQueue()
        self.scoring: deque[tuple[Job, Iterator[list[Any]]]] = deque()  # jobs before they wait, with the pieces that are left to score
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.accepted: Counter[int] = Counter()  # depth -> rounds that accepted a guess there
        self.thread = Thread(target=self._run, name="engine", daemon=True)

    def submit(self, job: Job) -> None:
        """Queue a job. Raises EngineFailed where the engine failed and could not be built again."""
        self.inbox.put(job)
        if self.failed:
            raise EngineFailed("the engine could not be built again")

    def stop(self) -> None:
        """End the thread after the round under way."""
        self.inbox.put(None)
        self.thread.join()

    def _run(self) -> None:
        try:
            while self._collect():
                began = time.perf_counter()
                if self.scoring:
                    job, pieces = self.scoring.popleft()
                    self._try([job], partial(self._score, job, pieces))
                while self.waiting and self.engine.free:
                    job = self.waiting.popleft()
                    self._try([job], partial(self._enter, job))
                self._try([*self.running], self._round)
                self.free = self.engine.free
                self.sums["seconds"] += time.perf_counter() - began
        except Exception:
            log.exception("the engine could not be built again")
            self.failed = True  # first: what is submitted from now on is refused, what was submitted before is in the inbox
            while not self.inbox.empty():
                self.waiting += [job for job in [self.inbox.get()] if job]
            self._fail([*self.running, *self.waiting, *(job for job, _ in self.scoring)])

    def _collect(self) -> bool:
        """Take in new jobs (wait for one while idle) and drop those that nobody waits for. Returns False when the thread is to end."""
        idle = not (self.running or self.waiting or self.scoring)
        while idle or not self.inbox.empty():
            job = self.inbox.get()
            if job is None:
                return False
            if job.scored:
                self.scoring.append((job, scores_of(self.engine.target, job.prompt, job.logprobs or 0)))
            else:
                self.waiting.append(job)
            idle = False
        for job in self.running:
            if job.gone:
                self.engine.drop(job.row)
        self.running = [job for job in self.running if not job.gone]
        self.waiting = deque(job for job in self.waiting if not job.gone)
        self.scoring = deque((job, pieces) for job, pieces in self.scoring if not job.gone)
        return True

    def _score(self, job: Job, pieces: Iterator[list[Any]]) -> None:
        """Score the next piece of a job's prompt. Once all of it is scored, the job waits for a row."""
        if (piece := next(pieces, None)) is None:
            self.waiting.append(job)
        else:
            job.scores += piece
            self.scoring.appendleft((job, pieces))

    def _enter(self, job: Job) -> None:
        """Give a job a row of the engine. After an engine failed, the job continues behind the tokens that it has reported. A greedy job
        gets the tokens that it would have had anyway; a sampled one may get others.
        """
        said, again = len(job.said), bool(job.row.prompt)
        if not job.new_tokens:
            job.tell(Said([], "length", [], job.scores))
            return
        sampling = replace(job.sampling, min_tokens=max(job.sampling.min_tokens - said, 0))
        try:
            job.row = self.engine.add_request(
                job.prompt + job.said,
                new_tokens=job.new_tokens - said,
                sampling=sampling,
                stop_ids=job.stop_ids,
                likely=job.logprobs,
            )
        except UserError as error:
            job.tell(error)
            return
        self.sums["prompt_tokens"] += 0 if again else len(job.prompt)
        job.told = job.counted = 0
        self.running.append(job)

    def _round(self) -> None:
        if self.running:
            self.engine.step()
        for job in [*self.running]:
            self._tell(job)

    def _tell(self, job: Job) -> None:
        row, new = job.row, job.row.tokens[job.told :]
        logprobs = row.logprobs[job.told : len(row.tokens)]
        emitted = row.emitted[job.counted :]
        self.sums["passes"] += len(emitted)
        self.sums["pass_tokens"] += sum(emitted)
        for accepted in accepted_of(emitted, row.guesses[job.counted :]):
            self.accepted.update(range(1, accepted + 1))
        job.told, job.counted = len(row.tokens), len(row.emitted)
        job.said += new
        self.sums["tokens"] += len(new)
        if row.done:
            self.running.remove(job)
        if new:
            job.tell(Said(new, row.ended, logprobs, job.scores))
            job.scores = []

    def _try(self, jobs: list[Job], act: Callable[[], None]) -> None:
        try:
            return act()
        except Exception:
            jobs = [job for job in jobs if job.row.ended == "failed"] or jobs  # the prompts that could not be read, or the whole round
            log.exception("the engine failed on %d sequences (%s)", len(jobs), ", ".join(dict.fromkeys(job.name for job in jobs)))
        # not in the handler: the exception there keeps the old engine's memory alive
        self.sums["restarts"] += 1
        self._fail(jobs)
        self.waiting.extendleft(job for job in reversed(self.running) if job not in jobs)
        self.running = []
        del self.engine
        self.engine = self.make()

    def _fail(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.tell(EngineFailed("the engine failed on this request"))
