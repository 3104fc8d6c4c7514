"""What others say is silenced for a while: what was shown and logged before is again."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
from transformers.utils import logging as bars

from headstart.heads.formats import causal_lm
from headstart.inference.decoding.info import loading
from headstart.trainers import joint


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("within", [joint.quiet, causal_lm.quiet, partial(loading, "a-target")])
def test_it_ends_as_it_began(within: Any, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (bars.enable_progress_bar if shown else bars.disable_progress_bar)()
    monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)
    try:
        with within():
            assert not bars.is_progress_bar_enabled()
        assert bars.is_progress_bar_enabled() == shown and logging.root.manager.disable == logging.INFO
    finally:
        bars.disable_progress_bar()
