"""Ray: start or attach, place processes, call them, and name the one that failed."""
