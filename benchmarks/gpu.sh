#!/bin/sh
# Measures what a GPU is wanted for, the most valuable first, without network and SGLang, on one GPU:
#
#   sh benchmarks/gpu.sh [--tiny] [OUT.jsonl [PART ...]]
#
# Parts, all by default: train (tokens per second and MFU beside plain transformers), compiled (the same with compiled
# layers), decode (against the memory bandwidth and `generate`), grpo (server and trainer in one process, by the
# launcher), launched (decode without CUDA graphs), memory (against the plan), kept (compiled, activations kept), 8b. Each
# prints and appends its results before the next begins. One that fails leaves the others; one for which too little of BUDGET_S is left is skipped. The status
# is 1 if any failed or was skipped. --tiny is for a CPU, where nothing is compiled.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python} budget=${BUDGET_S:-255} began=$(date +%s) slow=1 failed="" skipped=""
train="--size 0.6b --tokens 16384 --steps 6" large="--size 8b --tokens 16384 --steps 3" compile=--compile
decode="--size 0.6b --slots 64 --new-tokens 128" grpo="--size 0.6b --slots 64 --new-tokens 128 --steps 4"
memory="--size 0.6b --tokens 8192"
if [ "${1:-}" = --tiny ]; then
    shift
    train="--size tiny --tokens 256 --steps 1" large=$train compile=""
    decode="--size tiny --slots 4 --new-tokens 8" grpo="--size tiny --slots 16 --new-tokens 8 --steps 3"
    memory="--size tiny --tokens 128"
    budget=1800 slow=6 # the limits are those of a GPU
    export OMP_NUM_THREADS=1
fi
out=${1:-benchmarks/results/gpu.jsonl}
[ $# -eq 0 ] || shift
wanted=" ${*:-train compiled decode grpo launched memory kept 8b} "
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

part() { # NAME, seconds that it needs at least and takes at most, command
    name=$1 least=$2 most=$(($3 * slow)) left=$((budget - $(date +%s) + began))
    shift 3
    case "$wanted" in *" $name "*) ;; *) return ;; esac
    if [ "$left" -lt "$least" ]; then
        echo "SKIPPED $name: it needs about $least s, $left s are left"
        skipped="$skipped $name"
        return
    fi
    echo "== $name: $((budget - left)) s of $budget are over"
    timeout -k 5 "$((left < most ? left : most))" "$python" "$@" --out "$out"
    status=$?
    [ $status -eq 0 ] && return
    echo "FAILED $name: status $status$([ $status -ne 124 ] || echo ', it took too long')"
    failed="$failed $name"
}

part train 20 75 benchmarks/gpu.py train $train --peer
part compiled 30 100 benchmarks/gpu.py train $train $compile --peer
part decode 30 80 benchmarks/gpu.py decode $decode --peer
part grpo 30 90 benchmarks/gpu.py grpo $grpo
part launched 20 60 benchmarks/gpu.py decode $decode --no-graphs
part memory 20 60 benchmarks/memory.py $memory --layout d1 --case plain
part kept 30 75 benchmarks/gpu.py train $train $compile --keep
part 8b 40 110 benchmarks/gpu.py train $large --bf16-moments # 8.2 billion float32 weights with such moments take 92 GiB
echo "== $(($(date +%s) - began)) s${failed:+, FAILED:$failed}${skipped:+, SKIPPED:$skipped}; results: $out"
[ -z "$failed$skipped" ]
