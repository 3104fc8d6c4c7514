"""Ends all processes when one of them hangs, and prints which one it is.

A collective operation waits silently until the timeout of its process group. So in each process a thread writes its progress to the
store through which the processes met: how many places of the loop it has passed (counted alike in all of them), and where it is now.
Clocks are not compared. When a process has made no progress for too long, it looks which process is furthest behind: the others wait
for that one.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator

FIRST = 20  # seconds to wait for an answer of the store, which the first process holds


class Watch:
    """Ends all processes when the loop has not reached a new place for ``seconds``. It watches while it is entered as a context. In a run
    of one process it does nothing.
    """

    runs = 0  # in this process: a --multirun has several

    def __init__(self, accelerator: Accelerator, seconds: float) -> None:
        self.rank, self.world, self.seconds = accelerator.process_index, accelerator.num_processes, seconds
        self.count, self.where, self.alone, self.since = 0, "the start", False, time.monotonic()
        self.ended, self.thread = threading.Event(), threading.get_ident()

    def __enter__(self) -> Watch:
        Watch.runs += 1
        if self.world > 1:
            self.keys = [f"watch {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} {Watch.runs} {rank}" for rank in range(self.world)]
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            patience = timedelta(seconds=min(FIRST, self.seconds))  # a separate connection: the main one may be blocked
            self.store = torch.distributed.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)
            threading.Thread(target=self._run, name="watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.where, self.alone = f"the end of its loop, after {self.where}", False
        self.ended.set()

    def at(self, where: str) -> None:
        """Note that the loop has reached another place, ``where``."""
        self.count, self.where, self.since = self.count + 1, where, time.monotonic()

    @contextmanager
    def patiently(self, where: str) -> Iterator[None]:
        """Around work without a time limit, such as a checkpoint: the other processes wait for it as long as it takes."""
        self.at(where)
        self.alone = True
        try:
            yield
        finally:
            self.alone, self.since = False, time.monotonic()

    def _run(self) -> None:
        while not self.ended.wait(min(5.0, self.seconds / 4)):
            late = time.monotonic() - self.since > self.seconds and not self.alone
            try:
                self._tell()
                behind = self._behind() if late else []
            except RuntimeError:  # no answer, or no connection
                if not late:
                    continue
                behind = ["process 0, which does not answer any more"]
            if behind:
                self._end(behind)
        with suppress(RuntimeError):  # the first process may have gone already
            self._tell()  # else its last word might be ``alone``, and others that are still in the loop would wait for ever

    def _tell(self) -> None:
        self.store.set(self.keys[self.rank], json.dumps([self.count, self._place(), self.alone]))

    def _place(self) -> str:
        """This process and where its loop is, with the innermost line of Python there."""
        frame = sys._current_frames().get(self.thread)
        line = f", {Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}" if frame else ""
        return f"process {self.rank} ({socket.gethostname()}, pid {os.getpid()}) at {self.where}{line}"

    def _behind(self) -> list[str]:
        """Where those processes are that are furthest behind; [] if one of them is inside ``patiently``."""
        said: list[tuple[int, str, bool]] = [(-1, f"process {rank}, of which nothing was heard", False) for rank in range(self.world)]
        for rank, key in enumerate(self.keys):
            if self.store.check([key]):
                said[rank] = tuple(json.loads(self.store.get(key)))
        least = min(count for count, _, _ in said)
        last = [(where, alone) for count, where, alone in said if count == least]
        return [] if any(alone for _, alone in last) else [where for where, _ in last]

    def _end(self, behind: Sequence[str]) -> None:
        """End this process with status 2, even inside a collective operation. Only one process prints who is behind."""
        if self.ended.is_set():
            return
        try:
            first = self.store.add(f"{self.keys[0]} told", 1) == 1
        except RuntimeError:
            first = self.rank == 1
        if first:
            why = "the others wait for it" if len(behind) < self.world else "all of them wait"
            print(
                f"\nerror: nothing has moved for {self.seconds:g} seconds (trainer.timeout): {why}: {'; '.join(behind)}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(min(5.0, self.seconds / 2))  # time for the others to notice the hang, each by itself
        os._exit(2)
