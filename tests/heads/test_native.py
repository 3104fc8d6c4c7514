"""The C++ products and layers against float64, against torch's own modules, and against themselves over fewer rows."""

from __future__ import annotations

import fcntl
import logging
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads import native, native_layers
from headstart.heads.memory import Room, Slots
from headstart.heads.visibility import CausalSees, MaskSees
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from tests.drafters import make, random_tokens
from tests.orders import faster
from tests.tiny_targets import tiny_target

needs_library = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")
Spoil = Callable[[Path, pytest.MonkeyPatch], None]
KINDS = ("fp32", "half", "bf16")  # half: fp32 that bf16 holds
READ = 41  # tokens before a tree


def matrix(kind: str, V: int, H: int) -> Tensor:
    weight = torch.randn(V, H)
    return weight if kind == "fp32" else weight.bfloat16() if kind == "bf16" else weight.bfloat16().float()


@needs_library
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("V", "H"), [(16, 4), (48, 36), (160, 448)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_float64(kind: str, V: int, H: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight, add = matrix(kind, V, H), torch.randn(V) if bias else None
    dtype = weight.dtype
    packed = native.pack(weight)
    assert packed.shape == (V // 16, H, 8 if kind == "half" else 16) and packed.dtype == dtype
    for rows in (*range(14), 65, 130):
        x = torch.randn(rows, H).to(dtype)
        exact = F.linear(x.double(), weight.double(), None if add is None else add.to(dtype).double())
        found = native.linear(x[None], packed, None if add is None else add.to(dtype))[0]
        summed = x.double().abs() @ weight.double().abs().T + 3  # half of the inputs in each of two sums; then the result is rounded
        bound = summed * (H / 2 + 2) * torch.finfo(torch.float32).eps / 2 + exact.abs() * torch.finfo(dtype).eps
        assert found.dtype == dtype and bool(((found.double() - exact).abs() <= bound).all())


@needs_library
def test_another_width_or_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="36 columns"):
        native.linear(torch.randn(2, 40), native.pack(torch.randn(16, 36)))
    lean = target_of("fp32", monkeypatch).reader.lean
    assert lean is not None and lean.native is not None
    with pytest.raises(RuntimeError, match=f"{lean.native.width} wide"):
        lean.native([torch.randn(1, 2, 8)], (torch.randn(1, 1, 2, 4),) * 2, [], None, torch.randn(1, 2, 8))
    x, keys = torch.randn(1, 2, lean.native.width), torch.randn(1, 2, 8, 16).bfloat16()
    with pytest.raises(RuntimeError, match=r"memory of torch\.bfloat16 for layers of torch\.float32"):
        lean.native([x], (torch.randn(1, 1, 2, 16),) * 2, [Room(keys, keys, 0, 0, 2)] * lean.native.count, None, x)


@needs_library
def test_fp32_that_bf16_holds_gives_the_same_numbers_to_the_bit() -> None:
    torch.manual_seed(0)
    weight, x = matrix("half", 64, 96), torch.randn(9, 96)
    whole = weight.reshape(4, 16, 96).transpose(1, 2).contiguous()  # as fp32 that needs all its bits is stored
    assert torch.equal(native.linear(x, native.pack(weight)), native.linear(x, whole))
    other = weight.clone()
    other[3, 5] += 2**-20
    assert native.pack(other).shape == whole.shape


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_the_same_numbers_whoever_stands_beside_it(kind: str) -> None:
    torch.manual_seed(0)
    weight = matrix(kind, 48, 64)
    x, packed, threads = torch.randn(70, 64).to(weight.dtype), native.pack(weight), torch.get_num_threads()
    alone = torch.cat([native.linear(row[None], packed) for row in x])
    try:
        for some in (1, 2, 3):
            torch.set_num_threads(some)
            assert torch.equal(native.linear(x, packed), alone)
    finally:
        torch.set_num_threads(threads)


def target_of(kind: str, monkeypatch: pytest.MonkeyPatch, head_dim: int = 16) -> Target:
    faster(monkeypatch, "panels")
    model = tiny_target("qwen3", head_dim=head_dim).model  # norms of heads, groups of heads
    if kind != "fp32":
        model = model.bfloat16()
    return Target(model.float() if kind == "half" else model, name=kind).prepack()


@needs_library
@pytest.mark.parametrize(  # rows that one thread reads alone, and that threads share
    ("count", "head_dim"), [(7, 16), pytest.param(11, 24, marks=pytest.mark.slow), (20, 96)]
)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_node_of_a_tree_gets_the_numbers_of_plain_decoding_to_the_bit(
    kind: str, count: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a tree with branches, the states of each path equal those of its tokens read one by one."""
    target = target_of(kind, monkeypatch, head_dim)
    lean = target.reader.lean
    assert lean is not None and lean.native is not None and lean.native.name == kind
    prompt, nodes, parents = random_tokens(READ, 0), random_tokens(count, 1), [-1, 0, 0, 1, 2, 3, 2]
    parents += [node // 2 for node in range(len(parents), count)]
    taps = range(target.shape.layers + 1)

    def begun() -> Slots:
        memory = Slots(64)
        target.read_rows(torch.tensor([prompt]), torch.arange(READ)[None], memory, CausalSees(READ, READ))
        return memory

    own, depths = torch.zeros(1, count, count, dtype=torch.bool), list[int]()
    for i, parent in enumerate(parents):
        if parent >= 0:
            own[0, i] = own[0, parent]
        own[0, i, i] = True
        depths.append(0 if parent < 0 else depths[parent] + 1)
    seen = torch.cat([own.new_ones(1, count, READ), own], 2)
    states, final = target.read_rows(torch.tensor([nodes]), torch.tensor([depths]) + READ, begun(), MaskSees(seen), taps)
    for leaf in {*range(count)} - {*parents}:
        path = [i for i in range(count) if own[0, leaf, i]]
        memory = begun()
        for step, i in enumerate(path):
            tokens, places = torch.tensor([[nodes[i]]]), torch.tensor([[READ + step]])
            one, last = target.read_rows(tokens, places, memory, CausalSees(1, READ + 1 + step), taps)
            assert torch.equal(last[0, 0], final[0, i]) and torch.equal(target.logits(last)[0, 0], target.logits(final)[0, i])
            assert all(torch.equal(one[tap][0, 0], states[tap][0, i]) for tap in taps)


@needs_library
@torch.inference_mode()
def test_positions_of_another_layout_are_the_same_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    target, tokens = target_of("fp32", monkeypatch), torch.tensor([random_tokens(12, 0), random_tokens(12, 1)])
    places, said = torch.arange(6).repeat(2, 1), []
    for later in (places + 6, (places + 6).T.contiguous().T):
        memory = Slots(64)
        target.read_rows(tokens[:, :6], places, memory, CausalSees(6, 6))
        said.append(target.read_rows(tokens[:, 6:], later, memory, CausalSees(6, 12))[1])
    assert torch.equal(*said)


@needs_library
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=3)])
@pytest.mark.parametrize("depth", [0, 3])
def test_many_sequences_say_what_each_says_alone(depth: int, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of the engine: sequences of several lengths, one after the other ended, among places that no sequence uses."""
    faster(monkeypatch, "panels")
    target = tiny_target("qwen3")
    drafter = make("eagle", target).prepack()
    prompts, policy = [random_tokens(n, n) for n in (5, 21, 9)], TreePolicy("chain", depth=3)
    calls, read = list[int](), native_layers.Layers.__call__
    monkeypatch.setattr(native_layers.Layers, "__call__", lambda self, *given: (calls.append(len(given[4])), read(self, *given))[1])
    said = [generate(target, None, prompt, new_tokens=20, sampling=sampling).tokens for prompt in prompts]
    assert not calls
    target.prepack()
    assert calls == [1] and target.reader.lean is not None and target.reader.lean.native is not None  # it was compared when prepacked
    assert target.reader.passes == "C++, all layers in one call"
    engine = Engine(target, drafter if depth else None, sequences=4, max_length=48, plans=policy if depth else None)
    found = engine.run(prompts, new_tokens=20, sampling=[sampling] * 3)
    if not sampling.temperature or not depth:  # with guesses other numbers are drawn
        assert [each.tokens for each in found] == said
    assert max(calls) == 4 and all(len(each.tokens) == 20 for each in found)


@needs_library
@torch.inference_mode()
def test_a_bf16_target_is_as_near_to_exact_as_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, places = torch.tensor([random_tokens(40, 1)]), torch.arange(40)[None]
    model = tiny_target("qwen3").model
    half = Target(model.bfloat16(), name="half")
    exact = Target(tiny_target("qwen3").model.bfloat16().double(), name="exact")

    def read(target: Target) -> Tensor:
        memory = Slots(64)
        target.read_rows(tokens[:, :8], places[:, :8], memory, CausalSees(8, 8))
        return target.read_rows(tokens[:, 8:], places[:, 8:], memory, CausalSees(32, 40))[1].double()

    right, theirs = read(exact), read(half)
    faster(monkeypatch, "panels")
    ours = read(half.prepack())
    assert half.reader.lean is not None and half.reader.lean.native is not None
    assert (ours - right).norm() <= 1.2 * (theirs - right).norm()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_that_of_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for size in (8, 16, 40):
        x, weight = torch.randn(2, 3, size).to(dtype), torch.randn(size).to(dtype)
        exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        torch.testing.assert_close(native.norm(x, weight, 1e-5).double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


# Where it cannot be had ----------------------------------------------------------------------------------------------


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and nothing known of a library. Compiled without optimising, which takes a sixth of the time."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "searched", native.searched.__wrapped__)
    monkeypatch.setattr(native, "FLAGS", ["-O0" if flag == "-O3" else flag for flag in native.FLAGS])
    return tmp_path


@pytest.mark.slow
@needs_library
def test_it_is_compiled_once(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library() is not None
    (made,) = (anew / "native").iterdir()  # nothing is left beside it
    assert made.suffix == ".so" and (anew / "native").stat().st_mode & 0o777 == 0o700
    ran, run = list[str](), native._run

    def counted(command: list[str]) -> str:
        ran.append(command[-1])
        return run(command)

    monkeypatch.setattr(native, "_run", counted)
    assert native.library() is not None and ran == ["--version"]
    about = native._processor
    monkeypatch.setattr(native, "_processor", lambda: b"another")
    assert native.library() is not None and len(ran) == 4 and len([*(anew / "native").iterdir()]) == 2
    made.unlink()  # it is loaded here: not emptied in place
    made.touch()  # as a machine leaves it that is lost before it is on disk
    monkeypatch.setattr(native, "_processor", about)
    assert native.library() is not None and made.stat().st_size


@needs_library
def test_a_compiler_may_have_several_words(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[list[str]]()

    def run(command: list[str]) -> str:
        ran.append(command)
        if "-o" in command:
            Path(command[-1]).write_text("made")
        return ""

    monkeypatch.setattr(native, "_run", run)
    monkeypatch.setenv("CXX", "env g++ -m64")
    made = native._compiled()
    assert made.is_file() and len(ran) == 3 and all(command[:3] == ["env", "g++", "-m64"] for command in ran)
    monkeypatch.setenv("CXX", "env g++")  # its words may be options, which change what is compiled
    assert native._compiled() != made


@needs_library
@pytest.mark.parametrize("locks", [True, False])
def test_of_processes_that_start_at_once_one_compiles(anew: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    compiled, both, about = list[str](), threading.Barrier(2), native._processor

    def run(command: list[str]) -> str:
        if "-o" in command:
            compiled.append(command[-1])
            time.sleep(0.2)  # meanwhile the other one finds no library
            Path(command[-1]).write_text("made")
        return ""

    def processor() -> bytes:
        both.wait(60)
        return about()

    def refused(*_: object) -> None:
        raise OSError("no locks on this file system")

    monkeypatch.setattr(native, "_run", run)
    monkeypatch.setattr(native, "_processor", processor)
    if not locks:
        monkeypatch.setattr(fcntl, "flock", refused)
    with ThreadPoolExecutor(2) as threads:  # a lock is an open file's, so that threads stand for processes
        made = {done.result() for done in [threads.submit(native._compiled) for _ in range(2)]}
    (path,) = made
    assert path.read_text() == "made" and [*path.parent.iterdir()] == [path]  # nothing is left beside it
    assert len(compiled) == 2 or not locks  # one object, one library


def _no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def _failing_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder / "wrong.cpp"
    source.write_text("int main( {")
    monkeypatch.setattr(native, "SOURCE", source)


def _wrong_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (native.SOURCE, *native.SOURCE.parent.glob("native*.h")):
        shutil.copy(source, folder)
    products = folder / "native_products.h"
    text = products.read_text()
    assert text.count("x[r * H + h + 1]") == 1
    products.write_text(text.replace("x[r * H + h + 1]", "x[r * H + h]"))
    monkeypatch.setattr(native, "SOURCE", folder / native.SOURCE.name)


def _open_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "native").mkdir()
    (folder / "native").chmod(0o777)


def _no_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADSTART_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a user without an entry, as containers run them


def _busy_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "SECONDS", 1e-3)


def _no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "native").write_text("a file")


@needs_library
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_no_compiler, "install g++"), (_failing_compiler, "wrong.cpp"), (_wrong_library, "multiplies wrongly"),
        (_open_folder, "chmod 700"), (_no_folder, "HEADSTART_CACHE"), (_no_home, "HEADSTART_CACHE"),
        (_busy_machine, "took over 0.001 s: try again"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_and_torch_decodes(
    spoil: Spoil, why: str, anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(anew, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    (line,) = caplog.messages
    assert why in line and "goes on with torch's operations" in line and "\n" not in line
    monkeypatch.setattr(native, "library", lambda: None)
    faster(monkeypatch, "panels")
    target = tiny_target("llama").prepack()
    assert not any(p.dim() == 3 for p in target.model.parameters()) and target.reader.lean is not None and target.reader.lean.native is None
    assert target.reader.passes == "torch's operations, layer by layer"
