"""Drafters for the packaged model that are real enough to have trees accepted, and need no
download."""

from pathlib import Path

import torch

from adaptivespec.config import PACKAGED
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.loading import load_model
from adaptivespec.models.sources import read_config, resolve
from tests.adaptivespec.drafters.heads import TinyHead
from tests.smollm2 import packaged_embedding

NORM = "model.norm.weight"
MLP = 64


def write_lens_head(folder: Path) -> Path:
    """An EAGLE-3 head that reads the target's own next token off the input of its last layer, and
    proposes that token again and again: right wherever a text repeats one token, and only if the
    states that it is given are the right ones. Returns `folder`."""
    target = DecoderConfig.from_hf(read_config(resolve(PACKAGED, weights=False)))
    hidden, vocabulary = target.hidden_size, target.vocab_size
    norm = load_model(PACKAGED, torch.float32, only=[NORM])[1][NORM]
    into = 2 * hidden
    keys = target.kv_heads * target.head_dim
    weights = {
        "fc.weight": torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], 1),
        "norm.weight": norm,
        "lm_head.weight": packaged_embedding(),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "midlayer.self_attn.q_proj.weight": torch.zeros(target.heads * target.head_dim, into),
        "midlayer.self_attn.k_proj.weight": torch.zeros(keys, into),
        "midlayer.self_attn.v_proj.weight": torch.zeros(keys, into),
        "midlayer.self_attn.o_proj.weight": torch.zeros(hidden, target.heads * target.head_dim),
        "midlayer.mlp.gate_proj.weight": torch.zeros(MLP, hidden),
        "midlayer.mlp.up_proj.weight": torch.zeros(MLP, hidden),
        "midlayer.mlp.down_proj.weight": torch.zeros(hidden, MLP),
    }
    last = target.layers - 1
    head = TinyHead(
        weights,
        layer_fields={
            "hidden_size": hidden,
            "intermediate_size": MLP,
            "num_attention_heads": target.heads,
            "num_key_value_heads": target.kv_heads,
            "head_dim": target.head_dim,
            "rms_norm_eps": target.rms_norm_eps,
            "vocab_size": vocabulary,
        },
        top_fields={
            "draft_vocab_size": vocabulary,
            "eagle_aux_hidden_state_layer_ids": [1, last // 2, last],
        },
    )
    head.write(folder)
    return folder
