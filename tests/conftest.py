"""Runs every test on one thread and from the same seed (hypothesis' examples too), without transformers' log messages."""

from __future__ import annotations

import copy
import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read at import: no test waits for a hub, however it is started
try:
    import headstart.heads  # noqa: F401
except ModuleNotFoundError:  # a checkout that is not installed
    from benchmarks import checkout  # noqa: F401
from headstart.heads import prepack
from headstart.heads.errors import UserError
from headstart.heads.files import cache_folder
from headstart.inference.decoding import auto

if find_spec("hypothesis"):  # tests/test_gpu.py also runs without hypothesis and hydra
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True)
    settings.load_profile("repeatable")


# Tests compare printed output as it looks in a file, so nothing may ask for colors or a width.
for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
if os.environ.get("TERM") in ("dumb", "unknown"):
    os.environ["TERM"] = "xterm"


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
    """Exempt all that was imported from garbage collection, which took a second at the end of every training."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def tokenised_data_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tests have their own cache of tokenized data. Processes that they start inherit it, with what is compiled already: each would
    compile it anew, at once.
    """
    own = tmp_path_factory.mktemp("tokenised")
    (own / "native").mkdir(mode=0o700)
    with suppress(UserError):  # no home, no cache
        for each in (cache_folder() / "native").glob("*.so"):
            shutil.copy2(each, own / "native")
    os.environ["HEADSTART_CACHE"] = str(own)


@pytest.fixture(scope="session", autouse=True)
def every_matrix_is_prepacked() -> None:
    """The small ones of tests too, so that tests notice if code does to a matrix what a prepacked one does not support."""
    prepack.LEAST = 1


@pytest.fixture(scope="session", autouse=True)
def rounds_are_timed_briefly() -> None:
    """``decode=auto`` chooses by these times. No test needs them to be accurate; tests of the choice itself set the times."""
    auto.TURNS, auto.ROUNDS, auto.LONG = 1, 8, 0.02


@pytest.fixture(scope="session", autouse=True)
def yamls_are_read_and_merged_once() -> Iterator[None]:
    """Hydra takes a tenth of a second for a command line, mostly to read the same files again. Overrides are still applied each time."""
    if not find_spec("hydra"):
        yield
        return
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import ConfigRepository

    read, merge, known = ConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list, dict[Any, Any]()

    def read_once(self: Any, config_path: str) -> Any:
        key = (*(source.path for source in self.get_sources()), config_path)
        if key not in known:
            known[key] = read(self, config_path)
        return known[key]

    def merged_once(self: Any, defaults: Any, repo: Any) -> Any:
        key = (*(source.path for source in repo.get_sources()), *((each.config_path, each.package) for each in defaults))
        if key not in known:
            repo.cache = copy.deepcopy(repo.cache)  # merging changes the cached configs in place
            known[key] = merge(self, defaults, repo)
        return copy.deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigRepository, "load_config", read_once)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merged_once)
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a folder in a bucket of a server on this machine."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    for key, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{key}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    yield "s3://bucket/captured"
    s3fs.S3FileSystem().rm("bucket", recursive=True)  # all servers of a process share their buckets
    server.stop()
