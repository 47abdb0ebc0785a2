#!/bin/sh
# Measures all that a GPU is wanted for, without network and SGLang, in under ten minutes on one GPU:
#
#   sh benchmarks/gpu.sh [--tiny] [OUT.jsonl]
#
# The trainer's tokens per second and MFU, eager and compiled; decoding against the memory bandwidth; asynchronous
# training end to end with a server on the same GPU; and memory against the plan. --tiny is for a CPU.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
sizes="0.6b 8b" tokens=16384 decoded="--size 0.6b --slots 64 --new-tokens 256" memory="--size 0.6b --tokens 8192" steps=3
compiled="--compile" device=cuda
if [ "${1:-}" = --tiny ]; then
    sizes=tiny tokens=256 decoded="--size tiny --slots 4 --new-tokens 8" memory="--size tiny --tokens 128" steps=1
    compiled="" device=cpu
    export OMP_NUM_THREADS=1
    shift
fi
out=${1:-benchmarks/results/gpu.jsonl}
export PYTHONPATH="$PWD"
for size in $sizes; do
    "$python" benchmarks/gpu.py train --size "$size" --tokens "$tokens" --steps "$steps" --out "$out"
    [ -z "$compiled" ] ||
        "$python" benchmarks/gpu.py train --size "$size" --tokens "$tokens" --steps "$steps" --compile --out "$out"
done
"$python" benchmarks/gpu.py decode $decoded --out "$out"
"$python" benchmarks/memory.py $memory --ranks 1 --out "$out"
"$python" benchmarks/async_vs_sync.py --case uniform --rounds 1 --steps "$steps" --device "$device" --out "$out"
