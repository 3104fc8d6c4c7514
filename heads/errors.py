"""The error for a user: one line that names what is wrong and what to do. Doors print it without a stack trace."""

from __future__ import annotations

import difflib
from collections.abc import Collection

LONGEST = 300  # characters of what another library said


class UserError(ValueError):
    """What a user did wrong: one line that names the key or file, and what to do."""


def first_line(error: BaseException) -> str:
    """The first line of what another library's error says, for a message of our own."""
    return (str(error).strip() or repr(error)).splitlines()[0][:LONGEST]


def near(word: str, known: Collection[str]) -> str:
    """ " (did you mean ..?)" with the known word that is most like ``word``; "" where none is like it."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""
