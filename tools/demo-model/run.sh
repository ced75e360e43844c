#!/bin/sh
# Train the demonstration models and write models, items and fixtures.
# usage: run.sh [output root, default the repository]
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=${1:-$here/../..}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet -r "$here/requirements.txt"
python="$work/venv/bin/python"

# One thread per process: the sums are then always taken in the same order.
export JAX_PLATFORMS=cpu NPROC=1 XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
# Keep freed buffers instead of returning them to the kernel after every step (glibc; 11 % less CPU).
export MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000
export PYTHONDONTWRITEBYTECODE=1

"$python" "$here/train.py" demo-300k "$work/demo-300k.npz" &
small=$!
"$python" "$here/train.py" demo-1m "$work/demo-1m.npz"
wait "$small"
"$python" "$here/build.py" "$work" "$root"
"$python" "$here/check_llama_cpp.py" "$root"
