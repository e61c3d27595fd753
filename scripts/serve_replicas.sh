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
#   STORAGE_PORT      of that own Mooncake master (50051); it takes the next two ports as well
#   STORAGE_CONFIG    more options of that storage, as JSON
#   API_KEY           that clients must send; the router sends it on to the replicas
#   POLICY            of the router (cache_aware); ROUTER_FLAGS: more flags of `smg launch`
#   METRICS_PORT      of the router's Prometheus page (29000)
#   GPUS_PER_REPLICA  where there are GPUs (1); replica i gets the next ones
#   LOG_DIR           for replica-1.log ... and router.log (logs/ beside the project)
# Where the flags do not say it, the replicas have the name of the model's folder as served model
# name, and on a CPU take at most half of the free memory together for KV and host pools.
# A replica that ends is left out and the others go on; start it again by LOG_DIR/replica-1.sh ...,
# from any terminal: it counts as before, and is not stopped with this script.
# lib.sh lists the variables of the environment. docs/scaling.md says how to choose.

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() { sed -n '2,25p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'; }
case "${1:-}" in
  -h | --help) usage; exit 0 ;;
  '' | *[!0-9]* | 0) usage >&2; exit 2 ;;
esac
COUNT="$1"
shift
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
STORAGE="${STORAGE:-file}" STORAGE_PORT="${STORAGE_PORT:-50051}"
LOG_DIR="${LOG_DIR:-$ROOT/logs}"
{ mkdir -p -- "$LOG_DIR" && LOG_DIR="$(cd -- "$LOG_DIR" && pwd)"; } \
  || die "the folder $LOG_DIR cannot be made; set LOG_DIR."

# Before anything is installed or loaded, and so that nobody takes another's service for ours.
ROLES=()
require_free() { # port, what is to listen there, what to change
  require_port "$1" "$3"
  [ -z "${ROLES[10#$1]:-}" ] || die "port $1 would be for ${ROLES[10#$1]} and for $2; set $3."
  ROLES[10#$1]="$2"
  ! listens 127.0.0.1 "$1" || die "something listens on port $1 already, where $2 is to be; set $3."
}
require_free "$PORT" "the router" PORT
require_free "$METRICS_PORT" "the router's metrics page" METRICS_PORT
for ((i = 1; i <= COUNT; i++)); do require_free "$((PORT + i))" "replica $i" PORT; done
OWN_STORE=""
if [ "$STORAGE" = mooncake ] && [ -z "${MOONCAKE_MASTER:-}" ]; then
  OWN_STORE=1
  for i in 0 1 2; do
    require_free "$((STORAGE_PORT + i))" "the storage" \
      "STORAGE_PORT, or MOONCAKE_MASTER=HOST:PORT to use a store that runs"
  done
fi

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
  redis) ;; # the server's own client
  *) die "STORAGE must be file, mooncake, redis or none, not $STORAGE." ;;
esac
if [ -n "${STORAGE_CONFIG:-}" ]; then
  FLAGS+=(--hicache-storage-backend-extra-config "$STORAGE_CONFIG")
fi

# Once, not by every replica.
SMALL_MODEL=""
[ -n "$HAS_MODEL" ] || SMALL_MODEL="$("$PY" "$ROOT/scripts/fetch_model.py" | tail -n 1)" \
  || die "the small model could not be fetched (see above); serve one you have with --model-path."
EXTRA="$("$PY" "$ROOT/scripts/replica_flags.py" "$COUNT" "$SMALL_MODEL" "${FLAGS[@]}" "$@")" || exit 2
while IFS= read -r word; do
  if [ -n "$word" ]; then FLAGS+=("$word"); fi
done <<<"$EXTRA"
[ -z "$EXTRA" ] || say "each replica gets ${EXTRA//$'\n'/ }"
KEY=()
if [ -n "${API_KEY:-}" ]; then KEY=(--api-key "$API_KEY"); fi

PIDS=()
NAMES=()
stop_all() {
  trap - EXIT INT TERM
  say "stopping"
  for pid in ${PIDS[@]+"${PIDS[@]}"}; do kill "$pid" 2>/dev/null || true; done
  wait
  for ((i = 1; i <= COUNT; i++)); do
    if replica_lives "$i"; then say "replica $i, started by hand, goes on (process $(cat "$LOG_DIR/replica-$i.pid"))"; fi
  done
}
trap stop_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Whoever started it last, we or a user.
replica_lives() { # number
  local pid
  read -r pid 2>/dev/null <"$LOG_DIR/replica-$1.pid" && kill -0 "$pid" 2>/dev/null
}

if [ -n "$OWN_STORE" ]; then
  tied "$ROOT/scripts/mooncake_local.sh" --port "$STORAGE_PORT" --memory "${STORAGE_MEMORY:-4GB}" \
    >>"$LOG_DIR/storage.log" 2>&1 &
  PIDS+=("$!")
  NAMES+=("the storage")
  # The memory is that node's; a replica that dies must not take pages with it.
  export MOONCAKE_MASTER="127.0.0.1:$STORAGE_PORT" MOONCAKE_GLOBAL_SEGMENT_SIZE=0
  say "storage: a Mooncake Store on $MOONCAKE_MASTER >>$LOG_DIR/storage.log"
  until listens 127.0.0.1 "$((STORAGE_PORT + 2))"; do
    kill -0 "${PIDS[0]}" 2>/dev/null || die "the storage did not start; see $LOG_DIR/storage.log"
    sleep 0.2
  done
  kill -0 "${PIDS[0]}" 2>/dev/null || die "the storage has ended; see $LOG_DIR/storage.log"
fi

# A replica's start as a program of its own, with all that it needs of this environment.
write_start() { # number, command
  local name start="$LOG_DIR/replica-$1.sh"
  rm -f -- "$start"
  ( umask 077 && : >"$start" ) || die "$start cannot be written; set LOG_DIR."
  {
    printf '#!/usr/bin/env bash\n# Replica %s of scripts/serve_replicas.sh; holds keys and passwords.\n' "$1"
    for name in $(compgen -e | grep -E '^(SGLANG|HISPEC|MOONCAKE|MC|HF|CUDA|OMP|NCCL)_'); do
      printf 'export %s=%q\n' "$name" "${!name}"
    done
    printf 'cd %q || exit 1\n' "$PWD" # paths in flags
    printf 'printf "%%s\\n" "$$" >%q\n' "$LOG_DIR/replica-$1.pid"
    printf 'exec'
    printf ' %q' "${@:2}"
    printf ' >>%q 2>&1\n' "$LOG_DIR/replica-$1.log"
  } >>"$start"
  chmod 700 "$start"
}

URLS=()
for ((i = 1; i <= COUNT; i++)); do
  GPUS=()
  if has_gpu; then
    each="${GPUS_PER_REPLICA:-1}"
    GPUS=("CUDA_VISIBLE_DEVICES=$(seq -s, $(((i - 1) * each)) $((i * each - 1)))")
  fi
  COMMAND=(env ${GPUS[@]+"${GPUS[@]}"} "$ROOT/scripts/serve.sh" "${FLAGS[@]}" "$@" --port "$((PORT + i))")
  write_start "$i" "${COMMAND[@]}" ${KEY[@]+"${KEY[@]}"}
  tied "$LOG_DIR/replica-$i.sh" &
  PIDS+=("$!")
  printf '%s\n' "$!" >"$LOG_DIR/replica-$i.pid"
  NAMES+=("replica $i")
  URLS+=("http://127.0.0.1:$((PORT + i))")
  say "replica $i on port $((PORT + i)) >>$LOG_DIR/replica-$i.log; started, and again, by" \
    "$(printf '%q' "$LOG_DIR/replica-$i.sh")"
done

# shellcheck disable=SC2206 # flags are words
MORE=(--log-level warn ${ROUTER_FLAGS:-})
# A dead replica costs its share of traffic until the circuit breaker opens, and comes back by
# health checks; the defaults (checks once a minute) are for fleets that a service manager watches.
# Overload protection refuses requests when the replicas that live are full and another is dead;
# a full replica queues.
tied "$PY" -m smg launch --worker-urls "${URLS[@]}" --policy "${POLICY:-cache_aware}" \
  --host "$HOST" --port "$PORT" --prometheus-host 127.0.0.1 --prometheus-port "$METRICS_PORT" \
  --worker-startup-check-interval 2 --health-check-interval-secs 5 --health-failure-threshold 2 \
  --health-success-threshold 1 --cb-failure-threshold 3 --cb-timeout-duration-secs 10 \
  --cb-success-threshold 1 --disable-worker-overload-protection \
  ${KEY[@]+"${KEY[@]}"} "${MORE[@]}" \
  >>"$LOG_DIR/router.log" 2>&1 &
PIDS+=("$!")
NAMES+=("the router")

say "the router will answer on http://$HOST:$PORT; replicas that are ready: /readiness"
(
  exec >&2
  tied "$PY" - "http://$HOST:$PORT/readiness" "$COUNT" <<'PYTHON'
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
  sleep 1 &
  wait "$!" 2>/dev/null || true # what bash says of a killed child follows below
  for index in "${!PIDS[@]}"; do
    if ! kill -0 "${PIDS[$index]}" 2>/dev/null; then
      code=0
      wait "${PIDS[$index]}" 2>/dev/null || code=$?
      name="${NAMES[$index]}"
      unset "PIDS[$index]" "NAMES[$index]"
      case "$name" in
        "the start") ;;
        "the router")
          tail -n 3 "$LOG_DIR/router.log" >&2
          die "the router has ended with code $code and without it there is no service; see $LOG_DIR/router.log" ;;
        *) say "$name has ended with code $code; see $LOG_DIR" ;;
      esac
    fi
  done
  left=0
  for ((i = 1; i <= COUNT; i++)); do
    case " ${NAMES[*]} " in *" replica $i "*) left=$((left + 1)) ;; *)
      if replica_lives "$i"; then left=$((left + 1)); fi ;;
    esac
  done
  [ "$left" -gt 0 ] || die "no replica is left."
done
