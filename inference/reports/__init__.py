"""Reports on what a drafter gains: measured, expected, compared, tuned, and shown to people."""
