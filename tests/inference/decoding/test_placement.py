"""Targets on several devices, shared by processes, quantised, or of other shapes: they say what ``generate`` says, or one line why not."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headstart.door.launch import free_port
from headstart.heads import hub
from headstart.heads.base import TargetShape
from headstart.heads.errors import UserError
from headstart.inference import hf
from headstart.inference.decoding import auto, context
from headstart.inference.decoding.decode import check_prompt, generate, longest
from headstart.inference.decoding.decoder import generate_batch
from headstart.inference.decoding.gathered import AT_ONCE
from headstart.inference.decoding.placement import check_device, hub_answers, placement
from headstart.inference.decoding.policy import TreePolicy
from headstart.inference.decoding.probe import check_driven
from headstart.inference.decoding.propose import Drafting
from headstart.inference.decoding.stored import StoredTarget
from headstart.inference.decoding.target import Target
from tests.drafters import make, random_tokens
from tests.starting import LONGEST
from tests.tiny_targets import COMMON, MAMBA, tiny_target
from tests.trainers.conftest import TORCHRUN, save_target

ROOT = Path(__file__).resolve().parents[3]
TREE = TreePolicy(depth=3, nodes=8, branch=3)


def run(*command: str, **environment: str) -> subprocess.Popen[str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def assert_decodes_like_generate(target: Target, drafted: bool = True) -> None:
    """Plainly and with a drafter of its shape."""
    prompt = random_tokens(20, 3)
    stop = {"eos_token_id": None, "pad_token_id": 0}
    expected = target.model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, **stop)[0, 20:].tolist()
    assert generate(target, None, prompt, new_tokens=20, stop_ids=()).tokens == expected
    if drafted:
        found = generate(target, Drafting(make("eagle", target)), prompt, new_tokens=20, policy=TREE, stop_ids=())
        assert found.tokens == expected and len(set(expected)) > 3


# ---- several devices, several processes ----


@pytest.mark.slow
def test_two_devices() -> None:
    done = run("tests.inference.decoding.two_devices")
    said, _ = done.communicate(timeout=200)
    assert done.returncode == 0, said


@pytest.mark.slow
def test_two_processes_share_every_layer(tmp_path: Path) -> None:
    save_target(tmp_path / "target", vocab_size=304, num_hidden_layers=2, num_key_value_heads=2)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    both = [run("tests.inference.decoding.shared_layers", str(tmp_path / "target"), **where, RANK=r, LOCAL_RANK=r) for r in ("0", "1")]
    for process in both:
        said, _ = process.communicate(timeout=200)
        assert process.returncode == 0, said


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def gathered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes say of a target that they gather layer by layer; its layers are large beside the states."""
    out = tmp_path_factory.mktemp("gathered")
    folder = save_target(out / "target", hidden_size=256, intermediate_size=512)
    if request.param:
        weights = load_file(folder / "model.safetensors")
        save_file({k: x for k, x in weights.items() if k != "lm_head.weight"}, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    command = [*TORCHRUN, "--nproc-per-node", "2", "-m", "tests.inference.decoding.gathered_layers", str(folder), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
def test_a_layer_is_gathered_while_the_one_before_it_computes(gathered: list[dict[str, Any]]) -> None:
    """A pass then holds as many layers as a plan counts; gloo's own copy of a layer comes on top, on a GPU there is none."""
    for said in gathered:
        assert said["same"] and said["next"] == [True] * 3
        assert said["layers"] == pytest.approx(AT_ONCE + 1, abs=0.1)


@pytest.mark.slow
def test_the_ends_of_a_gathered_target_are_not_held_twice(gathered: list[dict[str, Any]]) -> None:
    """transformers keeps the output head whole once the whole model ran, as when a target is probed; a tied embedding after a pass, too."""
    assert [said["whole"] for said in gathered] == [[], []]


def test_one_process_has_nobody_to_share_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match=r"target\.device=tp .*start them with torchrun --nproc-per-node=GPUS -m inference"):
        check_device("tp")


def test_heads_that_cannot_be_shared_are_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig

    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UserError, match=r"target\.device=tp: 8 processes cannot share num_key_value_heads=4 equally: take tp:N .*or fsdp"):
        placement("tp", LlamaConfig(num_attention_heads=16, num_key_value_heads=4))


def test_layers_that_accelerate_keeps_on_disk_are_refused(tmp_path: Path) -> None:
    from accelerate import dispatch_model

    model = tiny_target().model
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "cpu" if i < 4 else "disk" for i in range(6)}
    dispatch_model(model, places, offload_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"model\.layers\.4\.self_attn\.q_proj\.weight and 17 other tensors do not fit on the GPUs"):
        Target(model)


# ---- quantised ----


@pytest.fixture
def eagerly() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.slow
def test_a_quantised_target(eagerly: None, tmp_path: Path) -> None:
    """BitNet, the one kind that transformers computes on a CPU by itself: ternary weights, activations of 8 bits."""
    folder = save_target(tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    (folder / "config.json").write_text(json.dumps(config))
    target = Target.load(str(folder), device="cpu")
    assert type(target.layers[0].self_attn.q_proj).__name__ == "AutoBitLinear"  # type: ignore[union-attr]
    assert target.ends.head_VD is target.model.lm_head.weight  # transformers leaves the output head alone
    assert_decodes_like_generate(target)


@pytest.mark.parametrize("load", [Target.load, StoredTarget])
def test_attention_that_sdpa_does_not_compute(load: Any, tmp_path: Path) -> None:
    """Capped scores, of which transformers 5.19 leaves out the cap; sinks, with which transformers refuses."""
    for architecture, says in (("gemma2", "caps its attention scores.*: take"), ("gpt_oss", "is not for torch's attention: take")):
        folder = str(save_target(tmp_path / architecture, architecture=architecture))
        if (load, architecture) != (StoredTarget, "gpt_oss"):  # of a stored target no layer is made
            with pytest.raises(UserError, match=rf"{says} target\.attention=eager"):
                load(folder, device="cpu")
        assert load(folder, device="cpu", attention="eager").shape.layers == 4
    folder = str(save_target(tmp_path / "uncapped", architecture="gemma2", attn_logit_softcapping=None))
    if Version(transformers.__version__) < Version("5.23"):
        assert load(folder, device="cpu").shape.layers == 4


MISSING = {"bitsandbytes": {"load_in_8bit": True}, "gptq": {"bits": 4}, "torchao": {"quant_type": "int4_weight_only"}}


@pytest.mark.parametrize("method", MISSING)
def test_a_quantised_target_whose_library_is_missing(method: str, tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) for name in (method, "optimum")):
        pytest.skip(f"{method} can be loaded here")
    folder = save_target(tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **MISSING[method]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"target .*target cannot be loaded: .*({method}|optimum|gptqmodel)"):
        Target.load(str(folder), device="cpu")


class Quantised(nn.Module):
    """An output head in 8 bits with a scale per token; its ``weight`` is no matrix of numbers."""

    bias = None

    def __init__(self, head: nn.Linear, packed: bool) -> None:
        super().__init__()
        self.scale = head.weight.abs().amax(1, keepdim=True) / 127
        whole = (head.weight / self.scale).round().to(torch.int8)
        self.packed, kept = packed, whole.flatten() if packed else whole
        self.weight = nn.Parameter(kept, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.view(len(self.scale), -1) * self.scale)


@pytest.mark.parametrize("packed", [False, True])
def test_a_quantised_output_head(packed: bool) -> None:
    model = tiny_target().model
    plain = model.lm_head.weight
    model.lm_head = Quantised(model.lm_head, packed)
    target = Target(model)
    assert target.ends.head_VD.shape == (96, 32) and target.ends.head_VD.dtype == torch.float32
    assert 0 < (target.ends.head_VD - plain).abs().max() < 0.02
    check_driven(target)
    assert_decodes_like_generate(target)


# ---- other shapes ----

OTHERS: dict[str, dict[str, Any]] = {  # layers under another name, learned positions, biases, Conv1D; logits with a scale
    "gpt2": dict(n_embd=32, n_layer=6, n_head=2, n_positions=256),
    "gpt_neox": dict(),
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "cohere": dict(logit_scale=0.25),
    "granite": dict(logits_scaling=4.0),
    "hyperclovax": dict(logits_scaling=0.25),
    "falcon_h1": MAMBA | dict(mamba_d_ssm=64, lm_head_multiplier=0.25),
    "llama4_text": dict(num_local_experts=2, intermediate_size_mlp=48),
    "qwen2": dict(rope_scaling={"type": "dynamic", "factor": 2.0}),
    "phi3": dict(
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, original_max_position_embeddings=64
    ),
}


@pytest.mark.parametrize("architecture", OTHERS)
def test_other_shapes_of_decoder(architecture: str) -> None:
    target = another(architecture, OTHERS[architecture])
    check_driven(target)
    tokens = torch.tensor([random_tokens(20, 3)])
    logits = target.model(tokens).logits[0]
    torch.testing.assert_close(target.logits(target.read(tokens, torch.arange(20)[None], ())[1][0]), logits, rtol=0, atol=1e-4)
    assert_decodes_like_generate(target)


def test_where_a_longrope_target_turns() -> None:
    assert another("phi3", OTHERS["phi3"]).rope_switch == 64
    target = tiny_target()
    assert target.rope_switch is None
    target.config.rope_parameters = {  # of each kind of layer its own
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 32},
    }
    assert target.rope_switch == 32


def test_a_prompt_beyond_the_turn_is_read_by_one_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in chunks, its beginning would be rotated as a short text is. Batches of such prompts are decoded one by one by ``hf``."""
    monkeypatch.setattr(context, "CHUNK", 16)
    target = another("phi3", OTHERS["phi3"])
    own: dict[str, Any] = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    for n in (40, 70, 100):
        prompts = torch.tensor([random_tokens(n, seed=n), random_tokens(n, seed=n + 1)])
        theirs = target.model.generate(prompts, **own)
        assert [generate(target, None, p.tolist(), new_tokens=12).tokens for p in prompts] == theirs[:, n:].tolist()
        assert torch.equal(hf.generate(target.model, None, prompts, **own), theirs)


@pytest.mark.parametrize(("tokens", "most"), [(20, 64), (64, 64), (65, 256)])
def test_how_long_a_sequence_may_be(tokens: int, most: int) -> None:
    """It stays on one side of the turn."""
    target = another("phi3", OTHERS["phi3"])
    assert longest(target, tokens) == most
    check_prompt(target, random_tokens(tokens, seed=1), most - tokens)
    with pytest.raises(UserError, match="changes its rotation at 64" if most == 64 else "exceed the target's context of 256"):
        check_prompt(target, random_tokens(tokens, seed=1), most - tokens + 1)


def test_an_auto_policy_is_measured_on_one_side_of_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own text is longer than what was asked for, which stays before the turn or is beyond it."""
    monkeypatch.setattr(auto, "TURNS", 1)
    monkeypatch.setattr(auto, "LONG", 0.0)
    target, small = another("phi3", OTHERS["phi3"]), TreePolicy("auto", depth=2, nodes=3, branch=2)
    for n in (20, 70):
        how: dict[str, Any] = dict(new_tokens=auto.WORTH, stop_ids=())
        made = generate(target, Drafting(make("eagle", target)), random_tokens(n, seed=n), policy=small, **how)
        assert made.tokens == generate(target, None, random_tokens(n, seed=n), **how).tokens


def test_sequences_of_a_batch_share_the_rotation_of_a_longrope_target() -> None:
    """Which the longest of a pass decides: so the engine stays below the turn, and says so."""
    target = another("phi3", OTHERS["phi3"])
    prompts = [random_tokens(n, seed=n) for n in (52, 5)]
    alone = [generate(target, None, p, new_tokens=12).tokens for p in prompts]
    assert [g.tokens for g in generate_batch(target, None, prompts, new_tokens=12)] == alone
    with pytest.raises(UserError, match="up to 64 tokens"):
        generate_batch(target, None, [random_tokens(70, seed=1), prompts[1]], new_tokens=8)


def test_a_draft_model_with_learned_positions_at_the_end_of_its_table() -> None:
    target = another("gpt2", OTHERS["gpt2"])
    drafter = hub.build("draft_lm", target.shape, config={"model_type": "gpt2", **OTHERS["gpt2"]})
    drafter.attach(target.ends)
    prompts = [random_tokens(244, seed=3), random_tokens(7, seed=4)]
    made = generate_batch(target, drafter.eval(), prompts, new_tokens=12, policy=TreePolicy(depth=4))
    assert [g.tokens for g in made] == [generate(target, None, p, new_tokens=12).tokens for p in prompts]


def another(architecture: str, given: dict[str, Any]) -> Target:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture, **({} if "n_embd" in given else COMMON) | {"vocab_size": 96} | given)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.25)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return Target(model, name=architecture)


@pytest.mark.parametrize(
    ("architecture", "given", "says"),
    [
        ("bloom", dict(n_layer=6, n_head=2), "bloom: it counts positions itself"),
        ("mamba", dict(), "mamba: .*(counts positions itself|layers of kind)"),
        ("recurrent_gemma", dict(), "recurrent_gemma: layers of kind (recurrent|linear_attention) cannot drop rejected positions"),
        (
            "doge",
            dict(num_key_value_heads=2, keep_window_size=64),
            "doge: of more than 64 keys its layers choose 64, of equal ones by where",
        ),
        ("gptj", dict(n_embd=32, n_layer=6, n_head=2, rotary_dim=8), "gptj: an output head with a bias is not supported"),
    ],
)
def test_a_shape_that_cannot_be_decoded_with_trees(architecture: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        another(architecture, given)


def test_attention_that_counts_rows_itself_is_refused_by_trying_it() -> None:
    """GPT-Neo masks by where a key stands in memory, its twin by what it is told."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    sizes = dict(vocab_size=96, hidden_size=32, num_layers=2, num_heads=2, max_position_embeddings=256)
    with pytest.raises(UserError, match=r"gpt_neo: its (attention|decoder) cannot be driven from outside"):
        check_driven(warm(GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global"], 2]]))))
    check_driven(another("gpt2", OTHERS["gpt2"]))


@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
def test_a_decoder_that_does_not_do_as_it_is_told(ignored: str) -> None:
    target = tiny_target()
    forward = target.body.forward

    def deaf(**inputs: Any) -> Any:
        return forward(**{key: value for key, value in inputs.items() if key != ignored})

    target.body.forward = deaf
    with pytest.raises(UserError, match=r"llama: its (attention|decoder) cannot be driven from outside"):
        check_driven(target)


def test_a_decoder_that_chokes_on_a_tree_is_refused_in_one_line() -> None:
    target = tiny_target()
    forward = target.body.forward

    def strict(attention_mask: Any = None, **inputs: Any) -> Any:
        if attention_mask is not None and attention_mask.ndim == 4:
            raise IndexError("too many indices\nfor this mask")
        return forward(**inputs)

    target.body.forward = strict
    with pytest.raises(UserError, match=r"cannot be driven from outside, IndexError at too many indices: take another target$"):
        check_driven(target)
    target.tensor = 2  # as with target.device=tp, whose plan for this architecture may be the cause
    with pytest.raises(UserError, match=r"IndexError at too many indices: take target.device=fsdp .in training., or another target$"):
        check_driven(target)


def test_a_window_that_counts_rows_and_not_positions() -> None:
    """Nothing is wrong until rows of memory stand between: in the static path a whole scratch does."""
    target = tiny_target(sliding_window=64)  # llama's config keeps what it does not know
    forward = target.body.forward

    def windowed(attention_mask: Any = None, **inputs: Any) -> Any:
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4:
            R, M = attention_mask.shape[-2:]
            far = torch.arange(M)[None] <= torch.arange(M - R, M)[:, None] - 64
            attention_mask = attention_mask.masked_fill(far, torch.finfo(attention_mask.dtype).min)
        return forward(attention_mask=attention_mask, **inputs)

    target.body.forward = windowed
    with pytest.raises(UserError, match="a tree of guesses in front of what was read is read"):
        check_driven(target)


def warm(model: Any) -> Target:
    """Weights larger than usual, so that rows hang on what they see."""
    torch.manual_seed(0)
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.25)
    return Target(model, name=model.config.model_type)


def test_a_config_that_asks_for_tuples() -> None:
    model = tiny_target().model
    model.config.return_dict = False
    check_driven(target := Target(model))
    assert_decodes_like_generate(target)


def test_logits_that_are_more_than_the_head() -> None:
    target = tiny_target()
    forward = target.model.forward
    target.model.forward = lambda *args, **kwargs: halved(forward(*args, **kwargs))
    with pytest.raises(UserError, match="llama: its logits are more than its output head over its final state"):
        check_driven(target)


def halved(out: Any) -> Any:
    out.logits = out.logits / 2
    return out


def test_a_config_without_a_shape_that_is_known() -> None:
    from transformers import GPT2Config, LlamaConfig

    assert TargetShape.of(GPT2Config(n_embd=32, n_head=2)).intermediate_size == 128
    assert TargetShape.of(GPT2Config(n_embd=32, n_head=2, n_inner=48)).intermediate_size == 48
    shape = TargetShape.of(LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e4}))
    assert shape.rope == {"rope_type": "default", "rope_theta": 5e4}


@pytest.mark.parametrize(("failures", "answers", "asked"), [(0, True, 1), (1, True, 2), (9, False, 2)])
def test_the_hub_is_asked_twice_before_a_process_takes_it_for_unreachable(
    monkeypatch: pytest.MonkeyPatch, failures: int, answers: bool, asked: int
) -> None:
    """And a process asks only when it first needs to know, so that it does not decide twice."""
    tries = list[str]()

    class Session:
        def head(self, url: str, timeout: float) -> None:
            tries.append(url)
            if len(tries) <= failures:
                raise TimeoutError

    monkeypatch.setattr("huggingface_hub.get_session", Session)
    hub_answers.cache_clear()
    try:
        assert [hub_answers() for _ in range(3)] == [answers] * 3 and len(tries) == asked
    finally:
        hub_answers.cache_clear()
