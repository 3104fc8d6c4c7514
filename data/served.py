"""A target whose layers run in a vLLM server (data/engine.py). Its files describe it, and the server computes its hidden states.

The server's output is verified. At the start, a text of random tokens is also run with the weights in the files, layer by layer. This shows
whether the served columns are the right layers of the same weights. The text is sent again every ``AGAIN`` batches and after every
failure of the server. At the start, the server's next tokens must also match those that its last states give with the local output head.

Shape suffixes: B batch, T tokens, L served layers, D target hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from headstart.data.batch import spans
from headstart.data.endpoint import key_in
from headstart.data.engine import HOW, Engine, Said
from headstart.heads.errors import UserError
from headstart.inference.decoding.layerwise import every_state, final_norm
from headstart.inference.decoding.placement import is_main
from headstart.inference.decoding.probe import apart, rounding
from headstart.inference.decoding.stored import NotStored, StoredTarget
from headstart.inference.settings import Settings, how_to_load, located

PROBE = 48  # tokens of the text that identifies layers
BEGINNINGS = (1, 2, 3, 5, 8, 13, 21, 34)  # tokens of its prefixes, for the check of next tokens
AGAIN = 100  # batches between two checks: the server may have been replaced between two requests


class ServedTarget(StoredTarget):
    """A target whose layers run in a server. Call ``expect`` before the first ``read``, and ``close`` at the end."""

    def __init__(self, path: str, engine: Engine, layers: Sequence[int] | None = None, **how: Any) -> None:
        """``layers``: the layers that the server returns (None: the tapped ones and the last). ``how``: further arguments of StoredTarget.

        Raises NotStored if the files do not describe a target, and UserError for missing or damaged files.
        """
        super().__init__(path, **how)
        self.engine, self.layers = engine, tuple(layers or ())
        self._norm = final_norm(self)
        self._begun: dict[bytes, Future[list[Said]]] = {}
        self._reads = 0

    def expect(self, taps: Collection[int], length: int) -> None:
        """Check that the server returns this target's layers for ``taps`` and takes ``length`` tokens. Raises UserError if not."""
        wanted, longest = sorted({*taps, self.shape.layers}), self.engine.longest
        self.layers = self.layers or tuple(wanted)
        self.check_taps(self.layers)
        if list(self.layers) != sorted({*self.layers, *wanted}):
            raise UserError(f"served.layers={list(self.layers)} must rise, and hold {wanted}: those that are read, and the last")
        if longest is not None and longest <= length:
            raise UserError(f"{self.engine.said} takes {longest} tokens, one more than a document may have: start it with --max-model-len "
                            f"{length + 1}, or set trainer.length={longest - 1} (of `python -m data`: length)")  # fmt: skip
        plain = torch.tensor(sorted({*range(self.shape.vocab_size)} - {*self.tokenizer.added_tokens_decoder}))  # no image tokens
        tokens_T = plain[torch.randint(len(plain), (min(PROBE, length),), generator=torch.Generator().manual_seed(0))]
        texts = [tokens_T[:n].tolist() for n in (*BEGINNINGS, len(tokens_T)) if n <= len(tokens_T)]
        said = self._ask(texts).result()
        self._check_next_tokens(said)
        self._probe, self._probed, self._failures = texts[-1], self._columns(said[-1]), self.engine.failures
        if is_main():  # only one of several processes reads all weights
            print(f"served: reading {len(tokens_T)} tokens by the weights of {self.name} too, a layer at a time ...", flush=True)
            off = self._check_layers(every_state(self, tokens_T))
            print(f"served: {self.engine.name} of {self.engine.url}, layers {list(self.layers)}: {off:.1e} off those weights", flush=True)

    def begin(self, tokens_BT: Tensor, positions_BT: Tensor) -> None:
        """Send the texts of a batch to the server, without waiting for its states. ``read`` waits for them."""
        name = _name(tokens_BT, positions_BT)
        if name not in self._begun:
            self._begun[name] = self._ask([tokens for _, _, tokens in _documents(tokens_BT, positions_BT)])

    @torch.no_grad()
    def read(self, tokens_BT: Tensor, positions_BT: Tensor, taps: Collection[int]) -> tuple[dict[int, Tensor], Tensor]:
        """As ``Target.read``: the states by tap, and the final state, each [B, T, D]. Raises UserError if the server fails for good."""
        self.begin(tokens_BT, positions_BT)
        said = self._begun.pop(_name(tokens_BT, positions_BT)).result()
        self._reads += 1
        if self.engine.failures > self._failures or self._reads % AGAIN == 0:
            self._check_again()
        N, columns = self.shape.layers, dict[int, Tensor]()
        for k in {*taps, N}:
            columns[k] = state_BTD = torch.empty(*tokens_BT.shape, self.shape.hidden_size, dtype=self.dtype)
            for (row, start, tokens), each in zip(_documents(tokens_BT, positions_BT), said, strict=True):
                state_BTD[row, start : start + len(tokens)] = each.states_TLD[:, self.layers.index(k)]
        states = self._finished(columns)
        return {k: states[k] for k in taps}, states[N]

    def close(self) -> None:
        self.engine.close()

    def _ask(self, texts: Sequence[list[int]]) -> Future[list[Said]]:
        return self.engine.run(texts, len(self.layers), self.shape.hidden_size, self.dtype)

    def _columns(self, said: Said) -> dict[int, Tensor]:
        return self._finished({k: said.states_TLD[:, i] for i, k in enumerate(self.layers)})

    @torch.no_grad()
    def _finished(self, columns: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The states on the device. The final norm is applied to those of the last layer."""
        with torch.autocast(self.device.type, enabled=False):
            states = {k: state.to(self.device) for k, state in columns.items()}
            return states | {k: self._norm(states[k]) for k in states if k == self.shape.layers}

    # ---- is it this target? ----

    def _check_layers(self, expected: Mapping[int, Tensor]) -> float:
        """The relative distance of the served states from the expected ones, in the worst layer. ``expected``: layer -> [T, D].

        Raises UserError if a served column is another layer or of another model.
        """
        worst = 0.0
        for i, k in enumerate(self.layers):
            column_TD = self._probed[k]
            off = {other: apart(column_TD, state_TD, self.dtype) for other, state_TD in expected.items()}
            nearest = min(off, key=off.__getitem__)
            if not off[k] <= min(rounding(self.dtype), 1.01 * off[nearest]):  # in half precision, neighbouring layers may be near too
                found = f"that after {nearest} layers" if off[nearest] <= rounding(self.dtype) else "another model's"
                raise UserError(f"{self.engine.said}: state {i + 1} of {len(self.layers)} should be that after {k} layers of {self.name}, "
                                f"it is {found} ({off[k]:.0%} off): {HOW}")  # fmt: skip
            worst = max(worst, off[k])
        return worst

    def _check_next_tokens(self, said: Sequence[Said]) -> None:
        """Check that each next token of the server has nearly the largest logit for its last state here. Raises UserError if not."""
        for each in said:
            logits_V = self.ends.logits(self._columns(each)[self.shape.layers][-1:])[0].float()
            if each.next_token >= len(logits_V) or not logits_V.max() - logits_V[each.next_token] <= 0.02 * logits_V.abs().max():
                ours = f"its last states and the output head of {self.name} {int(logits_V.argmax())}"
                raise UserError(f"{self.engine.said}: after {len(each.states_TLD)} tokens it says {each.next_token}, {ours}: it serves "
                                f"another model, or other layers than {list(self.layers)}: {HOW}")  # fmt: skip

    def _check_again(self) -> None:
        """Check that the server still returns the same states: after a failure, another server may have replaced it. Raises UserError if
        they differ.
        """
        self._failures = self.engine.failures
        now = self._columns(self._ask([self._probe]).result()[0])
        for k, before_TD in self._probed.items():
            if not (off := apart(now[k], before_TD, self.dtype)) <= rounding(self.dtype):
                raise UserError(f"{self.engine.said} came back as another: its state after {k} layers is {off:.0%} off what it was")


def open_served(target: Settings, served: Settings) -> ServedTarget:
    """Open the target of the settings ``target`` (conf/target) on the server of the settings ``served`` (conf/config.yaml).

    Raises UserError for a wrong setting, a server that cannot be reached, or files that do not describe the target.
    """
    if served["folder"] is None:
        raise UserError("served.url is given without served.folder: the folder that the server writes its states to, as it is seen here")
    key = key_in(served["key"], "served.")
    engine = Engine(served["url"], served["folder"], retries=served["retries"], key=key)  # before the slower steps
    try:
        with located(target) as path:
            return ServedTarget(path, engine, served["layers"], **how_to_load(target))
    except NotStored as e:
        engine.close()
        raise UserError(f"served.url: what {target['name']} is cannot be told by its files: {e}") from None
    except BaseException:
        engine.close()
        raise


def _documents(tokens_BT: Tensor, positions_BT: Tensor) -> Iterator[tuple[int, int, list[int]]]:
    """(row, first position in the row, tokens) of each document. A document begins where positions restart."""
    for row, (tokens, positions) in enumerate(zip(tokens_BT.tolist(), positions_BT.tolist(), strict=True)):
        for start, end in spans([position - t for t, position in enumerate(positions)]):
            yield row, start, tokens[start:end]


def _name(tokens_BT: Tensor, positions_BT: Tensor) -> bytes:
    return torch.stack([tokens_BT, positions_BT]).cpu().numpy().tobytes()
