"""The plans of `docs/tpu.md`: makes those whose file is not there yet, and prints the table of all.

    python benchmarks/tpu_plans.py FOLDER [NAME ...]

Needs the extra `tpu`, no TPU and no weights. Each plan is a command of its own, which is printed.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

_PAPER = "--model Qwen/Qwen2.5-3B-Instruct --micro-batch 32"
_BASELINE = "--model Qwen/Qwen2.5-72B-Instruct --part rollout --groups 50 --group-size 1"
_MESHES = {
    "v5e-4": "tensor=4",
    "v5e-8": "fsdp=2,tensor=4",
    "v5e-16": "fsdp=4,tensor=4",
    "v6e-8": "fsdp=2,tensor=4",
    "v5p-8": "tensor=4",
}

PLANS = {
    **{f"full {name}": f"--topology {name} --mesh {mesh} {_PAPER}" for name, mesh in _MESHES.items()},
    **{f"lora {name}": f"--topology {name} --mesh {mesh} {_PAPER} --lora.rank 16" for name, mesh in _MESHES.items()},
    "72b v5p-32": f"--topology v5p-32 --mesh tensor=16 {_BASELINE}",
    "72b v5e-64": f"--topology v5e-64 --mesh tensor=64 {_BASELINE}",
}


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    print("| plan | slice | chips | of a chip's memory, GB: rollout, update | fits | seconds at least: rollout, update "
          "| reply tokens a second | compiled in, s |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for name in names or PLANS:
        file = folder / f"{name.replace(' ', '_')}.json"
        if not file.exists():
            command = [sys.executable, "-m", "jaxgrpo", "plan", *shlex.split(PLANS[name]), "--json", str(file)]
            print(shlex.join(["jaxgrpo", *command[3:]]), file=sys.stderr)
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL)  # 1 where it does not fit
        print(_row(name, json.loads(file.read_text())))


def _row(name: str, found: dict[str, Any]) -> str:
    parts, chip = found["parts"].values(), found["topology"]["chip"]
    memory = ", ".join("more" if part["needed"] is None else f"{part['needed'] / 1e9:.1f}" for part in parts)
    seconds = ", ".join("" if part["seconds"] is None else f"{part['seconds']:.1f} ({part['bound']})" for part in parts)
    speed = found["tokens_per_second"]
    cells = [
        *(name.split()[0], found["topology"]["name"], str(found["topology"]["chips"])),
        f"{memory} of {chip['memory'] / 1e9:.1f}",
        "yes" if found["fits"] else "**no**",
        seconds,
        "" if speed is None else f"{speed:,.0f}",
        " + ".join(f"{part['compile_seconds']:.0f}" for part in parts),
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
