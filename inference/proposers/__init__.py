"""Proposers other than a drafter with a tree policy: without training, composed of others, or drafting ahead of time."""
