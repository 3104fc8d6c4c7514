"""Speculative decoding with one target: drafting and verification, for a single sequence (decode) and for many at once (engine)."""
