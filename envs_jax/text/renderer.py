"""From slot values to token ids inside jit, exactly as the tokenizer would tokenise the whole prompt."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from envs_jax.text.cuts import Piece, RenderError, cut_template
from envs_jax.text.template import Template
from envs_jax.text.tokenizer import TextTokenizer

__all__ = ["RenderError", "Renderer", "compile_template"]

MERGE_LIMIT = 20_000
"""Most alternatives that pieces merged for want of a safe cut may have together."""


@dataclasses.dataclass(frozen=True, eq=False)
class Renderer:
    """Renders one template with one tokenizer; made by `compile_template`.

    After the static prefix the text is a row of units (a slot, merged slots, or static text between them). The tokens
    of all alternatives of all units lie in one array; an observation is a few gathers from it, however many units.

    Attributes:
      prefix_ids: tokens that stand before every observation.
      max_tokens: length T of the padded observation.
      min_tokens: the fewest tokens of any observation.
      slot_sizes: number of alternatives of each slot.
    """

    prefix_ids: np.ndarray
    max_tokens: int
    min_tokens: int
    slot_sizes: tuple[int, ...]
    _tokens: np.ndarray  # [all tokens of all alternatives]
    _starts: np.ndarray  # [alternatives]: first token of each
    _lengths: np.ndarray  # [alternatives]: number of tokens of each
    _first_alternative: np.ndarray  # [units]
    _slots: np.ndarray  # [units, slots of the unit]; len(slot_sizes) where a unit has fewer
    _strides: np.ndarray  # [units, slots of the unit]; 0 likewise

    def __call__(self, values: Int[Array, " slots"]) -> tuple[Int[Array, " tokens"], Int[Array, ""]]:
        """Token ids of the observation, left-padded with 0 to `max_tokens`, and how many of them are real.

        Pure and jittable; batches by `jax.vmap`. Values must lie inside their slots' alternatives: inside jit they
        cannot be checked.
        """
        padded = jnp.append(jnp.asarray(values, jnp.int32), 0)
        chosen = self._first_alternative + jnp.sum(padded[self._slots] * self._strides, axis=-1)
        starts = jnp.asarray(self._starts)[chosen]
        if self.min_tokens == self.max_tokens:
            return self._concatenate(starts)
        return self._concatenate_ragged(starts, jnp.asarray(self._lengths)[chosen])

    def _concatenate(self, starts: Int[Array, " units"]) -> tuple[Int[Array, " tokens"], Int[Array, ""]]:
        lengths = self._lengths[self._first_alternative]
        unit = np.repeat(np.arange(len(lengths)), lengths)
        offset = np.arange(self.max_tokens) - (np.cumsum(lengths) - lengths)[unit]
        return jnp.asarray(self._tokens)[starts[unit] + offset], jnp.int32(self.max_tokens)

    def _concatenate_ragged(
        self, starts: Int[Array, " units"], lengths: Int[Array, " units"]
    ) -> tuple[Int[Array, " tokens"], Int[Array, ""]]:
        ends = jnp.cumsum(lengths)
        total = ends[-1]
        place = jnp.arange(self.max_tokens) - (self.max_tokens - total)
        unit = jnp.sum(ends[None, :] <= place[:, None], axis=-1)
        source = (starts - (ends - lengths))[unit] + place
        ids = jnp.asarray(self._tokens)[jnp.maximum(source, 0)]
        return jnp.where(place >= 0, ids, 0), total


def compile_template(template: Template, tokenizer: TextTokenizer, *, before: str, after: str) -> Renderer:
    """A renderer of `before + template + after`, whose ids are those that `tokenizer` gives the whole text.

    `before`, and whatever static text of the template can be cut from the first slot, becomes the prefix; `after`
    becomes the tail of every observation.

    Raises:
      RenderError: exactness cannot be proven (see `cuts`), or the template has no slots.
    """
    if not template.slots:
        raise RenderError("the template has no slots, so there is nothing to render; give it at least one")
    pieces = cut_template(Template((before, *template.parts, after)), tokenizer, MERGE_LIMIT)
    units = _tokenise(pieces, tokenizer)
    prefix = units.pop(0).alternatives[0] if not units[0].slots else ()
    sizes = tuple(len(slot.alternatives) for slot in template.slots)
    table = _token_table(units)
    slots, strides = _index_arithmetic(units, sizes)
    lengths = [[len(ids) for ids in unit.alternatives] for unit in units]
    return Renderer(
        prefix_ids=np.asarray(prefix, np.int32),
        max_tokens=sum(max(choices) for choices in lengths),
        min_tokens=sum(min(choices) for choices in lengths),
        slot_sizes=sizes,
        _tokens=table.tokens,
        _starts=table.starts,
        _lengths=table.lengths,
        _first_alternative=table.first_alternative,
        _slots=slots,
        _strides=strides,
    )


@dataclasses.dataclass(frozen=True)
class _Unit:
    """A slot, some merged slots, or a run of static text, as token ids."""

    slots: tuple[int, ...]
    alternatives: tuple[tuple[int, ...], ...]


def _tokenise(pieces: Iterable[Piece], tokenizer: TextTokenizer) -> list[_Unit]:
    units: list[_Unit] = []
    for is_static, run in itertools.groupby(pieces, lambda piece: piece.is_static):
        encoded = [_Unit(piece.slots, tuple(tuple(tokenizer.encode(text)) for text in piece.texts)) for piece in run]
        if is_static:
            # Tokens are joined, not texts: cut from what follows, the text of the run may split otherwise.
            ids = itertools.chain.from_iterable(unit.alternatives[0] for unit in encoded)
            encoded = [_Unit((), (tuple(ids),))]
        units += encoded
    return units


@dataclasses.dataclass(frozen=True)
class _TokenTable:
    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    first_alternative: np.ndarray


def _token_table(units: Sequence[_Unit]) -> _TokenTable:
    """Tokens of all alternatives; units with the same alternatives share their entries."""
    distinct = list(dict.fromkeys(unit.alternatives for unit in units))
    entries = list(itertools.chain.from_iterable(distinct))
    lengths = np.asarray([len(ids) for ids in entries], np.int32)
    sizes = np.asarray([len(alternatives) for alternatives in distinct], np.int32)
    first = dict(zip(distinct, np.cumsum(sizes) - sizes, strict=True))
    return _TokenTable(
        tokens=np.asarray(list(itertools.chain.from_iterable(entries)), np.int32),
        starts=(np.cumsum(lengths) - lengths).astype(np.int32),
        lengths=lengths,
        first_alternative=np.asarray([first[unit.alternatives] for unit in units], np.int32),
    )


def _index_arithmetic(units: Sequence[_Unit], sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """For each unit its slots and their strides in its (row-major) list of alternatives."""
    width = max(len(unit.slots) for unit in units)
    slots = np.full((len(units), width), len(sizes), np.int32)
    strides = np.zeros((len(units), width), np.int32)
    for i, unit in enumerate(units):
        stride = 1
        for j in reversed(range(len(unit.slots))):
            slots[i, j], strides[i, j] = unit.slots[j], stride
            stride *= sizes[unit.slots[j]]
    return slots, strides
