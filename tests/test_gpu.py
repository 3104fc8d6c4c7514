"""What only a GPU can show: training, packing, captured rounds, experts, reports and serving there say what they say on a CPU.

    make gpu            # at most 5 minutes; needs torch, transformers, accelerate and pytest, and no network

Every test runs on the CPU as well, and on a GPU that is pretended (tests/pretended_gpu.py), both with the slow tests, so that none of it
has stopped working when somebody has a GPU; graphs are then recorded by a stand-in.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from accelerate import Accelerator, dispatch_model
from accelerate.state import AcceleratorState
from accelerate.utils import patch_environment
from torch import Tensor

from headstart.data.live import look
from headstart.heads import hub
from headstart.heads.base import TargetEnds
from headstart.heads.errors import warn_once
from headstart.heads.unembedding import Unembedding
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.engine import Engine
from headstart.inference.decoding.policy import AUTO, TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.inference.reports.measure import make_report
from headstart.inference.serving.worker import Job, Worker
from headstart.trainers.arm import Arm
from headstart.trainers.losses import fused_loss
from tests.drafters import learn_by_heart, random_tokens
from tests.heads.test_lean import MANY, assert_as_near, states
from tests.inference.decoding.replays import replaying
from tests.tiny_targets import tiny_target
from tests.trainers.small import repetitive, train

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]
GPUS = getattr(torch, "gpu", torch.cuda)
# Other tests show the same on a CPU. For "gpu": tests/pretended_gpu.py.
DEVICES = ["gpu"] if hasattr(torch, "gpu") else [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=GPU)]
NEW, PROMPTS = 20, [random_tokens(n, seed=n) for n in (11, 1, 25, 4, 18)]
TREE, CHAIN = TreePolicy(depth=4, nodes=10, branch=3, least=0.05), TreePolicy("chain", depth=4)
MIXED = [SamplingParams(0.9 * (i % 2), top_k=20 * (i == 3), top_p=0.95, repetition_penalty=1.0 + 0.3 * (i == 4), seed=i) for i in range(5)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    AcceleratorState._reset_state(reset_partial_state=True)
    with nullcontext() if request.param == "cuda" else replaying():
        yield torch.device(request.param)
    AcceleratorState._reset_state(reset_partial_state=True)


@functools.cache
def pair(architecture: str = "llama") -> tuple[Target, Any]:
    """On the CPU: a target, and a drafter that has learnt by heart what it says."""
    target = tiny_target(architecture)
    torch.manual_seed(1)
    drafter = hub.build("eagle", target.shape)
    drafter.attach(target.ends)
    texts = [(p + generate(target, None, p, new_tokens=NEW).tokens)[: 1 + NEW] for p in PROMPTS]
    return target, learn_by_heart(drafter, target, texts, depth=3, steps=30)


def on(device: torch.device, architecture: str = "llama", dtype: torch.dtype = torch.float32) -> tuple[Target, Any]:
    target, drafter = pair(architecture)
    there = Target(copy.deepcopy(target.model).to(device, dtype), name=architecture)
    moved = hub.build("eagle", target.shape)
    moved.load_state_dict(drafter.state_dict())
    moved.attach(there.ends)
    return there, moved.to(device, dtype).eval()


def said(engine: Engine, each: list[SamplingParams]) -> list[list[int]]:
    return [row.tokens for row in engine.run(PROMPTS, new_tokens=NEW, sampling=each, stop_ids=())]


def plain(target: Target) -> list[list[int]]:
    return [generate(target, None, p, new_tokens=NEW, stop_ids=()).tokens for p in PROMPTS]


# ---- training ----


def two_steps(device: torch.device, precision: str, run: Path) -> tuple[dict[str, Tensor], float]:
    """Its weights on the CPU, and the loss of the second step."""
    AcceleratorState._reset_state(reset_partial_state=True)
    target, drafter = on(device)
    drafter.train()
    arms: list[Arm] = []
    with patch_environment(ACCELERATE_TORCH_DEVICE=str(device)):
        accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
    train(drafter, target, run, accelerator=accelerator, arms=arms, steps=2, optimizer="adamw", save_every=100)
    return {name: weight.detach().cpu() for name, weight in drafter.state_dict().items()}, arms[0].shown["loss"]


def test_two_steps_are_those_of_the_cpu(device: torch.device, tmp_path: Path) -> None:
    """In fp32, by the dense mask there; and in bf16, by the flash kernels, within what that rounds."""
    wanted, loss = two_steps(torch.device("cpu"), "no", tmp_path / "cpu")
    found, same = two_steps(device, "no", tmp_path / "fp32")
    assert same == pytest.approx(loss, rel=1e-4)
    for name, weight in wanted.items():
        assert (found[name] - weight).abs().median() < 1e-5 and (found[name] - weight).abs().max() < 9.1e-3, name  # two steps of AdamW
    assert two_steps(device, "bf16", tmp_path / "bf16")[1] == pytest.approx(loss, rel=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trimmed", [False, True])
def test_one_kernel_judges_as_the_chunked_loss(dtype: torch.dtype, trimmed: bool) -> None:
    """Values and gradients; interpreted it is compared with float64 in tests/trainers/test_kernel.py."""
    pytest.importorskip("triton")
    cuda, W, N, K, found = torch.device("cuda"), 5000, 64, 3, []
    ids_V = torch.arange(0, W, 3, device=cuda) if trimmed else None
    for kernel in ("torch", "triton"):
        torch.manual_seed(0)
        weight = torch.randn(W if ids_V is None else len(ids_V), 32, device=cuda, dtype=dtype).requires_grad_()
        hidden = [torch.randn(2, N, 32, device=cuda, dtype=dtype).requires_grad_() for _ in range(K)]
        final, ends = (
            torch.randn(2, N, 16, device=cuda, dtype=dtype),
            TargetEnds(torch.nn.Identity(), torch.randn(W, 16, device=cuda, dtype=dtype)),
        )
        tokens, supervised = torch.randint(W, (2, N), device=cuda), [torch.arange(N).expand(2, -1) < N - 1 - d for d in range(1, K + 1)]
        terms = {"kl": 1.0, "tv": 0.5, "lk_alpha": 0.2, "lk_hybrid": 0.3, "ce": 0.2, "data_ce": 0.1}
        out = fused_loss(hidden, [Unembedding(weight, ids_V)] * K, final, ends, tokens, supervised, terms, 0.8, 100, kernel=kernel)
        out.loss_sum.backward()
        found.append([out.loss_sum.detach(), out.alpha_KBT, weight.grad, *(h.grad for h in hidden)])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= (1e-4 if dtype == torch.float32 else 0.03) * a.abs().max()


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "mixtral"])
def test_packed_documents_are_read_as_if_each_were_alone(architecture: str, device: torch.device) -> None:
    target, packed = on(device, architecture)[0], repetitive()
    taps, T = (0, 2, target.shape.layers), packed.tokens_RT.shape[1]
    batch = look(packed.batch(slice(0, 3)), target, taps)
    assert batch.final_BTD.device.type == device.type and len({*batch.documents_BT[0].tolist()}) > 1
    for row in range(3):
        start = 0
        for t in range(1, T + 1):
            if t == T or batch.positions_BT[row, t] == 0:
                states, final = target.read(batch.tokens_BT[row : row + 1, start:t], batch.positions_BT[row : row + 1, start:t], taps)
                assert torch.allclose(final[0], batch.final_BTD[row, start:t], atol=1e-3)
                assert all(torch.allclose(states[tap][0], batch.states[tap][row, start:t], atol=1e-3) for tap in taps)
                start = t


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_passes_are_those_of_the_modules(architecture: str, dtype: torch.dtype, device: torch.device) -> None:
    """Prompts, a row, a tree; packed documents, whole rows. In half precision as near to fp32 on the CPU as the modules are."""
    right, (theirs, _), (ours, _) = tiny_target(architecture), *(on(device, architecture, dtype) for _ in range(2))
    ours.prepack()
    assert device.type != "cuda" or ours.reader.passes.startswith("fused kernels")
    batch = repetitive().batch(slice(0, 3))
    texts = [(batch.tokens_BT, batch.positions_BT), (batch.tokens_BT, torch.arange(batch.tokens_BT.shape[1]).expand_as(batch.tokens_BT))]
    taps = (0, 2, right.shape.layers)

    def said(target: Target) -> list[Tensor]:
        found = states(target, MANY)
        for tokens, positions in texts:
            tapped, final = target.read(tokens, positions, taps)
            found += [*tapped.values(), final]
        return [x.float().cpu() for x in found]

    if device.type == "cuda":
        theirs.quick = False
        assert ours.quick == (dtype == torch.bfloat16)
    for exact, a, b in zip(said(right), said(theirs), said(ours), strict=True):
        if dtype == torch.float32:
            assert torch.allclose(b, exact, atol=2e-3)
        else:
            assert_as_near(exact, a, b)


# ---- decoding ----


@pytest.mark.gpu
@pytest.mark.skipif(GPUS.device_count() < 2, reason="there are no two GPUs here")
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_layers_on_two_gpus_say_the_same(architecture: str) -> None:
    """As ``target.device=map`` places them: the masks of a pass are wanted on both."""
    here, name = pair(architecture)[0], GPUS.__name__.split(".")[-1]
    half = here.shape.layers // 2
    places = {f"model.layers.{i}": f"{name}:{int(i >= half)}" for i in range(here.shape.layers)}
    places |= {"model.embed_tokens": f"{name}:0", "model.rotary_emb": f"{name}:0", "model.norm": f"{name}:1", "lm_head": f"{name}:1"}
    there = Target(dispatch_model(copy.deepcopy(here.model), places, force_hooks=True), name=architecture)
    drafter = hub.build("eagle", there.shape)
    drafter.load_state_dict(pair(architecture)[1].state_dict())
    drafter.attach(there.ends)
    for policy in (None, TREE, CHAIN):
        proposer = None if policy is None else Drafting(drafter.to(there.device).eval())
        assert [generate(there, proposer, p, policy=policy, new_tokens=NEW, stop_ids=()).tokens for p in PROMPTS] == plain(here)
    assert look(repetitive().batch(slice(0, 3)), there, (0, 2)).final_BTD.device == there.device


@pytest.mark.parametrize("passes", ["modules", "ours"])
@pytest.mark.parametrize("policy", [None, TREE, CHAIN], ids=["plain", "tree", "chain"])
def test_replayed_rounds_say_what_launched_ones_say(policy: TreePolicy | None, passes: str, device: torch.device) -> None:
    target, drafter = on(device)
    if passes == "ours":
        target.prepack()
        drafter.prepack()
    replayed, launched = (Engine(target, drafter, sequences=3, max_length=100, plans=policy, graphs=graphs) for graphs in (True, False))
    assert said(replayed, [SamplingParams()] * 5) == said(launched, [SamplingParams()] * 5) == plain(target)
    assert said(replayed, MIXED) == said(launched, MIXED)
    assert replayed.rounds.graphs is not None and replayed.rounds.graphs.kept and launched.rounds.graphs is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_drafts_and_verifies(dtype: torch.dtype, device: torch.device) -> None:
    """One sequence, no graphs: prompts and chains of every length behind memories of every length."""
    target, drafter = on(device, dtype=dtype)
    for policy in (CHAIN, TREE):
        made = [generate(target, Drafting(drafter), p, new_tokens=NEW, policy=policy, stop_ids=()) for p in PROMPTS]
        assert dtype != torch.float32 or [each.tokens for each in made] == plain(target)
        assert sum(len(each.emitted) for each in made) < 0.7 * sum(len(each.tokens) for each in made)
        warm = generate(target, Drafting(drafter), PROMPTS[0], new_tokens=NEW, policy=policy, sampling=MIXED[1], stop_ids=())
        assert len(warm.tokens) == NEW


@pytest.mark.parametrize("passes", ["modules", "ours"])
def test_in_half_precision_rounds_run_and_guesses_are_right(passes: str, device: torch.device) -> None:
    target, drafter = on(device, dtype=torch.bfloat16)
    if passes == "ours":
        target.prepack()
        drafter.prepack()
    engine = Engine(target, drafter, sequences=3, max_length=100, plans=TREE, graphs=True)
    rows = engine.run(PROMPTS, new_tokens=NEW, sampling=[SamplingParams()] * 5, stop_ids=())
    assert engine.rounds.graphs is not None and engine.rounds.graphs.kept
    assert all(len(row.tokens) == NEW for row in rows) and sum(sum(row.emitted) for row in rows) > 1.2 * sum(len(r.emitted) for r in rows)


@pytest.mark.parametrize("experts", ["eager", pytest.param(None, marks=pytest.mark.slow)], ids=["a loop", "as they come"])
def test_experts_are_captured_or_launched(experts: str | None, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """A loop over those that were picked waits for the device. What comes after it is captured as if nothing had been."""
    target, drafter = on(device, "mixtral")
    if experts is not None:
        target.model.set_experts_implementation(experts)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            engine = Engine(target, drafter, sequences=3, max_length=100, plans=TREE, graphs=True)
            assert said(engine, [SamplingParams()] * 5) == plain(target)
    assert sum("cannot be device graphs" in message for message in caplog.messages) == (engine.rounds.graphs is None)
    assert experts is None or engine.rounds.graphs is None
    torch.randn(3, device=device)  # random numbers are in order
    test_replayed_rounds_say_what_launched_ones_say(TREE, "modules", device)


# ---- reports, serving ----


@pytest.mark.slow  # on a CPU, where tests/inference/reports has others
@pytest.mark.parametrize("policy", [TREE, AUTO], ids=["tree", "auto"])
def test_a_report_is_lossless(policy: TreePolicy, device: torch.device) -> None:
    target, drafter = on(device)
    drafter.config = {"head": "eagle"}
    report = make_report(target, drafter, PROMPTS, policy.at_most(4), SamplingParams(), new_tokens=NEW)
    assert report["lossless"] and report["differing_prompts"] == 0 and report["prompts"] == len(PROMPTS)
    assert report["temperature_0"]["tokens_per_second"] > 0 and report["hf_generate_tokens_per_second"] > 0
    chain = report["chain_temperature_0"]
    assert policy is AUTO or chain["accepted_length"] == pytest.approx(chain["expected_length"], abs=0.2)
    assert (report["device"] == torch.cuda.get_device_name()) if device.type == "cuda" else report["device"]


def test_a_server_answers_and_captures_nothing_meanwhile(device: torch.device) -> None:
    target, drafter = on(device)
    worker = Worker(lambda: Engine(target, drafter, sequences=2, max_length=100, plans=TREE, graphs=True))
    graphs = worker.engine.rounds.graphs
    assert graphs is not None and graphs.complete
    known, told = len(graphs.kept), [SimpleQueue[Any]() for _ in PROMPTS]
    worker.thread.start()
    for prompt, sampling, events in zip(PROMPTS, [SamplingParams(), *MIXED[1:4], SamplingParams()], told, strict=True):
        worker.submit(Job(prompt, NEW, sampling, events.put, stop_ids=()))
    answers = []
    for events in told:
        answers.append(list[int]())
        ended = ""
        while not ended:
            event = events.get(timeout=60)
            answers[-1] += event.tokens
            ended = event.ended
    worker.stop()
    wanted = plain(target)
    assert [answers[i] for i in (0, 2, 4)] == [wanted[i] for i in (0, 2, 4)] and all(len(answer) == NEW for answer in answers)
    assert len(graphs.kept) == known and worker.sums["restarts"] == 0
