"""What losses know of sampled tokens, from hidden states, never holding `[tokens, vocabulary]` at once.

Two ways to the same numbers: over the whole vocabulary in chunks, or, where a constraint leaves a handful of tokens,
over those alone. Beside log-probability and entropy there are the divergence from a reference and the expectation of a
critic's Q, for the algorithms that ask.

There is one policy here, pi: the tempered and constrained distribution that tokens are drawn from. Log-probability,
entropy, divergence and expectation are all of that one, so the distribution that is optimised is the one that plays.
The reference rho is tempered and constrained alike: it plays as the starting model would. A critic's Q is a value, not
a distribution, and is never divided by the temperature.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, Num

from jaxgrpo.model.chunks import cut, joined
from jaxgrpo.model.sharding import constrain_rows
from jaxgrpo.sampling import tempered


class TokenStatistics(NamedTuple):
    """What losses may know of each sampled token, in float32; None where it was not asked for.

    Gradients flow into the policy alone: reference and Q are constants. The critic's own are `q` and `value`, in which
    the policy does not appear.
    """

    log_prob: Float[Array, "*tokens"]
    """log pi of the token."""
    entropy: Float[Array, "*tokens"]
    """Entropy of pi, in nats."""
    kl: Float[Array, "*tokens"] | None = None
    """KL(pi || rho) over all tokens, in nats; it needs a reference."""
    expected_q: Float[Array, "*tokens"] | None = None
    """E_{v ~ pi} Q(v); it needs a critic."""
    mean_log_prob: Float[Array, "*tokens"] | None = None
    """log pi(v) averaged over the allowed tokens v, each weighing the same: only the ETPO ablation looks at it."""
    mean_q: Float[Array, "*tokens"] | None = None
    """Q(v) averaged likewise."""
    q: Float[Array, "*tokens"] | None = None
    """Q of the token, differentiable in the critic."""
    value: Float[Array, "*tokens"] | None = None
    """Value before the token is drawn, differentiable in the critic; it needs a critic of values."""


class Scores(NamedTuple):
    """A number for each token of the vocabulary, not multiplied out: `hidden` with every row of `head`.

    A head that is frozen may be packed (`model/packed.py`); the product unpacks it.
    """

    hidden: Float[Array, "*tokens width"]
    head: Num[Array, "vocab width"]


def over_choices(
    logits: Float[Array, "*tokens choices"],
    choices: Int[Array, "*tokens choices"],
    token: Int[Array, "*tokens"],
    temperature: Float[Array, ""],
    *,
    reference_logits: Float[Array, "*tokens choices"] | None = None,
    q: Float[Array, "*tokens choices"] | None = None,
    unweighted: bool = False,
) -> TokenStatistics:
    """Statistics where only a few tokens were allowed.

    Args:
        logits: of the allowed tokens.
        choices: ids of the allowed tokens; -1 fills up, and is not allowed.
        token: the sampled token, one of `choices`. Positions where it is not give an undefined log-probability.
        temperature: of sampling.
        reference_logits: of the allowed tokens under the reference, for `kl`.
        q: the critic's values of the allowed tokens, for `expected_q` and `q`.
        unweighted: whether to make the unweighted means as well.
    """
    allowed = choices >= 0

    def log_softmax(logits: Array) -> Array:
        # A row without any choice (a position that was not sampled) must stay finite, in the gradient too.
        return jax.nn.log_softmax(jnp.where(allowed, tempered(logits, temperature), -1e30), axis=-1)

    def total(x: Array) -> Array:
        return jnp.sum(jnp.where(allowed, x, 0.0), axis=-1)

    log_probs = log_softmax(logits)
    probs = jnp.exp(log_probs)
    taken = (choices == token[..., None]) & allowed
    count = jnp.maximum(jnp.sum(allowed, axis=-1), 1)
    reference = None if reference_logits is None else log_softmax(jax.lax.stop_gradient(reference_logits))
    taken_q = None if q is None else jnp.sum(jnp.where(taken, q, 0.0), axis=-1)
    q = None if q is None else jax.lax.stop_gradient(q)
    return TokenStatistics(
        log_prob=jnp.sum(jnp.where(taken, log_probs, 0.0), axis=-1),
        entropy=-total(probs * log_probs),
        kl=None if reference is None else total(probs * (log_probs - reference)),
        expected_q=None if q is None else total(probs * q),
        mean_log_prob=total(log_probs) / count if unweighted else None,
        mean_q=total(q) / count if unweighted and q is not None else None,
        q=taken_q,
    )


def over_vocabulary(
    hidden: Float[Array, "tokens embed"],
    head: Num[Array, "vocab embed"],
    token_logit: Float[Array, " tokens"],
    temperature: Float[Array, ""],
    *,
    vocab_size: int,
    logits: Callable[[Float[Array, "tokens width"], Num[Array, "chunk width"]], Float[Array, "tokens chunk"]],
    allowed: Partial | None = None,
    reference: Scores | None = None,
    critic: Scores | None = None,
    critic_is_relative: bool = False,
    unweighted: bool = False,
) -> TokenStatistics:
    r"""Statistics over the first `vocab_size` tokens of the head, a chunk of the vocabulary at a time.

    With z the tempered logits, $\log Z = m + \log \sum e^{z - m}$ for a running maximum m, and $p = e^z / Z$,

    $$\log \pi(w) = z_w - \log Z, \quad H = \log Z - \sum p z, \quad
      KL = \sum p (z - z^{\rho}) - (\log Z - \log Z^{\rho}), \quad E_\pi Q = \sum p Q$$

    Memory is one chunk of each kind of scores, forward and backward: the backward pass makes the chunks again, and with
    the totals known adds up $\partial / \partial z_v = p_v (\dots)$ in closed form. A head that is not differentiated
    gets no gradient array. Reference, critic and temperature are constants.

    Args:
        hidden: final hidden states at the positions that predict the tokens.
        head: rows of the output projection; padding rows beyond `vocab_size` take no probability.
        token_logit: logit of each sampled token.
        temperature: of sampling.
        vocab_size: number of real tokens.
        logits: the product of hidden states with rows of a head, in float32; it must hold no traced array.
        allowed: tells, for a chunk of token ids `[chunk]`, which tokens each position may take, `[tokens, chunk]`.
            Traced arrays that it reads are arguments of the `Partial`, not closed over. None allows all.
        reference: scores of the reference, which are logits like the policy's, for `kl`.
        critic: scores of the critic: its Q, or with `critic_is_relative` what Q is added to the reference's logits.
        critic_is_relative: whether Q is the difference of the critic's scores to the reference's logits: 0 for a critic
            that begins as the reference.
        unweighted: whether to make the unweighted means as well.

    Raises:
        ValueError: a relative critic without a reference.
    """
    if critic_is_relative and (critic is None or reference is None):
        raise ValueError("a relative critic is the difference of two scores: give critic and reference")
    temperature = jax.lax.stop_gradient(temperature)
    plan = _Plan(vocab_size, logits, critic_is_relative, unweighted)
    policy = Scores(constrain_rows(hidden), head)
    found: Any = _moments(plan, policy, _Constants(reference, critic, temperature, allowed))
    log_z = found["log_z"]
    return TokenStatistics(
        log_prob=tempered(token_logit, temperature) - log_z,
        entropy=log_z - found["logit"],
        kl=None if reference is None else found["gap"] - (log_z - found["reference_log_z"]),
        expected_q=found.get("q"),
        mean_log_prob=found["plain_logit"] - log_z if unweighted else None,
        mean_q=found.get("plain_q") if unweighted else None,
    )


class _Plan(NamedTuple):
    """What is static about a pass through the vocabulary."""

    vocab_size: int
    logits: Callable[..., Array]
    relative: bool
    unweighted: bool


class _Constants(NamedTuple):
    """The arrays of a pass that no gradient flows into."""

    reference: Scores | None
    critic: Scores | None
    temperature: Float[Array, ""]
    allowed: Partial | None


class _Rows(NamedTuple):
    """Rows of the heads, a chunk of each, and their ids, which are no token's where a chunk is filled up."""

    ids: Int[Array, "*chunks chunk"]
    policy: Num[Array, "*chunks chunk width"]
    reference: Num[Array, "*chunks chunk width"] | None
    critic: Num[Array, "*chunks chunk critic_width"] | None


def _rows(head: Array, constants: _Constants) -> _Rows:
    """All heads cut into chunks."""
    reference, critic = (scores and cut(scores.head) for scores in (constants.reference, constants.critic))
    ids = jnp.arange(head.shape[0], dtype=jnp.int32)
    return _Rows(cut(ids, fill=head.shape[0]), cut(head), reference, critic)


class _Chunk(NamedTuple):
    """Scores of a chunk of the vocabulary, `[tokens, chunk]`."""

    mask: Bool[Array, "tokens chunk"]
    z: Float[Array, "tokens chunk"]
    reference: Float[Array, "tokens chunk"] | None
    q: Float[Array, "tokens chunk"] | None

    @classmethod
    def make(cls, plan: _Plan, z: Array, rows: _Rows, constants: _Constants) -> "_Chunk":
        """The chunk in which the policy's tempered logits are `z`."""
        mask = (rows.ids < plan.vocab_size)[None, :]
        if constants.allowed is not None:
            mask = mask & constants.allowed(rows.ids)
        reference = q = None
        if constants.critic is not None:
            q = plan.logits(constants.critic.hidden, rows.critic)
        if constants.reference is not None:
            logits = plan.logits(constants.reference.hidden, rows.reference)
            reference = tempered(logits, constants.temperature)
            q = q - logits if q is not None and plan.relative else q
        return cls(jnp.broadcast_to(mask, z.shape), z, reference, q)

    def values(self) -> dict[str, Array]:
        """What is averaged over the vocabulary."""
        values = {"logit": self.z}
        if self.reference is not None:
            # The difference, rather than two expectations: where the two policies are near, so is KL to 0.
            values["gap"] = self.z - self.reference
        if self.q is not None:
            values["q"] = self.q
        return values


class _Mass(NamedTuple):
    """Sum of exponentials so far, over e^maximum."""

    maximum: Float[Array, " tokens"]
    total: Float[Array, " tokens"]

    @classmethod
    def none(cls, tokens: int) -> "_Mass":
        return cls(jnp.full(tokens, -jnp.inf), jnp.zeros(tokens))

    def add(self, z: Array, mask: Array) -> tuple["_Mass", Array, Array]:
        """With more terms; what earlier sums shrink by, and the new terms."""
        new = jnp.maximum(self.maximum, jnp.max(jnp.where(mask, z, -jnp.inf), axis=-1))
        # Both maxima are minus infinity until the first allowed token: subtract a finite number then.
        shift = jnp.where(jnp.isfinite(new), new, 0.0)
        keep = jnp.exp(self.maximum - shift)
        terms = jnp.where(mask, jnp.exp(jnp.where(mask, z - shift[:, None], 0.0)), 0.0)
        return _Mass(new, self.total * keep + terms.sum(-1)), keep, terms

    def log(self) -> Float[Array, " tokens"]:
        """Logarithm of the whole sum; 0 where there was nothing to add."""
        some = self.total > 0
        return jnp.where(some, self.maximum, 0.0) + jnp.log(jnp.where(some, self.total, 1.0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moments(plan: _Plan, policy: Scores, constants: _Constants) -> dict[str, Float[Array, " tokens"]]:
    """Log-normalisers, expectations under the policy by name, and unweighted means (`plain_`)."""
    tokens = policy.hidden.shape[0]

    def scores(rows: _Rows) -> _Chunk:
        z = tempered(plan.logits(policy.hidden, rows.policy), constants.temperature)
        return _Chunk.make(plan, z, rows, constants)

    def add(carry: Any, rows: _Rows) -> tuple[Any, None]:
        mass, reference_mass, sums, plain, count = carry
        chunk = scores(rows)
        mass, keep, terms = mass.add(chunk.z, chunk.mask)
        if chunk.reference is not None:
            reference_mass = reference_mass.add(chunk.reference, chunk.mask)[0]
        values = chunk.values()
        sums = {name: x * keep + jnp.sum(terms * values[name], axis=-1) for name, x in sums.items()}
        plain = {name: x + jnp.sum(jnp.where(chunk.mask, values[name], 0.0), axis=-1) for name, x in plain.items()}
        return (mass, reference_mass, sums, plain, count + chunk.mask.sum(-1)), None

    rows = _rows(policy.head, constants)
    names = jax.eval_shape(lambda: scores(jax.tree.map(lambda x: x[0], rows)).values())
    zeros = {name: jnp.zeros(tokens) for name in names}
    start = _Mass.none(tokens), _Mass.none(tokens), zeros, zeros if plan.unweighted else {}, jnp.zeros(tokens)
    (mass, reference_mass, sums, plain, count), _ = jax.lax.scan(add, start, rows)
    total, count = jnp.where(mass.total > 0, mass.total, 1.0), jnp.maximum(count, 1.0)
    found = {name: x / total for name, x in sums.items()}
    found |= {f"plain_{name}": x / count for name, x in plain.items()}
    if constants.reference is not None:
        found["reference_log_z"] = reference_mass.log()
    return found | {"log_z": mass.log(), "count": count}


def _moments_forward(plan: _Plan, policy: Any, constants: Any) -> tuple[dict[str, Array], Any]:
    """The moments, and what the backward pass begins with; each array comes with whether it is differentiated."""
    trains_head = policy.head.perturbed
    arguments = jax.tree.map(lambda x: x.value, (policy, constants), is_leaf=lambda x: hasattr(x, "perturbed"))
    found: Any = _moments(plan, *arguments)
    # Nothing but arrays and the structure they stand in may go from here to the backward pass.
    return found, (arguments, found, () if trains_head else None)


def _moments_backward(plan: _Plan, residual: Any, cotangents: dict[str, Any]) -> tuple[Any, None]:
    """Gradients with respect to the policy's hidden states and, where it is differentiated, its head."""
    (policy, constants), found, trains_head = residual
    tokens = policy.hidden.shape[0]
    of = {k: jnp.zeros(tokens) if isinstance(g, SymbolicZero) else g for k, g in cotangents.items()}

    def by_logit(chunk: _Chunk) -> Array:
        probs = jnp.where(chunk.mask, jnp.exp(jnp.where(chunk.mask, chunk.z - found["log_z"][:, None], 0.0)), 0.0)
        # The values that are logits, or differences of logits, also move themselves.
        moved = of["log_z"] + of["logit"] + of.get("gap", 0.0)
        inner = sum((of[k][:, None] * (x - found[k][:, None]) for k, x in chunk.values().items()), moved[:, None])
        if not plan.unweighted:
            return probs * inner
        plain = (of["plain_logit"] + of.get("plain_gap", 0.0)) / found["count"]
        return probs * inner + jnp.where(chunk.mask, plain[:, None], 0.0)

    def add(so_far: Array, rows: _Rows) -> tuple[Array, Array | None]:
        def product(hidden: Array, head: Array) -> Array:
            return tempered(plan.logits(hidden, head), constants.temperature)

        if trains_head is None:
            z, back = jax.vjp(lambda hidden: product(hidden, rows.policy), policy.hidden)
        else:
            z, back = jax.vjp(product, policy.hidden, rows.policy)
        by_hidden, *by_rows = back(by_logit(_Chunk.make(plan, z, rows, constants)))
        return so_far + by_hidden.astype(jnp.float32), by_rows[0] if by_rows else None

    nothing = jnp.zeros(policy.hidden.shape, jnp.float32)
    by_hidden, by_rows = jax.lax.scan(add, nothing, _rows(policy.head, constants))
    by_head = None if by_rows is None else joined(by_rows, policy.head.shape[0])
    return Scores(by_hidden.astype(policy.hidden.dtype), by_head), None  # pyright: ignore[reportArgumentType]


_moments.defvjp(_moments_forward, _moments_backward, symbolic_zeros=True)
