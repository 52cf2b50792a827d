"""Configurations: published models are read as they are meant, and what is not computed here is refused by name."""

import math

import jax
import pytest

from jaxgrpo.model.config import ModelConfig, RopeScaling, UnsupportedModelError
from jaxgrpo.model.transformer import declare
from tests.jaxgrpo.model.checkpoints import CONFIG, error_of
from tests.jaxgrpo.model.published import PUBLISHED

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    values, parameters = PUBLISHED[name]
    config = ModelConfig.from_hf(values)
    assert sum(math.prod(declaration.shape) for declaration in declare(config).values()) == parameters
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_what_a_published_configuration_says():
    qwen = ModelConfig.from_hf(PUBLISHED["Qwen2.5-3B-Instruct"][0], compute_dtype="bfloat16")
    assert (qwen.head_dim, qwen.kv_heads, qwen.qkv_bias, qwen.output_bias) == (128, 2, True, False)
    assert (qwen.rope_theta, qwen.norm_epsilon, qwen.eos_ids, qwen.tie_embeddings) == (1e6, 1e-6, (151645,), True)
    assert (qwen.precision, qwen.rope_scaling, qwen.max_positions) == (jax.lax.Precision.DEFAULT, None, 32_768)
    qwen3 = ModelConfig.from_hf(PUBLISHED["Qwen3-0.6B"][0])
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias, qwen3.output_bias) == (128, True, False, False)
    llama = ModelConfig.from_hf(PUBLISHED["Llama-3.2-3B-Instruct"][0])
    assert llama.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    assert (llama.rope_theta, llama.eos_ids, llama.qk_norm) == (5e5, (128001, 128008, 128009), False)


def test_windows_that_no_layer_uses_are_no_obstacle():
    unused = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": CONFIG.layers}
    assert ModelConfig.from_hf(CONFIG.to_hf() | unused) == CONFIG
    assert ModelConfig.from_hf(CONFIG.to_hf() | {"layer_types": ["full_attention"] * CONFIG.layers}) == CONFIG


@pytest.mark.parametrize(("changes", "named"), [
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope scaling 'yarn'"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope scaling 'longrope'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 has no number 'low_freq_factor'"),
    ({"rope_scaling": LLAMA3 | {"factor": 0.5}}, "llama3 with factor 0.5"),
    ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor 1 "),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ({"rope_interleaved": True}, "rope_interleaved"),
    ({"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1}, "sliding-window"),
    ({"use_sliding_window": True}, "sliding-window"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
    ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
    ({"architectures": [], "model_type": "mistral"}, "mistral"),
    ({"num_experts": 8}, "mixture of experts"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"hidden_size": None}, "'hidden_size'"),
    ({"num_key_value_heads": 3}, "kv_heads 3"),
])  # fmt: skip
def test_unsupported_configurations_are_named(changes, named):
    assert named in error_of(ModelConfig.from_hf, CONFIG.to_hf() | changes, kind=UnsupportedModelError)
