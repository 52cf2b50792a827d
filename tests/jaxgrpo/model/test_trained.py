"""Training of chosen layers: how they are named, how parameters are divided, and what is computed for it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.trained import join, parse_layers, restack, split_trained
from jaxgrpo.model.transformer import Stack, Transformer
from tests.jaxgrpo.jaxprs import array_shapes

CONFIG = ModelConfig(
    architecture="qwen2",
    vocab_size=40,
    width=24,
    layers=6,
    heads=2,
    kv_heads=1,
    head_dim=8,
    ffn=20,
    qkv_bias=True,
    tie_embeddings=True,
)


@pytest.mark.parametrize(
    ("text", "stacks"),
    [
        ("all", [(6, True)]),
        ("0-5", [(6, True)]),
        ("0-", [(6, True)]),
        ("5", [(5, False), (1, True)]),
        ("4-", [(4, False), (2, True)]),
        ("0, 2-3", [(1, True), (1, False), (2, True), (2, False)]),
        ("2,3,1", [(1, False), (3, True), (2, False)]),
    ],
)
def test_names_of_layers(text, stacks):
    assert parse_layers(text, 6) == tuple(Stack(*stack) for stack in stacks)


@pytest.mark.parametrize(
    ("text", "why"),
    [("6", "layers are 0-5"), ("4-6", "layers are 0-5"), ("3-2", "layers are 0-5"), ("", "give all"), ("top", "give")],
)
def test_names_of_no_layers(text, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        parse_layers(text, 6)


def loss(graph, trained, frozen, ids):
    model = nnx.merge(graph, join(trained, frozen))
    prefix = model.prefill(ids[0, :3])
    rows = ids[:, 3:]
    positions = jnp.broadcast_to(3 + jnp.arange(rows.shape[1]), rows.shape)
    hidden = model.forward(rows, positions, jnp.ones_like(rows, bool), prefix)
    return jnp.sum(jnp.sin(hidden) * jnp.arange(hidden.shape[-1]))


@pytest.mark.parametrize("text", ["4-", "1-2,5"])
def test_the_gradient_is_the_chosen_layers_part_of_the_whole(text):
    model = Transformer.initial(CONFIG, jax.random.key(0))
    graph, params = nnx.split(model)
    ids = jax.random.randint(jax.random.key(1), (4, 9), 0, CONFIG.vocab_size)
    expected, whole = jax.value_and_grad(loss, argnums=1)(graph, params, nnx.State({}), ids)
    stacks = parse_layers(text, CONFIG.layers)
    divided = nnx.split(Transformer.abstract(CONFIG, stacks))[0]
    trained, frozen = split_trained(restack(model, stacks), stacks)
    found, gradient = jax.value_and_grad(loss, argnums=1)(divided, trained, frozen, ids)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    whole_parts, _ = split_trained(restack(nnx.merge(graph, whole), stacks), stacks)
    assert jax.tree.structure(gradient) == jax.tree.structure(trained) == jax.tree.structure(whole_parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradient, whole_parts)
    back = restack(nnx.merge(divided, join(trained, frozen)), [Stack(CONFIG.layers)])
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_nothing_is_computed_backwards_below_the_first_chosen_layer():
    """Frozen layers above it carry the gradient; those below have neither activations nor gradients kept for them."""
    ids = jnp.zeros((4, 9), jnp.int32)

    def scanned_backwards(text):
        stacks = parse_layers(text, CONFIG.layers)
        graph, params = nnx.split(Transformer.abstract(CONFIG, stacks))
        trained, frozen = split_trained(params, stacks)
        jaxpr = jax.make_jaxpr(jax.grad(lambda t, f: loss(graph, t, f, ids)))(trained, frozen)
        # Gradients with respect to a stack's queries, or to their input, leave a shape of the stack's length.
        return [shape for shape in array_shapes(jaxpr) if shape[1:] == (4, 6, CONFIG.width)]

    assert {shape[0] for shape in scanned_backwards("4-")} == {2}
    assert {shape[0] for shape in scanned_backwards("3")} == {1, 2}
    assert {shape[0] for shape in scanned_backwards("all")} == {6}
