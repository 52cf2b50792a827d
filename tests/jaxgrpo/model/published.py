"""Configurations of published models, as their `config.json` says, and their numbers of parameters.

The numbers are those that transformers counts in a model of the same configuration, tied heads once.
"""

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


def _sizes(base, width, layers, heads, kv_heads, ffn, **more):
    return base | {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        **more,
    }


def _qwen(width, layers, heads, kv_heads, ffn, vocab, tied, window):
    more = {"vocab_size": vocab, "tie_word_embeddings": tied, "max_window_layers": window, "sliding_window": 32768}
    return _sizes(_QWEN, width, layers, heads, kv_heads, ffn, **more)


def _qwen3(width, layers, heads, ffn, tied):
    return _sizes(_QWEN3, width, layers, heads, 8, ffn, tie_word_embeddings=tied, max_window_layers=layers)


def _llama(width, layers, heads, ffn, tied, factor, **more):
    rope = _LLAMA_ROPE | {"factor": factor}
    return _sizes(_LLAMA, width, layers, heads, 8, ffn, tie_word_embeddings=tied, rope_scaling=rope, **more)


PUBLISHED = {
    "Qwen2.5-0.5B-Instruct": (_qwen(896, 24, 14, 2, 4864, 151936, True, 21), 494_032_768),
    "Qwen2.5-1.5B-Instruct": (_qwen(1536, 28, 12, 2, 8960, 151936, True, 21), 1_543_714_304),
    "Qwen2.5-3B-Instruct": (_qwen(2048, 36, 16, 2, 11008, 151936, True, 70), 3_085_938_688),
    "Qwen2.5-7B-Instruct": (_qwen(3584, 28, 28, 4, 18944, 152064, False, 28), 7_615_616_512),
    "Qwen2.5-14B-Instruct": (_qwen(5120, 48, 40, 8, 13824, 152064, False, 70), 14_770_033_664),
    "Qwen2.5-32B-Instruct": (_qwen(5120, 64, 40, 8, 27648, 152064, False, 70), 32_763_876_352),
    "Qwen2.5-72B-Instruct": (_qwen(8192, 80, 64, 8, 29568, 152064, False, 70), 72_706_203_648),
    "Qwen3-0.6B": (_qwen3(1024, 28, 16, 3072, True), 596_049_920),
    "Qwen3-4B": (_qwen3(2560, 36, 32, 9728, True), 4_022_468_096),
    "Qwen3-8B": (_qwen3(4096, 36, 32, 12288, False), 8_190_735_360),
    "Llama-3.2-1B-Instruct": (_llama(2048, 16, 32, 8192, True, 32.0, head_dim=64), 1_235_814_400),
    "Llama-3.2-3B-Instruct": (_llama(3072, 28, 24, 8192, True, 32.0, head_dim=128), 3_212_749_824),
    "Llama-3.1-8B-Instruct": (_llama(4096, 32, 32, 14336, False, 8.0), 8_030_261_248),
    "SmolLM2-135M-Instruct": (_sizes(_SMOLLM2, 576, 30, 9, 3, 1536, rope_theta=100000), 134_515_008),
    "SmolLM2-360M-Instruct": (_sizes(_SMOLLM2, 960, 32, 15, 5, 2560, rope_theta=100000), 361_821_120),
    "SmolLM2-1.7B-Instruct": (_sizes(_SMOLLM2, 2048, 24, 32, 32, 8192, rope_theta=130000), 1_711_376_384),
}
"""Name -> (config.json, number of parameters)."""
