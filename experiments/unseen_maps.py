"""How well a trained run plays Frozen Lake maps that never came up in its training, and how many those are.

    python experiments/unseen_maps.py runs/frozen-lake-tiny-seed0 [--episodes 4000]

A small board has few maps, so that a separate stream of random maps repeats many of those trained on.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxgrpo.beginning import restore_params
from jaxgrpo.build import build
from jaxgrpo.evaluation import held_out_key
from jaxgrpo.rollout import Keys, start
from jaxgrpo.train_step import play_key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path)
    parser.add_argument("--episodes", type=int, default=4000)
    options = parser.parse_args()
    config, params = restore_params(options.run)
    experiment = build(config)
    state, game, groups = experiment.init(), experiment.game.game, config.play.groups

    @jax.jit
    def trained_boards(iteration: jax.Array) -> jax.Array:
        key = play_key(state.replace(iteration=iteration))
        return start(game, Keys.make(key, groups, 1).groups).board

    trained = np.asarray(jax.lax.map(trained_boards, jnp.arange(config.iterations)))
    seen = {board.tobytes() for board in trained.reshape(-1, *trained.shape[2:])}
    held_out = np.asarray(start(game, Keys.make(held_out_key(0), options.episodes, 1).groups).board)
    was_seen = np.array([board.tobytes() in seen for board in held_out])
    outcome = experiment.evaluate(params, episodes=options.episodes, temperature=config.run.evaluate_temperature)
    print(f"{len(seen)} different maps in training ({config.iterations} iterations of {groups})")
    for name, which in (("seen in training", was_seen), ("never seen", ~was_seen)):
        share, success = which.mean(), outcome.success[which].mean()
        print(f"{name}: {share:.1%} of {options.episodes} held-out maps, success {success:.3f}")


if __name__ == "__main__":
    main()
