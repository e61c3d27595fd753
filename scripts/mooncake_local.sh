#!/usr/bin/env bash
# Start a Mooncake Store on this machine: a master and one storage node, both on 127.0.0.1.
#
#   scripts/mooncake_local.sh [--port PORT] [--memory SIZE] [--check]
#
# --port    of the master; its metrics and the node take the two ports after it   (default: 50051)
# --memory  of the node, e.g. 512MB or 8GB                                        (default: 1GB)
# --check   write and read a page, and end
#
# Runs until it is interrupted, then everything that was stored is gone. A server uses it with
#   MOONCAKE_MASTER=127.0.0.1:50051 MOONCAKE_GLOBAL_SEGMENT_SIZE=0
#   --enable-hierarchical-cache --page-size 64 --hicache-storage-backend mooncake
# lib.sh lists the environment variables.

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

PORT=50051 MEMORY=1GB CHECK=""
while [ $# -gt 0 ]; do
  case "$1" in
    --port | --memory)
      [ $# -ge 2 ] || die "$1 needs a value."
      if [ "$1" = --port ]; then PORT="$2"; else MEMORY="$2"; fi
      shift 2
      ;;
    --check) CHECK=1; shift ;;
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) die "unknown argument $1; --help lists them." ;;
  esac
done
case "$PORT" in *[!0-9]* | "") die "--port must be a number, not $PORT." ;; esac

programs() {
  "$PY" -c 'import importlib.util as u; print(u.find_spec("mooncake").submodule_search_locations[0])' 2>/dev/null
}
PROGRAMS="$(programs)" || { ensure_environment mooncake; PROGRAMS="$(programs)"; } \
  || die "Mooncake is not installed in $VENV."
ensure_rdma_library || exit 1

PIDS=()
finish() {
  trap - EXIT
  if [ ${#PIDS[@]} -gt 0 ]; then
    kill "${PIDS[@]}" 2>/dev/null || true
    wait "${PIDS[@]}" 2>/dev/null || true
  fi
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

wait_for_port() { # port, process, name
  local tries=0
  until (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; do
    kill -0 "$2" 2>/dev/null || die "the $3 ended; its last words are above. Is port $1 in use?"
    tries=$((tries + 1))
    [ "$tries" -lt 200 ] || die "the $3 does not listen on port $1."
    sleep 0.1
  done
}

export MC_LOG_LEVEL="${MC_LOG_LEVEL:-WARNING}"
"$PROGRAMS/mooncake_master" --rpc_address=127.0.0.1 --rpc_port="$PORT" \
  --metrics_host=127.0.0.1 --metrics_port="$((PORT + 1))" >&2 &
PIDS+=($!)
wait_for_port "$PORT" "${PIDS[0]}" "master"
"$PROGRAMS/mooncake_client" --host=127.0.0.1 --port="$((PORT + 2))" \
  --global_segment_size="$MEMORY" --metadata_server=P2PHANDSHAKE \
  --master_server_address="127.0.0.1:$PORT" >&2 &
PIDS+=($!)
wait_for_port "$((PORT + 2))" "${PIDS[1]}" "storage node"
say "Mooncake Store on 127.0.0.1:$PORT, $MEMORY; metrics on http://127.0.0.1:$((PORT + 1))/metrics"

if [ -n "$CHECK" ]; then
  "$PY" - "127.0.0.1:$PORT" <<'PYTHON'
import sys
from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
setup = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1])
page = bytes(range(256)) * 1024
written = setup or store.put("a page", page)
is_right = not written and store.get("a page") == page
store.close()
sys.exit(0 if is_right else f"a page did not come back ({written})")
PYTHON
  say "a page was written and read"
  exit 0
fi
wait -n "${PIDS[@]}" || true
die "a process of the store ended."
