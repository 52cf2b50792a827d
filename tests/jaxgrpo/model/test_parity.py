"""Gate 17: the same logits as transformers, from the same files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxgrpo.model import weights
from jaxgrpo.model.attention import rope_frequencies
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.transformer import Transformer
from tests.jaxgrpo.model.gguf_files import Kind, gguf_tensors, write_gguf
from tests.jaxgrpo.model.published import PUBLISHED

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FAMILIES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
}
PROMPT = 150
# Wavelengths of 6, 53, 445 and 3735 tokens: one kept, one between, two divided. The prompt exceeds the 64 tokens.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def random_reference(family, **options):
    """A small transformers model whose every parameter, norms and biases too, is away from its default."""
    config_class, model_class = FAMILIES[family]
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "rope_theta": 5000.0,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(0)
    model = model_class(config_class(**(sizes | options))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
    return model


def our_logits(config, params, ids, prefix_length=0):
    graph, _ = nnx.split(Transformer.abstract(config))

    @jax.jit
    def run(params, ids):
        model = nnx.merge(graph, params)
        prefix = model.prefill(ids[0, :prefix_length])
        rest = ids[:, prefix_length:]
        positions = jnp.broadcast_to(jnp.arange(prefix_length, ids.shape[1]), rest.shape)
        return model.logits(model.forward(rest, positions, jnp.ones_like(rest, bool), prefix, remat=False))

    return np.asarray(run(params, jnp.asarray(ids, jnp.int32)))


def their_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.numpy()


def assert_same_logits(reference, directory):
    config, params = weights.load(directory)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (2, PROMPT))
    ids[1, :40] = ids[0, :40]
    expected = their_logits(reference, ids)
    assert expected.std() > 0.5
    np.testing.assert_allclose(our_logits(config, params, ids), expected, atol=1e-4)
    np.testing.assert_allclose(our_logits(config, params, ids, prefix_length=40), expected[:, 40:], atol=1e-4)
    return config, params


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 2}),
        ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4, "attention_bias": True}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "rope_parameters": LLAMA3_ROPE}),
        ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 16}),
        ("qwen3", {"tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 8, "attention_bias": True}),
    ],
)
def test_logits_equal_transformers(tmp_path, family, options):
    reference = random_reference(family, **options)
    reference.save_pretrained(tmp_path / "theirs")
    config, params = assert_same_logits(reference, tmp_path / "theirs")

    weights.save_pretrained(tmp_path / "ours", config, params)
    again = FAMILIES[family][1].from_pretrained(tmp_path / "ours").eval()
    ids = np.random.default_rng(2).integers(0, config.vocab_size, (1, 20))
    np.testing.assert_array_equal(their_logits(again, ids), their_logits(reference, ids))


def test_sharded_checkpoints_both_ways(tmp_path):
    reference = random_reference("qwen2", tie_word_embeddings=False)
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    config, params = assert_same_logits(reference, tmp_path / "theirs")

    weights.save_pretrained(tmp_path / "ours", config, params, max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    assert_same_logits(transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "ours").eval(), tmp_path / "theirs")


def test_rope_frequencies_of_llama3_equal_transformers():
    values = PUBLISHED["Llama-3.2-1B-Instruct"][0]
    given = {name: value for name, value in values.items() if name not in ("model_type", "architectures")}
    reference = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**given))
    config = ModelConfig.from_hf(values)
    ours = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    np.testing.assert_allclose(ours, reference.inv_freq.numpy(), rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_logits_equal_transformers(tmp_path, family):
    """Types as in llama.cpp's Q4_K_M and Q4_0 files, and the 16-bit ones."""
    types = {
        "token_embd": Kind.Q6_K,
        "attn_q": Kind.Q4_K,
        "attn_k": Kind.Q4_K,
        "attn_v": Kind.Q5_K,
        "attn_output": Kind.Q4_0,
        "ffn_gate": Kind.Q4_1,
        "ffn_up": Kind.Q8_0,
        "ffn_down": Kind.BF16,
        "output": Kind.F16,
    }
    # What transformers takes for the size of heads, whatever the header says.
    head_dim = 128 if family == "qwen3" else 64
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": head_dim, "tie_word_embeddings": False}
    random_reference(family, **sizes, eos_token_id=3).save_pretrained(tmp_path)
    tensors = gguf_tensors(weights.read_config(tmp_path), load_file(tmp_path / "model.safetensors"))
    kinds = {name: types[name.split(".")[-2]] for name, tensor in tensors.items() if tensor.ndim == 2}
    assert set(kinds.values()) == set(types.values())
    write_gguf(tmp_path / "a.gguf", weights.read_config(tmp_path), tensors, kinds)
    theirs = FAMILIES[family][1].from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32).eval()
    config, params = weights.load(tmp_path / "a.gguf")
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (1, PROMPT))
    expected = their_logits(theirs, ids)
    assert expected.std() > 0.5
    np.testing.assert_allclose(our_logits(config, params, ids, prefix_length=40), expected[:, 40:], atol=1e-4)


def test_bfloat16_checkpoint_becomes_float32(tmp_path):
    random_reference("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert_same_logits(reference, tmp_path)


@pytest.fixture(scope="module")
def smollm2():
    try:
        path = weights.resolve_model("smollm2-135m")
    except weights.WeightsError as error:
        pytest.skip(str(error))
    return path, *weights.load(path), smollm2_reference(path)


def smollm2_reference(path):
    """transformers' own reading of the same GGUF file."""
    return transformers.LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


# <|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n
CHAT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


def test_smollm2_gguf_logits(smollm2):
    _, config, params, reference = smollm2
    expected = their_logits(reference, [CHAT])
    np.testing.assert_allclose(our_logits(config, params, [CHAT], prefix_length=5), expected[:, 5:], atol=2e-4)


def test_smollm2_greedy_continuation(smollm2):
    _, config, params, reference = smollm2
    length = 24
    ids = torch.tensor([CHAT])
    options = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(CHAT) :].tolist()
    assert greedy(config, params, CHAT, split=5, length=length) == expected


def greedy(config, params, prompt, split, length):
    """Greedy tokens after `prompt`: its first `split` ids are the shared prefix, the rest one decoded block."""
    graph, _ = nnx.split(Transformer.abstract(config))

    @jax.jit
    def run(params, prompt):
        model = nnx.merge(graph, params)
        prefix, layers = model.prefill(prompt[:split]), model.decode_params()
        block = prompt[None, split:]
        cache = model.init_cache(1, block.shape[1] + length)
        positions = split + jnp.arange(block.shape[1])[None]
        hidden, cache = model.decode(block, positions, jnp.ones_like(block, bool), prefix, cache, layers)
        first = model.logits(hidden[:, -1]).argmax(-1).astype(jnp.int32)

        def step(index, state):
            tokens, last, cache = state
            tokens = tokens.at[index].set(last[0])
            position = (len(prompt) + index)[None, None]
            hidden, cache = model.decode(last[:, None], position, jnp.ones((1, 1), bool), prefix, cache, layers)
            return tokens, model.logits(hidden[:, 0]).argmax(-1).astype(jnp.int32), cache

        return jax.lax.fori_loop(0, length, step, (jnp.zeros(length, jnp.int32), first, cache))[0]

    return run(params, jnp.asarray(prompt, jnp.int32)).tolist()
