"""The algorithms beside one another: `tiny`, equal numbers of episodes, both games, several seeds.

    python experiments/compare_algorithms.py [--seeds 0 1 2] [--games frozen-lake snake-8] [--out DIR]

Every algorithm runs with its preset, and iterations are what the budget of episodes makes of them. Give the same
command again to go on after a stop.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from jaxgrpo.comparison import present, run_all
from jaxgrpo.config import resolve
from jaxgrpo.stopping import Exit

VARIANTS: dict[str, dict[str, Any]] = {
    "MS-GRPO": {},
    "MS-GRPO without AAW": {"alpha": 0.0},
    "per-step GRPO": {"algorithm": "step-grpo"},
    "GiGPO": {"algorithm": "gigpo"},
    "PPO-KL": {"algorithm": "ppo-kl"},
    "POAD": {"algorithm": "poad"},
    "ETPO": {"algorithm": "etpo"},
}
BUDGET = {"frozen-lake": 24576, "snake-8": 12288}
"""Episodes that each run plays in training."""
EVALUATIONS = 8
"""After equal shares of the budget."""


def within(budget: int, options: dict[str, Any]) -> dict[str, Any]:
    """Options with as many iterations as the budget has room for."""
    iterations = budget // resolve(options).episodes
    return {**options, "iterations": iterations, "evaluate_every": iterations // EVALUATIONS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--games", nargs="+", choices=BUDGET, default=[*BUDGET])
    parser.add_argument("--out", type=Path, default=Path("runs/compare-algorithms"))
    options = parser.parse_args()
    results = []
    for game in options.games:
        variants = {name: within(BUDGET[game], of_variant) for name, of_variant in VARIANTS.items()}
        found = run_all(variants, {game: {"evaluate_episodes": 500}}, options.seeds, options.out)
        if isinstance(found, Exit):
            return found
        results += found
    present(results, options.out, first="MS-GRPO")
    return 0


if __name__ == "__main__":
    sys.exit(main())
