#!/usr/bin/env bash
# What needs a CUDA device, in one run of at most five minutes on a Hopper GPU.
#
#     bash benchmarks/gpu.sh [FOLDER]        results go to FOLDER (default: benchmarks/results/gpu)
#
# 1. every kernel against float64, rounding included    3. ceilings, and the table of benchmarks.kernels as JSON
# 2. compute-sanitizer on small shapes, where it is      4. tile sizes and warps of the Triton kernels
# 5. the engine's GPU tests and the streaming benchmark, as far as what they import is there and time is left
#
# Parts 1 to 4 need the checkout, torch, triton and transformers. PYTHON names the interpreter; by default that of .venv, else
# python3. LIMIT: seconds in all (default 300). Each part has a share of them, and a part that fails does not end the run. The
# exit status is 1 where a kernel, the sanitizer or a test found an error. OPD_GPU_TESTS_ON=cpu tries the script without a GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-benchmarks/results/gpu}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
device=${OPD_GPU_TESTS_ON:-cuda}
limit=${LIMIT:-300}
status=0
small=()
[ "$device" = cuda ] || small=(--small)
mkdir -p "$out"

# share SECONDS: as many, or what is left.
share() {
    echo "$((limit - SECONDS < $1 ? limit - SECONDS : $1))"
}

# part SECONDS COMMAND...: at most as long, and not beyond the limit; 124 where the time is up.
part() {
    local seconds
    seconds=$(share "$1")
    shift
    if [ "$seconds" -lt 10 ]; then
        echo "no time left for: $*"
        return 124
    fi
    timeout --kill-after=5 "$seconds" "$@"
}

# note NAME STATUS: says how a part ended.
note() {
    case $2 in
        0) echo "== $1: done after $SECONDS s" ;;
        124 | 137) echo "== $1: not finished after $SECONDS s" ;;
        *) echo "== $1: FAILED (exit status $2) after $SECONDS s" ;;
    esac
}

importable() {
    "$python" -c 'import importlib.util, sys; sys.exit(any(importlib.util.find_spec(n) is None for n in sys.argv[1:]))' "$@"
}

if [ "$device" = cuda ]; then
    unset TRITON_INTERPRET
    "$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.cuda.get_device_name())' || exit 1
fi

# Compiling takes the CPU most of the time: the checks share the device.
names=(divergence gather topk "linear launch")
pids=()
for checks in "${names[@]}"; do
    # shellcheck disable=SC2086 # names of several checks
    part 110 "$python" -m benchmarks.kernels.check $checks --device "$device" "${small[@]}" \
        --out "$out/check-${checks// /-}.json" > "$out/check-${checks// /-}.txt" 2>&1 &
    pids+=($!)
done
for place in "${!pids[@]}"; do
    wait "${pids[$place]}"
    code=$?
    cat "$out/check-${names[$place]// /-}.txt"
    note "correctness of ${names[$place]}" "$code"
    [ "$code" -eq 0 ] || status=1
done

part 120 "$python" -m benchmarks.kernels --device "$device" "${small[@]}" --rounds 1 --budget "$(($(share 120) - 8))" \
    --out "$out/kernels.json"
note "table of kernels" $?

part 35 "$python" -m benchmarks.kernels.tuning --budget "$(($(share 35) - 10))" --out "$out/tuning.json" \
    $([ "$device" = cuda ] || echo --rows 2 --vocab 5000) > "$out/tuning.txt" 2>&1
note "tile sizes and warps ($out/tuning.txt)" $?

if [ "$device" = cuda ] && command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck; do
        # without torch's pool, so that every tensor has bounds of its own
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 part 45 compute-sanitizer --tool "$tool" --error-exitcode 9 \
            "$python" -m benchmarks.kernels.check divergence gather --small --device cuda > "$out/$tool.txt" 2>&1
        code=$?
        tail -n 3 "$out/$tool.txt"
        note "$tool" "$code"
        case $code in 0 | 124 | 137) ;; *) status=1 ;; esac
    done
else
    echo "== compute-sanitizer: not on the path, nothing is known about races and bounds"
fi

if importable pytest pytest_timeout beartype jaxtyping omegaconf accelerate aiohttp datasets math_verify typer; then
    part 180 "$python" -m pytest -m gpu tests/gpu --durations=0 2>&1 | tee "$out/tests.txt"
    code=${PIPESTATUS[0]}
    note "tests on the device" "$code"
    case $code in 0 | 124 | 137) ;; *) status=1 ;; esac
    part 60 "$python" -m benchmarks.stream --real --rounds 1 --out "$out/stream.json" > /dev/null
    note "streaming" $?
else
    echo "== tests on the device: pytest or the toolkit's own requirements are not installed"
fi
exit "$status"
