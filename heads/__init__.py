"""The ground layer: what a drafter is (base), its parts (layers, vocab), every drafter (one file each), saving and loading (hub)."""
