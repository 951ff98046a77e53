"""Make a tiny Qwen3 mixture of experts with random weights and the tokenizer of tiny-adder: it knows nothing.

python examples/make_tiny_moe.py --out examples/models/tiny-moe
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

TOKENIZER = Path(__file__).parent / "models/tiny-adder"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def build_model() -> Qwen3MoeForCausalLM:
    """157,632 parameters: two layers of four experts, two of which see each token."""
    config = Qwen3MoeConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.125,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model, which must not exist yet")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = build_model()
    options.out.mkdir(parents=True)
    model.save_pretrained(options.out)
    for name in TOKENIZER_FILES:
        shutil.copy2(TOKENIZER / name, options.out / name)
    print(f"{options.out}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
