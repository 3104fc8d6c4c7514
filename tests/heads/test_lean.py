"""Decoders and drafters in lean form say what their own modules say, and what is not of their shape is left to its own modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from headstart.heads import frozen, lm, native, prepack
from headstart.heads.base import TargetShape
from headstart.heads.layers import DecoderLayer, Rope, freeze
from headstart.heads.lean import _known as known
from headstart.heads.lm import Backbone
from headstart.heads.memory import Memory, Slots
from headstart.heads.visibility import CausalSees
from headstart.inference.decoding.context import Context
from headstart.inference.decoding.target import Target
from headstart.inference.decoding.tree import Tree
from tests.hostile import ROOT
from tests.orders import ORDERS, faster
from tests.tiny_targets import tiny_target

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "llama, no groups": ("llama", dict(num_key_value_heads=2)),
    "llama, yarn": ("llama", dict(rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=64))),
    "qwen2": ("qwen2", {}),  # biases of queries, keys and values
    "qwen3": ("qwen3", {}),  # norms of each head
    "mistral": ("mistral", dict(sliding_window=None)),
}
TREE = [4, 5, 6, 7, 8], [-1, -1, 0, 0, 2]


def states(target: Target, texts: int = 1) -> list[Tensor]:
    """Of a prompt, one row, a chain and a tree, each behind what was kept: taps and final states, those of all ``texts`` together."""
    found: list[list[Tensor]] = []
    for shift in range(texts):
        context, said = Context(target, (0, 3, 6)), []
        for rows, tree in (([*range(9, 29)], None), ([3], None), ([*range(4)], None), ([3, 4, 5, 6, 7, 8], TREE)):
            tokens = torch.tensor(rows, device=target.device) + shift
            taps, final = context.read(tokens, None if tree is None else Tree.of(*tree, device=target.device))
            said += [*taps.values(), final]
            context.keep([0, 1, 3] if tree is not None else len(rows))
        found.append(said)
    return [torch.cat(of, dim=-2) for of in zip(*found, strict=True)]


def assert_as_near(exact: Tensor, theirs: Tensor, ours: Tensor) -> None:
    """To what fp32 says. By chance alone one row in twelve of 32 numbers is not: give it the states of ``MANY`` texts."""
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm() + 1e-3 * exact.norm()


MANY = 20


@pytest.fixture(params=ORDERS)
def orders(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    faster(monkeypatch, request.param)


@pytest.mark.usefixtures("orders")
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_a_lean_decoder_says_what_its_modules_say(shape: str) -> None:
    name, changes = SHAPES[shape]
    target = tiny_target(name, **changes)
    for bias in (p for n, p in target.model.named_parameters() if n.endswith("bias")):
        bias.data.normal_()
    before = states(target)
    target.prepack()
    assert target.reader.lean is not None
    for a, b in zip(before, states(target), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_in_half_precision_it_is_as_far_from_fp32_as_the_modules_themselves() -> None:
    target = tiny_target("llama")
    exact, half = states(target, MANY), Target(copy.deepcopy(target.model).bfloat16(), name="half")
    theirs = states(half, MANY)
    half.prepack()
    assert half.reader.lean is not None
    for right, a, b in zip(exact, theirs, states(half, MANY), strict=True):
        assert_as_near(right, a.float(), b.float())


class _Scaled(nn.Module):
    """A norm by its looks, another by its numbers."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return 1.1 * torch.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


def test_another_of_the_same_looks_keeps_its_own_modules() -> None:
    target = tiny_target("llama")
    target.body.layers[3].input_layernorm = _Scaled(target.body.layers[3].input_layernorm)
    before = states(target)
    target.prepack()
    assert target.reader.lean is None
    for a, b in zip(before, states(target), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma3_text", "mixtral", "gpt_oss", "granite", "jetmoe"])
def test_another_shape_keeps_its_own_modules(family: str) -> None:
    changes = {"granite": dict(residual_multiplier=0.5), "jetmoe": dict(kv_channels=16, num_local_experts=4)}
    target = tiny_target(family, **changes.get(family, {})).prepack()
    assert target.reader.lean is None and target.reader.passes == "the model's own modules"


SIZES = [
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "rope_parameters", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
]  # fmt: skip


FARTHER = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", dict(sliding_window=16)),
        ("granite", dict(attention_multiplier=0.25)),
        ("granite", dict(residual_multiplier=0.9, attention_multiplier=32**-0.5)),
        ("ministral3", dict(rope_parameters=FARTHER)),
        ("llama", {}),
    ],
)
@torch.inference_mode()
def test_in_half_precision_what_hides_in_rounding_keeps_its_own_modules(family: str, changes: dict[str, Any]) -> None:
    """Where the weights are those of a trained model: a window leaves out a tenth of a state, which bf16 alone may lose."""
    tiny = AutoModelForCausalLM.from_pretrained(ROOT / "assets" / "tiny", dtype=torch.bfloat16)
    config = AutoConfig.for_model(family, **{key: getattr(tiny.config, key) for key in SIZES} | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.load_state_dict(tiny.state_dict())
    prompt = torch.arange(40)[None] % config.vocab_size
    theirs = model(prompt).logits[0].argmax(-1)
    target = Target(model, name="same weights").prepack()
    assert (target.reader.lean is not None) == (family == "llama")
    context = Context(target, ())
    ours = target.logits(context.read(prompt[0])[1])[0].argmax(-1)
    assert (theirs == ours).float().mean() > 0.9


@pytest.mark.parametrize("family", ["smollm3", "helium", "ernie4_5", "qwen3"])
def test_in_half_precision_another_rotation_keeps_its_own_modules(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some layers, or of neighbours: attention over drawn weights is so flat that bf16 does not tell."""
    sizes = dict(vocab_size=64, hidden_size=128, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    config = AutoConfig.for_model(family, **sizes, head_dim=32, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    reader = Backbone(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().get_decoder())
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", lambda: pytest.fail("a machine with a GPU would compile it for this alone"))
        assert reader._same_in_float64() == (family == "qwen3")
    reader.quicken()
    assert (reader.lean is not None) == (family == "qwen3")


def test_hooks_and_other_forwards_keep_it_from_being_lean() -> None:
    target = tiny_target("llama")
    target.body.layers[2].register_forward_pre_hook(lambda *_: None)
    assert (reader := Backbone(target.body)) and reader.quicken() is None and reader.lean is None


@pytest.mark.parametrize("rows", [1, 3, 2 * frozen.FEW // 64])
def test_a_frozen_norm_of_few_numbers_and_of_many(rows: int) -> None:
    norm, x = nn.RMSNorm(64, 1e-5), torch.randn(1, rows, 64)
    norm.weight.data.normal_()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    torch.testing.assert_close(frozen.Norm(norm)(x).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("orders")
@pytest.mark.parametrize("head_norm", [False, True])
@pytest.mark.parametrize("input_norm", [False, True])
@torch.inference_mode()
def test_a_frozen_layer_of_ours_over_any_memory(input_norm: bool, head_norm: bool) -> None:
    torch.manual_seed(0)
    shape = TargetShape("toy", 32, 1, 4, 2, 16, 48, 100, 64, 1e-5, {}, "float32")
    layer = DecoderLayer(shape, 4, 2, 48, input_norm=input_norm, head_norm=head_norm).requires_grad_(False)
    for p in layer.parameters():
        p.normal_(1.0 if p.ndim == 1 else 0.0, 0.3)
    other, rope = copy.deepcopy(layer), Rope({}, 16, 64)
    prepack.prepack(other)
    freeze(other)
    assert other.frozen is not None
    for new in (Memory, Slots):
        memories = new(), new()
        first = 0
        for rows in (7, 1, 4):
            x, cos_sin = torch.randn(1, rows, 32), rope(torch.arange(first, first + rows)[None])
            sees = CausalSees(rows, first + rows)
            a, b = (m(x, cos_sin, memory, 0, sees) for m, memory in zip((layer, other), memories, strict=True))
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
            first += rows
            assert memories[0].rows() == memories[1].rows() == first


class Foreign(Tensor):
    """A tensor of another library."""


def test_weights_in_foreign_tensors_are_left_to_their_modules() -> None:
    """Quantised ones may give the dtype that they are read in, and cannot be joined."""
    target = tiny_target("llama")
    assert known(target.body) is not None
    projection = target.body.layers[1].mlp.up_proj
    projection.weight = nn.Parameter(projection.weight.data.as_subclass(Foreign), requires_grad=False)
    assert known(target.body) is None


def test_what_is_quickened_again_lets_its_earlier_form_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep the matrices that are joined now beside the joined ones."""
    reader, found = tiny_target("llama").reader, []
    reader.quicken()
    assert reader.lean is not None
    monkeypatch.setattr(lm, "lean", lambda module, own: found.append(reader.lean))
    reader.quicken()
    assert found == [None]


def test_what_reads_packed_documents_is_asked_anew_after_prepacking() -> None:
    """The form that read them may be gone."""
    target = tiny_target("llama")
    target.quick = True
    assert not target.prepack().quick
