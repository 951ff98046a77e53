"""Rollouts: vLLM engines as Ray actors, and the vocabulary of the data that flows through a step (`types`)."""
