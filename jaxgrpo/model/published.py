"""Configurations of published models, as their `config.json` says: for planning with a model that is not at hand."""

from typing import Any

Values = dict[str, Any]

_QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "attention_dropout": 0.0,
         "bos_token_id": 151643, "eos_token_id": 151645, "initializer_range": 0.02, "rms_norm_eps": 1e-06,
         "rope_theta": 1000000.0, "max_position_embeddings": 32768, "use_sliding_window": False,
         "torch_dtype": "bfloat16"}  # fmt: skip
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
          "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
          "initializer_range": 0.02, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_scaling": None,
          "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936,
          "num_key_value_heads": 8, "torch_dtype": "bfloat16"}  # fmt: skip
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
          "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009],
          "initializer_range": 0.02, "max_position_embeddings": 131072, "mlp_bias": False, "num_key_value_heads": 8,
          "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "vocab_size": 128256,
          "torch_dtype": "bfloat16"}  # fmt: skip
_LLAMA_ROPE = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
               "rope_type": "llama3"}  # fmt: skip
_SMOLLM2 = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "is_llama_config": True,
            "max_position_embeddings": 8192, "mlp_bias": False, "pad_token_id": 2, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "tie_word_embeddings": True,
            "vocab_size": 49152, "torch_dtype": "bfloat16"}  # fmt: skip


def _sizes(base: Values, width: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> Values:
    return base | {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        **more,
    }


def _qwen(width: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool, window: int) -> Values:
    more = {"vocab_size": vocab, "tie_word_embeddings": tied, "max_window_layers": window, "sliding_window": 32768}
    return _sizes(_QWEN, width, layers, heads, kv_heads, ffn, **more)


def _qwen3(width: int, layers: int, heads: int, ffn: int, tied: bool) -> Values:
    return _sizes(_QWEN3, width, layers, heads, 8, ffn, tie_word_embeddings=tied, max_window_layers=layers)


def _llama(width: int, layers: int, heads: int, ffn: int, tied: bool, factor: float, **more: Any) -> Values:
    rope = _LLAMA_ROPE | {"factor": factor}
    return _sizes(_LLAMA, width, layers, heads, 8, ffn, tie_word_embeddings=tied, rope_scaling=rope, **more)


PUBLISHED: dict[str, Values] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen(896, 24, 14, 2, 4864, 151936, True, 21),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen(1536, 28, 12, 2, 8960, 151936, True, 21),
    "Qwen/Qwen2.5-3B-Instruct": _qwen(2048, 36, 16, 2, 11008, 151936, True, 70),
    "Qwen/Qwen2.5-7B-Instruct": _qwen(3584, 28, 28, 4, 18944, 152064, False, 28),
    "Qwen/Qwen2.5-14B-Instruct": _qwen(5120, 48, 40, 8, 13824, 152064, False, 70),
    "Qwen/Qwen2.5-32B-Instruct": _qwen(5120, 64, 40, 8, 27648, 152064, False, 70),
    "Qwen/Qwen2.5-72B-Instruct": _qwen(8192, 80, 64, 8, 29568, 152064, False, 70),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728, True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12288, False),
    "meta-llama/Llama-3.2-1B-Instruct": _llama(2048, 16, 32, 8192, True, 32.0, head_dim=64),
    "meta-llama/Llama-3.2-3B-Instruct": _llama(3072, 28, 24, 8192, True, 32.0, head_dim=128),
    "meta-llama/Llama-3.1-8B-Instruct": _llama(4096, 32, 32, 14336, False, 8.0),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _sizes(_SMOLLM2, 576, 30, 9, 3, 1536, rope_theta=100000),
    "HuggingFaceTB/SmolLM2-360M-Instruct": _sizes(_SMOLLM2, 960, 32, 15, 5, 2560, rope_theta=100000),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _sizes(_SMOLLM2, 2048, 24, 32, 32, 8192, rope_theta=130000),
}
"""Hub name -> config.json."""
