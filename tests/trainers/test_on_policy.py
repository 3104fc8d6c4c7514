"""Rows of the drafter's own making: which they are, what is supervised in them, and what they change."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.data.batch import ReplayBatch, TokenBatch
from headstart.data.live import look
from headstart.heads.base import Drafter
from headstart.heads.errors import UserError
from headstart.heads.memory import Memory
from headstart.heads.visibility import CausalSees
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.sampling import SamplingParams
from headstart.inference.decoding.target import Target
from headstart.trainers import checkpoint
from headstart.trainers.arm import Arm
from headstart.trainers.learner import Learner, Wanted
from headstart.trainers.on_policy import OnPolicy, Recording, rejected_rounds
from headstart.trainers.run import run
from headstart.trainers.tracker import Tracker
from headstart.trainers.trainer import fit
from tests.drafters import HEADS, arguments, fresh, judged, learn_by_heart, make, roots_of
from tests.tiny_targets import tiny_target
from tests.trainers.conftest import TORCHRUN, small_run
from tests.trainers.small import COMMON, LOOP, LOSS, repetitive

ROOT = Path(__file__).resolve().parents[2]
REJECTED: dict[str, Any] = {"kind": "rejected", "share": 0.3, "rows": 3, "every": 2, "new_tokens": 8, "temperature": 0.0}
SAMPLES = REJECTED | {"kind": "samples", "share": 0.5, "temperature": 1.0}
TINY_TARGET = tiny_target()
ALONE = [name for name in HEADS if not make(name, TINY_TARGET).taps]  # they go on without the target's states
FED = [name for name in HEADS if name not in ALONE]
NOISY = next(name for name in FED if "noise" in arguments(name))
STEPS = next(name for name in FED if not make(name, TINY_TARGET).anchors)  # is fed every guess


@pytest.fixture(scope="module")
def target() -> Target:
    return TINY_TARGET


def batches(seed: int = 0) -> list[TokenBatch]:
    return [next(repetitive(seed).stream(4, seed))]


def kept_rows(own: OnPolicy) -> list[tuple[list[int], int]]:
    """(tokens, where the drafter's own begin)"""
    assert own.kept is not None
    rows = zip(own.kept["tokens"].tolist(), own.kept["begin"].tolist(), own.kept["length"].tolist(), strict=True)
    return [(tokens[:length], begin) for tokens, begin, length in rows if length]


def plain(target: Target, prompt: list[int], count: int) -> list[int]:
    """The target's own greedy text, by transformers."""
    tokens = torch.tensor([prompt])
    for _ in range(count):
        tokens = torch.cat([tokens, target.model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens[0].tolist()


def half_learnt(target: Target, name: str, prompts: list[list[int]]) -> Drafter:
    """It knows how the target goes on after the first two prompts: some of its rounds are accepted."""
    drafter = fresh(name, target.shape)
    drafter.attach(target.ends)
    drafter.start_from(target.ends)
    return learn_by_heart(drafter, target, [plain(target, prompt, 14) for prompt in prompts[:2]], 3, 40)


PROMPTS = [[5, 9, 31, 7], [40, 3, 3, 77], [8, 61, 20, 50]]


@pytest.mark.parametrize("name", [STEPS, ALONE[0]])
def test_the_replayed_roots_are_the_rejected_rounds(name: str, target: Target) -> None:
    """Recounted from plain decoding: at each root of the walk the drafter's chain is drawn anew and compared with the target's text."""
    torch.manual_seed(0)
    drafter, policy, n, accepted = half_learnt(target, name, PROMPTS), TreePolicy("chain", depth=3), 14, 0
    for prompt in PROMPTS:
        speaker = Recording(drafter)
        made = generate(target, speaker, prompt, new_tokens=n, policy=policy)
        text, expected, t = plain(target, prompt, n), [], len(prompt) - 1
        while t + 3 < len(text):  # the round of root t: x[t+1] is chosen, x[t+2] is guessed first, the last token is never guessed
            drafting = Drafting(drafter)
            drafting.start(None, len(text))
            drafting.absorb(roots_of(target, drafter, torch.tensor([text]))[: t + 1])
            depth = min(3, len(text) - t - 3)
            chain = drafting.propose(policy.at_most(depth), None, SamplingParams()).tokens_BN[0].tolist()  # type: ignore[arg-type]
            right = next((i for i, token in enumerate(chain) if token != text[t + 2 + i]), len(chain))
            accepted += right
            if right < len(chain):
                expected.append((text[: t + 2] + chain, t + 2))
            t += right + 1
        found = rejected_rounds(prompt, made, speaker.chains)
        assert [(row.tokens, row.begin) for row in found] == expected and prompt + made.tokens == text
    assert accepted > 3  # the walk was not a step at a time


def test_a_round_that_ends_the_text_is_rejected_only_where_a_guess_was(target: Target) -> None:
    torch.manual_seed(0)
    drafter, prompt = half_learnt(target, STEPS, PROMPTS), PROMPTS[0]
    text = plain(target, prompt, 14)
    for stop in sorted(set(text[len(prompt) + 1 :])):
        speaker = Recording(drafter)
        made = generate(target, speaker, prompt, new_tokens=14, policy=TreePolicy("chain", depth=3), stop_ids=[stop])
        for tokens, begin in rejected_rounds(prompt, made, speaker.chains):
            emitted = text[begin : len(prompt) + len(made.tokens)]
            wrong = next(i for i, token in enumerate(tokens[begin:]) if token != text[begin + i])
            assert wrong < len(emitted) and tokens[:begin] == text[:begin]  # the target got as far as the wrong guess


@pytest.mark.slow
def test_rows_that_end_near_the_last_token_fit(target: Target) -> None:
    """Above temperature 0 a chain is cut at the context's end alone, so the last one reaches beyond the new tokens."""
    settings = REJECTED | {"temperature": 1.0, "rows": 40}
    drafter = make(STEPS, target)
    own = OnPolicy(settings, drafter, Learner(drafter, **LOSS, on_policy=settings).asked, target, seed=3)
    T, longest = batches()[0].tokens_BT.shape[1], 0
    for step in range(6):
        own.collect(step, batches(), Accelerator(cpu=True))
        longest = max([longest, *(len(tokens) for tokens, _ in kept_rows(own))])
    assert T - 3 <= longest <= T


@pytest.mark.parametrize("name", HEADS)
def test_supervised_is_the_root_at_every_drafted_depth(name: str, target: Target) -> None:
    drafter = make(name, target)
    learner = Learner(drafter, **LOSS, on_policy=REJECTED)
    own = OnPolicy(REJECTED, drafter, learner.asked, target, seed=3)
    figures = own.collect(0, batches(), Accelerator(cpu=True))
    rows = kept_rows(own)
    assert len(rows) == figures["on_policy_rows"] > 3 and 0 < figures["on_policy_rejected_rounds"] <= 1
    batch = own.draw(5, len(rows), 0)
    assert batch is not None and len(batch.tokens_BT) == len(rows)
    there = {tuple(tokens): begin for tokens, begin in rows}
    depths = range(1, learner.depth + 1)
    pairs = 0
    for b, row in enumerate(batch.tokens_BT.tolist()):
        tokens = max((t for t in there if list(t) == row[: len(t)] and not any(row[len(t) :])), key=len)
        root, drafted = there[tokens] - 2, len(tokens) - there[tokens]
        roots = {d: batch.supervised(d)[b].nonzero()[:, 0].tolist() for d in depths}
        if drafter.unrolls:
            assert roots == {d: [root] * (d <= drafted) for d in depths}
        else:  # a guess of depth d of root t is its guess of depth 1 from root t+d-1
            assert roots == {1: list(range(root, root + drafted))}
        pairs += drafted
    drafter.train()
    out = learner(batch, wanted=learner.wanted(batch))
    assert int(out.count_K.sum()) == pairs > len(rows)
    out.loss_sum.backward()
    assert any(p.grad is not None and p.grad.any() for p in drafter.parameters())


@pytest.mark.parametrize("name", FED)
def test_the_gradient_is_that_of_three_lines(name: str) -> None:
    """One root in float64, fed with what was drafted as decoding feeds it; the teacher is the model's own forward."""
    target = Target(tiny_target().model.double())
    drafter = make(name, target).double()
    learner = Learner(drafter, **LOSS, on_policy=REJECTED)
    root, chain, tokens = 4, [17, 80, 33], [5, 9, 31, 7, 40, 3]
    own = OnPolicy(REJECTED, drafter, 3, target, 0)
    row = torch.tensor([tokens + chain])
    own.kept = {"tokens": row, "begin": torch.tensor([root + 2]), "length": torch.tensor([row.shape[1]])}
    batch = own.draw(0, 1, 0)
    assert isinstance(batch, ReplayBatch) and batch.root_B.tolist() == [root] and batch.drafted_B.tolist() == [3]
    ask = batch.root_B[:, None] if drafter.anchors else None  # as learner.anchors, without the noise of training
    out = learner(batch, wanted=Wanted(ask, learner.supervised(batch, ask)))
    found = torch.autograd.grad(out.loss_sum, list(drafter.parameters()), allow_unused=True)

    memory, T = Memory(), root + 1
    draft = drafter.begin(roots_of(target, drafter, row)[:T], memory, CausalSees(T, T), ask=torch.tensor([[root]]))
    log_p_TV = target.model(row).logits[0].log_softmax(-1)
    own_BEX, loss = torch.ones(1, 1, 0, dtype=torch.bool), torch.zeros((), dtype=torch.float64)
    for d in (1, 2, 3):
        unembedding, log_p_V = drafter.unembedding(d), log_p_TV[root + d]
        log_q_V = judged(drafter, d, draft.hidden_BNH)[0, 0].log_softmax(-1)
        log_p_V = log_p_V if unembedding.ids_V is None else log_p_V[unembedding.ids_V]
        loss = loss + LOSS["decay"] ** (d - 1) * (log_p_V.exp() * (log_p_V - log_q_V)).sum()
        if d < 3:
            own_BEX = torch.ones(1, 1, d, dtype=torch.bool)
            sees = memory.sees_nodes(own_BEX, chain=True)
            draft = drafter.step(d + 1, torch.tensor([[chain[d - 1]]]), draft, torch.tensor([[root + d]]), memory, sees)
    expected = torch.autograd.grad(loss, list(drafter.parameters()), allow_unused=True)
    torch.testing.assert_close(out.loss_sum.detach(), loss.detach(), rtol=1e-9, atol=1e-9, check_dtype=False)
    assert any(g is not None and g.any() for g in expected)
    for a, b in zip(found, expected, strict=True):
        zero = torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(zero if a is None else a, b if b is not None else torch.zeros_like(zero if a is None else a),
                                   rtol=1e-7, atol=1e-9)  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_are_what_the_drafter_says_alone(temperature: float, name: str, target: Target) -> None:
    """At temperature 0 token for token; above it, drawn from the drafter's own distribution: its likelihoods fit."""
    drafter = make(name, target)
    settings = SAMPLES | {"temperature": temperature, "rows": 20, "new_tokens": 6}
    own = OnPolicy(settings, drafter, 3, target, seed=1)
    own.collect(0, batches(), Accelerator(cpu=True))
    rows, ranks = kept_rows(own), []
    for tokens, begin in rows:
        assert len(tokens) == begin + 6
        for i in range(begin, len(tokens)):
            roots = roots_of(target, drafter, torch.tensor([tokens[:i]]))[: i - 1]
            with torch.no_grad():
                draft = drafter.begin(roots, Memory(), CausalSees(i - 1, i - 1), ask=torch.tensor([[i - 2]]))
                q_V = drafter.unembedding(1).logits(draft.hidden_BNH)[0, 0].softmax(-1)
            if temperature == 0:
                assert int(q_V.argmax()) == tokens[i]
            likelier = q_V[q_V > q_V[tokens[i]]].sum()
            ranks.append(float(likelier + 0.5 * q_V[tokens[i]]))  # its mean is 1/2 if q is true, its spread at most a uniform's
    if temperature == 1:
        assert abs(sum(ranks) / len(ranks) - 0.5) < 4 * (1 / 12 / len(ranks)) ** 0.5
    batch = own.draw(0, 5, 0)
    assert batch is not None and not isinstance(batch, ReplayBatch) and len(batch.tokens_BT) == 5
    for b, tokens in enumerate(batch.tokens_BT.tolist()):
        begin = next(n for row, n in rows if row == tokens[: len(row)])
        assert batch.supervised(1)[b].nonzero()[:, 0].tolist() == list(range(begin - 2, begin + 4))


def collected(own: OnPolicy, micro: list[TokenBatch], step: int = 0) -> list[tuple[list[int], list[int]]]:
    """(the prompt, what the drafter says) of each row"""
    own.collect(step, micro, Accelerator(cpu=True))
    return [(tokens[:begin], tokens[begin:]) for tokens, begin in kept_rows(own)]


@pytest.mark.parametrize("turn", [None, 20])
def test_prompts_are_all_beginnings_of_documents_before_a_supervised_token(
    turn: int | None, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that leave room for the new tokens, in the row and before the turn of a longrope target."""
    monkeypatch.setattr(Target, "rope_switch", turn)
    (batch,) = micro = batches()
    batch.loss_mask_BT &= torch.rand(batch.tokens_BT.shape) < 0.4
    wanted = []
    for tokens, mask, numbers in zip(batch.tokens_BT.tolist(), batch.loss_mask_BT.tolist(), batch.documents_BT.tolist(), strict=True):
        for first in sorted({numbers.index(number) for number in numbers}):
            size = numbers.count(numbers[first])
            wanted += [tokens[first : first + n] for n in range(2, size) if mask[first + n] and n + 8 <= (turn or len(tokens))]
    own = OnPolicy(SAMPLES | {"rows": 1000}, make(ALONE[0], target), 3, target, seed=1)
    assert sorted(prompt for prompt, _ in collected(own, micro)) == sorted(wanted) and len(wanted) > 10


def test_each_collection_and_each_step_draws_for_itself(target: Target) -> None:
    own = OnPolicy(SAMPLES | {"rows": 12}, make(ALONE[0], target), 3, target, seed=1)
    assert [prompt for prompt, _ in collected(own, batches(), 0)] != [prompt for prompt, _ in collected(own, batches(), 1)]
    drawn = [batch.tokens_BT.tolist() for place in ((0, 0), (1, 0), (0, 1)) if (batch := own.draw(place[0], 4, place[1]))]
    assert len(drawn) == 3 and drawn[0] not in drawn[1:]  # another step, and another process


def test_each_sampled_token_has_random_numbers_of_its_own(target: Target) -> None:
    """At a temperature at which nothing else decides: of one prompt no two rows go on alike, and none repeats a token."""
    (batch,) = micro = batches()
    for x in vars(batch).values():
        x[:] = x[0].clone()
    batch.loss_mask_BT[:] = torch.arange(batch.tokens_BT.shape[1]) == 5
    own = OnPolicy(SAMPLES | {"rows": 4, "temperature": 1e4}, make(ALONE[0], target), 3, target, seed=1)
    rows = collected(own, micro)
    assert len(rows) == 4 and len({tuple(prompt) for prompt, _ in rows}) == 1
    assert len({tuple(said) for _, said in rows}) == 4 and min(len(set(said)) for _, said in rows) > 4


def test_a_sample_ends_where_the_target_stops(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SAMPLES | {"rows": 1, "temperature": 0.0}
    ((prompt, whole),) = collected(OnPolicy(settings, make(ALONE[0], target), 3, target, seed=1), batches())
    monkeypatch.setattr(Target, "stop_ids", (whole[2],))
    assert collected(OnPolicy(settings, make(ALONE[0], target), 3, target, seed=1), batches()) == [
        (prompt, whole[: whole.index(whole[2]) + 1])
    ]


def test_the_noise_of_training_is_not_decoded_with_and_comes_back(target: Target) -> None:
    drafter, rows = make(NOISY, target), []
    drafter.noise = 1.0  # type: ignore[assignment]
    for training in (False, True):
        drafter.train(training)
        rows.append(collected(OnPolicy(REJECTED, drafter, 3, target, seed=1), batches()))
        assert drafter.training == training
    assert rows[0] == rows[1]


def arm_of(name: str, target: Target, folder: Path, on_policy: Any, label: str = "", **changes: Any) -> Arm:
    drafter = make(name, target, **changes)
    torch.manual_seed(5)
    folder.mkdir(parents=True, exist_ok=True)
    loop = {k: v for k, v in LOOP.items() if k not in COMMON}
    loss = LOSS | {"on_policy": on_policy}
    return Arm(label, drafter, folder, Tracker(folder, {}), {"x": 1}, {}, loss=loss, target=target, seed=7, **loop)


def trained(arms: list[Arm], target: Target, accelerator: Accelerator | None = None, **changes: Any) -> list[dict[str, Tensor]]:
    packed = repetitive()

    def stream(start: int, rank: int, world: int) -> Iterator[TokenBatch]:
        return packed.stream(4, 0, start, rank, world)

    loop = {k: (LOOP | changes)[k] for k in COMMON}
    fit(arms, stream, lambda batch, taps: look(batch, target, taps), [], accelerator or Accelerator(cpu=True), **loop)
    return [arm.drafter.state_dict() for arm in arms]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].equal(b[k]) for k in a)


@pytest.mark.parametrize(("name", "settings"), [(STEPS, REJECTED), (ALONE[0], SAMPLES)], ids=["rejected", "samples"])
def test_a_resumed_arm_goes_on_with_the_same_rows(name: str, settings: dict[str, Any], target: Target, tmp_path: Path) -> None:
    """Stopped at step 3, between the collections of steps 2 and 4."""
    (at_once,) = trained([arm_of(name, target, tmp_path / "a", settings)], target)
    trained([arm_of(name, target, tmp_path / "b", settings)], target, steps=6, save_every=3, keep=9)
    newest = checkpoint.folders(tmp_path / "b")[-1]
    assert newest.name.endswith("6")
    checkpoint.remove(newest)
    resumed = arm_of(name, target, tmp_path / "b", settings)
    (again,) = trained([resumed], target)
    assert equal(at_once, again)
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert {"train/on_policy_rows", "train/on_policy_acceptance"} <= lines[-1].keys() and 0 < lines[-1]["train/on_policy_acceptance"] < 1
    if settings is REJECTED:
        assert 0 < lines[-1]["train/on_policy_rejected_rounds"] <= 1 <= lines[-1]["train/on_policy_accepted_length"]


def test_other_arms_are_untouched(target: Target, tmp_path: Path) -> None:
    def side_by_side(folder: Path, on_policy: Any) -> list[dict[str, Tensor]]:
        return trained([arm_of(STEPS, target, folder / str(i), x, label=str(i)) for i, x in enumerate([None, on_policy])], target)

    plain, own = side_by_side(tmp_path / "a", None), side_by_side(tmp_path / "b", REJECTED)
    assert equal(plain[0], own[0]) and not equal(plain[1], own[1])
    alone = trained([arm_of(STEPS, target, tmp_path / "c", REJECTED)], target)
    assert equal(own[1], alone[0])  # and it learns what it would learn alone


def test_own_rows_weigh_their_share(target: Target, tmp_path: Path) -> None:
    """The gradient is (1 - share) of the mean over the data's pairs plus ``share`` of the mean over its own."""
    settings, micro = REJECTED | {"share": 0.25}, batches()
    arm = arm_of(STEPS, target, tmp_path, settings)
    arm.drafter.train()
    arm.open(Accelerator(cpu=True), resume=False)
    step = arm.start(micro, 6)
    arm.learn(step, look(micro[0], target, arm.drafter.taps), 0, True)
    found = [p.grad.clone() for p in arm.drafter.parameters() if p.grad is not None]
    total = float(step.loss_sum / step.count)
    arm.drafter.zero_grad()
    assert arm.on_policy is not None
    own = arm.on_policy.draw(0, 4, 0)
    data = look(micro[0], target, arm.drafter.taps)
    loss = torch.zeros(())
    for batch, share in ((data, 0.75), (own, 0.25)):
        assert batch is not None
        out = arm.learner(batch)
        loss = loss + share * out.loss_sum / out.weight_sum
    loss.backward()
    torch.testing.assert_close(found, [p.grad for p in arm.drafter.parameters() if p.grad is not None], rtol=1e-4, atol=1e-6)
    assert total == pytest.approx(float(loss.detach()), rel=1e-5)


def test_nothing_rejected_is_the_data_alone(target: Target, tmp_path: Path) -> None:
    arm = arm_of(STEPS, target, tmp_path, REJECTED)
    arm.open(Accelerator(cpu=True), resume=False)
    arm.start(batches(), 6)
    assert arm.on_policy is not None and arm.on_policy.kept is not None
    arm.on_policy.kept = {k: torch.zeros_like(x[:1]) for k, x in arm.on_policy.kept.items()}
    arm.fitted.steps = 1  # no collection
    arm.drafter.zero_grad()
    step = arm.start(batches(), 6)
    assert float(step.loss_sum) == 0 and float(step.count) == pytest.approx(arm.learner.count(arm.learner.wanted(batches()[0])))
    assert not any(p.grad is not None for p in arm.drafter.parameters())
    assert not arm.on_policy.state(arm.accelerator)["length"].any()


@pytest.mark.parametrize("trimmed", [False, True])
def test_data_without_supervision_leave_the_rows_of_its_own(trimmed: bool, target: Target, tmp_path: Path) -> None:
    """Nothing is collected from such a batch either; what was kept is learnt from."""
    vocabulary = {"draft_vocab": list(range(0, 96, 3))} if trimmed else {}
    arm = arm_of(STEPS, target, tmp_path, REJECTED, **vocabulary)
    arm.drafter.train()
    arm.open(Accelerator(cpu=True), resume=False)
    arm.start(batches(), 6)
    for number in (1, 2):  # without a collection, and with one
        arm.fitted.steps, (micro,) = number, batches()
        micro.loss_mask_BT[:] = False
        arm.drafter.zero_grad()
        step = arm.start([micro], 6)
        out = arm.learn(step, look(micro, target, arm.drafter.taps), 0, True)
        grads = [p.grad for p in arm.drafter.parameters() if p.grad is not None]
        assert (
            any(g.any() for g in grads)
            and all(g.isfinite().all() for g in grads)
            and float(out.loss_sum.detach()) == 0 < float(step.loss_sum)
        )


def test_a_drafter_that_reads_states_cannot_go_on_alone(target: Target) -> None:
    with pytest.raises(UserError, match=r"loss\.on_policy\.kind=samples .* rejected"):
        Learner(make(STEPS, target), **(LOSS | {"on_policy": SAMPLES}))


def test_a_target_that_changes_is_refused(target: Target, tmp_path: Path) -> None:
    lora = {"rank": 2, "alpha": 4, "names": ["q_proj"], "lr": 1e-3, "start": 0.5, "weight": 1.0}
    own = {k: v for k, v in LOOP.items() if k not in COMMON}
    loss = LOSS | {"on_policy": REJECTED}
    with pytest.raises(UserError, match=r"loss.on_policy .* trainer.lora"):
        Arm("", make(STEPS, target), tmp_path, Tracker(tmp_path, {}), {}, {}, loss=loss, target=target, lora=lora, **own)


def test_no_room_for_new_tokens_is_named(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"loss.on_policy.new_tokens=40 leaves no room"):
        trained([arm_of(STEPS, target, tmp_path, REJECTED | {"new_tokens": 40})], target)


def test_damaged_rows_of_a_checkpoint_are_named(target: Target, tmp_path: Path) -> None:
    trained([arm_of(STEPS, target, tmp_path, REJECTED)], target)
    path = checkpoint.folders(tmp_path)[-1] / "on_policy.safetensors"
    whole = load_file(path)
    for key, bad in (("tokens", whole["tokens"] + 96), ("begin", whole["begin"] + 99), ("length", whole["length"].float())):
        save_file(whole | {key: bad}, path)
        with pytest.raises(UserError, match=r"cannot resume: .*on_policy.safetensors"):
            arm_of(STEPS, target, tmp_path, REJECTED).open(Accelerator(cpu=True), resume=True)
    path.unlink()
    with pytest.raises(UserError, match=r"cannot resume: .*on_policy.safetensors"):
        arm_of(STEPS, target, tmp_path, REJECTED).open(Accelerator(cpu=True), resume=True)


def test_a_whole_run(composed: Any, target_folder: Path, conversations: Path, tmp_path: Path) -> None:
    small = ["loss=on_policy_rejected", "loss.on_policy.rows=2", "loss.on_policy.new_tokens=8", "loss.on_policy.every=2"]
    report = run(**composed(*small_run(target_folder, conversations, tmp_path / "run"), *small))[""]
    assert report["lossless"] and report["loss"]["on_policy"]["kind"] == "rejected"
    assert (tmp_path / "run" / "checkpoints" / "step-00000004" / "on_policy.safetensors").is_file()


@pytest.mark.slow
def test_two_processes_collect_from_their_own_rows(tmp_path: Path) -> None:
    """Both end with the same weights, also when the second half is resumed."""
    torchrun = [*TORCHRUN, "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tests.trainers.two_on_policy", STEPS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    ends = {(part, rank): load_file(tmp_path / f"{part}-{rank}") for part in ("at_once", "again") for rank in (0, 1)}
    rows = {place: end.pop("rows") for place, end in ends.items()}
    assert all(equal(ends["at_once", 0], end) for end in ends.values())
    assert not rows["at_once", 0].equal(rows["at_once", 1])
    assert all(rows["at_once", rank].equal(rows["again", rank]) for rank in (0, 1))


def test_a_head_in_another_dtype_is_cast_once() -> None:
    """A collection is some hundred guesses; the target's head is the largest matrix there is."""
    target = Target(tiny_target().model.bfloat16())
    name = next(name for name in FED if make(name, target).unembedding(1).weight_VH is target.ends.head_VD)
    drafter, casts = make(name, target).float(), list[torch.dtype]()
    ends = drafter.ends

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name == "aten::_to_copy" and args[0].data_ptr() == ends.head_VD.data_ptr():
                casts.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    own = OnPolicy(REJECTED, drafter, 3, target, seed=3)
    with Casts():
        figures = own.collect(0, batches(), Accelerator(cpu=True))
    assert casts == [torch.bfloat16] and figures["on_policy_rows"] > 3 and drafter.ends is ends
