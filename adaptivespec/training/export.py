"""A trained head as a folder in the standard layout: config.json and model.safetensors."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from adaptivespec.models.eagle3_config import HeadConfig
from adaptivespec.models.layers import Weights


def export(folder: Path, config: HeadConfig, weights: Weights, target_ids: Tensor) -> None:
    """Write a head that SGLang, vLLM and this package load: `weights` by the standard names, in
    bf16, and the draft vocabulary `target_ids` int64, ascending, as `d2t` and `t2d`."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = target_ids.cpu()
    known = torch.zeros(config.layer.vocab_size, dtype=torch.bool)
    known[ids] = True
    stored = {name: w.to("cpu", torch.bfloat16).contiguous() for name, w in weights.items()}
    stored |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    (folder / "config.json").write_text(json.dumps(_config(config), indent=2) + "\n")
    unfinished = folder / "model.tmp"
    save_file(stored, unfinished, metadata={"format": "pt"})
    unfinished.rename(folder / "model.safetensors")  # last: who finds it finds all


def _config(config: HeadConfig) -> dict[str, Any]:
    layer = config.layer
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope_theta,
        "rope_scaling": layer.rope_scaling,
        "max_position_embeddings": layer.max_position_embeddings,
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "use_aux_hidden_state": True,
            # by outputs: that of layer i is the input of layer i + 1
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in config.aux_layers],
        },
    }
