"""Tiny Llama and GPT-2 models in the layouts of the hub, and their functions in plain numpy."""

import json

import numpy as np

LLAMA = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 48,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "layer_norm_epsilon": 1e-4,
}


def llama_tensors(config=LLAMA, seed=0):
    """Returns random weights with the names and shapes `[out, in]` of a Llama checkpoint."""
    rng = np.random.default_rng(seed)
    width, hidden = config["hidden_size"], config["intermediate_size"]
    size = width // config["num_attention_heads"]
    heads, kv_heads = (size * config[f"num_{x}_heads"] for x in ("attention", "key_value"))
    shapes = {"embed_tokens": (config["vocab_size"], width), "norm": (width,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.input_layernorm": (width,),
            f"layers.{i}.self_attn.q_proj": (heads, width),
            f"layers.{i}.self_attn.k_proj": (kv_heads, width),
            f"layers.{i}.self_attn.v_proj": (kv_heads, width),
            f"layers.{i}.self_attn.o_proj": (width, heads),
            f"layers.{i}.post_attention_layernorm": (width,),
            f"layers.{i}.mlp.gate_proj": (hidden, width),
            f"layers.{i}.mlp.up_proj": (hidden, width),
            f"layers.{i}.mlp.down_proj": (width, hidden),
        }
    names = {f"model.{name}.weight": shape for name, shape in shapes.items()}
    names["lm_head.weight"] = (config["vocab_size"], width)
    return {name: random(rng, shape) for name, shape in names.items()}


def gpt2_tensors(config=GPT2, seed=0, prefix="transformer."):
    """Returns random weights with the names and shapes `[in, out]` of a GPT-2 checkpoint."""
    rng = np.random.default_rng(seed)
    width = config["n_embd"]
    shapes = {"wte.weight": (config["vocab_size"], width),
              "wpe.weight": (config["n_positions"], width),
              "ln_f.weight": (width,), "ln_f.bias": (width,)}  # fmt: skip
    for i in range(config["n_layer"]):
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{i}.{name}.{kind}": (width,) for kind in ("weight", "bias")}
        for name, inputs, outputs in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes |= {f"h.{i}.{name}.weight": (inputs, outputs)}
            shapes |= {f"h.{i}.{name}.bias": (outputs,)}
    return {prefix + name: random(rng, shape) for name, shape in shapes.items()}


def random(rng, shape):
    scale = 0.3 if len(shape) > 1 else 0.5
    return (scale * rng.standard_normal(shape) + (len(shape) == 1)).astype(np.float32)


def write(folder, config, tensors, **metadata):
    """Writes a snapshot with one file, using the library of the format."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata or {"format": "pt"})
    return folder


def llama_forward(tensors, tokens, config=LLAMA):
    """Computes logits in float64, head by head."""
    w = {name.removeprefix("model."): np.float64(x) for name, x in tensors.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale

    def turn(x):
        angle = np.arange(x.shape[1])[:, None] * config["rope_theta"] ** -(
            np.arange(0, size, 2) / size
        )
        cos, sin = (np.concatenate([f(angle)] * 2, -1) for f in (np.cos, np.sin))
        half = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], -1)
        return x * cos + half * sin

    def part(x, layer, name, head):
        return (
            x @ w[f"layers.{layer}.self_attn.{name}_proj.weight"][head * size : (head + 1) * size].T
        )

    x = w["embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        y = norm(x, w[f"layers.{i}.input_layernorm.weight"])
        mixed = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            query, key = turn(part(y, i, "q", head)), turn(part(y, i, "k", shared))
            mixed.append(attend(query, key, part(y, i, "v", shared)))
        x = x + np.concatenate(mixed, -1) @ w[f"layers.{i}.self_attn.o_proj.weight"].T
        y = norm(x, w[f"layers.{i}.post_attention_layernorm.weight"])
        gate, up = (y @ w[f"layers.{i}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"layers.{i}.mlp.down_proj.weight"].T
    return norm(x, w["norm.weight"]) @ w["lm_head.weight"].T


def gpt2_forward(tensors, tokens, config=GPT2):
    """Computes logits in float64, head by head."""
    w = {name.removeprefix("transformer."): np.float64(x) for name, x in tensors.items()}
    size = config["n_embd"] // config["n_head"]

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config["layer_norm_epsilon"])
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][: tokens.shape[1]]
    for i in range(config["n_layer"]):
        y = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        parts = [np.split(part, config["n_head"], -1) for part in np.split(y, 3, -1)]
        assert parts[0][0].shape[-1] == size
        x = x + linear(np.concatenate([attend(*head) for head in zip(*parts, strict=True)], -1),
                       f"h.{i}.attn.c_proj")  # fmt: skip
        y = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def attend(query, key, value):
    scores = query @ key.swapaxes(1, 2) / np.sqrt(query.shape[-1])
    scores[:, ~np.tri(query.shape[1], dtype=bool)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True) @ value
