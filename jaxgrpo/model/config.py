"""The shape of a decoder-only language model, and its reading from and writing to Hugging Face's `config.json`.

Three published families share one forward function: Qwen2/Qwen2.5, Qwen3 and Llama (SmolLM2 among them). What they
differ in are fields here. A feature that the forward function does not compute is refused by name on reading.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxgrpo.model.lora import LoRA

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
COMPUTE_DTYPES = ("float32", "bfloat16")


class UnsupportedModelError(ValueError):
    """A model configuration asks for something this package does not compute; the message names it."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of slow rotary frequencies, `rope_type: llama3`; see `attention.rope_frequencies`.

    Attributes:
        factor: what slow frequencies are divided by, at least 1 (8 in Llama 3.1, 32 in 3.2).
        low_freq_factor: frequencies that turn fewer times than this within the original context are slow.
        high_freq_factor: frequencies that turn more times than this stay as they are; above `low_freq_factor`.
        original_positions: context length before the scaling, in tokens.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def __post_init__(self) -> None:
        if self.factor < 1 or self.high_freq_factor <= self.low_freq_factor or self.original_positions < 1:
            raise UnsupportedModelError(
                f"model rope scaling llama3 with factor {self.factor:g}, low_freq_factor {self.low_freq_factor:g}, "
                f"high_freq_factor {self.high_freq_factor:g} and {self.original_positions} positions is not possible; "
                "factor must be at least 1 and high_freq_factor above low_freq_factor"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one model. Hashable, so it is a static part of compiled functions.

    Attributes:
        architecture: family, a key of `ARCHITECTURES`.
        vocab_size: rows of the embedding; at least the tokenizer's number of ids (checkpoints pad it).
        width: size of the residual stream.
        layers: number of transformer blocks.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: size of one head; even, because rotary embeddings rotate pairs.
        ffn: size of the gated feed-forward's hidden layer.
        rope_theta: base of the rotary wavelengths.
        norm_epsilon: added to the mean square in every RMS norm.
        tie_embeddings: whether the head is the embedding.
        qkv_bias: whether queries, keys and values have biases (Qwen2).
        output_bias: whether the attention output has a bias (Llama's `attention_bias`, together with `qkv_bias`).
        qk_norm: whether each head of queries and keys is RMS-normed (Qwen3).
        rope_scaling: Llama 3.1's scaling of the rotary wavelengths; None without.
        max_positions: longest sequence the checkpoint declares; recorded, not enforced.
        init_std: standard deviation of randomly drawn matrices.
        eos_ids: ids that end a sequence, as the checkpoint declares them; may be empty.
        compute_dtype: type of activations and matrix products; norms, softmax and logits are float32 in any case.
        lora: low-rank adapters beside the matrices of the blocks; None without. Not a part of the checkpoint.
        scan_decode: whether decoding goes through the layers in a loop, which compiles in the time that one layer takes
            (a TPU's compiler takes seconds a layer), or has them one behind the other, which is faster on CPUs.
    """

    architecture: str
    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    max_positions: int = 32_768
    init_std: float = 0.02
    eos_ids: tuple[int, ...] = ()
    compute_dtype: str = "float32"
    lora: LoRA | None = None
    scan_decode: bool = False

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"model architecture {self.architecture!r} is not supported; use one of {', '.join(ARCHITECTURES)}"
            )
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ffn"):
            if getattr(self, name) < 1:
                raise UnsupportedModelError(f"model {name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise UnsupportedModelError(f"model kv_heads {self.kv_heads} does not divide heads {self.heads}")
        if self.head_dim % 2:
            raise UnsupportedModelError(f"model head_dim {self.head_dim} is odd; rotary embeddings need an even one")
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise UnsupportedModelError(
                f"model compute_dtype {self.compute_dtype!r} is not supported; use one of {', '.join(COMPUTE_DTYPES)}"
            )

    @property
    def dtype(self) -> Any:
        """The type of activations and matrix products."""
        return jnp.dtype(self.compute_dtype)

    @property
    def precision(self) -> jax.lax.Precision:
        """Precision of matrix products: full for float32 (TPUs would otherwise multiply in bfloat16)."""
        return jax.lax.Precision.HIGHEST if self.compute_dtype == "float32" else jax.lax.Precision.DEFAULT

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], compute_dtype: str = "float32") -> "ModelConfig":
        """Reads the contents of a Hugging Face `config.json`.

        Raises:
            UnsupportedModelError: the architecture, activation, rope scaling, attention window or a bias is not
                one this package computes, or a size is missing.
        """
        family = _family(values)
        _refuse_unsupported(values)
        heads = _required(values, "num_attention_heads")
        width = _required(values, "hidden_size")
        attention_bias = bool(values.get("attention_bias", False))
        return cls(
            architecture=family,
            vocab_size=_required(values, "vocab_size"),
            width=width,
            layers=_required(values, "num_hidden_layers"),
            heads=heads,
            kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or (128 if family == "qwen3" else width // heads),
            ffn=_required(values, "intermediate_size"),
            rope_theta=_rope_theta(values),
            rope_scaling=_rope_scaling(values),
            norm_epsilon=float(values.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=family != "qwen2" and attention_bias,
            qk_norm=family == "qwen3",
            max_positions=int(values.get("max_position_embeddings", 32_768)),
            init_std=float(values.get("initializer_range", 0.02)),
            eos_ids=_eos_ids(values.get("eos_token_id")),
            compute_dtype=compute_dtype,
        )

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` from which transformers builds the same model."""
        values: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "rope_theta": self.rope_theta,
            # Where transformers 5 looks; version 4 reads rope_theta above and rope_scaling.
            "rope_parameters": {"rope_theta": self.rope_theta, **self._rope_to_hf()},
            "rms_norm_eps": self.norm_epsilon,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
            "initializer_range": self.init_std,
            "hidden_act": "silu",
            "dtype": "float32",
        }
        if self.rope_scaling is not None:
            values["rope_scaling"] = self._rope_to_hf()
        if self.architecture != "qwen2":
            values["attention_bias"] = self.output_bias
        if self.eos_ids:
            values["eos_token_id"] = list(self.eos_ids)
        return values

    def _rope_to_hf(self) -> dict[str, Any]:
        scaling = self.rope_scaling
        if scaling is None:
            return {"rope_type": "default"}
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }


def _family(values: Mapping[str, Any]) -> str:
    named = values.get("architectures") or []
    for family, class_name in ARCHITECTURES.items():
        if class_name in named or (not named and values.get("model_type") == family):
            return family
    given = ", ".join(named) or values.get("model_type") or "none named"
    raise UnsupportedModelError(
        f"model architecture {given} is not supported; use one of {', '.join(ARCHITECTURES.values())}"
    )


def _required(values: Mapping[str, Any], name: str) -> int:
    if not isinstance(values.get(name), int):
        raise UnsupportedModelError(
            f"model configuration has no whole number {name!r}; is this a complete config.json?"
        )
    return values[name]


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    activation = values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"model hidden_act {activation!r} is not supported; only 'silu' is")
    rope = _rope_parameters(values)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnsupportedModelError(f"model rope scaling {kind!r} is not supported; only none and 'llama3' are")
    if values.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise UnsupportedModelError("model partial_rotary_factor below 1 is not supported")
    if values.get("rope_interleaved"):
        raise UnsupportedModelError("model rope_interleaved is not supported; heads must be rotated by halves")
    if others := set(values.get("layer_types") or []) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(f"model layer type {min(others)!r} is not supported; only 'full_attention' is")
    if _slides(values):
        raise UnsupportedModelError("model sliding-window attention is not supported; set use_sliding_window to false")
    if values.get("num_experts") or values.get("num_local_experts"):
        raise UnsupportedModelError("model mixture of experts is not supported; only dense feed-forward layers are")
    if values.get("mlp_bias"):
        raise UnsupportedModelError("model mlp_bias is not supported; feed-forward biases must be absent")
    if values.get("quantization_config"):
        raise UnsupportedModelError("model quantization_config is not supported; use unquantised safetensors or a GGUF")


def _slides(values: Mapping[str, Any]) -> bool:
    """Whether any layer attends to a window only: Qwen's configurations name one that they do not use."""
    if layer_types := values.get("layer_types"):
        return "sliding_attention" in layer_types
    layers = values.get("num_hidden_layers", 0)
    return bool(values.get("use_sliding_window")) and values.get("max_window_layers", 0) < layers


def _rope_parameters(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return values.get("rope_scaling") or values.get("rope_parameters") or {}


def _rope_theta(values: Mapping[str, Any]) -> float:
    parameters = values.get("rope_parameters") or {}
    return float(values.get("rope_theta") or parameters.get("rope_theta") or 10_000.0)


_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _rope_scaling(values: Mapping[str, Any]) -> RopeScaling | None:
    rope = _rope_parameters(values)
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        return None
    if missing := [name for name in _LLAMA3_FIELDS if not isinstance(rope.get(name), int | float)]:
        raise UnsupportedModelError(f"model rope scaling llama3 has no number {missing[0]!r}")
    factor, low, high, positions = (rope[name] for name in _LLAMA3_FIELDS)
    return RopeScaling(float(factor), float(low), float(high), int(positions))


def _eos_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
