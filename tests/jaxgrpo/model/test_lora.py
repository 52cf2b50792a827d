"""Adapters: what they compute and its gradient, how they start, and what they cost beside a base that members share."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxgrpo.checkpoints import bytes_of
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.lora import LINEAR, PEFT_NAMES, LoRA, parse_targets
from jaxgrpo.model.packed import PACKED
from jaxgrpo.model.trained import (
    add_nothing,
    base_types,
    cast_base,
    initial_adapters,
    join,
    merge_adapters,
    split_trained,
    switched_off,
)
from jaxgrpo.model.transformer import Stack, Transformer
from jaxgrpo.optimizer import decays
from jaxgrpo.records import digest
from jaxgrpo.token_statistics import Scores, over_vocabulary
from jaxgrpo.train_step import Fixed
from tests.jaxgrpo.experiments import compiled, small
from tests.jaxgrpo.jaxprs import array_shapes
from tests.jaxgrpo.model.checkpoints import assert_same
from tests.jaxgrpo.model.test_transformer import (
    CONFIG,
    DEEP,
    TOKENS,
    _decode,
    decode,
    forward,
    log_probs,
    prompt,
    random_model,
    rows,
)

ADAPTED = dataclasses.replace(CONFIG, lora=LoRA(rank=3, alpha=6.0))
DEEP_ADAPTED = dataclasses.replace(DEEP, lora=LoRA(rank=2, alpha=5.0))
STACKS = (Stack(2, False), Stack(2), Stack(1, False))


def jittered(adapters, std=0.3):
    """Adapters as after some training: no B is zero."""
    keys = iter(jax.random.split(jax.random.key(9), 99))
    return jax.tree.map(lambda x: x + std * jax.random.normal(next(keys), x.shape), adapters)


def adapted(config, stacks=()):
    """Graph, trained adapters and base of a model with random weights."""
    base = random_model(dataclasses.replace(config, lora=None))
    values = {name: base.parameter(name) for name in base_types(config, jnp.float32)}
    frozen = nnx.split(Transformer(base.config, values, stacks))[1]
    graph = nnx.split(Transformer.abstract(config, stacks))[0]
    return graph, jittered(initial_adapters(config, stacks or base.stacks, jax.random.key(1))), frozen


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("all-linear", tuple(LINEAR)),
        ("value,query", ("query", "value")),
        ("q_proj, down_proj,query", ("query", "down")),
        (",".join(PEFT_NAMES.values()), tuple(LINEAR)),
    ],
)
def test_names_of_targets(text, targets):
    assert parse_targets(text) == targets


@pytest.mark.parametrize(
    ("text", "why"),
    [("q_prj", "did you mean q_proj?"), ("", "give all-linear, or query"), ("lm_head", "'lm_head' is no linear layer")],
)
def test_names_of_no_targets(text, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        parse_targets(text)


def test_adapters_begin_as_pefts_do():
    """torch's kaiming_uniform_(A, a=sqrt(5)) is uniform within 1 / sqrt(inputs) of 0."""
    config = dataclasses.replace(ADAPTED, lora=LoRA(rank=64, alpha=1.0))
    (layers,) = initial_adapters(config, (Stack(2),), jax.random.key(0))["layers"].values()
    assert len(layers) == 2 * len(LINEAR)
    for name, inputs in {"query": 32, "output": 32, "down": 48}.items():
        a, b = np.asarray(layers[f"{name}_lora_a"][...]), layers[f"{name}_lora_b"][...]
        assert a.shape[:2] == (2, 64) and a[0, 0].size == inputs and b.shape[-1] == 64
        assert not b.any()
        bound = inputs**-0.5
        assert 0.98 * bound < np.abs(a).max() <= bound
        assert a.std() == pytest.approx(bound / np.sqrt(3), rel=0.03)


def test_adapters_that_add_nothing_or_are_off_leave_every_bit():
    graph, trained, frozen = adapted(ADAPTED)
    fresh = initial_adapters(ADAPTED, (Stack(2),), jax.random.key(0))
    assert add_nothing(fresh) and not add_nothing(trained)
    assert bytes_of(switched_off(trained)) == 0
    inputs, base = (*rows(7), prompt(7)), random_model(CONFIG)
    for run, adapters in ((forward, fresh), (decode, switched_off(trained))):
        expected = run(base, *inputs)
        np.testing.assert_array_equal(run(nnx.merge(graph, join(adapters, frozen)), *inputs), expected)
    found = forward(nnx.merge(graph, join(trained, frozen)), *inputs)
    assert not np.allclose(found, expected, atol=0.1)


def test_decode_equals_forward_equals_the_merged_model():
    graph, trained, frozen = adapted(ADAPTED, (Stack(1, False), Stack(1)))
    model = nnx.merge(graph, join(trained, frozen))
    assert [any("lora" in name for name in stack) for stack in model.layers] == [s.trained for s in model.stacks]
    inputs = rows(7)
    valid = np.asarray(inputs[2])
    expected = log_probs(model, forward(model, *inputs, prompt(7)))[valid]
    np.testing.assert_allclose(log_probs(model, decode(model, *inputs, prompt(7)))[valid], expected, atol=1e-4)
    plain = nnx.split(Transformer.abstract(CONFIG))[0]
    merged = nnx.merge(plain, merge_adapters(model))
    np.testing.assert_allclose(log_probs(merged, forward(merged, *inputs, prompt(7)))[valid], expected, atol=1e-4)


def test_gradients_are_those_through_the_merged_matrices():
    """A and B get what W + alpha / rank * B A passes on to them by the chain rule; of the middle layers, scanned."""
    graph, trained, frozen = adapted(DEEP_ADAPTED, STACKS)
    ids, positions, valid = rows(5)
    plain = nnx.split(Transformer.abstract(DEEP))[0]

    def score(model):
        hidden = model.forward(ids, positions, valid, model.prefill(prompt(5)))
        return jnp.sum(jnp.where(valid, jax.nn.log_softmax(model.logits(hidden))[..., 3], 0))

    @jax.jit
    @jax.value_and_grad
    def beside(adapters):
        return score(nnx.merge(graph, join(adapters, frozen)))

    @jax.jit
    @jax.value_and_grad
    def through(adapters):
        return score(nnx.merge(plain, merge_adapters(nnx.merge(graph, join(adapters, frozen)))))

    (found, gradient), (expected, dense) = beside(trained), through(trained)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert jax.tree.structure(gradient) == jax.tree.structure(trained)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(dense), strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * np.abs(other).max())


def test_a_base_in_bfloat16():
    graph, trained, frozen = adapted(ADAPTED)
    half = cast_base(frozen, base_types(ADAPTED, jnp.bfloat16))
    kinds = {str(place[-1]): param[...].dtype.name for place, param in nnx.to_flat_state(half)}
    assert {kind for name, kind in kinds.items() if name.endswith(("norm", "bias"))} == {"float32"}
    assert {kind for name, kind in kinds.items() if not name.endswith(("norm", "bias"))} == {"bfloat16"}
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    inputs = (*rows(7), prompt(7))
    found, expected = (decode(nnx.merge(graph, join(trained, base)), *inputs) for base in (half, rounded))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("vocab", [CONFIG.vocab_size, 16_385])  # one chunk of the head, and two of unequal size
def test_a_packed_base_gives_the_bits_of_a_base_in_bfloat16(vocab):
    config = dataclasses.replace(DEEP_ADAPTED, vocab_size=vocab)
    graph, trained, frozen = adapted(config, STACKS)
    half, packed = (cast_base(frozen, base_types(config, kind)) for kind in (jnp.bfloat16, PACKED))
    assert digest(packed) == digest(half)
    assert bytes_of(packed) == bytes_of(half)
    one, other = (nnx.merge(graph, join(trained, base)) for base in (half, packed))
    inputs = (*rows(7), prompt(7))
    for run in (forward, decode):
        states = run(one, *inputs)
        np.testing.assert_array_equal(run(other, *inputs), states)
    few = jnp.broadcast_to(jnp.array([5, 0, vocab - 1]), (*states.shape[:2], 3))
    np.testing.assert_array_equal(other.token_logits(states, few), one.token_logits(states, few))
    np.testing.assert_allclose(jax.jit(type(one).logits)(other, states), one.logits(states), rtol=1e-6)
    assert_same(merge_adapters(other), merge_adapters(one))

    @jax.jit
    @jax.value_and_grad
    def score(adapters, base):
        model = nnx.merge(graph, join(adapters, base))
        hidden = model.forward(*inputs[:3], model.prefill(inputs[3])).reshape(-1, config.width)
        taken = model.token_logits(hidden, inputs[0].reshape(-1, 1))[:, 0]
        start = Scores(jnp.flip(hidden, axis=0), model.head())
        found = over_vocabulary(
            hidden, model.head(), taken, jnp.float32(1), vocab_size=60, logits=model.logits_of, reference=start
        )
        return jnp.sum(found.log_prob + 2 * found.entropy + 3 * found.kl)  # pyright: ignore[reportOperatorIssue]

    assert_same(score(trained, packed), score(trained, half))


def test_no_more_than_some_layers_of_a_packed_base_are_expanded():
    """In decoding, where the loop must not be given them expanded, and in a gradient that goes through the prefix."""
    config = ModelConfig(
        "qwen2", 512, width=128, layers=16, heads=2, kv_heads=1, head_dim=64, ffn=512, lora=LoRA(2, 4.0)
    )
    graph, params = nnx.split(Transformer.abstract(config))
    trained, frozen = split_trained(params, (Stack(16),))
    frozen = jax.eval_shape(lambda base: cast_base(base, base_types(config, PACKED)), frozen)
    ids, valid = jnp.zeros((2, TOKENS), jnp.int32), jnp.ones((2, TOKENS), bool)

    def play(trained, frozen, prompt):
        return _decode(graph, join(trained, frozen), ids, ids, valid, prompt, (4,))

    def learn(trained, frozen, prompt):
        def total(trained):
            model = nnx.merge(graph, join(trained, frozen))
            return model.forward(ids, ids, valid, model.prefill(prompt)).sum()

        return jax.grad(total)(trained)

    layer = 4 * sum(x.size for x in jax.tree.leaves(frozen["layers"])) / config.layers
    for run in (play, learn):
        compiled = jax.jit(run).lower(trained, frozen, prompt(5)).compile()
        found: Any = compiled.memory_analysis()
        assert found.temp_size_in_bytes < 4 * layer


OPTIONS = {
    "lora.rank": 2,
    "base_dtype": "bfloat16",
    "kl_beta": 0.1,
    "weight_decay": 0.1,
    "gradient_clip": 0.5,
    "learning_rate": 0.01,
}


def test_a_step_trains_the_adapters_alone_and_on_policy_the_ratio_is_one():
    experiment = small(**OPTIONS)
    state, fixed = experiment.init(), experiment.fixed
    assert bytes_of(fixed.reference) == 0
    # What a checkpoint holds: adapters and two moments of each.
    assert bytes_of(state) < 4 * bytes_of(state.params) < 0.6 * bytes_of(fixed.params)
    state = state.replace(params=jittered(state.params, 0.02))
    episodes = compiled(experiment, "rollout")(state, fixed, experiment.hyperparameters)
    noise = jax.random.normal(jax.random.key(0), episodes.reward.shape)
    episodes = episodes._replace(reward=jnp.where(episodes.alive, noise, 0.0))
    after, metrics = compiled(experiment, "update")(state, episodes, fixed, experiment.hyperparameters)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["logprob_gap"] < 1e-4
    assert metrics["kl"] > 1e-4  # from the base alone
    assert jax.tree.structure(after.params) == jax.tree.structure(state.params)
    for path, new in jax.tree.leaves_with_path(after.params):
        assert "lora" in jax.tree_util.keystr(path)
        assert np.isfinite(new).all()
    assert all(jax.tree.leaves(decays(state.params)))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), after.params, state.params)))


def test_members_share_one_base():
    """Adapters and keys have a member axis; no array of the size of a matrix of the base gets one."""
    experiment, members = small(**OPTIONS), 5
    state, fixed = experiment.init(), experiment.fixed
    many = jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.stack([x] * members), state))
    step = jax.vmap(experiment.train_step, in_axes=(0, Fixed(None, None), None))
    shapes = array_shapes(jax.make_jaxpr(step)(many, fixed, experiment.hyperparameters))
    sizes = {tuple(sorted(shape)) for shape in shapes}
    assert tuple(sorted((members, *state.params["layers"][0]["gate_lora_a"].shape))) in sizes
    for path, leaf in jax.tree.leaves_with_path(fixed.params):
        name = jax.tree_util.keystr(path)
        if "norm" not in name and "bias" not in name:
            for shape in (leaf.shape, leaf.shape[1:]) if "layers" in name else (leaf.shape,):
                assert tuple(sorted((members, *shape))) not in sizes, name
