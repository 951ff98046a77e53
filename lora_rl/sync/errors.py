"""Errors of weight synchronisation. Apart from the rest, so that catching them imports no torch."""


class SyncError(RuntimeError):
    """Trainer and engine disagree about weights. Never ignored: training on it would be silently wrong."""
