"""Weights in few bits: which numbers they can be (grid), how they lie in files (stored), and inputs cast likewise."""
