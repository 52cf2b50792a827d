"""What a step of a model with a large vocabulary would hold."""

import dataclasses
import math

import jax
import pytest
from flax import nnx

from jaxgrpo.critic import CriticNetwork
from jaxgrpo.model.chunks import chunk_size
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.transformer import Transformer
from jaxgrpo.train_step import Fixed, TrainState
from tests.jaxgrpo.experiments import small
from tests.jaxgrpo.jaxprs import array_shapes

VOCAB, ROWS, LIMIT = 151_936, 16, 8  # of Qwen2.5; rows in a micro-batch; tokens that are sampled in each


@pytest.mark.parametrize(
    "options",
    [{"kl_beta": 0.1, "entropy_bonus": 0.1}, {"algorithm": "etpo"}, {"algorithm": "etpo", "critic": "head"}],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_no_array_of_tokens_by_vocabulary(options):
    """Neither forward nor backward; of the vocabulary there are a head, its gradient, and scores of a chunk."""
    experiment = small(**options, constrain=False, reply_limit=LIMIT, micro_batch=ROWS)
    config = ModelConfig("qwen2", VOCAB, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=48, qkv_bias=True)
    graph, params = nnx.split(Transformer.abstract(config))
    policy = dataclasses.replace(experiment.policy, graphdef=graph, vocab_size=VOCAB - 271)
    critic = experiment.train_step.critic
    if critic is not None:
        critic = CriticNetwork(critic.kind, critic.output, 24, config.width, VOCAB)
    step = dataclasses.replace(experiment.train_step, policy=policy, critic=critic)
    hp, start = experiment.hyperparameters, jax.eval_shape(experiment.init)

    def begin(params):
        critic = step.init_critic(start_key(), params, hp)
        return TrainState(params, step.init_optimizer(params, hp), critic, start_key(), jax.numpy.int32(0))

    def start_key():
        return jax.random.key(0)

    state = jax.eval_shape(begin, params)
    assert jax.tree.structure(start) == jax.tree.structure(state)
    fixed = Fixed(nnx.State({}), params)
    episodes = jax.eval_shape(step.rollout, state, fixed, hp)
    shapes = array_shapes(jax.make_jaxpr(step.update)(state, episodes, fixed, hp))
    tokens = ROWS * LIMIT
    assert (tokens, chunk_size(VOCAB)) in shapes and (VOCAB, config.width) in shapes
    assert max(map(math.prod, shapes)) < tokens * VOCAB
