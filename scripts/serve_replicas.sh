#!/usr/bin/env bash
# Serve a model by N replicas behind a router that sends a prompt where its beginning is cached.
#
#   scripts/serve_replicas.sh N [server flags]
#
# Flags are those of serve.sh; without --model-path the small model is served. The router listens on
# PORT (default 30000) of HOST (127.0.0.1), replica i on PORT + i of 127.0.0.1. Variables:
#   STORAGE           what the replicas share: file (default), mooncake, redis or none
#                     file: the folder SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR
#                     mooncake: the master MOONCAKE_MASTER, else one of this machine alone
#                     redis: the RESP server SGLANG_HICACHE_REDIS_URL
#   STORAGE_MEMORY    of that own Mooncake node (4GB)
#   STORAGE_CONFIG    more options of that storage, as JSON
#   API_KEY           that clients must send; the router sends it on to the replicas
#   POLICY            of the router (cache_aware); ROUTER_FLAGS: more flags of `smg launch`
#   METRICS_PORT      of the router's Prometheus page (29000)
#   GPUS_PER_REPLICA  where there are GPUs (1); replica i gets the next ones
#   LOG_DIR           for replica-1.log ... and router.log (logs/ beside the project)
# A replica that ends is left out and the others go on; start it again by the line that is printed.
# lib.sh lists the variables of the environment. docs/scaling.md says how to choose.

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() { sed -n '2,21p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; }
case "${1:-}" in
  -h | --help) usage; exit 0 ;;
  '' | *[!0-9]* | 0) usage >&2; exit 2 ;;
esac
COUNT="$1"
shift
[ "$((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1]))" -ge 501 ] || die "this script needs bash 5.1 or newer."
HAS_MODEL=""
for argument in "$@"; do
  case "$argument" in
    --port | --port=* | --host | --host=*)
      die "the replicas' addresses follow from HOST and PORT; set those instead of $argument." ;;
    --api-key | --api-key=*) die "set API_KEY instead: the router needs the key too." ;;
    --model-path | --model-path=* | --config | --config=*) HAS_MODEL=1 ;;
  esac
done

HOST="${HOST:-127.0.0.1}" PORT="${PORT:-30000}" METRICS_PORT="${METRICS_PORT:-29000}"
STORAGE="${STORAGE:-file}"
LOG_DIR="${LOG_DIR:-$ROOT/logs}"
mkdir -p -- "$LOG_DIR" || die "the folder $LOG_DIR cannot be made; set LOG_DIR."

ensure_environment gguf
ensure_environment router
FLAGS=(--enable-metrics)
if [ "$STORAGE" != none ]; then
  # Every page is a file or a record of the storage: small pages would be many.
  FLAGS+=(--enable-hierarchical-cache --page-size 64 --hicache-storage-backend "$STORAGE")
fi
case "$STORAGE" in
  none) FLAGS+=(--no-storage) ;;
  file)
    # The variable would win over a path of STORAGE_CONFIG.
    case "${STORAGE_CONFIG:-}" in *'"file_storage_path"'*) ;; *)
      FOLDER="${SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR:-${HISPEC_CACHE:-$HOME/.cache/hispec}/hicache}"
      mkdir -p -- "$FOLDER" || die "the storage folder $FOLDER cannot be made."
      export SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR="$FOLDER" ;;
    esac ;;
  mooncake)
    ensure_environment mooncake
    ensure_rdma_library || exit 1 ;;
  redis) ensure_environment redis ;;
  *) die "STORAGE must be file, mooncake, redis or none, not $STORAGE." ;;
esac
if [ -n "${STORAGE_CONFIG:-}" ]; then
  FLAGS+=(--hicache-storage-backend-extra-config "$STORAGE_CONFIG")
fi

# Once, not by every replica.
[ -n "$HAS_MODEL" ] || "$PY" "$ROOT/scripts/fetch_model.py" >/dev/null \
  || die "the small model could not be fetched (see above); serve one you have with --model-path."
KEY=()
if [ -n "${API_KEY:-}" ]; then KEY=(--api-key "$API_KEY"); fi

PIDS=()
NAMES=()
stop_all() {
  trap - EXIT INT TERM
  say "stopping"
  for pid in ${PIDS[@]+"${PIDS[@]}"}; do kill "$pid" 2>/dev/null || true; done
  wait
}
trap stop_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [ "$STORAGE" = mooncake ] && [ -z "${MOONCAKE_MASTER:-}" ]; then
  "$ROOT/scripts/mooncake_local.sh" --memory "${STORAGE_MEMORY:-4GB}" >>"$LOG_DIR/storage.log" 2>&1 &
  PIDS+=("$!")
  NAMES+=("the storage")
  # The memory is that node's; a replica that dies must not take pages with it.
  export MOONCAKE_MASTER=127.0.0.1:50051 MOONCAKE_GLOBAL_SEGMENT_SIZE=0
  say "storage: a Mooncake Store on $MOONCAKE_MASTER >>$LOG_DIR/storage.log"
  until (exec 3<>/dev/tcp/127.0.0.1/50053) 2>/dev/null; do
    kill -0 "${PIDS[0]}" 2>/dev/null || die "the storage did not start; see $LOG_DIR/storage.log"
    sleep 0.2
  done
fi

URLS=()
for ((i = 1; i <= COUNT; i++)); do
  GPUS=()
  if has_gpu; then
    each="${GPUS_PER_REPLICA:-1}"
    GPUS=("CUDA_VISIBLE_DEVICES=$(seq -s, $(((i - 1) * each)) $((i * each - 1)))")
  fi
  COMMAND=(env ${GPUS[@]+"${GPUS[@]}"} "$ROOT/scripts/serve.sh" "${FLAGS[@]}" "$@" --port "$((PORT + i))")
  "${COMMAND[@]}" ${KEY[@]+"${KEY[@]}"} >>"$LOG_DIR/replica-$i.log" 2>&1 &
  PIDS+=("$!")
  NAMES+=("replica $i")
  URLS+=("http://127.0.0.1:$((PORT + i))")
  say "replica $i: ${COMMAND[*]} >>$LOG_DIR/replica-$i.log"
done

# shellcheck disable=SC2206 # flags are words
MORE=(--log-level warn ${ROUTER_FLAGS:-})
# A dead replica costs its share of traffic until the circuit breaker opens, and comes back by
# health checks; the defaults (checks once a minute) are for fleets that a service manager watches.
# Overload protection refuses requests when the replicas that live are full and another is dead;
# a full replica queues.
"$PY" -m smg launch --worker-urls "${URLS[@]}" --policy "${POLICY:-cache_aware}" \
  --host "$HOST" --port "$PORT" --prometheus-host 127.0.0.1 --prometheus-port "$METRICS_PORT" \
  --worker-startup-check-interval 2 --health-check-interval-secs 5 --health-failure-threshold 2 \
  --health-success-threshold 1 --cb-failure-threshold 3 --cb-timeout-duration-secs 10 \
  --cb-success-threshold 1 --disable-worker-overload-protection \
  ${KEY[@]+"${KEY[@]}"} "${MORE[@]}" \
  >>"$LOG_DIR/router.log" 2>&1 &
ROUTER=$!
PIDS+=("$ROUTER")
NAMES+=("the router")

say "the router will answer on http://$HOST:$PORT; replicas that are ready: /readiness"
(
  exec >&2
  "$PY" - "http://$HOST:$PORT/readiness" "$COUNT" <<'PYTHON'
import json, sys, time, urllib.error, urllib.request

url, wanted, seen = sys.argv[1], int(sys.argv[2]), -1
while seen < wanted:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            healthy = json.load(reply)["healthy_workers"]
    except (OSError, urllib.error.URLError):
        healthy = 0
    if healthy != seen:
        seen = healthy
        print(f"[hispec] {seen} of {wanted} replicas are ready", flush=True)
    time.sleep(1)
print("[hispec] all replicas serve", flush=True)
PYTHON
) &
PIDS+=("$!")
NAMES+=("the start")

# Report who ends; go on while the router and a replica live.
while true; do
  code=0
  wait -n -p ended "${PIDS[@]}" || code=$?
  left=0
  for index in "${!PIDS[@]}"; do
    if [ "${PIDS[$index]}" = "$ended" ]; then
      name="${NAMES[$index]}"
      unset "PIDS[$index]" "NAMES[$index]"
      [ "$name" = "the start" ] || say "$name has ended with code $code; see $LOG_DIR"
    elif [ "${NAMES[$index]#replica}" != "${NAMES[$index]}" ]; then
      left=$((left + 1))
    fi
  done
  [ "$ended" != "$ROUTER" ] || die "without the router there is no service."
  [ "$left" -gt 0 ] || die "no replica is left."
done
