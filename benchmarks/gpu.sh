#!/usr/bin/env bash
# What needs a CUDA device, in one short run: the engine's GPU tests, then the streaming benchmark with a real server.
#
#     bash benchmarks/gpu.sh [FOLDER]        results go to FOLDER (default: benchmarks/results/gpu)
#
# PYTHON names the interpreter; by default that of .venv, else python3. Exits with the tests' status.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-benchmarks/results/gpu}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
mkdir -p "$out"
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.cuda.get_device_name())' || exit 1
"$python" -m pytest -m gpu tests/gpu --durations=0 2>&1 | tee "$out/tests.txt"
status=${PIPESTATUS[0]}
"$python" -m benchmarks.stream --real --rounds 1 --out "$out/stream.json" > /dev/null
exit "$status"
