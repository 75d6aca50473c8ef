"""
Make tiny models whose outputs depend on their KV cache, for a real vLLM without any download.

Theory. vLLM's `load_format="dummy"` draws weights of about 0.001, norms included: attention then
counts for nothing, every answer is the same whatever the KV holds, and a comparison of outputs
proves nothing. The models here have seeded normal weights (std 0.1) and norms of one (zero where
the architecture adds one itself), so that a single altered block changes the tokens that follow.
They have no tokenizer: prompts are token ids.

Covers: config.json and model.safetensors of three shapes, made once per folder.
Does not cover: how an engine is started on them (`tools/engine_process.py`).
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

VOCABULARY = 2048
WEIGHT_STD = 0.1
#: Gemma multiplies embeddings by sqrt(hidden size) and ties them to the output: larger ones would drown attention
#: in the residual stream, and every answer would repeat its last token.
EMBEDDING_STD = {"llama": 0.1, "gemma3_text": 0.002}
SEED = 20240

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

#: Name -> config.json. `llama` has one full-attention group; `llama-gpu` too, with heads that GPU kernels take;
#: `gemma3` has two sliding-window groups beside a full-attention one.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    },
    "llama-gpu": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    },
    "gemma3": {
        **_COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "sliding_window": 512,
        "sliding_window_pattern": 3,
        "tie_word_embeddings": True,
    },
}


def tiny_model(name: str, folder: Path) -> Path:
    """
    Return the folder of the tiny model *name*, made below *folder* when it is not there yet.

    Safe against two processes that make it at once: it is written aside and renamed into place.
    """
    target = folder / name
    if (target / "model.safetensors").exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
    try:
        (scratch / "config.json").write_text(json.dumps(CONFIGS[name], indent=1))
        _write_weights(scratch, CONFIGS[name])
        os.rename(scratch, target)
    except OSError:
        if not (target / "model.safetensors").exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every weight, named as transformers names those of the two architectures."""
    hidden, between, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj.weight": (heads * head, hidden),
        "self_attn.k_proj.weight": (kv_heads * head, hidden),
        "self_attn.v_proj.weight": (kv_heads * head, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head),
        "mlp.gate_proj.weight": (between, hidden),
        "mlp.up_proj.weight": (between, hidden),
        "mlp.down_proj.weight": (hidden, between),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config["model_type"] == "gemma3_text":
        layer |= {
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
            "pre_feedforward_layernorm.weight": (hidden,),
            "post_feedforward_layernorm.weight": (hidden,),
        }
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _write_weights(folder: Path, config: dict[str, Any]) -> None:
    """Write seeded random weights as safetensors."""
    import torch
    from safetensors.torch import save_file

    # Gemma's norms multiply by one plus their weight.
    norm = 0.0 if config["model_type"] == "gemma3_text" else 1.0
    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for name, shape in sorted(_shapes(config).items()):
        if "norm" in name:
            weights[name] = torch.full(shape, norm, dtype=torch.bfloat16)
        else:
            std = EMBEDDING_STD[config["model_type"]] if "embed" in name else WEIGHT_STD
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
            weights[name] = (drawn * std).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Make the models named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the models go; what is there already is kept")
    parser.add_argument("names", nargs="*", default=sorted(CONFIGS), help=f"of {sorted(CONFIGS)}; default: all")
    args = parser.parse_args()
    for name in args.names:
        print(tiny_model(name, args.folder))


if __name__ == "__main__":
    main()
