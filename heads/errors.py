"""The error for a user: one line that names what is wrong and what to do, which commands print without a stack trace; warnings that are
logged once, and words of messages.
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Collection

log = logging.getLogger(__name__)

LONGEST = 300  # characters of another library's message


class UserError(ValueError):
    """A mistake of the user. Its message is one line that names the key or file, and what to do."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error, for a message of our own: at most ``LONGEST`` characters."""
    return (str(error).strip() or repr(error)).splitlines()[0][:LONGEST]


def near(word: str, known: Collection[str]) -> str:
    """ " (did you mean ..?)" with the known word that is most like ``word``; an empty string where none is like it."""
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""


def counted(number: int, noun: str) -> str:
    """ "1 prompt", "2 prompts"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def sized(count: int) -> str:
    """ "1.5 MB", "2.0 GB"."""
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.1f} GB"


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning only once in this process: its cause, such as a folder that is read again, may recur."""
    log.warning(text)
