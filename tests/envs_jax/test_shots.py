"""Example turns in the prompt: part of the shared prefix, and exact like the rest."""

import jax
import numpy as np
import pytest

from envs_jax.games import make_game, tokenize_game
from envs_jax.text.tokenizer import TextTokenizer


@pytest.mark.parametrize("style", ["short", "full"])
def test_example_turns_lengthen_the_prefix_alone(style: str):
    tokenizer = TextTokenizer.tiny()
    plain, shown = (
        tokenize_game(make_game("frozen-lake", style=style, shots=shots), tokenizer, reply_limit=8, constrain=False)
        for shots in (0, 3)
    )
    assert shown.max_tokens == plain.max_tokens
    assert len(shown.prefix_ids) > len(plain.prefix_ids) + 3 * plain.max_tokens
    for seed in range(20):
        _, state = shown.game.environment.reset(jax.random.key(seed), shown.game.params)
        ids, length = shown.observation(state)
        whole = [*shown.prefix_ids.tolist(), *np.asarray(ids)[-int(length) :].tolist()]
        assert whole == tokenizer.encode(shown.full_text(state))


def test_example_turns_show_readable_replies_with_the_actions_in_turn():
    game = make_game("frozen-lake", shots=5)
    replies = [answered for _, answered in game.shots]
    assert replies == [f"<action>{word}</action>" for word in ("left", "down", "right", "up", "left")]
    thinking = [answered for _, answered in make_game("frozen-lake", reply="think", shots=2).shots]
    form = "<think>your thoughts</think><plan>your plan</plan>"
    assert thinking == [f"{form}<action>{word}</action>" for word in ("left", "down")]
    roles = [message["role"] for message in game.messages(game.environment.reset(jax.random.key(0))[1])]
    assert roles == ["system", *["user", "assistant"] * 5, "user"]
