"""States as they are stored: held against the formats written out, and against the bytes on disk."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headstart.data.capture import capture, mean_errors
from headstart.data.index import files_in_all
from headstart.data.live import look
from headstart.data.storage import STORAGES, bytes_of, decode, encode, errors
from headstart.heads.errors import UserError
from tests.data.captures import TAPS, FakeTarget, equal, in_bf16, rows

# e4m3 as its authors have it (2209.05433, table 1): a sign, 4 bits of exponent with a bias of 7, 3 of mantissa; no infinities, one NaN
EXPONENTS, MANTISSAS = np.meshgrid(np.arange(16), np.arange(8), indexing="ij")
E4M3 = np.where(EXPONENTS == 0, MANTISSAS / 8 * 2.0**-6, (1 + MANTISSAS / 8) * 2.0 ** (EXPONENTS - 7)).flatten()[:-1]
GRIDS = {"fp8": np.concatenate([-E4M3[::-1], E4M3]), "int8": np.arange(-127.0, 128.0)}


@pytest.fixture
def states_ND() -> torch.Tensor:
    """Tokens of very different sizes, one with an outlier, one of zeros."""
    states_ND = torch.randn(50, 64) * torch.logspace(-6, 4, 50)[:, None]
    states_ND[7, 3] *= 2000
    states_ND[11] = 0
    return states_ND


@pytest.mark.parametrize("name", list(GRIDS))
def test_what_is_stored_is_the_nearest_number_of_the_format(name: str, states_ND: torch.Tensor) -> None:
    storage = STORAGES[name]
    stored_ND, scale_N = encode(states_ND, storage)
    assert stored_ND.dtype == storage.dtype and scale_N is not None
    scaled_ND = states_ND.double().numpy() / scale_N.double().numpy()[:, None]
    off_ND = np.abs(scaled_ND - stored_ND.double().numpy())
    nearest_ND = np.abs(scaled_ND[..., None] - GRIDS[name]).min(-1)
    assert np.allclose(off_ND, nearest_ND, atol=1e-4, rtol=1e-3)
    assert np.abs(scaled_ND).max(1)[np.arange(50) != 11].min() > 0.99 * storage.largest, "the whole range is used, by every token"
    back_ND = decode(stored_ND, scale_N, torch.float64)
    true_N = ((back_ND - states_ND.double()).norm(dim=1) / states_ND.double().norm(dim=1).clamp(min=1e-30)).float()
    assert torch.allclose(errors(states_ND, stored_ND, scale_N), true_N, rtol=1e-3, atol=1e-6)
    assert torch.equal(back_ND[11], torch.zeros(64).double())
    assert true_N.max() < 0.05 and true_N[[i for i in range(50) if i != 7]].max() < {"fp8": 0.035, "int8": 0.02}[name]


def test_bf16_is_the_number_itself(states_ND: torch.Tensor) -> None:
    stored_ND, scale_N = encode(states_ND.bfloat16(), STORAGES["bf16"])
    assert scale_N is None and torch.equal(decode(stored_ND, None, torch.float32), states_ND.bfloat16().float())
    assert float(errors(states_ND.bfloat16(), stored_ND, None).max()) == 0


@pytest.mark.parametrize("taps", [TAPS, (0, 2)])
@pytest.mark.parametrize("name", list(STORAGES))
def test_a_capture_takes_the_bytes_that_were_said(name, taps, tmp_path, capsys):
    """And gives back the states to within the error that it said; the final state where a supervised token is chosen, as it was asked."""
    target, packed, held = FakeTarget(), rows(), rows(seed=3, documents=60)
    read = capture(packed, target, taps, tmp_path, rows_per_shard=5, storage=name, held_out=held)
    said = capsys.readouterr().out
    live, captured = look(packed.batch(slice(None)), target, taps), read.batch(range(len(packed)))
    asked_BT = live.supervised(0) if 3 not in taps else live.tokens_BT >= 0
    assert asked_BT.sum() > 0 and (bool(asked_BT.all()) == (3 in taps))
    live.final_BTD[~asked_BT], states = 0, dict(live.states)
    if name == "bf16":
        assert equal(captured, in_bf16(live))
    found = mean_errors(read.index)
    for tap in (0, 2):
        key, error_BT = f"tap_{tap}", (captured.states[tap].float() - states[tap]).norm(dim=-1) / states[tap].norm(dim=-1).clamp(min=1e-9)
        assert float(error_BT.mean()) == pytest.approx(found[key], rel=0.2) and f"{key.replace('_', ' ')} {found[key]:.2%}" in said
    assert all({"bf16": 0, "fp8": 0.01, "int8": 0.001}[name] <= error < 0.04 for error in found.values())

    tokens = (len(packed) + 16) * 32
    final = tokens if 3 in taps else int(asked_BT.sum()) + int(held.batch(slice(0, 16)).supervised(0).sum())
    whole = bytes_of(STORAGES[name], 6, 2, tokens, final)
    headers = sum(int.from_bytes((tmp_path / file["name"]).read_bytes()[:8], "little") + 8 for file in read.files)
    assert sum(file["bytes"] for file in read.files) == whole + headers
    assert f"{whole / tokens:,.0f} bytes a token, {whole / 1e6:,.1f} MB in {files_in_all(read.index)} files" in said


def test_eight_bits_are_half_the_bytes():
    """Of the shapes of an 8B target; what a token is beside its states counts too."""
    half = {name: bytes_of(STORAGES[name], 4096, 3, 1000, 1000) for name in STORAGES}
    assert half["fp8"] == half["int8"] < 0.501 * half["bf16"]


def test_states_that_are_no_numbers_are_refused(tmp_path):
    class Broken(FakeTarget):
        def read(self, tokens_BT, positions_BT, taps):
            states, final = super().read(tokens_BT, positions_BT, taps)
            states[2][0, 5, 1] = float("inf") if self.passes == 2 else 0.0
            return states, final

    for name in STORAGES:
        with pytest.raises(UserError, match=r"^rows 3 to 4: the target's tap 2 holds NaN or infinite values"):
            capture(rows(), Broken(), (0, 2), tmp_path / name, 3, 5, storage=name)
        assert not (tmp_path / name).exists()


def test_a_tap_that_was_not_kept_everywhere_is_not_read(tmp_path):
    read = capture(rows(), FakeTarget(), (0, 2), tmp_path)
    with pytest.raises(UserError, match=r"tap 3 was not captured \(only \[0, 2\]\)"):
        read.check_taps((0, 3))
