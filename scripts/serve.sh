#!/usr/bin/env bash
# Set up the environment, fetch a small model and serve it on 127.0.0.1:30000.
#
#   scripts/serve.sh [--no-speculation] [--no-hicache] [--no-storage] [server flags]
#
# Server flags pass on, e.g. --port 8000 --log-level debug. With --model-path MODEL that model is
# served instead of the small one, which is then not fetched. The small model is served with its
# EAGLE3 draft, the hierarchical cache and file storage; each of the three can be turned off.
# The line "The server is fired up and ready to roll!" says that requests are answered.
# lib.sh lists the environment variables.

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

HELP="" SPECULATION=1 HICACHE=1 STORAGE=1
FLAGS=()
for argument in "$@"; do
  case "$argument" in
    --no-speculation) SPECULATION="" ;;
    --no-hicache) HICACHE="" STORAGE="" ;;
    --no-storage) STORAGE="" ;;
    -h | --help) HELP=1 ;;
    *) FLAGS+=("$argument") ;;
  esac
done
set -- ${FLAGS[@]+"${FLAGS[@]}"}

ensure_environment gguf

if [ -n "$HELP" ]; then
  sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exec "$PY" -m sglang.cli serve --help
fi

# Read by the server's own parser, so that abbreviations and --config mean here what they mean
# there. Mistakes and a busy port are found now, not after a model has been fetched.
LISTENS="$("$PY" - "$@" <<'PYTHON'
import logging, sys
from sglang.srt.mem_cache.storage.extra_config import parse_extra_config
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.network import wait_port_available

logging.disable()
try:
    args = prepare_server_args(sys.argv[1:], defaults=["--model-path", "/the small model"])
    storage = parse_extra_config(args.hicache_storage_backend_extra_config).backend
except ValueError as error:
    sys.exit(f"sglang: error: {error}")
if args.node_rank == 0 and not wait_port_available(args.port, args.host, 0):
    sys.exit(
        f"sglang: error: cannot listen on {args.host}:{args.port}: it is in use or not allowed; "
        "choose another with --port."
    )
is_theirs = args.hicache_storage_backend not in (None, "file") or "file_storage_path" in storage
print(
    "small" if args.model_path == "/the small model" else "own",
    "their-storage" if is_theirs else "our-folder",
    args.url(),
)
PYTHON
)" || exit 2
read -r WHOSE_MODEL WHOSE_STORAGE URL <<<"$LISTENS"

DEFAULTS=()
if [ "$WHOSE_MODEL" = small ]; then
  MODEL="$("$PY" "$ROOT/scripts/fetch_model.py" | tail -n 1)" && [ -n "$MODEL" ] \
    || die "the small model could not be fetched (see above); serve one you have with --model-path."
  DEFAULTS+=(--model-path "$MODEL" --served-model-name smollm2-135m-instruct)
  if [ -n "$SPECULATION" ]; then
    DEFAULTS+=(--speculative-algorithm EAGLE3 --speculative-num-steps 7 --speculative-eagle-topk 1
      --speculative-draft-model-path "$ROOT/python/sglang/test/data/smollm2-135m-eagle3")
    say "speculative decoding with the EAGLE3 draft of this repository (--no-speculation: without)"
  fi
  if [ -n "$HICACHE" ]; then
    DEFAULTS+=(--enable-hierarchical-cache --page-size 16)
    say "hierarchical cache: KV is kept in host memory too (--no-hicache: without)"
  fi
  # Storage that the flags describe is left to them: the variable would win over its path.
  if [ -n "$STORAGE" ] && [ "$WHOSE_STORAGE" = our-folder ]; then
    FOLDER="${SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR:-${HISPEC_CACHE:-$HOME/.cache/hispec}/hicache}"
    mkdir -p -- "$FOLDER" || die "the storage folder $FOLDER cannot be made; see --no-storage."
    export SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR="$FOLDER"
    DEFAULTS+=(--hicache-storage-backend file)
    say "KV that outlives the server goes to $FOLDER (--no-storage: without)"
  elif [ -n "$STORAGE" ]; then
    DEFAULTS+=(--hicache-storage-backend file)
    say "KV that outlives the server goes where the flags say (--no-storage: without)"
  fi
fi
say "starting the server on $URL"
exec "$PY" -m sglang.cli serve ${DEFAULTS[@]+"${DEFAULTS[@]}"} "$@"
