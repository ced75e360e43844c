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
# glibc: keep freed buffers rather than give them back to the kernel after each step (a fifth of the
# CPU time; the weights stay the same).
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8000000000 MALLOC_ARENA_MAX=1
export PYTHONDONTWRITEBYTECODE=1

"$python" "$here/train.py" demo-300k "$work/demo-300k.npz" &
small=$!
"$python" "$here/train.py" demo-1m "$work/demo-1m.npz"
wait "$small"
"$python" "$here/build.py" "$work" "$root"
"$python" "$here/check_llama_cpp.py" "$root"
