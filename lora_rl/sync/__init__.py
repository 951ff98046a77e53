"""Weight synchronisation: trainer ranks send, vLLM workers receive, every push is proved by checksums."""
