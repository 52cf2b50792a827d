"""What a reply may look like and what it says, as automata over tokens: the reader and the constraint."""

from envs_jax.text.automaton import Vocabulary
from envs_jax.text.constraint import MOST_CHOICES, Constraint, ReplyMode, reply_pattern
from envs_jax.text.reader import CLOSE, OPEN, Reader, check_actions

__all__ = [
    "CLOSE",
    "MOST_CHOICES",
    "OPEN",
    "Constraint",
    "Reader",
    "ReplyMode",
    "Vocabulary",
    "check_actions",
    "reply_pattern",
]
