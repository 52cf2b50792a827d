"""MS-GRPO on Snake with the small built-in model, then the same policy on every Snake scenario beside other players.

    python experiments/snake.py [--long] [--seed 0] [--out runs/snake]

Training is on `snake-8` alone: 150 iterations, or 600 with --long, towards greedy play. A run that is trained already
is not trained again, and one that was stopped goes on where it was.
"""

import argparse
import sys
from pathlib import Path

import jaxgrpo
from jaxgrpo.comparison import train_in

SHORT = {"iterations": 150}
LONG = {"iterations": 600, "entropy_bonus": 0.4, "schedule": "linear", "evaluate_every": 50}
SCENARIOS = ("snake-8", "snake-20", "snake-20-poison", "snake-20-downhill")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/snake"))
    parser.add_argument("--episodes", type=int, default=500, help="of each scenario")
    options = parser.parse_args()
    folder = options.out / f"{'long' if options.long else 'short'}-seed{options.seed}"
    run = train_in(folder, {"game": "snake-8", **(LONG if options.long else SHORT), "seed": options.seed})
    if run.after is None:
        return run.exit  # interrupted: give the same command again
    results = jaxgrpo.evaluate(str(folder), SCENARIOS, episodes=options.episodes)["scenarios"]
    players = list(results["snake-8"])
    print("| player |", " | ".join(results), "|")
    print("|---" * (1 + len(results)) + "|")
    for player in players:
        cells = [f"{of[player]['return_mean']:.2f} ± {_half(of[player]):.2f}" for of in results.values()]
        print("|", " | ".join([player, *cells]), "|")
    return 0


def _half(summary: dict) -> float:
    return summary["return_ci95"][1] - summary["return_mean"]


if __name__ == "__main__":
    sys.exit(main())
