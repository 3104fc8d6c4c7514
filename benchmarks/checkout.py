"""Makes this checkout importable as ``headstart`` if it is not installed: GPU machines often have torch and transformers but no network."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

try:
    import headstart.heads  # noqa: F401
except ModuleNotFoundError:
    package = ModuleType("headstart")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]  # its folders lie at the top level
    sys.modules["headstart"] = package
