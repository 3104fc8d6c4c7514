"""How long tests wait for a process that they start."""

from __future__ import annotations

# Seconds, below pytest's own limit. It only ends what hangs: on a busy machine torch alone may take a minute to import.
LONGEST = 280
