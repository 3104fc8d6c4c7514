"""What training costs on one GPU: an EAGLE-3 drafter, unrolled to depth 7, draft vocabulary of 32,064, rows of 2,048 tokens, for an 8B
target of random weights in bf16. Needs torch, transformers, accelerate and this checkout.

    python benchmarks/train_gpu.py            # at most 9 minutes; appends to benchmarks/results/train_gpu.jsonl
    python benchmarks/train_gpu.py --smoke    # toy shapes on any machine: does it run?

Each measurement is written at once as a JSON line, to standard output and to the file; a failed one leaves its error in its line. The
loop is that of ``python train.py`` (AdamW, bf16 autocast, the same clock), without checkpoints.

- ``matmul``: the measured speed of bf16 matrix products on this GPU.
- ``prefill``: the target's pass over a batch, with the outputs that training needs: taps and final states.
- ``in process``: steps in which the target reads each batch; ``..., torch``: with loss.kernel=torch instead of our kernel;
  ``..., modules``: with the target's own modules instead of ours (heads/kernels/fused.py); ``..., parts``: the share of each part, timed
  with a wait after it.
- ``capture``: the same passes, written to disk. ``from captured states``: steps that read these states, after the target was freed;
  ``..., 24 GB``: with the memory that a GPU of 24 GB has for tensors, as ``plan=true`` counts it. ``capture`` also stays below: peak_gib.

Model FLOPs are counted as in training (trainers/operations.py): matrix products, and attention as if it were not causal. ``mfu`` divides
by the dense bf16 peak of the GPU's data sheet, ``share_of_matmul`` by the best measured product.
"""

from __future__ import annotations

import gc
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
import yaml  # type: ignore[import-untyped]
from accelerate import Accelerator
from accelerate.state import AcceleratorState

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import checkout  # noqa: F401  (first: it finds the others where nothing is installed)
from benchmarks.frame import ROOT
from benchmarks.gpu import Bench
from benchmarks.rows import Row, measure
from headstart.data.batch import TargetBatch, TokenBatch
from headstart.data.capture import capture
from headstart.data.live import look
from headstart.data.packed import InMemory
from headstart.data.shards import Shards, StoredBatch
from headstart.heads import hub
from headstart.trainers import learner
from headstart.trainers.arm import Arm
from headstart.trainers.gpus import GPUS, peak
from headstart.trainers.operations import Operations
from headstart.trainers.parallel import Parallel
from headstart.trainers.plan import USABLE
from headstart.trainers.trainer import fit

BATCHES, DEPTH, STEPS = (1, 4), 7, 20  # rows of a step; the clock shows steps 11 to 20
Observe = Callable[[TokenBatch, Collection[int]], TargetBatch]


class Training:
    """The target and its rows; a fresh drafter for every measurement."""

    def __init__(self, bench: Bench) -> None:
        bench.model.requires_grad_(False)
        self.bench, self.device, self.target = bench, bench.device, bench.target
        self.length, rows, V = 32 if bench.smoke else 2048, 16, bench.target.shape.vocab_size
        tokens_RT = np.random.default_rng(0).integers(0, V, (rows, self.length), dtype=np.int32)
        place_RT = np.broadcast_to(np.arange(self.length, dtype=np.int32), tokens_RT.shape)
        self.packed = InMemory(tokens_RT, np.ones(tokens_RT.shape, dtype=np.bool_), place_RT, np.zeros_like(tokens_RT))
        self.shape, self.ends, self.fingerprint = self.target.shape, self.target.ends, self.target.fingerprint
        self.matmul: float | None = None
        self.flops = dict[str, float]()  # FLOPs of a row, by the part of the work
        self.folder = Path(mkdtemp(prefix="train_gpu"))

    def live(self, batch: TokenBatch, taps: Collection[int]) -> TargetBatch:
        return look(batch, self.target, taps)

    def stored(self, batch: TokenBatch, taps: Collection[int]) -> TargetBatch:
        assert isinstance(batch, StoredBatch)
        return batch.states_on(self.device, torch.bfloat16)

    def arm(self, kernel: str = "auto") -> Arm:
        torch.manual_seed(0)
        with torch.device(self.device):
            drafter = hub.build("eagle", self.shape, draft_vocab=list(range(self.shape.vocab_size // 4)))
        drafter.attach(self.ends)
        drafter.start_from(self.ends)
        loss = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text())["loss"]
        loss |= {"depth": DEPTH, "terms": {"kl": 1.0}, "kernel": kernel}
        loop: dict[str, Any] = dict(optimizer="adamw", lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, warmup=10, schedule="cosine", clip=0.5)
        arm = Arm("", drafter.to(self.device), self.folder, Curves(), {}, {}, loss=loss, **loop)  # type: ignore[arg-type]
        arm.save = lambda *_: None  # type: ignore[method-assign]
        return arm

    def fit(self, arm: Arm, rows: int, steps: int, observe: Observe, stream: Any) -> dict[str, float]:
        """Train, and return the clock's figures of the last steps."""
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(mixed_precision="bf16", cpu=self.device.type == "cpu")
        loop = dict(steps=steps, accumulate=1, save_every=10 * steps, keep=1, eval_every=10 * steps, resume=False)
        with redirect_stdout(sys.stderr):  # the progress bar
            fit([arm], lambda start, rank, world: stream(rows, 0, start, rank, world), observe, [], accelerator, **loop)  # type: ignore[arg-type]
        return arm.tracker.kept  # type: ignore[attr-defined]

    def steps(self, rows: int, what: str, kernel: str = "auto", memory: float | None = None) -> dict[str, Any]:
        """Measure steps. ``memory``: bytes that tensors may take."""
        observe, stream = (self.live, self.packed.stream) if what == "in process" else (self.stored, self.opened)
        if what not in self.flops:
            with Operations() as counted:
                self.fit(self.arm(), 1, 1, observe, stream)
            self.flops[what] = counted.count
        arm = self.arm(kernel)
        with self.at_most(memory), self.peak() as found:
            kept = self.fit(arm, rows, STEPS, observe, stream)
        found |= {"rows": rows, "loss": kept["loss"], **{k.removeprefix("speed/"): v for k, v in kept.items() if k.startswith("speed/")}}
        return found | self.rates(found["tokens_per_second"], self.flops[what])

    def opened(self, *place: int) -> Iterator[StoredBatch]:
        return Shards(self.folder / "shards", self.fingerprint).stored_stream(*place, pin=self.device.type == "cuda")

    def rates(self, tokens_per_second: float, flops: float) -> dict[str, Any]:
        """The rates of a measurement. ``flops``: per row."""
        done = flops * tokens_per_second / self.length
        most = peak(self.device)
        ratios = {"mfu": most and done / most, "share_of_matmul": self.matmul and done / self.matmul}
        return {"tokens_per_second": tokens_per_second, "teraflops": done / 1e12, **ratios}

    @contextmanager
    def at_most(self, memory: float | None) -> Iterator[None]:
        if memory is None or self.device.type != "cuda":
            yield
            return
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(memory / torch.cuda.get_device_properties(self.device).total_memory)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    @contextmanager
    def peak(self) -> Iterator[dict[str, Any]]:
        """The peak of tensors on the GPU in GiB (not counted on a CPU)."""
        found: dict[str, Any] = {"peak_gib": None}
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        yield found
        if self.device.type == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30


class Curves:
    """A tracker that keeps the last figures of a training."""

    def __init__(self) -> None:
        self.kept: dict[str, float] = {}

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.kept |= numbers

    def go_on_after(self, step: int) -> None:
        pass

    def cut(self) -> None:
        pass


# The rows ---------------------------------------------------------------------------------------------------------------


def measure_matmul(made: Training) -> dict[str, Any]:
    n = 256 if made.bench.smoke else 8192
    a, b = (torch.randn(n, n, device=made.device, dtype=torch.bfloat16) for _ in range(2))
    took = min(made.bench.seconds(lambda: [a @ b for _ in range(10)]) for _ in range(5)) / 10
    made.matmul = 2 * n**3 / took
    return {"teraflops": made.matmul / 1e12, "size": n}


def measure_prefill(made: Training, rows: int) -> dict[str, Any]:
    taps, batch = made.arm().drafter.taps, made.packed.batch(slice(0, rows))
    with Operations() as counted:
        look(batch, made.target, taps)
    with made.peak() as found:
        took = min(made.bench.seconds(lambda: look(batch, made.target, taps)) for _ in range(5))
    return found | {"rows": rows} | made.rates(rows * made.length / took, counted.count / rows)


def by_modules(made: Training, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Inside, the target runs with its own modules."""
    quick, made.target.quick = made.target.quick, False
    try:
        return measure()
    finally:
        made.target.quick = quick


def measure_parts(made: Training, rows: int) -> dict[str, Any]:
    """Shares of wall-clock time. ``unroll``: the drafter's forward pass; ``rest``: data, counting and the host between the parts."""
    took, arm = Counter[str](), made.arm()

    def watch(owner: Any, name: str, part: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **how: Any) -> Any:
            made.bench.wait()
            start = time.perf_counter()
            try:
                return call(*args, **how)
            finally:
                made.bench.wait()
                took[part] += time.perf_counter() - start  # type: ignore[assignment]

        setattr(owner, name, timed)
        undo.append(lambda: setattr(owner, name, call))

    undo: list[Callable[[], None]] = []
    made.fit(arm, rows, 2, made.live, made.packed.stream)  # work that only the first steps do
    arm = made.arm()
    places = (learner, "unroll", "unroll"), (learner, "fused_loss", "loss"), (Parallel, "backward", "backward")
    for owner, name, part in (*places, (arm, "step", "optimizer"), (made.target, "read", "target")):
        watch(owner, name, part)
    try:
        whole = made.bench.seconds(lambda: made.fit(arm, rows, 5, made.live, made.packed.stream))
    finally:
        for put_back in undo:
            put_back()
    shares = {part: seconds / whole for part, seconds in took.items()}
    return {"rows": rows, "shares": shares | {"rest": 1 - sum(shares.values())}, "milliseconds_of_a_step": 1e3 * whole / 5}


def measure_capture(made: Training) -> dict[str, Any]:
    taps, start = made.arm().drafter.taps, time.perf_counter()
    with redirect_stdout(sys.stderr), made.peak() as found:
        shards = capture(made.packed, made.target, taps, made.folder / "shards", batch_size=4, rows_per_shard=8)
    took = time.perf_counter() - start
    assert shards is not None
    size = sum(file["bytes"] for file in shards.files)
    return found | {"tokens_per_second": len(shards) * made.length / took, "bytes_per_token": size / (len(shards) * made.length)}


def let_go(made: Training) -> dict[str, Any]:
    """Free everything of the target except its embedding and head."""
    made.ends.whole = None
    del made.target, made.bench.target, made.bench.model
    with made.peak() as found:
        pass
    return found


def rows_of(bench: Bench) -> Iterator[Row]:
    made = Training(bench)
    try:
        yield "matmul", lambda: measure_matmul(made)
        for n in BATCHES:
            yield f"prefill {n}", lambda n=n: measure_prefill(made, n)  # type: ignore[misc]
        for n in BATCHES:
            yield f"in process {n}", lambda n=n: made.steps(n, "in process")  # type: ignore[misc]
        yield f"in process {BATCHES[-1]}, torch", lambda: made.steps(BATCHES[-1], "in process", "torch")
        yield f"prefill {BATCHES[-1]}, modules", lambda: by_modules(made, lambda: measure_prefill(made, BATCHES[-1]))
        yield f"in process {BATCHES[-1]}, modules", lambda: by_modules(made, lambda: made.steps(BATCHES[-1], "in process"))
        yield f"in process {BATCHES[-1]}, parts", lambda: measure_parts(made, BATCHES[-1])
        yield "capture", lambda: measure_capture(made)
        yield "target let go", lambda: let_go(made)
        for n in BATCHES:
            yield f"from captured states {n}", lambda n=n: made.steps(n, "from captured states")  # type: ignore[misc]
        small = USABLE * GPUS["rtx4090"].memory
        yield f"from captured states {BATCHES[0]}, 24 GB", lambda: made.steps(BATCHES[0], "from captured states", memory=small)
    finally:
        shutil.rmtree(made.folder, ignore_errors=True)


def main() -> None:
    measure(__file__, __doc__, {"training": (530, rows_of)}, total=530)


if __name__ == "__main__":
    main()
