"""Models that nobody here wrote, as their packages have them: tiny sizes, random weights.

They come with the extra `foreign`. A Hugging Face model is the Linen module within it, bridged; it
is called with what its signature asks for and trained with its dropout.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

SAMPLES, LENGTH, VOCABULARY = 8, 16, 64
"""The shape of every batch of tokens, and how many tokens there are."""


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A model, its loss and its batches.

    Args:
        make: makes the model.
        loss_fn: (model, batch) -> its mean over samples.
        batch: the number of a step -> the batch.
        example: what `suggest_plan` gives the model's call: (args, kwargs).
    """

    make: Callable[[], nnx.Module]
    loss_fn: Callable[[nnx.Module, Any], jax.Array]
    batch: Callable[[int], dict[str, np.ndarray]]
    example: tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """One Flax model of the package transformers.

    Args:
        folder: of the model in the package.
        name: of the Linen module.
        config: of its config class.
        sizes: what the config is given.
        task: which batches and loss it has.
    """

    folder: str
    name: str
    config: str
    sizes: Mapping[str, Any]
    task: str

    def load(self) -> Foreign:
        """Imports the package and gives the model.

        Raises:
            ImportError: where the package is not installed, or has no Flax models.
        """
        base = f"transformers.models.{self.folder}"
        kind = getattr(importlib.import_module(f"{base}.modeling_flax_{self.folder}"), self.name)
        config = importlib.import_module(f"{base}.configuration_{self.folder}")
        config = getattr(config, self.config)(**self.sizes)
        task = TASKS[self.task]
        names = tuple(inspect.signature(kind.__call__).parameters)[1:]
        called = lambda batch: task.inputs(batch, names)

        def make() -> nnx.Module:
            module = kind(config)
            bridge = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0, dropout=1))
            bridge.lazy_init(**called(task.batch(0)))
            return bridge

        # Without this Linen refuses to update an average.
        more = {"mutable": ["batch_stats"]} if task.has_statistics else {}

        def loss_fn(model: nnx.Module, batch: Any) -> jax.Array:
            return task.loss(model(**called(batch), **more), batch)

        return Foreign(make, loss_fn, task.batch, ((), {**called(task.batch(0)), **more}))


@dataclasses.dataclass(frozen=True)
class Tunix:
    """One NNX model of the package google-tunix.

    Args:
        folder: of the model in the package.
        name: of the class.
        sizes: what its config is given.
    """

    folder: str
    name: str
    sizes: Mapping[str, Any]

    def load(self) -> Foreign:
        """Imports the package and gives the model.

        Raises:
            ImportError: where the package is not installed.
        """
        module = importlib.import_module(f"tunix.models.{self.folder}.model")
        kind, config = getattr(module, self.name), module.ModelConfig(**self.sizes)
        causal = np.tril(np.ones((LENGTH, LENGTH), bool))

        def inputs(batch: Any) -> tuple[Any, ...]:
            tokens = batch["tokens"]
            mask = jnp.broadcast_to(causal, (tokens.shape[0], LENGTH, LENGTH))
            return tokens, jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape), None, mask

        def loss_fn(model: nnx.Module, batch: Any) -> jax.Array:
            logits, _ = model(*inputs(batch))
            entropy = optax.softmax_cross_entropy_with_integer_labels
            return entropy(logits.astype(jnp.float32), batch["targets"]).mean()

        make = lambda: kind(config, rngs=nnx.Rngs(0))
        return Foreign(make, loss_fn, _tokens, (inputs(_tokens(0)), {}))


@dataclasses.dataclass(frozen=True)
class Task:
    """The training data of a kind of model.

    Args:
        batch: the number of a step -> the batch.
        given: what a call may be given, by name, made of a batch.
        loss: (outputs, batch) -> the mean.
        has_statistics: whether the model keeps averages over batches.
    """

    batch: Callable[[int], dict[str, np.ndarray]]
    given: Callable[[Any], dict[str, Any]]
    loss: Callable[[Any, Any], jax.Array]
    has_statistics: bool = False

    def inputs(self, batch: Any, names: tuple[str, ...]) -> dict[str, Any]:
        """The arguments among `names` that a call is given."""
        given = {"deterministic": False, "return_dict": True, **self.given(batch)}
        return {name: value for name, value in given.items() if name in names}


def _tokens(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step).integers
    text = lambda: draw(3, VOCABULARY, size=(SAMPLES, LENGTH)).astype(np.int32)
    return {"tokens": text(), "targets": text()}


def _images(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    images = draw.normal(size=(SAMPLES, 16, 16, 3)).astype(np.float32)
    return {"images": images, "labels": draw.integers(0, 4, size=SAMPLES).astype(np.int32)}


def _sound(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    sound = draw.normal(size=(SAMPLES, 8, 2 * LENGTH)).astype(np.float32)
    return {"sound": sound, "targets": _tokens(step)["targets"]}


def _pairs(step: int) -> dict[str, np.ndarray]:
    return _images(step) | _tokens(step)


def _text(batch: Any) -> dict[str, Any]:
    tokens = batch["tokens"]
    places = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    return {
        "input_ids": tokens,
        "attention_mask": jnp.ones(tokens.shape, jnp.int32),
        "token_type_ids": jnp.zeros(tokens.shape, jnp.int32),
        "position_ids": places,
        "head_mask": None,
    }


def _both(batch: Any) -> dict[str, Any]:
    text = _text(batch)
    names = ("input_ids", "attention_mask", "position_ids")
    targets = _text({"tokens": jnp.roll(batch["targets"], 1, axis=1)})
    return text | {f"decoder_{name}": targets[name] for name in names}


def _heard(batch: Any) -> dict[str, Any]:
    given = _both({"tokens": batch["targets"], "targets": batch["targets"]})
    decoder = {name: value for name, value in given.items() if name.startswith("decoder_")}
    return {"input_features": batch["sound"], **decoder}


def _likelihood(outputs: Any, batch: Any) -> jax.Array:
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(outputs.logits, batch["targets"]).mean()


def _label(outputs: Any, batch: Any) -> jax.Array:
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return entropy(outputs.logits, batch["labels"]).mean()


def _contrast(outputs: Any, batch: Any) -> jax.Array:
    entropy = optax.softmax_cross_entropy_with_integer_labels
    logits = outputs.logits_per_text
    return entropy(logits, jnp.arange(logits.shape[0])).mean()


TASKS: MappingProxyType[str, Task] = MappingProxyType(
    {
        "text": Task(_tokens, _text, _likelihood),
        "translation": Task(_tokens, _both, _likelihood),
        "speech": Task(_sound, _heard, _likelihood),
        "images": Task(_images, lambda batch: {"pixel_values": batch["images"]}, _label),
        "images with statistics": Task(
            _images, lambda batch: {"pixel_values": batch["images"]}, _label, True
        ),
        "pairs": Task(
            _pairs, lambda batch: {"pixel_values": batch["images"], **_text(batch)}, _contrast
        ),
    }
)
"""The tasks by name."""

_WIDTH, _LAYERS, _HEADS = 32, 2, 4
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
_SIZES = {
    "hidden_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "intermediate_size": 64,
}
_GPT = {"n_positions": 32, "n_embd": _WIDTH, "n_layer": _LAYERS, "n_head": _HEADS}
_BART = {
    **_TEXT,
    "d_model": _WIDTH,
    "encoder_layers": _LAYERS,
    "decoder_layers": _LAYERS,
    "encoder_attention_heads": _HEADS,
    "decoder_attention_heads": _HEADS,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
_IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": 4}
_TUNIX = {
    "num_layers": _LAYERS,
    "embed_dim": _WIDTH,
    "hidden_dim": 64,
    "num_heads": _HEADS,
    "head_dim": 8,
    "num_kv_heads": 2,
}
_QWEN = {
    **_TUNIX,
    "vocab_size": VOCABULARY,
    "rope_theta": 10_000,
    "norm_eps": 1e-6,
    "dtype": jnp.float32,
    "param_dtype": jnp.float32,
}
_NET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [2, 2],
    "num_labels": 4,
}

MODELS: MappingProxyType[str, Any] = MappingProxyType(
    {
        "gpt2": HuggingFace(
            "gpt2", "FlaxGPT2LMHeadModule", "GPT2Config", {"vocab_size": VOCABULARY, **_GPT}, "text"
        ),
        "bert": HuggingFace(
            "bert", "FlaxBertForMaskedLMModule", "BertConfig", {**_TEXT, **_SIZES}, "text"
        ),
        "albert": HuggingFace(
            "albert",
            "FlaxAlbertForMaskedLMModule",
            "AlbertConfig",
            {**_TEXT, **_SIZES, "embedding_size": 16},
            "text",
        ),
        "vit": HuggingFace(
            "vit",
            "FlaxViTForImageClassificationModule",
            "ViTConfig",
            {**_SIZES, **_IMAGE},
            "images",
        ),
        "roberta": HuggingFace(
            "roberta",
            "FlaxRobertaForMaskedLMModule",
            "RobertaConfig",
            {**_TEXT, **_SIZES, "pad_token_id": 0},
            "text",
        ),
        "distilbert": HuggingFace(
            "distilbert",
            "FlaxDistilBertForMaskedLMModule",
            "DistilBertConfig",
            {**_TEXT, "dim": _WIDTH, "n_layers": _LAYERS, "n_heads": _HEADS, "hidden_dim": 64},
            "text",
        ),
        "electra": HuggingFace(
            "electra",
            "FlaxElectraForMaskedLMModule",
            "ElectraConfig",
            {**_TEXT, **_SIZES, "embedding_size": 16},
            "text",
        ),
        "roformer": HuggingFace(
            "roformer",
            "FlaxRoFormerForMaskedLMModule",
            "RoFormerConfig",
            {**_TEXT, **_SIZES, "embedding_size": _WIDTH},
            "text",
        ),
        "gpt_neo": HuggingFace(
            "gpt_neo",
            "FlaxGPTNeoForCausalLMModule",
            "GPTNeoConfig",
            {
                **_TEXT,
                "hidden_size": _WIDTH,
                "num_layers": _LAYERS,
                "num_heads": _HEADS,
                "intermediate_size": 64,
                "attention_types": [[["global", "local"], 1]],
                "window_size": 4,
            },
            "text",
        ),
        "gptj": HuggingFace(
            "gptj",
            "FlaxGPTJForCausalLMModule",
            "GPTJConfig",
            {"vocab_size": VOCABULARY, **_GPT, "rotary_dim": 4},
            "text",
        ),
        "opt": HuggingFace(
            "opt",
            "FlaxOPTForCausalLMModule",
            "OPTConfig",
            {
                **_TEXT,
                "hidden_size": _WIDTH,
                "word_embed_proj_dim": _WIDTH,
                "num_hidden_layers": _LAYERS,
                "num_attention_heads": _HEADS,
                "ffn_dim": 64,
            },
            "text",
        ),
        "bloom": HuggingFace(
            "bloom",
            "FlaxBloomForCausalLMModule",
            "BloomConfig",
            {"vocab_size": VOCABULARY, "hidden_size": _WIDTH, "n_layer": _LAYERS, "n_head": _HEADS},
            "text",
        ),
        "xglm": HuggingFace(
            "xglm",
            "FlaxXGLMForCausalLMModule",
            "XGLMConfig",
            {
                **_TEXT,
                "d_model": _WIDTH,
                "num_layers": _LAYERS,
                "attention_heads": _HEADS,
                "ffn_dim": 64,
            },
            "text",
        ),
        "llama": HuggingFace(
            "llama",
            "FlaxLlamaForCausalLMModule",
            "LlamaConfig",
            {**_TEXT, **_SIZES, "num_key_value_heads": 2},
            "text",
        ),
        "mistral": HuggingFace(
            "mistral",
            "FlaxMistralForCausalLMModule",
            "MistralConfig",
            {**_TEXT, **_SIZES, "num_key_value_heads": 2},
            "text",
        ),
        "gemma": HuggingFace(
            "gemma",
            "FlaxGemmaForCausalLMModule",
            "GemmaConfig",
            {**_TEXT, **_SIZES, "num_key_value_heads": 2, "head_dim": 8},
            "text",
        ),
        "bart": HuggingFace(
            "bart", "FlaxBartForConditionalGenerationModule", "BartConfig", _BART, "translation"
        ),
        "marian": HuggingFace("marian", "FlaxMarianMTModule", "MarianConfig", _BART, "translation"),
        "pegasus": HuggingFace(
            "pegasus",
            "FlaxPegasusForConditionalGenerationModule",
            "PegasusConfig",
            _BART,
            "translation",
        ),
        "whisper": HuggingFace(
            "whisper",
            "FlaxWhisperForConditionalGenerationModule",
            "WhisperConfig",
            {
                **_BART,
                "num_mel_bins": 8,
                "max_source_positions": LENGTH,
                "max_target_positions": LENGTH,
            },
            "speech",
        ),
        "beit": HuggingFace(
            "beit",
            "FlaxBeitForImageClassificationModule",
            "BeitConfig",
            {**_SIZES, **_IMAGE},
            "images",
        ),
        "dinov2": HuggingFace(
            "dinov2",
            "FlaxDinov2ForImageClassificationModule",
            "Dinov2Config",
            {**_SIZES, **_IMAGE},
            "images",
        ),
        "resnet": HuggingFace(
            "resnet",
            "FlaxResNetForImageClassificationModule",
            "ResNetConfig",
            _NET,
            "images with statistics",
        ),
        "regnet": HuggingFace(
            "regnet",
            "FlaxRegNetForImageClassificationModule",
            "RegNetConfig",
            {**_NET, "groups_width": 4},
            "images with statistics",
        ),
        "clip": HuggingFace(
            "clip",
            "FlaxCLIPModule",
            "CLIPConfig",
            {
                "text_config": {**_TEXT, **_SIZES, "eos_token_id": 2},
                "vision_config": {**_SIZES, **_IMAGE},
                "projection_dim": 16,
            },
            "pairs",
        ),
        "tunix llama3": Tunix(
            "llama3",
            "Llama3",
            {**_TUNIX, "vocab_size": VOCABULARY, "rope_theta": 10_000, "norm_eps": 1e-6},
        ),
        "tunix qwen2": Tunix("qwen2", "Qwen2", _QWEN),
        "tunix qwen3": Tunix("qwen3", "Qwen3", _QWEN),
        "tunix qwen3 experts": Tunix(
            "qwen3", "Qwen3", {**_QWEN, "num_experts": 4, "num_experts_per_tok": 2}
        ),
        "tunix gemma3": Tunix(
            "gemma3",
            "Gemma3",
            {
                **_TUNIX,
                "num_embed": VOCABULARY,
                "sliding_window_size": 4,
                "param_dtype": jnp.float32,
            },
        ),
    }
)
"""The models by name; `load` imports their package."""
