"""Values on the command line, as Hydra reads them."""

from __future__ import annotations

import re


def quoted(value: str) -> str:
    """In quotes, with what is in it escaped."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def typed(value: str) -> str:
    """As one types it behind ``key=`` of our own doors: in quotes only where it is not read as it is."""
    return value if re.fullmatch(r"[\w./:@+=-]+", value) else quoted(value)
