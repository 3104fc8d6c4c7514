"""Running models: the target, trees of guesses, verification, decoding, reports."""
