"""Ground: what a drafter is (base), what it is made of (layers, vocab), every drafter (one file each), saving and loading (hub)."""
