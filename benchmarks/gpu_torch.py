"""A GPT-2 in `torch.compile`, to compare with ours where torch is installed with a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from typing import Any


def missing(needs_gpu: bool = True) -> str | None:
    """Why it cannot be measured here; None where it can.

    Args:
        needs_gpu: whether a CPU is too slow for it.
    """
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    torch = importlib.import_module("torch")
    return None if torch.cuda.is_available() or not needs_gpu else "torch sees no GPU"


def measure(size: Any, rounds: int = 5, calls: int = 4) -> dict[str, Any]:
    """Tokens per second of one GPU: AdamW, clipping, bfloat16 by autocast.

    Without a GPU it runs on the CPU.

    Args:
        size: a `benchmarks.gpu.Size`; the largest of its batches that fits is taken.
        rounds: of measuring.
        calls: steps of a round.

    Returns:
        The figures.
    """
    torch = importlib.import_module("torch")
    has_gpu = torch.cuda.is_available()
    for samples in size.batches:
        try:
            seconds = _seconds(torch, size, samples, rounds, calls)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        return {
            "torch": torch.__version__,
            "samples": samples,
            "tokens_per_second": samples * size.length / seconds,
            "torch_peak_bytes": torch.cuda.max_memory_allocated() if has_gpu else None,
        }
    raise MemoryError(f"not even {size.batches[-1]} samples fit")


def _seconds(torch: Any, size: Any, samples: int, rounds: int, calls: int) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = _model(torch, size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(0, size.vocab, (samples, size.length + 1), device=device)

    @torch.compile
    def loss_of(tokens: Any) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        flat = logits.float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(flat, tokens[:, 1:].flatten())

    def step() -> None:
        loss_of(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    wait()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(calls):
            step()
        wait()
        times.append((time.perf_counter() - begun) / calls)
    return statistics.median(times)


def _model(torch: Any, size: Any) -> Any:
    layers = torch.nn

    class Block(layers.Module):
        """One pre-norm layer, as `axon_dist.models.transformer.Block`."""

        def __init__(self) -> None:
            super().__init__()
            width = size.width
            self.norm, self.mlp_norm = layers.LayerNorm(width), layers.LayerNorm(width)
            self.qkv = layers.Linear(width, 3 * width, bias=False)
            self.out = layers.Linear(width, width, bias=False)
            self.up = layers.Linear(width, 4 * width, bias=False)
            self.down = layers.Linear(4 * width, width, bias=False)

        def forward(self, x: Any) -> Any:
            """Maps `[B, T, D]` to its like."""
            heads = self.qkv(self.norm(x)).unflatten(-1, (3, size.heads, -1)).unbind(2)
            query, key, value = (each.transpose(1, 2) for each in heads)
            attend = layers.functional.scaled_dot_product_attention
            mixed = attend(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.out(mixed)
            return x + self.down(layers.functional.gelu(self.up(self.mlp_norm(x))))

    class Model(layers.Module):
        """Embeddings, blocks, and a tied head."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens = layers.Embedding(size.vocab, size.width)
            self.positions = layers.Embedding(size.length, size.width)
            self.blocks = layers.ModuleList(Block() for _ in range(size.layers))
            self.norm = layers.LayerNorm(size.width)

        def forward(self, tokens: Any) -> Any:
            """Logits of every next token."""
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = self._run(block, x)
            return self.norm(x) @ self.tokens.weight.T

        def _run(self, block: Any, x: Any) -> Any:
            if not size.remat:
                return block(x)
            return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    return Model()
