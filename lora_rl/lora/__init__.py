"""Adapters: which modules they sit on, how they start, and what they mean to the merged weights."""
