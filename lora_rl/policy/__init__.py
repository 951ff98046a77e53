"""The policy: a Megatron-Core model with LoRA adapters, its optimizer, and the actor that hosts one rank of it."""
