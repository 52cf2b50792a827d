"""GGUF files: every type expanded as the gguf package does, rows in the right order, what is not computed refused."""

import dataclasses
import itertools

import gguf
import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxgrpo.model import weights
from jaxgrpo.model.attention import rope_frequencies
from jaxgrpo.model.config import RopeScaling, UnsupportedModelError
from jaxgrpo.model.files import open_weights
from tests.jaxgrpo.model.checkpoints import CONFIG, assert_same, error_of
from tests.jaxgrpo.model.gguf_files import Kind, gguf_tensors, write_gguf

FAMILIES = {
    "llama": CONFIG,
    "llama-attention-bias": dataclasses.replace(CONFIG, qkv_bias=True, output_bias=True, tie_embeddings=False),
    "qwen2": dataclasses.replace(CONFIG, architecture="qwen2", qkv_bias=True),
    "qwen3": dataclasses.replace(CONFIG, architecture="qwen3", qk_norm=True, tie_embeddings=False),
}
# K types come in blocks of 256 values of a row.
WIDE = dataclasses.replace(CONFIG, width=256, heads=4, kv_heads=4, head_dim=64, ffn=256, tie_embeddings=False)


def random_checkpoint(directory, config):
    """A Hugging Face folder whose every tensor, biases too, is random; its tensors under llama.cpp's names."""
    graph, state = nnx.split(weights.Transformer.abstract(config))
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    leaves = [0.05 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    weights.save_pretrained(directory, config, structure.unflatten(leaves))
    return gguf_tensors(config, load_file(directory / "model.safetensors"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    return directory, random_checkpoint(directory, CONFIG)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_safetensors(tmp_path, family):
    config = FAMILIES[family]
    write_gguf(tmp_path / "a.gguf", config, random_checkpoint(tmp_path, config))
    found, params = weights.load(tmp_path / "a.gguf")
    assert found == config
    assert_same(params, weights.load(tmp_path)[1])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantised_weights_are_close(llama, tmp_path, kind):
    directory, tensors = llama
    write_gguf(tmp_path / "a.gguf", CONFIG, tensors, dict.fromkeys(tensors, Kind[kind]))
    _, params = weights.load(tmp_path / "a.gguf")
    _, expected = weights.load(directory)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, atol=0.03)
    assert not np.array_equal(params["layers"][0]["up"][...], expected["layers"][0]["up"][...])


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_types_are_expanded_in_the_right_order(tmp_path, kind):
    matrices = random_checkpoint(tmp_path, WIDE)
    write_gguf(tmp_path / "a.gguf", WIDE, matrices, dict.fromkeys(matrices, Kind[kind]))
    _, params = weights.load(tmp_path / "a.gguf")
    expanded = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert 0.02 < expanded["blk.1.ffn_up.weight"].std() < 0.2
    model = nnx.merge(nnx.split(weights.Transformer.abstract(WIDE))[0], params)
    np.testing.assert_array_equal(model.parameter("embedding"), expanded["token_embd.weight"])
    np.testing.assert_array_equal(model.parameter("layers.down")[1], expanded["blk.1.ffn_down.weight"])
    np.testing.assert_array_equal(
        model.parameter("layers.output")[0].reshape(256, 256), expanded["blk.0.attn_output.weight"]
    )
    keys = expanded["blk.1.attn_k.weight"].reshape(4, 64, 256)
    np.testing.assert_array_equal(model.parameter("layers.key")[1][:, :32], keys[:, ::2])
    np.testing.assert_array_equal(model.parameter("layers.key")[1][:, 32:], keys[:, 1::2])


def test_llama3_rope_scaling(tmp_path):
    config = dataclasses.replace(CONFIG, rope_theta=500_000.0, rope_scaling=RopeScaling(32.0), max_positions=131_072)
    tensors = random_checkpoint(tmp_path, config)
    divisors = rope_frequencies(8, 500_000.0) / rope_frequencies(8, 500_000.0, config.rope_scaling)
    assert divisors[0] == 1
    assert 1 < divisors[2] < divisors[3] == 32
    write_gguf(tmp_path / "a.gguf", config, tensors | {"rope_freqs.weight": divisors})
    found, params = weights.load(tmp_path / "a.gguf")
    assert found == config
    assert_same(params, weights.load(tmp_path)[1])
    write_gguf(tmp_path / "a.gguf", config, tensors | {"rope_freqs.weight": divisors**0.9})
    assert "rope scaling by rope_freqs.weight is not Llama 3's" in error_of(
        weights.load, tmp_path / "a.gguf", kind=UnsupportedModelError
    )


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.02, 0.05, 0.5, 0.99])
def test_truncated(llama, tmp_path, keep):
    path = tmp_path / "a.gguf"
    write_gguf(path, CONFIG, llama[1])
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    message = error_of(weights.load, path)
    assert str(path) in message
    assert "not a whole GGUF file" in message


def test_damaged_header(llama, tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path, CONFIG, llama[1])
    data = path.read_bytes()
    at = data.index(b"llama", data.index(b"general.architecture"))
    path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    assert "the header's general.architecture is damaged" in error_of(weights.load, path)


def test_slices_are_parts_of_the_whole(tmp_path):
    """As each device reads its own part: rows of llama.cpp's order, columns of expanded blocks."""
    tensors = random_checkpoint(tmp_path, WIDE)
    kinds = dict(zip(tensors, itertools.cycle([Kind.Q4_K, Kind.Q8_0, Kind.F16, Kind.BF16]), strict=False))
    write_gguf(tmp_path / "a.gguf", WIDE, tensors, kinds)
    for file in (open_weights(tmp_path / "a.gguf"), open_weights(tmp_path)):
        for name in file.names():
            whole = file.read(name, tuple(slice(0, size) for size in file.shape(name)))
            part = tuple(slice(size // 4 + 3, size - 5) for size in whole.shape)
            np.testing.assert_array_equal(file.read(name, part), whole[part])


def test_tensors_that_do_not_fit(llama, tmp_path):
    tensors = llama[1]
    path = tmp_path / "a.gguf"
    write_gguf(path, CONFIG, {name: x for name, x in tensors.items() if name != "blk.1.ffn_up.weight"})
    assert "lacks tensor blk.1.ffn_up.weight" in error_of(weights.load, path)
    write_gguf(path, CONFIG, {name: x for name, x in tensors.items() if name != "token_embd.weight"})
    assert "lacks tensor token_embd.weight" in error_of(weights.load, path)
    write_gguf(path, CONFIG, tensors | {"blk.0.ffn_up.bias": np.zeros(32, np.float32)})
    assert "has tensor blk.0.ffn_up.bias" in error_of(weights.load, path)
    write_gguf(path, CONFIG, tensors, add_feed_forward_length=64)
    assert "shape (32, 32) where the configuration says (64, 32)" in error_of(weights.load, path)
    write_gguf(path, CONFIG, tensors | {"output_norm.weight": np.zeros(32, np.int32)})
    assert "output_norm.weight is quantised as I32, which gguf cannot expand" in error_of(weights.load, path)


@pytest.mark.parametrize(("changes", "named"), [
    ({"add_rope_scaling_type": gguf.RopeScalingType.YARN}, "rope scaling 'yarn'"),
    ({"add_rope_dimension_count": 4}, "partial rotary"),
    ({"add_value_length": 16}, "value heads of another size"),
    ({"add_sliding_window": 4096}, "sliding-window attention (of 4096)"),
    ({"add_expert_count": 8}, "mixture of experts"),
])  # fmt: skip
def test_unsupported_headers_are_named(llama, tmp_path, changes, named):
    write_gguf(tmp_path / "a.gguf", CONFIG, llama[1], **changes)
    assert f"model {named}" in error_of(weights.load, tmp_path / "a.gguf", kind=UnsupportedModelError)


def test_other_headers_are_refused(llama, tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path, CONFIG, llama[1], add_block_count=None)
    assert "llama.block_count is None, not one whole number" in error_of(weights.load, path)
    write_gguf(path, CONFIG, llama[1], add_head_count_kv=[2, 1])
    assert "llama.attention.head_count_kv is [2, 1], not one whole number" in error_of(weights.load, path)
    write_gguf(path, CONFIG, llama[1], also=lambda writer: writer.add_uint16("split.count", 3))
    assert "is one of 3 parts; join them" in error_of(weights.load, path)


def test_other_architectures_are_refused(llama, tmp_path):
    path = tmp_path / "a.gguf"
    for name in ("mamba", "qwen3moe"):
        write_gguf(path, CONFIG, llama[1], architecture=name)
        assert f"'{name}' is not supported" in error_of(weights.load, path, kind=UnsupportedModelError)
