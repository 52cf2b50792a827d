#!/usr/bin/env bash
# A run on the GPUs of two nodes under SLURM: one process a GPU, stopped with a checkpoint before the time is up, requeued.
#
#     sbatch experiments/launch/slurm_gpus.sh
#
# Processes find each other through SLURM. The folder must be on a file system that all nodes share.
#SBATCH --job-name=jaxgrpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@600
set -uo pipefail

OUT="${OUT:-$HOME/runs/snake-20-qwen}"
PYTHON_ENVIRONMENT="${PYTHON_ENVIRONMENT:-$HOME/venv}"
# shellcheck disable=SC1091
source "$PYTHON_ENVIRONMENT/bin/activate"

resume=()
if [[ -e "$OUT/config.json" ]]; then
  resume=(--resume)
fi

srun --kill-on-bad-exit=0 \
  jaxgrpo train --model Qwen/Qwen2.5-3B-Instruct --game snake-20 --out "$OUT" --mesh auto "${resume[@]}" &
step=$!
# SLURM's warning comes to this script; every process gets it and leaves after its iteration, with a checkpoint.
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM
wait "$step"
code=$?
if ((code > 128)) && kill -0 "$step" 2>/dev/null; then # the wait was interrupted by the warning, not the run
  wait "$step"
  code=$?
fi

# Done, and a mistake in the options: nothing is left to do. Else (preempted, a node lost) it goes on where it stood.
case "$code" in
  0 | 2 | 3) exit "$code" ;;
  *) scontrol requeue "$SLURM_JOB_ID" ;;
esac
