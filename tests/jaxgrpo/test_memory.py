"""What a step of a model with a large vocabulary would hold."""

import dataclasses
import math

import jax
import pytest
from flax import nnx

from jaxgrpo.critic import CriticNetwork
from jaxgrpo.fitting import memory_needed
from jaxgrpo.model.chunks import chunk_size
from jaxgrpo.model.config import ModelConfig
from jaxgrpo.model.lora import LoRA
from jaxgrpo.model.trained import split_trained, switched_off
from jaxgrpo.model.transformer import UNROLLED_LAYERS, Transformer
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
    config = ModelConfig("qwen2", VOCAB, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=48, qkv_bias=True)
    step, arguments = planned(options, config)
    shapes = array_shapes(jax.make_jaxpr(step.update)(*arguments))
    tokens = ROWS * LIMIT
    assert (tokens, chunk_size(VOCAB)) in shapes and (VOCAB, config.width) in shapes
    assert max(map(math.prod, shapes)) < tokens * VOCAB


@pytest.mark.parametrize("rows", [16, 64])
def test_with_adapters_etpo_takes_little_more_than_ms_grpo(rows):
    """Actor, critic, target critic and reference are one base and three adapters: of a compiled update's memory, which
    is its temporary arrays, arguments and results less the donated ones, at most 1.6 times that of MS-GRPO's."""
    lora = LoRA(rank=8, alpha=16.0)
    config = ModelConfig("llama", 49_152, width=192, layers=9, heads=3, kv_heads=1, head_dim=64, ffn=512, lora=lora)
    # Few layers stand one after another in the program, and compilers for CPUs then keep what is to be made again.
    assert config.layers > UNROLLED_LAYERS

    def memory(**options):
        step, arguments = planned({**options, "micro_batch": rows}, config)
        needed = memory_needed(jax.jit(step.update, donate_argnums=0).lower(*arguments))
        assert needed is not None
        return needed

    assert memory(algorithm="etpo") < 1.6 * memory(algorithm="ms-grpo", kl_beta=0.0)


def planned(options, config):
    """A train step for a model that is not there, and the arguments of its update, shapes and types alone."""
    experiment = small(**{"micro_batch": ROWS, "minibatches": 12, **options}, constrain=False, reply_limit=LIMIT)
    whole = Transformer.abstract(config)
    graph, params = nnx.split(whole)
    policy = dataclasses.replace(experiment.policy, graphdef=graph, vocab_size=config.vocab_size - 271, remat=True)
    critic = experiment.train_step.critic
    if critic is not None:
        critic = CriticNetwork(critic.kind, critic.output, 24, config.width, config.vocab_size)
    step = dataclasses.replace(experiment.train_step, policy=policy, critic=critic)
    hp = experiment.hyperparameters
    trained, frozen = (params, nnx.State({})) if config.lora is None else split_trained(params, whole.stacks)
    reference = trained if config.lora is None else jax.eval_shape(switched_off, trained)

    def begin(params):
        key = jax.random.key(0)
        return TrainState(
            params, step.init_optimizer(params, hp), step.init_critic(key, params, hp), key, jax.numpy.int32(0)
        )

    state = jax.eval_shape(begin, trained)
    fixed = Fixed(frozen, reference if step.uses_reference else None)
    return step, (state, jax.eval_shape(step.rollout, state, fixed, hp), fixed, hp)
