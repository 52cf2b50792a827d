"""Critics: networks that say what a token, or the state before it, is worth. They know a model and no game.

| kind  | what it reads                             | Q of a token v                          | value V              |
|-------|-------------------------------------------|-----------------------------------------|----------------------|
| model | hidden states of a copy of the model      | own logit of v - the reference's        | linear, without bias |
| raw   | the same                                  | own logit of v                          | none                 |
| head  | hidden states of the reference, frozen    | row v of a matrix, over a small network | linear, over the same |

A copy holds only the parameters that are trained: beside frozen ones it costs adapters or a few layers. With `model` Q
begins at exactly 0, for the copy begins as the reference; rows of `head` and of values begin at 0 as well. With `raw`,
which is what ETPO's published code does, Q begins as whatever the language model's logits are.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from jaxgrpo.token_statistics import Scores


@dataclasses.dataclass(frozen=True)
class CriticNetwork:
    """The form of a critic; its parameters are apart.

    Attributes:
        kind: see the module's head.
        output: Q of each token, or the value before it.
        width: of the small network of `head`.
        embed: width of the model's hidden states.
        vocab: rows of the model's head.
    """

    kind: Literal["model", "raw", "head"]
    output: Literal["q", "value"]
    width: int
    embed: int
    vocab: int

    @property
    def is_relative(self) -> bool:
        """Whether Q is the difference of the scores to the reference's logits."""
        return self.kind == "model" and self.output == "q"

    @property
    def uses_reference(self) -> bool:
        """Whether the reference is needed to make anything of the critic."""
        return self.kind == "head" or self.is_relative

    def init(self, key: PRNGKeyArray, trained: PyTree[Array]) -> dict[str, Any]:
        """Parameters before the first update, in buffers of their own.

        Args:
            key: of the small network's weights.
            trained: the trained parameters of the model, which a copy begins with.
        """
        if self.kind != "head":
            params: dict[str, Any] = {"model": jax.tree.map(jnp.copy, trained)}
            width = self.embed
        else:
            first, second = jax.random.split(key)
            params = {
                "first": jax.random.normal(first, (self.embed, self.width)) / jnp.sqrt(self.embed),
                "second": jax.random.normal(second, (self.width, self.width)) / jnp.sqrt(self.width),
            }
            width = self.width
        if self.output == "value":
            return {**params, "value": jnp.zeros(width)}
        return params if self.kind != "head" else {**params, "rows": jnp.zeros((self.vocab, width))}

    def copy(self, params: dict[str, Any]) -> PyTree[Array] | None:
        """The trained parameters of the model it reads; None where that is the reference."""
        return params.get("model")

    def scores(self, params: dict[str, Any], read: Scores) -> Scores:
        """Its scores of the vocabulary, where it puts out Q.

        Args:
            params: from `init`.
            read: what the model that it reads makes of the same tokens.
        """
        return Scores(self._features(params, read.hidden), params["rows"]) if self.kind == "head" else read

    def value(self, params: dict[str, Any], read: Scores) -> Float[Array, "*tokens"]:
        """Value before each token, in float32, where it puts out values."""
        features = self._features(params, read.hidden) if self.kind == "head" else read.hidden.astype(jnp.float32)
        return features @ params["value"]

    def _features(self, params: dict[str, Any], hidden: Float[Array, "*tokens embed"]) -> Float[Array, "*tokens width"]:
        inner = jax.nn.silu(hidden.astype(jnp.float32) @ params["first"])
        return jax.nn.silu(inner @ params["second"])
