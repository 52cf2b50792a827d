"""Gate 9: one function three ways. Sampling, training and plain whole-sequence evaluation agree, row by row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.transformer import Transformer, declare

CONFIG = ModelConfig(
    architecture="qwen2", vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, qkv_bias=True,
    init_std=0.3,
)  # fmt: skip
DEEP = dataclasses.replace(CONFIG, layers=5, tie_embeddings=False)  # Scanned, not unrolled.
TOKENS = 9


def random_model(config):
    """Random weights, biases and norms too."""
    rng = np.random.default_rng(0)
    values = {
        name: jnp.asarray((d.init == "ones") + config.init_std * rng.standard_normal(d.shape), jnp.float32)
        for name, d in declare(config).items()
    }
    return Transformer(config, values)


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


def rows(prefix_length, batch=5, seed=0):
    """Ragged rows: left pads, pads inside, a full row, a row of one token."""
    rng = np.random.default_rng(seed)
    valid = rng.random((batch, TOKENS)) < 0.7
    valid[0] = True
    valid[1] = np.arange(TOKENS) >= 4
    valid[2] = np.arange(TOKENS) == TOKENS - 1
    ids = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (batch, TOKENS)), jnp.int32)
    return ids, positions_of(valid, prefix_length), jnp.asarray(valid)


def positions_of(valid, prefix_length):
    return jnp.asarray(prefix_length + np.maximum(np.cumsum(valid, 1) - 1, 0), jnp.int32)


def prompt(length):
    return jnp.arange(length, dtype=jnp.int32) * 7 % CONFIG.vocab_size


def log_probs(model, hidden):
    return np.asarray(_log_probs(*nnx.split(model), hidden))


@functools.partial(jax.jit, static_argnums=0)
def _log_probs(graph, params, hidden):
    return jax.nn.log_softmax(nnx.merge(graph, params).logits(hidden))


def forward(model, ids, positions, valid, prefix_ids):
    return _forward(*nnx.split(model), ids, positions, valid, prefix_ids)


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph, params, ids, positions, valid, prefix_ids):
    model = nnx.merge(graph, params)
    return model.forward(ids, positions, valid, model.prefill(prefix_ids), remat=False)


def decode(model, ids, positions, valid, prefix_ids, blocks=(4,)):
    """The hidden states of all tokens, decoded in blocks of the given widths and then one by one in a loop."""
    return _decode(*nnx.split(model), ids, positions, valid, prefix_ids, blocks)


@functools.partial(jax.jit, static_argnums=(0, 6))
def _decode(graph, params, ids, positions, valid, prefix_ids, blocks):
    model = nnx.merge(graph, params)
    prefix, layers = model.prefill(prefix_ids), model.decode_params()
    spare_slots = 3
    cache, parts, start = model.init_cache(ids.shape[0], TOKENS + spare_slots), [], 0
    for width in blocks:
        block = (x[:, start : start + width] for x in (ids, positions, valid))
        hidden, cache = model.decode(*block, prefix, cache, layers)
        parts.append(hidden)
        start += width

    def step(cache, columns):
        hidden, cache = model.decode(*(x[:, None] for x in columns), prefix, cache, layers)
        return cache, hidden[:, 0]

    _, rest = jax.lax.scan(step, cache, tuple(x[:, start:].T for x in (ids, positions, valid)))
    return jnp.concatenate([*parts, rest.swapaxes(0, 1)], axis=1)


@pytest.mark.parametrize(
    ("config", "prefix_length", "blocks"),
    [
        *[(CONFIG, 0, ()), (CONFIG, 0, (TOKENS,)), (CONFIG, 7, (4, 3)), (CONFIG, 3, (4,)), (DEEP, 7, (4,))],
        (dataclasses.replace(DEEP, scan_decode=True), 7, (4, 3)),
    ],
)
def test_decode_equals_forward(config, prefix_length, blocks):
    model = random_model(config)
    inputs = rows(prefix_length)
    valid = np.asarray(inputs[2])
    expected = log_probs(model, forward(model, *inputs, prompt(prefix_length)))[valid]
    found = log_probs(model, decode(model, *inputs, prompt(prefix_length), blocks))[valid]
    assert expected.std() > 0.5
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_shared_prefix_and_padding_change_nothing(model):
    """A ragged row equals its own tokens written out after the prompt, with neither prefix nor padding."""
    ids, positions, valid = rows(7)
    found = np.asarray(forward(model, ids, positions, valid, prompt(7)))
    for row in (1, 3):
        whole = jnp.concatenate([prompt(7), ids[row][valid[row]]])[None]
        alone = forward(model, whole, jnp.arange(whole.shape[1])[None], jnp.ones_like(whole, bool), prompt(0))
        np.testing.assert_allclose(found[row][np.asarray(valid[row])], alone[0, 7:], atol=1e-5)


@pytest.mark.parametrize("run", [forward, decode])
def test_rows_do_not_depend_on_neighbours(model, run):
    ids, positions, valid = rows(3)
    mask = np.asarray(valid)
    together = np.asarray(run(model, ids, positions, valid, prompt(3)))
    others = ids.at[1:].set((ids[1:] + 1) % CONFIG.vocab_size)
    changed = np.asarray(run(model, others, positions, valid, prompt(3)))
    np.testing.assert_array_equal(changed[0], together[0])
    assert not np.allclose(changed[1:][mask[1:]], together[1:][mask[1:]])
    alone = np.asarray(run(model, ids[:1], positions[:1], valid[:1], prompt(3)))
    np.testing.assert_allclose(alone[0], together[0], atol=1e-5)


@pytest.mark.parametrize("run", [forward, decode])
def test_padding_ids_and_the_future_are_not_seen(model, run):
    ids, positions, valid = rows(3)
    mask = np.asarray(valid)
    expected = np.asarray(run(model, ids, positions, valid, prompt(3)))
    other_pads = jnp.where(valid, ids, (ids + 5) % CONFIG.vocab_size)
    np.testing.assert_array_equal(np.asarray(run(model, other_pads, positions, valid, prompt(3)))[mask], expected[mask])
    other_last = ids.at[:, -1].add(1)
    found = np.asarray(run(model, other_last, positions, valid, prompt(3)))
    np.testing.assert_array_equal(found[:, :-1][mask[:, :-1]], expected[:, :-1][mask[:, :-1]])


def test_a_row_without_tokens_is_finite(model):
    ids, positions, valid = rows(0)
    empty = valid.at[3].set(False)
    assert np.isfinite(forward(model, ids, positions, empty, prompt(0))).all()
    assert np.isfinite(decode(model, ids, positions, empty, prompt(0), (4,))).all()


@pytest.mark.parametrize(("config", "remat"), [(CONFIG, False), (CONFIG, True), (DEEP, True)])
def test_gradient_through_the_shared_prefix(config, remat):
    """The gradient with one shared prefix equals that of rows which each hold the whole prompt."""
    graph, params = nnx.split(random_model(config))
    ids, positions, valid = rows(7)
    repeated = jnp.broadcast_to(prompt(7), (ids.shape[0], 7))
    whole = jnp.concatenate([repeated, ids], axis=1)
    whole_valid = jnp.concatenate([jnp.ones_like(repeated, bool), valid], axis=1)
    whole_positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(7), repeated.shape), positions], axis=1)

    def score(model, hidden):
        return jnp.sum(jnp.where(valid, jax.nn.log_softmax(model.logits(hidden))[..., 3], 0))

    @jax.jit
    @jax.value_and_grad
    def shared(params):
        model = nnx.merge(graph, params)
        return score(model, model.forward(ids, positions, valid, model.prefill(prompt(7)), remat=remat))

    @jax.jit
    @jax.value_and_grad
    def plain(params):
        model = nnx.merge(graph, params)
        return score(
            model, model.forward(whole, whole_positions, whole_valid, model.prefill(prompt(0)), remat=False)[:, 7:]
        )

    (found, gradient), (expected, expected_gradient) = shared(params), plain(params)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-5 * np.abs(other).max())


def test_token_logits_are_rows_of_the_logits(model):
    hidden = jax.random.normal(jax.random.key(0), (3, 4, CONFIG.width))
    tokens = jax.random.randint(jax.random.key(1), (3, 4, 5), 0, CONFIG.vocab_size)
    expected = jnp.take_along_axis(model.logits(hidden), tokens, axis=-1)
    np.testing.assert_allclose(model.token_logits(hidden, tokens), expected, atol=1e-5)
    assert model.head().shape == (CONFIG.vocab_size, CONFIG.width)


def test_bfloat16_compute_stays_close_and_keeps_float32_where_it_matters(model):
    low = nnx.merge(nnx.split(Transformer.abstract(dataclasses.replace(model.config, compute_dtype="bfloat16")))[0],
                    nnx.split(model)[1])  # fmt: skip
    inputs = rows(7)
    valid = np.asarray(inputs[2])
    hidden = forward(low, *inputs, prompt(7))
    assert hidden.dtype == jnp.bfloat16
    assert low.logits(hidden).dtype == jnp.float32
    expected = log_probs(model, forward(model, *inputs, prompt(7)))[valid]
    trained = log_probs(low, hidden)[valid]
    sampled = log_probs(low, decode(low, *inputs, prompt(7), (4,)))[valid]
    assert np.abs(trained - expected).mean() < 0.1
    # Bound stated for bfloat16: sampling and training differ by rounding only.
    assert np.abs(trained - sampled).mean() < 0.05


def test_same_key_same_weights_and_one_graph_definition():
    one, two = (nnx.split(Transformer.initial(CONFIG, jax.random.key(0))) for _ in range(2))
    assert one[0] == two[0] == nnx.split(Transformer.abstract(CONFIG))[0]
    assert hash(one[0]) == hash(two[0])
    jax.tree.map(np.testing.assert_array_equal, one[1], two[1])
    other = Transformer.initial(CONFIG, jax.random.key(1))
    assert not np.array_equal(other.embedding[...], Transformer.initial(CONFIG, jax.random.key(0)).embedding[...])


def test_declarations_match_the_values():
    for config in (CONFIG, DEEP, dataclasses.replace(CONFIG, architecture="qwen3", qk_norm=True, output_bias=True)):
        model = Transformer.initial(config, jax.random.key(0))
        declarations = declare(config)
        assert len(jax.tree.leaves(nnx.split(model)[1])) == len(declarations)
        for name, declaration in declarations.items():
            value = np.asarray(model.parameter(name))
            assert value.shape == declaration.shape == declaration.abstract().shape
            assert value.dtype == declaration.dtype
            assert len(declaration.axes) == len(declaration.shape)
            if declaration.init == "normal":
                assert abs(value.std() / config.init_std - 1) < 0.2
