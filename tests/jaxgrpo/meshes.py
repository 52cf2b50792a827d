"""Run in a process with 8 devices: the same small experiment on one of them and on meshes of all, as numbers in JSON.

    python meshes.py MODEL FOLDER MESH ...

FOLDER gets the checkpoints. Of each mesh: whether what is sampled in two iterations and what a given iteration teaches
is what one device gives, what a device holds, and whether checkpoints go from mesh to mesh.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgrpo.build import Experiment, build
from jaxgrpo.checkpoints import Checkpoints
from jaxgrpo.config import resolve
from jaxgrpo.records import state_digests

OPTIONS: dict[str, Any] = {
    "groups": 2,
    "group_size": 4,
    "train_fraction": 1.0,
    "rollout_rows": 0,
    "micro_batch": 12,  # no multiple of 8: rounded up on a mesh
    "learning_rate": 1e-4,
    "constrain": False,
    "reply_limit": 4,
    "kl_beta": 0.01,
    "entropy_bonus": 0.01,
    "preset": "tiny",
}


def experiment(model: str, mesh: str, devices: list[Any]) -> Experiment:
    return build(resolve({**OPTIONS, "model": model, "mesh": mesh}), devices)


def gradient(state: Any) -> dict[str, np.ndarray]:
    """The gradient of the first update, which is what the first moments are made of."""
    (moments,) = [part.mu for part in state.opt_state if hasattr(part, "mu")]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(moments)}


def play_twice(one: Experiment) -> tuple[list[Any], Any, list[float], dict[str, np.ndarray]]:
    """Episodes and losses of two iterations, the state after them, and the gradient of the first."""
    state, played, losses, first = one.init(), [], [], {}
    for _ in range(2):
        played.append(one.rollout(state, one.hyperparameters))
        state, metrics = one.update(state, played[-1], one.hyperparameters)
        losses.append(float(metrics["loss"]))
        first = first or gradient(state)
    return played, state, losses, first


def held(state: Any) -> float:
    """Share of the parameters and moments that the first device holds."""
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return sum(x.addressable_shards[0].data.nbytes for x in leaves) / sum(x.nbytes for x in leaves)


def main(model: str, folder: str, *meshes: str) -> dict[str, Any]:
    alone = experiment(model, "auto", jax.devices()[:1])
    played, state, losses, expected = play_twice(alone)
    digests, found = state_digests(state), {}
    checkpoints = Checkpoints(Path(folder), keep=9)
    checkpoints.save(1, state)
    checkpoints.wait()
    for number, mesh in enumerate(meshes, start=2):
        many = experiment(model, mesh, jax.devices())
        again, state, own_losses, got = play_twice(many)
        given = many.update(many.init(), played[0], many.hyperparameters)[1]
        largest = max(np.abs(x).max() for x in expected.values())
        restored = checkpoints.restore(1, many.template())
        checkpoints.save(number, state)
        checkpoints.wait()
        found[mesh] = {
            "same_tokens": [_same(a.reply.ids, b.reply.ids) for a, b in zip(played, again, strict=True)],
            "losses": [losses, own_losses],
            "given_loss": float(given["loss"]),
            "gradient_error": float(max(np.abs(got[k] - x).max() for k, x in expected.items()) / largest),
            "held": held(state),
            "placed": all(
                a.sharding.is_equivalent_to(b.sharding, a.ndim)
                for tree in (restored, state)
                for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(many.abstract_state()), strict=True)
            ),
            "restored": state_digests(restored) == digests,
            "back": state_digests(checkpoints.restore(number, alone.template())) == state_digests(state),
        }
    checkpoints.close()
    # Of the last mesh: what it plays greedily. Six episodes are no multiple of anything.
    options: dict[str, Any] = {"episodes": 6, "temperature": 0.0}
    found["lengths"] = many.evaluate(state.params, **options).lengths.tolist()
    found["lengths_alone"] = alone.evaluate(_on_one(state.params), **options).lengths.tolist()
    return found


def _same(one: Any, other: Any) -> bool:
    return bool((np.asarray(one) == np.asarray(other)).all())


def _on_one(params: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x), jax.devices()[0]), params)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
