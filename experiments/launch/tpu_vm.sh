#!/usr/bin/env bash
# A run on a TPU VM slice: creates the slice, installs jaxgrpo on every host, trains, and deletes the slice.
#
#     BUCKET=my-bucket PROJECT=my-project ZONE=us-west4-a experiments/launch/tpu_vm.sh create|train|delete
#
# All hosts run the same command; they find each other by what the slice tells them. The run's folder is in a bucket, so
# `train` again goes on from its last checkpoint, also on a slice created anew after a preemption.
set -euo pipefail

PROJECT="${PROJECT:?the project of Google Cloud}"
ZONE="${ZONE:?a zone that has the accelerator}"
BUCKET="${BUCKET:?a bucket that the hosts may write to, without gs://}"
NAME="${NAME:-jaxgrpo}"
ACCELERATOR="${ACCELERATOR:-v5litepod-16}"
RUNTIME="${RUNTIME:-v2-alpha-tpuv5-lite}"
OUT="${OUT:-gs://$BUCKET/runs/$NAME}"
PACKAGE="${PACKAGE:-jaxgrpo[tpu,gcs]}"

tpu=(gcloud compute tpus tpu-vm)
where=(--project="$PROJECT" --zone="$ZONE")

on_all_hosts() {
  "${tpu[@]}" ssh "$NAME" "${where[@]}" --worker=all --command="$1"
}

create() {
  "${tpu[@]}" create "$NAME" "${where[@]}" --accelerator-type="$ACCELERATOR" --version="$RUNTIME" --spot
  on_all_hosts "sudo apt-get -q update && sudo apt-get -yq install python3.11-venv"
  on_all_hosts "python3.11 -m venv venv && venv/bin/pip install '$PACKAGE'"
}

train() {
  local resume=""
  if gcloud storage ls "$OUT/config.json" >/dev/null 2>&1; then
    resume="--resume"
  fi
  on_all_hosts "venv/bin/jaxgrpo train --model Qwen/Qwen2.5-3B-Instruct --game snake-20 --out '$OUT' --mesh auto $resume"
}

delete() {
  "${tpu[@]}" delete "$NAME" "${where[@]}" --quiet
}

case "${1:-}" in
  create | train | delete) "$1" ;;
  *)
    echo "usage: $0 create|train|delete" >&2
    exit 2
    ;;
esac
