#!/usr/bin/env bash
# Set up the environment, fetch a small model and serve it on 127.0.0.1:30000.
#
#   scripts/serve.sh [server flags]
#
# Server flags pass on, e.g. --port 8000 --log-level debug. With --model-path MODEL that model is
# served instead of the small one, which is then not fetched. The line
# "The server is fired up and ready to roll!" says that requests are answered.
# lib.sh lists the environment variables.

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

MODEL_GIVEN="" HELP="" HOST=127.0.0.1 PORT=30000 PREVIOUS=""
for argument in "$@"; do
  case "$argument" in
    --model-path | --model | --model-path=* | --model=*) MODEL_GIVEN=1 ;;
    --config | --config=*) MODEL_GIVEN=1 ;;
    --host=*) HOST="${argument#*=}" ;;
    --port=*) PORT="${argument#*=}" ;;
    -h | --help) HELP=1 ;;
  esac
  case "$PREVIOUS" in
    --host) HOST="$argument" ;;
    --port) PORT="$argument" ;;
  esac
  PREVIOUS="$argument"
done

ensure_environment gguf

if [ -n "$HELP" ]; then
  sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exec "$PY" -m sglang.cli serve --help
fi

# Found out now, not after the model has been loaded.
"$PY" - "$HOST" "$PORT" <<'PYTHON' || die "cannot listen on $HOST:$PORT: it is in use or not allowed; choose another with --port."
import socket, sys
host, port = sys.argv[1], sys.argv[2]
try:
    family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
except (OSError, ValueError, OverflowError):
    sys.exit(1)
PYTHON

DEFAULTS=(--host "$HOST" --port "$PORT")
if [ -z "$MODEL_GIVEN" ]; then
  MODEL="$("$PY" "$ROOT/scripts/fetch_model.py" | tail -n 1)" && [ -n "$MODEL" ] \
    || die "the small model could not be fetched (see above); serve one you have with --model-path."
  DEFAULTS+=(--model-path "$MODEL" --served-model-name smollm2-135m-instruct)
fi
say "starting the server on http://$HOST:$PORT"
exec "$PY" -m sglang.cli serve "${DEFAULTS[@]}" "$@"
