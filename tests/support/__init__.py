"""Helpers shared by the tests: ranks in forked processes, tiny models, configurations."""
