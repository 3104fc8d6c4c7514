"""Proposers beside a drafter under a tree policy: without training, composed of others, or drafting ahead of time."""
