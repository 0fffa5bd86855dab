"""The named transformer sizes: one row each, plain numbers.

A preset fixes shapes only. `"gpt2-124m"` and `"gpt2-medium"` have the width, depth, heads,
vocabulary, context and tied head of GPT-2 (Radford et al. 2019), `"gpt3-175b"` those of GPT-3
(arXiv:2005.14165, table 2.1), but the layers of this library: RMSNorm, rotary positions and a gated
feed-forward, whose three kernels of 8/3 of the width hold what two of 4 hold. `"gpt2"` is GPT-2 of
124 M as published, its layers included, and `"llama-8b"`, `"llama-70b"` and `"llama-405b"` Llama 3
(arXiv:2407.21783, table 3). `"1b"`, `"7b"` and `"8b"` are the shapes that the benchmarks of this
library are quoted for.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

_LLAMA_8B = {
    "vocab_size": 128_256,
    "width": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "ffn_width": 14_336,
    "max_length": 8192,
    "rope_theta": 500_000.0,
}

PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "tiny": {
            "vocab_size": 256,
            "width": 64,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_width": 128,
            "max_length": 128,
        },
        "quickstart": {
            "vocab_size": 256,
            "width": 128,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 4,
            "ffn_width": 384,
            "max_length": 128,
        },
        "gpt2": {
            "vocab_size": 50_257,
            "width": 768,
            "num_layers": 12,
            "num_heads": 12,
            "ffn_width": 3072,
            "max_length": 1024,
            "tied_head": True,
            "norm": "layer",
            "positions": "learned",
            "gated": False,
            "activation": "gelu",
            "bias": True,
        },
        "gpt2-124m": {
            "vocab_size": 50_257,
            "width": 768,
            "num_layers": 12,
            "num_heads": 12,
            "num_kv_heads": 12,
            "ffn_width": 2048,
            "max_length": 1024,
            "tied_head": True,
        },
        "gpt2-medium": {
            "vocab_size": 50_257,
            "width": 1024,
            "num_layers": 24,
            "num_heads": 16,
            "num_kv_heads": 16,
            "ffn_width": 2752,
            "max_length": 1024,
            "tied_head": True,
        },
        "gpt3-175b": {
            "vocab_size": 50_257,
            "width": 12_288,
            "num_layers": 96,
            "num_heads": 96,
            "num_kv_heads": 96,
            "ffn_width": 32_768,
            "max_length": 2048,
            "tied_head": True,
        },
        "1b": {
            "vocab_size": 32_000,
            "width": 2048,
            "num_layers": 24,
            "num_heads": 16,
            "num_kv_heads": 16,
            "ffn_width": 5504,
            "max_length": 4096,
        },
        "7b": {
            "vocab_size": 32_000,
            "width": 4096,
            "num_layers": 32,
            "num_heads": 32,
            "num_kv_heads": 32,
            "ffn_width": 11_008,
            "max_length": 4096,
        },
        "8b": _LLAMA_8B,
        "llama-8b": _LLAMA_8B,
        "llama-70b": {
            **_LLAMA_8B,
            "width": 8192,
            "num_layers": 80,
            "num_heads": 64,
            "ffn_width": 28_672,
        },
        "llama-405b": {
            **_LLAMA_8B,
            "width": 16_384,
            "num_layers": 126,
            "num_heads": 128,
            "ffn_width": 53_248,
        },
    }
)
