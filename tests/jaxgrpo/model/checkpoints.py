"""Small checkpoints, and what tests of reading them share."""

import json

import jax
import numpy as np
import pytest

from jaxgrpo.model import weights
from jaxgrpo.model.config import ModelConfig

CONFIG = ModelConfig(
    architecture="llama", vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=32,
    rope_theta=5000.0, norm_epsilon=1e-5, eos_ids=(2,),
)  # fmt: skip


def assert_same(one, other):
    """Two trees of arrays are equal, value by value."""
    jax.tree.map(np.testing.assert_array_equal, one, other)


def rewrite_json(path, **changes):
    """Changes values of a JSON object in a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def error_of(call, *arguments, kind: type[ValueError] = weights.WeightsError):
    """The message of the error that a call raises; always one line."""
    with pytest.raises(kind) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message
