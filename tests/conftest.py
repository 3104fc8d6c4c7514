"""Every test on one thread and from the same seed, hypothesis' examples too, without transformers' chatter."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from heads import prepack

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def one_quiet_thread() -> Iterator[None]:
    from transformers.utils import logging

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


def pytest_collection_finish() -> None:
    """What was imported stays: looking through it for garbage took a second at the end of every training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def every_matrix_is_prepacked() -> None:
    """Those of the tests are small; what is prepacked has fewer uses than a dense matrix."""
    prepack.LEAST = 1


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
