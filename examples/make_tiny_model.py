"""Make a small Qwen3 model that adds two-digit numbers correctly about 40 % of the time: a start for RL.

Writes a Hugging Face model directory with random weights and a byte-level tokenizer, trains all weights by supervised
fine-tuning (examples/configs/sft_from_scratch_cpu.yaml) in some minutes, and keeps the result. Held-out pairs of the
addition task are never trained on.

    python examples/make_tiny_model.py --out examples/models/tiny-adder
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from lora_rl.config import as_sft, derive_layout, exit_on_config_error, load_config
from lora_rl.data import load_tokenizer
from lora_rl.track import read_metrics
from lora_rl.train.run import run
from lora_rl.train.sft import MODEL_FOLDER

CONFIG = Path(__file__).parent / "configs" / "sft_from_scratch_cpu.yaml"
TARGET = "val/answer_probability"

PAD, END = "<|pad|>", "<|end|>"
VOCAB_ROWS = 264  # 2 special tokens + 256 bytes, padded so that tensor parallelism 2, 4 and 8 divide it
HEAD_DIM = 32
# A conversation is the bare concatenation of its messages: a single user message equals the raw prompt.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
)


def write_tokenizer(out: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja: ids 0, 1 special, then one id per byte."""
    vocab = {token: index for index, token in enumerate([PAD, END, *sorted(ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def build_model(hidden: int, layers: int, eos_token_id: int, pad_token_id: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB_ROWS,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=hidden // HEAD_DIM // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=hidden**-0.5,  # the default 0.02 trains several times slower at this width
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=eos_token_id, pad_token_id=pad_token_id)
    return model


README = """\
# {name}

A Qwen3 model of {parameters:,} parameters, made from scratch, that adds two-digit numbers: `12+34=` -> `46<|end|>`.
Expected accuracy on held-out pairs, sampled at temperature 1: {accuracy:.3f}, after {steps} steps of cross-entropy
on 7,290 of the 8,100 pairs; the other 810 (`data.addition` with its defaults) were never trained on. It was stopped
there on purpose, to leave something for reinforcement learning to do.

- Tokens: `<|pad|>` 0, `<|end|>` 1, then one per byte; the embedding is padded to {vocab} rows. There is no
  beginning-of-text token.
- Prompts are raw text, `a+b=`. The chat template adds nothing to a single user message, so both ways give the
  same tokens.
- Weights are fp32. It knows nothing but this task.

Reproduce (the same bits on the same kind of CPU and versions of the libraries):

    {command}
"""


def main() -> int:
    """Write, train, keep; the exit code is that of the training job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    args = parser.parse_args()
    if args.hidden < 64 or args.hidden % 64:
        parser.error(f"--hidden is {args.hidden}; it must be a multiple of 64 (pairs of heads of {HEAD_DIM})")
    with tempfile.TemporaryDirectory() as folder:
        start, log_dir = Path(folder) / "start", Path(folder) / "run"
        start.mkdir()
        write_tokenizer(start)
        tokenizer = load_tokenizer(start)
        torch.manual_seed(args.seed)
        model = build_model(args.hidden, args.layers, tokenizer.eos_token_id, tokenizer.pad_token_id)
        model.save_pretrained(start)
        with exit_on_config_error():
            config = as_sft(
                load_config(CONFIG, [f"policy.model_name={start}", f"logger.log_dir={log_dir}", *args.overrides])
            )
            layout = derive_layout(config)
        if code := run(config, layout, "sft"):
            return code
        last = read_metrics(log_dir / "metrics.jsonl")[-1]
        target = config.sft.target_answer_probability
        if target is not None and last[TARGET] < target:
            sys.stderr.write(f"{TARGET} is {last[TARGET]:.3f} after all steps, not {target}; nothing was written\n")
            return 1
        readme = README.format(
            name=args.out.name,
            parameters=model.num_parameters(),
            accuracy=last[TARGET],
            steps=int(last["step"]),
            vocab=VOCAB_ROWS,
            command=" ".join(["python examples/make_tiny_model.py", *sys.argv[1:]]),
        )
        (log_dir / MODEL_FOLDER / "README.md").write_text(readme)
        shutil.copytree(log_dir / MODEL_FOLDER, args.out, dirs_exist_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
