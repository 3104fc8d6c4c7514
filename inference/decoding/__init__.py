"""One target, guesses of what it will say, verification: a sequence alone (decode) and many at once (engine)."""
