# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = [
#   "trl==1.16.0",
#   "peft==0.21.0",
#   "torch==2.13.0",
#   "transformers==5.12.1",
# ]
# ///
"""A job with TRL and PEFT adapters, in an environment of its own; benchmarks/vs_trl.py starts it.

uv run benchmarks/trl_grpo.py SETTINGS.json RUN_FOLDER

SETTINGS.json is written by vs_trl.py from the resolved configuration of lora_rl: prompts and answers, batch, loss and
optimizer. A line of metrics.jsonl is one batch of rollouts, as it is there, with the same names.
"""

import json
import sys
import time

STARTED = time.time()

import resource  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig, PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class TimedTrainer(GRPOTrainer):
    """Books the seconds and tokens of generation; the rest of a training step is training."""

    generation_s = 0.0
    training_s = 0.0
    generated_tokens = 0
    prompt_tokens = 0
    rewards: tuple[float, ...] = ()

    def _generate(self, *args, **kwargs):
        start = time.perf_counter()
        result = super()._generate(*args, **kwargs)
        self.generation_s += time.perf_counter() - start
        return result

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.prompt_tokens += sum(map(len, prompt_ids))
        self.generated_tokens += sum(map(len, completion_ids))
        return completion_ids, logprobs

    def training_step(self, *args, **kwargs):
        start, generation = time.perf_counter(), self.generation_s
        loss = super().training_step(*args, **kwargs)
        self.training_s += time.perf_counter() - start - (self.generation_s - generation)
        return loss


class Record(TrainerCallback):
    """Writes a line per batch of rollouts, and validates now and then."""

    def __init__(self, settings: dict, folder: Path, tokenizer) -> None:
        self.settings, self.tokenizer, self.trainer = settings, tokenizer, None
        self.file = (folder / "metrics.jsonl").open("w")
        self.booked = dict.fromkeys(("generation", "training", "tokens", "prompts"), 0.0)

    def on_train_begin(self, args, state, control, **kwargs):
        self.write(0)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.settings["updates_per_step"] == 0:
            self.write(state.global_step // self.settings["updates_per_step"])

    def write(self, step: int) -> None:
        """One record."""
        trainer = self.trainer
        now = {
            "generation": trainer.generation_s,
            "training": trainer.training_s,
            "tokens": trainer.generated_tokens,
            "prompts": trainer.prompt_tokens,
        }
        spent = {key: value - self.booked[key] for key, value in now.items()}
        self.booked = now
        record = {
            "step": step,
            "time/generation": spent["generation"],
            "time/training": spent["training"],
            "tokens/generation": spent["tokens"],
            "tokens/training": spent["tokens"] + spent["prompts"],
        }
        if trainer.rewards:
            record["train/reward"] = sum(trainer.rewards) / len(trainer.rewards)
        if step % self.settings["val_period"] == 0:
            start = time.perf_counter()
            record["val/accuracy"] = self.accuracy()
            record["time/validation"] = time.perf_counter() - start
        record["elapsed_s"] = time.time() - STARTED
        record["memory/peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Share of the held-out prompts that are answered exactly, one completion each, sampled at temperature 1."""
        model = self.trainer.model
        was_training = model.training
        model.eval()
        prompts = [prompt for prompt, _ in self.settings["held_out"]]
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs.pop("token_type_ids", None)
        output = model.generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.settings["max_new_tokens"],
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        completions = output[:, inputs["input_ids"].shape[1] :]
        ended = (completions == self.tokenizer.eos_token_id).any(dim=1).tolist()
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        model.train(was_training)
        answers = [answer for _, answer in self.settings["held_out"]]
        marker = self.settings["marker"]
        right = [e and is_right(t, a, marker) for e, t, a in zip(ended, texts, answers, strict=True)]
        return sum(right) / len(right)


def is_right(text: str, answer: str, marker: str | None) -> bool:
    """Whether a completion is the answer; with a marker, whether what follows its last occurrence is."""
    return text == answer if marker is None else marker in text and text.rpartition(marker)[2].strip() == answer


def new_adapter(settings: dict) -> LoraConfig:
    """On all linears."""
    return LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        lora_dropout=0.0,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )


def main() -> None:
    """Train."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[2])
    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)

    def exact_match(completions, answer, completion_ids, **_):
        # A completion that was cut off counts as wrong.
        ended = [tokenizer.eos_token_id in ids for ids in completion_ids]
        right = [e and is_right(c, a, settings["marker"]) for e, c, a in zip(ended, completions, answer, strict=True)]
        trainer.rewards = tuple(map(float, right))
        return list(trainer.rewards)

    updates = settings["updates_per_step"]
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=settings["steps"] * updates,
        per_device_train_batch_size=settings["update_batch"],
        gradient_accumulation_steps=1,
        steps_per_generation=updates,
        num_generations=settings["group"],
        max_completion_length=settings["max_new_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=settings["clip_low"],
        epsilon_high=settings["clip_high"],
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=settings["lr"],
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(settings["lr_decay"], settings["lr_decay"]),
        warmup_steps=settings["warmup"],
        adam_beta1=settings["beta1"],
        adam_beta2=settings["beta2"],
        adam_epsilon=settings["eps"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["max_grad_norm"],
        seed=settings["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=10**9,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    record = Record(settings, folder, tokenizer)
    if settings["adapter"] is not None:
        model = PeftModel.from_pretrained(model, settings["adapter"], is_trainable=True)
    trainer = TimedTrainer(
        model=model,
        reward_funcs=exact_match,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": p, "answer": a} for p, a in settings["train"]]),
        processing_class=tokenizer,
        callbacks=[record],
        peft_config=new_adapter(settings) if settings["adapter"] is None else None,
    )
    record.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
