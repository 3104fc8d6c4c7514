"""EAGLE-3 and P-EAGLE with a sliding window and with Qwen3's head norms, against loops in float64, and against themselves: training,
decoding, many sequences at once.

Shapes: [D] a row, [T, D] rows.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import windows
from headstart.heads.base import Drafter, Roots
from headstart.heads.errors import UserError
from headstart.heads.memory import Memory, Slots
from headstart.heads.unroll import unroll
from headstart.heads.visibility import CausalSees, ChainSees, LaterSees, MaskSees, Sees
from headstart.heads.windows import WindowSees
from headstart.inference.decoding.decode import generate
from headstart.inference.decoding.fixed import FixedMemory
from headstart.inference.decoding.propose import Drafting, begin
from tests.drafters import fresh, make, random_tokens, roots_of
from tests.heads.test_blocks import EXACT, Loops
from tests.heads.test_parity import absorb, grow, logits, trained
from tests.inference.decoding.test_engine import POLICIES, check_lossless
from tests.tiny_targets import tiny_target

TARGET = functools.cache(tiny_target)
DEPTH, WINDOW = 4, 6
CASES: list[tuple[str, dict[str, Any]]] = [
    ("eagle", dict(layers=2)),
    ("eagle", dict(layers=2, qk_norm=True, window_slides=False)),
    ("eagle", dict(window_slides=False, fc_norm=False, norm_before_fc=True, norm_before_residual=True)),  # speculators' defaults
    ("eagle", dict(qk_norm=True, window=None)),
    ("eagle", dict(window=2)),  # fewer than the depths
    ("peagle", dict(layers=2, depth=DEPTH)),
    ("peagle", dict(layers=1, depth=DEPTH, qk_norm=True, mask_token=95, window=DEPTH)),
]
EACH = pytest.mark.parametrize(("head", "changes"), CASES, ids=range(len(CASES)))


def windowed(head: str, changes: dict[str, Any]) -> Any:
    return make(head, TARGET(), **(dict(window=WINDOW) | changes))


class EagleLoops(Loops):
    """EAGLE-3 row by row. ``seen``: keys and values of the rows that a row sees, in each layer."""

    def __init__(self, drafter: Any) -> None:
        super().__init__(drafter, TARGET())
        self.w = {key: value.double() for key, value in self.w.items()}
        self.embed = self.embed.double()  # type: ignore[assignment]
        self.drafter = drafter

    def feature(self, tapped: Tensor) -> Tensor:
        if "fc_norm.0.weight" in self.w:
            tapped = torch.cat([self.norm(x, f"fc_norm.{i}") for i, x in enumerate(tapped.split(32))])
        return self.w["fc.weight"] @ (self.norm(tapped, "input_norm") if "input_norm.weight" in self.w else tapped)

    def row(self, token: Tensor, x: Tensor, position: int, seen: list[list[Any]]) -> tuple[Tensor, list[Any]]:
        """The last layer's output, and the row's own keys and values in each layer."""
        own = []
        for i, layer in enumerate(["midlayer", *(f"layers.{i}" for i in range(len(self.drafter.layers)))]):
            if i == 0:
                normed = self.norm(x, "midlayer.hidden_norm")
                into = torch.cat([self.norm(token, "midlayer.input_layernorm"), normed])
                x = normed if self.drafter.midlayer.norm_before_residual else x
            else:
                into = self.norm(x, f"{layer}.input_layernorm")
            own.append(self.key_value(into, layer, position))
            x = self.mlp(x + self.attend(into, layer, position, [*seen[i], own[-1]]), layer)
        return x, own

    def chain(self, roots: Roots, t: int) -> list[Tensor]:
        """What meets the output head, depth 1 to ``DEPTH`` of root t."""
        tapped = torch.cat([roots.states[tap][0] for tap in self.drafter.taps], dim=-1).double()
        chosen, window, parallel = roots.chosen_BT[0].tolist(), self.drafter.window, hasattr(self.drafter, "mask_hidden")
        kept: list[list[Any]] = []

        def seen(position: int) -> list[list[Any]]:
            near = [p for p in range(len(kept)) if window is None or position - p < window]
            return [[kept[p][i] for p in near] + [x[i] for x in nodes] for i in range(1 + len(self.drafter.layers))]

        nodes: list[list[Any]] = []
        for root in range(t + 1):
            x, own = self.row(self.embed[chosen[root]], self.feature(tapped[root]), root, seen(root))
            kept.append(own)
        found = [self.norm(x, "norm")]
        for position in range(t + 1, t + DEPTH):
            if parallel:
                mask = self.w["mask_embedding"] if "mask_embedding" in self.w else self.embed[self.drafter.mask_token]
                token, x = mask, self.feature(self.w["mask_hidden"][0, 0])
            else:
                token, x = self.embed[chosen[position]], found[-1] if self.drafter.norm_output else x
            x, own = self.row(token, x, position, seen(position if self.drafter.window_slides else t))
            nodes.append(own)
            found.append(self.norm(x, "norm"))
        return found


@torch.no_grad()
@EACH
@pytest.mark.parametrize("closed_form", [True, False])
def test_it_is_its_definition(head: str, changes: dict[str, Any], closed_form: bool) -> None:
    drafter = windowed(head, changes)
    roots = roots_of(TARGET(), drafter, torch.tensor([random_tokens(18, seed=3)]))
    drafts = unroll(drafter, roots, None, DEPTH, closed_form)
    for t in (0, 4, 9, 13):
        for draft, expected in zip(drafts, EagleLoops(drafter).chain(roots, t), strict=True):
            torch.testing.assert_close(draft.hidden_BNH[0, t].double(), expected, **EXACT)


@torch.no_grad()
@EACH
@pytest.mark.parametrize("kind", ["slots", "growing", "prepacked"])
def test_what_is_trained_is_what_is_decoded(head: str, changes: dict[str, Any], kind: str) -> None:
    drafter, tokens = windowed(head, changes), random_tokens(30, seed=1)
    roots = roots_of(TARGET(), drafter, torch.tensor([tokens]))
    expected = trained(drafter, roots, None, DEPTH, closed_form=True)
    if kind == "prepacked":
        drafter.prepack()
    memory, stop = Memory() if kind == "growing" else Slots(30 + 2 * DEPTH), 0
    for piece in (7, 1, 5, 2, 1):
        start, stop = stop, stop + piece
        draft = absorb(drafter, roots, memory, start, stop)
        rows, root = memory.rows(), stop - 1
        found = [logits(drafter, 1, draft)[0, 0], *grow(drafter, draft, root, tokens[root + 2 : root + 1 + DEPTH], memory)]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b[0, root], **EXACT)
        memory.rewind(rows)


@torch.no_grad()
@EACH
def test_many_sequences_at_once(head: str, changes: dict[str, Any]) -> None:
    """Two sequences of different lengths in the engine's memory, where nodes stand before the roots: a chain of true tokens on each."""
    drafter, lengths = windowed(head, changes), (13, 9)
    alone = [roots_of(TARGET(), drafter, torch.tensor([random_tokens(n + DEPTH, seed=n)])) for n in lengths]
    expected = [trained(drafter, roots, None, DEPTH, closed_form=True) for roots in alone]
    memory = FixedMemory(2, 40, DEPTH, torch.device("cpu"))
    for kept, take in ((0, 4), (4, 2)):  # the prompt's rows; some more of it behind them
        part = joined([r[kept : kept + take] for r in alone])
        drafter.begin(part, memory, memory.load([0, 1], [kept, kept], take), torch.tensor([[take - 1]] * 2))
    memory.loading, stops = None, [6, 6]
    memory.kept_B[:] = torch.tensor(stops)
    for more in (3, 2, 1):  # rounds: the accepted rows of one sequence are one fewer than of the other
        memory.use(2, 16, DEPTH)
        part = joined([r[s : s + more] for r, s in zip(alone, stops, strict=True)])
        counts = [more, max(more - 1, 1)]
        draft = drafter.begin(part, memory, memory.sees_roots(more), torch.tensor([[c - 1] for c in counts]))
        stops = [s + c for s, c in zip(stops, counts, strict=True)]
        memory.kept_B[:] = torch.tensor(stops)
        for depth in range(1, DEPTH + 1):
            if depth > 1:
                tokens = torch.cat([r.chosen_BT[:, [s - 1 + depth - 1]] for r, s in zip(alone, stops, strict=True)])
                own = torch.ones(2, 1, depth - 1, dtype=torch.bool)
                positions = torch.tensor([[s - 1 + depth - 1] for s in stops])
                draft = drafter.step(depth, tokens, draft, positions, memory, memory.sees_nodes(own))
            for b, stop in enumerate(stops):
                torch.testing.assert_close(logits(drafter, depth, draft)[b, 0], expected[b][depth - 1][0, stop - 1], **EXACT)


def joined(some: list[Roots]) -> Roots:
    states = {tap: torch.cat([r.states[tap] for r in some]) for tap in some[0].states}
    return Roots(*(torch.cat([getattr(r, name) for r in some]) for name in ("read_BT", "chosen_BT")), states,
                 torch.cat([r.positions_BT for r in some]))  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("slides", [True, False])
def test_long_texts_and_prompts(slides: bool) -> None:
    """More rows than a strip, two documents: training in strips, prompts in pieces, each document alone."""
    drafter = make("eagle", TARGET(), layers=2, window=70, window_slides=slides)
    lengths = (400, 150)
    tokens = [random_tokens(n, seed=n) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = (torch.arange(550) >= 400).long()[None]
    alone = [roots_of(TARGET(), drafter, torch.tensor([each])) for each in tokens]
    states = {tap: torch.cat([roots.states[tap] for roots in alone], dim=1) for tap in drafter.taps}
    roots = Roots(torch.cat([r.read_BT for r in alone], 1), torch.cat([r.chosen_BT for r in alone], 1), states, positions)
    expected = trained(drafter, roots, documents, 3, closed_form=False)
    for found, dense in zip(trained(drafter, roots, documents, 3, closed_form=True), expected, strict=True):
        torch.testing.assert_close(found, dense, **EXACT)
    for one, start in zip(alone, (0, 400), strict=True):
        memory = Slots(600)
        draft = begin(drafter, one[:100], memory)
        draft = begin(drafter, one[100:140], memory)
        torch.testing.assert_close(logits(drafter, 1, draft)[0, 0], expected[0][0, start + 139], **EXACT)
        memory = FixedMemory(1, 600, 4, torch.device("cpu"))
        drafter.begin(one[:90], memory, memory.load([0], [0], 90), torch.tensor([[89]]))
        draft = drafter.begin(one[90:140], memory, memory.load([0], [90], 50), torch.tensor([[49]]))
        draft = drafter.begin(one[140:149], memory, memory.load([0], [140], 9), torch.tensor([[8]]))
        torch.testing.assert_close(logits(drafter, 1, draft)[0, 0], expected[0][0, start + 148], **EXACT)


@pytest.mark.parametrize("depth", [1, 2, 4, 9])
@pytest.mark.parametrize("limit", [1, 7, 100, 130, 150])
def test_strips_of_a_chain_are_the_mask_written_out(depth: int, limit: int) -> None:
    """Forward and backward, grouped heads, documents, more rows than a strip."""
    N, generator = 300, torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, N, 8, generator=generator, dtype=torch.float64).requires_grad_()
    kv = [torch.randn(2, 2, N, 8, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2 * depth)]
    documents = torch.arange(N)[None] // torch.tensor([[250], [140]])
    row = torch.arange(N)
    back = row[:, None] - row
    seen = (back >= 0) & (back < limit) & (documents[:, :, None] == documents[:, None])
    seen = torch.cat([seen, *[torch.eye(N, dtype=torch.bool).expand(2, N, N)] * (depth - 1)], dim=2)
    keys, values = (torch.cat(kv[i::2], dim=2).repeat_interleave(2, 1) for i in (0, 1))
    expected = ((q @ keys.mT) * 0.3).masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ values
    grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, (q, *kv), grad)
    for closed in (True, False):
        rule = WindowSees(ChainSees(documents, depth, closed_form=closed), limit)
        found = rule.attend(q, list(zip(kv[::2], kv[1::2], strict=True)), 0.3)
        torch.testing.assert_close(found, expected)
        for a, b in zip(torch.autograd.grad(found, (q, *kv), grad), wanted, strict=True):
            torch.testing.assert_close(a, b)


@EACH
def test_gradients(head: str, changes: dict[str, Any]) -> None:
    """Of all weights: in closed form, with activations computed again, by the dense mask."""
    drafter, found = windowed(head, changes).double(), []
    roots = roots_of(TARGET(), drafter, torch.tensor([random_tokens(30, 1), random_tokens(30, 2)])).to(torch.float64)
    documents, weights = torch.arange(30).expand(2, -1) // 17, list(drafter.parameters())
    for closed_form, again in ((True, False), (True, True), (False, False)):
        drafts = unroll(drafter, roots, documents, DEPTH, closed_form, checkpointing=again)
        loss = sum((logits(drafter, d, draft)[:, :10] ** 2).sum() for d, draft in enumerate(drafts, start=1))
        found.append(torch.autograd.grad(loss, weights, allow_unused=True))  # type: ignore[arg-type]
    for some in zip(*found, strict=True):
        assert some[0] is not None
        torch.testing.assert_close(some[1], some[0])
        torch.testing.assert_close(some[2], some[0])


def test_within_the_window_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers to the last bit by the same code as without a window: the strips are not called."""
    monkeypatch.setattr(windows, "strips", None)
    monkeypatch.setattr(windows, "grouped", None)
    roots, found = None, []
    for window in (None, 30):
        drafter = make("eagle", TARGET(), window=window)
        roots = roots or roots_of(TARGET(), drafter, torch.tensor([random_tokens(27, seed=2)]))
        found.append(trained(drafter, roots, None, 4, closed_form=True))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("limit", [1, 3, 11, 12, 30])
def test_who_sees_whom_counted_by_hand(limit: int) -> None:
    """The rules of decoding: a prompt, prompts of several sequences, trees before or behind the roots."""
    M = 12
    before, behind = slice(3), slice(9, None)
    own = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1]]).bool()
    nine = torch.ones(3, 9, dtype=torch.bool)
    nodes_before, nodes_behind = torch.cat([own, nine], 1), torch.cat([nine, own], 1)
    rules: list[tuple[Sees, int, Any]] = [
        (CausalSees(4, M), 4, lambda b, i: [p for p in range(9 + i) if 8 + i - p < limit]),
        (CausalSees(1, M), 1, lambda b, i: [p for p in range(M) if 11 - p < limit]),
        (LaterSees([7, 2], 3), 3, lambda b, i: [p for p in range([8, 3][b] + i) if [7, 2][b] + i - p < limit]),
        (MaskSees(nodes_before[None], before), 3, lambda b, i: [*own[i].nonzero()[:, 0].tolist(), *range(max(3, M - limit), M)]),
        (MaskSees(nodes_behind[None], behind), 3, lambda b, i: [*range(max(0, 9 - limit), 9), *(own[i].nonzero()[:, 0] + 9).tolist()]),
        (MaskSees(None, behind), 1, lambda b, i: [*range(max(0, 9 - limit), M)]),
        (MaskSees(), 1, lambda b, i: [*range(max(0, M - limit), M)]),
    ]
    for rule, rows, seen in rules:
        mask = WindowSees(rule, limit).dense(rows, M, "cpu")
        if mask is None:
            assert limit >= M
            continue
        for b in range(len(mask)):
            for i in range(rows):
                assert mask[b, 0, i].nonzero()[:, 0].tolist() == seen(b, i), (rule, b, i)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("changes", [dict(window=5), dict(window=5, window_slides=False, qk_norm=True)])
def test_lossless_in_batches_and_alone(changes: dict[str, Any], policy: str) -> None:
    drafter: Drafter = make("eagle", TARGET(), **changes)
    check_lossless(drafter, "llama", POLICIES[policy])
    text = random_tokens(11, seed=11)
    found = generate(TARGET(), Drafting(drafter), text, new_tokens=20, policy=POLICIES[policy])
    assert found.tokens == generate(TARGET(), None, text, new_tokens=20).tokens


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"head\.window=3 must be at least head\.depth=4"):
        fresh("peagle", TARGET().shape, depth=4, window=3)
    with pytest.raises(UserError, match=r"head\.window must be"):
        fresh("eagle", TARGET().shape, window=0)
    with pytest.raises(UserError, match="has no setting 'window_slides'"):
        fresh("peagle", TARGET().shape, window=16, window_slides=False)
