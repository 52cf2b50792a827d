"""The one description of an observation: static text and slots, each slot with the few texts that may stand in it."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place in a template where one of a fixed list of texts stands.

    Attributes:
      name: how error messages call it.
      alternatives: the texts; a slot's value is an index into them. `""` stands for something that is absent.
    """

    name: str
    alternatives: tuple[str, ...]

    def __post_init__(self):
        if not self.alternatives:
            raise ValueError(f"slot {self.name!r} has no alternatives; give at least one text")


@dataclasses.dataclass(frozen=True)
class Template:
    """Static text and slots in reading order.

    Example:
      >>> template = Template(("You are at ", Slot("x", ("0", "1")), "."))
      >>> template.text([1])
      'You are at 1.'
    """

    parts: tuple[str | Slot, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots in reading order; values are given in this order."""
        return tuple(part for part in self.parts if isinstance(part, Slot))

    def text(self, values: Sequence[int]) -> str:
        """The text with each slot's alternative chosen by `values`.

        Raises:
          ValueError: not one value per slot, or a value outside its slot's alternatives.
        """
        slots = self.slots
        if len(values) != len(slots):
            raise ValueError(f"{len(values)} values for a template with {len(slots)} slots; give one for each")
        chosen = iter([_choose(slot, int(value)) for slot, value in zip(slots, values, strict=True)])
        return "".join(next(chosen) if isinstance(part, Slot) else part for part in self.parts)

    def examples(self) -> list[str]:
        """Texts that between them show every alternative of every slot."""
        sizes = [len(slot.alternatives) for slot in self.slots]
        return [self.text([i % size for size in sizes]) for i in range(max(sizes, default=1))]


def _choose(slot: Slot, value: int) -> str:
    if not 0 <= value < len(slot.alternatives):
        raise ValueError(f"slot {slot.name!r}: value {value} is not in 0..{len(slot.alternatives) - 1}")
    return slot.alternatives[value]
