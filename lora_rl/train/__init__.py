"""The loops: what a step of training is (`grpo`), how a job starts (`job`), how weights reach the engines."""
