"""Values on the command line, in Hydra's syntax."""

from __future__ import annotations

import re


def quoted(value: str) -> str:
    """The value in single quotes, with quotes and backslashes escaped."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def typed(value: str) -> str:
    """The value as a user types it after ``key=`` in our commands: quoted only where Hydra would not read it literally."""
    return value if re.fullmatch(r"[\w./:@+=-]+", value) else quoted(value)
