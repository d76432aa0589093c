"""A Hugging Face causal language model, made from a configuration: no download, no pretrained weights.

    pip install transformers
    python study/run.py examples/hf_causal_lm.yaml

A file like this one beside your own study does the same for your own model.
"""

from typing import Any

from torch import nn


def build(
    *,
    vocab_size: int,
    context_length: int,
    hidden_size: int = 64,
    num_layers: int = 4,
    num_heads: int = 4,
    **config: Any,
) -> nn.Module:
    """A Llama of this size; `config` goes to LlamaConfig as it is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {"intermediate_size": 4 * hidden_size, "attn_implementation": "sdpa"} | config
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            max_position_embeddings=context_length,
            hidden_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            use_cache=False,  # keys and values of the past serve generation, not training
            **settings,
        )
    )
