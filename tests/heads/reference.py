"""What serving engines compute from an exported folder, written from the formats' descriptions.

Imports nothing from heads/ and reads only the exported files. Shapes: [T, D] rows by hidden size; einsum letters: q rows, k rows
seen, h heads, d head size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class Reference:
    """A Llama-shaped drafter, from a folder."""

    kinds: list[str] = []  # of its layers; none: all have full attention

    def __init__(self, folder: Path, model: Any) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.w = {k.replace("midlayer.", "layers.0."): v.float() for k, v in load_file(folder / "model.safetensors").items()}
        self.embed, self.head = model.model.embed_tokens.weight, model.lm_head.weight
        c = self.config
        self.h, self.g, self.d, self.eps = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], c["rms_norm_eps"]
        self.kinds, rope = c.get("layer_types", []), c["rope_parameters"]
        self.frequency = rope["rope_theta"] ** (-torch.arange(0, self.d, 2).float() / self.d)
        if rope["rope_type"] == "llama3":  # long wavelengths are slowed down, medium ones are blended
            wave = 2 * torch.pi / self.frequency
            blend = (rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            blend = blend.clamp(0, 1)
            self.frequency = self.frequency * (blend + (1 - blend) / rope["factor"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.w[name + ".weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[name + ".weight"].T

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """The first half of a head and the second are the two parts of complex numbers."""
        a, b = x.chunk(2, -1)
        angle = positions[:, None, None].float() * self.frequency
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def layer(self, i: int, into: Tensor, residual: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        name, T = f"layers.{i}.", len(into)
        q, k, v = (self.linear(into, f"{name}self_attn.{x}_proj").view(T, -1, self.d) for x in "qkv")
        if f"{name}self_attn.q_norm.weight" in self.w:
            q, k = self.norm(q, f"{name}self_attn.q_norm"), self.norm(k, f"{name}self_attn.k_norm")
        if self.kinds and self.kinds[i] == "sliding_attention":
            sees = sees & (positions[:, None] - positions < self.config["sliding_window"])
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        k, v = (x.repeat_interleave(self.h // self.g, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.d**0.5
        p = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        x = residual + self.linear(torch.einsum("hqk,khd->qhd", p, v).reshape(T, -1), name + "self_attn.o_proj")
        y = self.norm(x, name + "post_attention_layernorm")
        gated = F.silu(self.linear(y, name + "mlp.gate_proj")) * self.linear(y, name + "mlp.up_proj")
        return x + self.linear(gated, name + "mlp.down_proj")

    def eagle3(self, tokens: Tensor, x: Tensor, positions: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
        """Logits over the target's vocabulary, and the state that is fed back."""
        e, n = self.norm(self.embed[tokens], "layers.0.input_layernorm"), self.norm(x, "layers.0.hidden_norm")
        x = self.layer(0, torch.cat([e, n], -1), n if self.config["norm_before_residual"] else x, positions, sees)
        for i in range(1, self.config["num_hidden_layers"]):
            x = self.layer(i, self.norm(x, f"layers.{i}.input_layernorm"), x, positions, sees)
        out = self.norm(x, "norm")
        logits = self.linear(out, "lm_head")
        if "d2t" in self.w:
            ids = torch.arange(len(self.w["d2t"])) + self.w["d2t"].long()
            logits = torch.full((len(out), self.config["vocab_size"]), -torch.inf).index_copy(1, ids, logits)
        return logits, out if self.config["norm_output"] else x

    def features(self, aux: list[Tensor]) -> Tensor:
        if self.config["fc_norm"]:
            aux = [self.norm(a, f"fc_norm.{i}") for i, a in enumerate(aux)]
        joint = torch.cat(aux, -1)
        return self.linear(self.norm(joint, "input_norm") if self.config.get("norm_before_fc") else joint, "fc")

    def eagle1(self, tokens: Tensor, x: Tensor, positions: Tensor, sees: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(torch.cat([self.embed[tokens], x], -1), "fc") + self.w["fc.bias"]
        x = self.layer(0, x, x, positions, sees)
        return x @ self.head.T, x


def markov_bias(kind: str, w: dict[str, Tensor], slots: Tensor, before: list[int]) -> Tensor:
    """What DSpark's Markov head adds to the logits of the first slots, in float64, from the formulas. ``before``: the token before each."""
    w, biases = {name: tensor.double() for name, tensor in w.items()}, list[Tensor]()
    s = torch.zeros(w["markov_w2"].shape[1], dtype=torch.float64)
    for h, token in zip(slots.double(), before, strict=False):
        m = e = w["markov_w1.weight"][token]
        if kind == "gated":
            m = e / (1 + (-w["gate.weight"] @ torch.cat([h, e]) - w["gate.bias"]).exp())
        if kind == "rnn":
            g, c, o = (w["joint.weight"] @ torch.cat([s, e, h]) + w["joint.bias"]).view(3, -1)
            m, s = o.tanh(), s / (1 + (-g).exp()) + c.tanh() / (1 + g.exp())
        biases.append(w["markov_w2"] @ m)
    return torch.stack(biases)
