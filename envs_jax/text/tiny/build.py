"""Trains the small tokenizer on text of the games and writes `tokenizer.json` beside this file.

Run `python -m envs_jax.text.tiny.build` after changing it; the result is the same on every machine.
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, trainers

from envs_jax.text.tokenizer import QWEN2_PATTERN

VOCAB_SIZE = 512
PLAIN_TOKENS = ("<think>", "</think>", "<plan>", "</plan>", "<action>", "</action>")
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

WORDS = ("left", "down", "right", "up")
PROSE = """\
You play Frozen Lake. Reach G, avoid H. The lake is a grid of tiles seen from above. Column x grows to the right, row
y grows downwards, the top left tile is (0, 0). P is the player, F is frozen and safe, H is a hole, G is the goal.
Falling into a hole ends the game. The ice is slippery: a move may slide to either side. You move one tile at a time.
You play Snake. The board has a width and a height; (x, y) counts from the bottom left cell, y grows upwards. Eat
apples and bananas, avoid fire, walls and all bodies. Your head is P, your body is B, the enemy's head is E, its body
is D, A is an apple. The game ends when a snake dies or the last round is over. Eating makes a snake longer by one.
Reply with one action out of left, down, right, up. First think, then plan, then act. Write your reasons between the
think tags, your plan between the plan tags and one action word between the action tags. The player is at (1, 2). The
goal is at (3, 3). The enemy is at (7, 4). Apples are at (0, 1), (5, 9). I go left. I go right. I go up. I go down.
The hole is below me, so the next safe step is to the right. Avoid the wall and move towards the goal.
"""


def train() -> tokenizers.Tokenizer:
    """The tokenizer, trained from nothing."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(PLAIN_TOKENS) - len(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_corpus(), trainer)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    return backend


def _corpus() -> Iterator[str]:
    """Boards, coordinates, action words and prose, in proportions that make cells and actions single tokens."""
    generator = random.Random(0)
    yield from itertools.repeat(PROSE, 20)
    for _ in range(400):
        yield _board(generator, "PFFFFHG", generator.choice((4, 6, 8)))
        yield _board(generator, "_____PBEDA", 10)
        yield f"The player is at ({generator.randrange(10)}, {generator.randrange(10)})."
        yield f"<action>{generator.choice(WORDS)}</action> go {generator.choice(WORDS)}"
        yield f"{generator.choice(WORDS)}, {generator.choice(WORDS)}"


def _board(generator: random.Random, letters: str, size: int) -> str:
    rows = ("".join(f" {generator.choice(letters)}" for _ in range(size)) for _ in range(size))
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    train().save(str(Path(__file__).with_name("tokenizer.json")))
