#!/usr/bin/env bash
# Start a Mooncake Store on this machine: a master on 127.0.0.1 and one storage node. The node is
# asked on 127.0.0.1 and moves pages on a port of all interfaces above 12000, without passwords.
#
#   scripts/mooncake_local.sh [--port PORT] [--memory SIZE] [--check]
#
# --port    of the master; its metrics and the node take the two ports after it   (default: 50051)
# --memory  of the node, 16MiB or more, e.g. 512MB or 8GiB                        (default: 1GB)
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
    -h | --help) sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) die "unknown argument $1; --help lists them." ;;
  esac
done
require_port "$PORT" --port
require_port "$((PORT + 2))" "--port, two more,"

programs() {
  "$PY" -c 'import importlib.util as u; print(u.find_spec("mooncake").submodule_search_locations[0])' 2>/dev/null
}
PROGRAMS="$(programs)" || { ensure_environment mooncake; PROGRAMS="$(programs)"; } \
  || die "Mooncake is not installed in $VENV."
ensure_rdma_library || exit 1

# The node takes a size that it cannot read for 0, and one that it cannot have ends it.
MEMORY_BYTES="$(PYTHONPATH="$ROOT/python" "$PY" - "$MEMORY" <<'PYTHON'
import sys
import psutil
from sglang.srt.environ import parse_bytes

LEAST = 16 << 20  # the store's unit
try:
    size, total = parse_bytes(sys.argv[1]), psutil.virtual_memory().total
except ValueError as error:
    sys.exit(f"[hispec] error: --memory {sys.argv[1]}: {error}")
if not LEAST <= size <= total:
    sys.exit(
        f"[hispec] error: --memory must be from {LEAST >> 20}MiB to this host's "
        f"memory, {total} bytes, not {sys.argv[1]}"
    )
print(size)
PYTHON
)" || exit 1
for ((i = PORT; i <= PORT + 2; i++)); do
  ! listens 127.0.0.1 "$i" || die "port $i is in use; the store takes $PORT and the two after it: set --port."
done

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
    kill -0 "$2" 2>/dev/null || die "the $3 ended; its last words are above."
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
  --global_segment_size="$MEMORY_BYTES" --metadata_server=P2PHANDSHAKE \
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
