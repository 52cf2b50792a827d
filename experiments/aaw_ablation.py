"""Absolute-advantage-weighted episode sampling: what the exponent of |advantage| is worth, on both games.

    python experiments/aaw_ablation.py [--seeds 0 1 2] [--out runs/aaw-ablation]

A quarter of the episodes is trained on, drawn with weight |advantage| ** alpha; alpha 0 draws uniformly. Give the same
command again to go on after a stop.
"""

import argparse
import sys
from pathlib import Path

from jaxgrpo.comparison import present, run_all
from jaxgrpo.stopping import Exit

VARIANTS = {f"alpha {alpha:g}": {"alpha": alpha} for alpha in (0.0, 0.5, 1.0, 2.0)}
GAMES = {"frozen-lake": {"iterations": 160}, "snake-8": {"iterations": 80}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/aaw-ablation"))
    options = parser.parse_args()
    results = run_all(VARIANTS, GAMES, options.seeds, options.out)
    if isinstance(results, Exit):
        return results
    present(results, options.out, first="alpha 0")
    return 0


if __name__ == "__main__":
    sys.exit(main())
