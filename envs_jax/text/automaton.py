"""Finite automata over bytes, lifted to the tokens of a tokenizer.

An automaton is a table of next states. Over bytes it is small; over tokens it would have a column for each of 150,000
ids. Tokens that act alike in every state therefore share a *token class*: a `[states, classes]` table and one map from
ids to classes.
"""

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

_State = TypeVar("_State", bound=Hashable)

DEAD = -1
"""The next state of a byte or token that an automaton does not allow."""


@runtime_checkable
class Vocabulary(Protocol):
    """What the automata need to know of a tokenizer (`TextTokenizer` is one)."""

    @property
    def vocab_size(self) -> int:
        """Number of real token ids."""
        ...

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes each id stands for; `b""` for control tokens."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which never stand for text."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a reply."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokenizer's own spelling of a text."""
        ...


class Tables:
    """Base of frozen dataclasses of numpy tables: read-only, compared and hashed by value.

    Instances may be static arguments of `jax.jit`: equal ones share one compilation.
    """

    def __post_init__(self):
        """Make every table read-only, because the hash depends on the contents."""
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    @functools.cached_property
    def _digest(self) -> bytes:
        digest = hashlib.sha256()
        for name, value in sorted(vars(self).items()):
            if isinstance(value, np.ndarray):
                digest.update(f"{name} {value.dtype} {value.shape} ".encode() + value.tobytes())
            else:
                digest.update(f"{name} {value!r} ".encode())
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Tables) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    @property
    def nbytes(self) -> int:
        """Size of all tables together, in bytes."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))


def explore(start: _State, targets: Callable[[_State], Iterable[_State]]) -> dict[_State, int]:
    """Number the states that can be reached from `start` (which is 0) in the order in which they are found."""
    numbers, queue = {start: 0}, [start]
    for state in queue:  # grows while it is visited
        for target in targets(state):
            if target not in numbers:
                numbers[target] = len(queue)
                queue.append(target)
    return numbers


def lift(table: Int[np.ndarray, "states 256"], token_bytes: Sequence[bytes]) -> Int[np.ndarray, "states tokens"]:
    """Next state of every (state, token): the byte automaton run over the token's bytes.

    `DEAD` entries stay dead; a token without bytes leaves every state as it is.
    """
    states, tokens = table.shape[0], len(token_bytes)
    # A row of its own for the dead state, which numpy then also reaches as index -1.
    total = narrow(np.concatenate([table, np.full((1, 256), DEAD)]))
    lengths = np.array([len(piece) for piece in token_bytes], dtype=np.int64)
    # Longest first, so that the tokens which still have a byte at position i are a leading slice.
    order = np.argsort(-lengths, kind="stable")
    text = np.frombuffer(b"".join(token_bytes), dtype=np.uint8)
    starts = (np.cumsum(lengths) - lengths)[order]
    current = np.repeat(np.arange(states, dtype=total.dtype)[:, None], tokens, axis=1)
    for position in range(int(lengths.max(initial=0))):
        active = int(np.count_nonzero(lengths > position))
        current[:, :active] = total[current[:, :active], text[starts[:active] + position]]
    lifted = np.empty_like(current)
    lifted[:, order] = current
    return lifted


def token_classes(
    columns: Int[np.ndarray, "states tokens"],
) -> tuple[Int[np.ndarray, " tokens"], Int[np.ndarray, "states classes"]]:
    """Share equal columns: `(class_map, table)` with `table[:, class_map] == columns`."""
    rows = np.ascontiguousarray(columns.T)
    packed = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    _, first, class_map = np.unique(packed, return_index=True, return_inverse=True)
    return narrow(class_map), np.ascontiguousarray(columns[:, first])


def minimise(
    table: Int[np.ndarray, "states symbols"], start: int, final: Bool[np.ndarray, " states"]
) -> tuple[Int[np.ndarray, "fewer symbols"], int, Bool[np.ndarray, " fewer"]]:
    """Merge the states that no continuation tells apart (Moore's partition refinement)."""
    labels = final.astype(np.int64)
    while True:
        following = np.where(table == DEAD, DEAD, labels[table])
        signature = np.concatenate([labels[:, None], following], axis=1)
        _, first, refined = np.unique(signature, axis=0, return_index=True, return_inverse=True)
        refined = refined.reshape(-1)
        if len(first) == len(np.unique(labels)):
            return np.where(table == DEAD, DEAD, refined[table])[first], int(refined[start]), final[first]
        labels = refined


def narrow(values: Int[np.ndarray, "*shape"]) -> Int[np.ndarray, "*shape"]:
    """The same integers as int16 where they fit, else as int32."""
    fits = values.size == 0 or max(abs(int(values.min())), int(values.max())) <= np.iinfo(np.int16).max
    return values.astype(np.int16 if fits else np.int32)


def class_of(class_map: Int[np.ndarray, " vocab_and_one"], token: Int[ArrayLike, "*batch"]) -> Int[Array, "*batch"]:
    """Class of each token id; ids outside the vocabulary (padding, or a padded head) share the map's last entry."""
    token = jnp.asarray(token)
    outside = class_map.shape[0] - 1
    inside = (token >= 0) & (token < outside)
    return jnp.asarray(class_map)[jnp.where(inside, token, outside)].astype(jnp.int32)
