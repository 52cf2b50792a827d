"""MS-GRPO on Frozen Lake with the small built-in model: trains one seed after another and prints what came of them.

    python experiments/frozen_lake.py [--seeds 0 1 2] [--iterations 200] [--out runs/frozen-lake]

A seed that is already trained is not trained again, and one that was stopped goes on where it was.
"""

import argparse
import sys
from pathlib import Path

from jaxgrpo.comparison import train_in


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/frozen-lake"))
    options = parser.parse_args()
    lines = []
    for seed in options.seeds:
        run = train_in(options.out / f"seed{seed}", {"seed": seed, "iterations": options.iterations})
        if run.before is None or run.after is None:
            return run.exit  # interrupted: give the same command again
        before, after = run.before["success_rate"], run.after["success_rate"]
        lines.append(f"seed {seed}: held-out success {before:.3f} -> {after:.3f} in {run.iteration} iterations")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
