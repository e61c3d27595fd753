# Shared by serve.sh and test.sh: finds Python, makes the virtual environment, installs the project.
# Sourced, never run. Sets ROOT, VENV and PY.
#
# HISPEC_VENV    environment to use or make   (default: .venv beside pyproject.toml)
# HISPEC_PYTHON  interpreter that makes it    (default: the first one that is 3.11 or newer)
# HISPEC_TORCH   torch release for a machine without a GPU (default: 2.13.0)

set -euo pipefail

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${HISPEC_VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
PY="$VENV/bin/python"
TORCH_RELEASE="${HISPEC_TORCH:-2.13.0}"
NEEDED_MB_WITH_TORCH=2500
NEEDED_MB=500

say() { printf '[hispec] %s\n' "$*" >&2; }
die() { printf '[hispec] error: %s\n' "$*" >&2; exit 1; }

# Prints the version of torch that the interpreter $1 would import if it is recent enough.
# Reads the installed metadata, since importing torch takes seconds.
recent_torch() {
  "$1" - <<'PYTHON' 2>/dev/null
import importlib.metadata, re, sys
version = importlib.metadata.version("torch")
if tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 11):
    sys.exit(1)
print(version)
PYTHON
}

is_recent_python() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [ -n "${HISPEC_PYTHON:-}" ]; then
    is_recent_python "$HISPEC_PYTHON" || die "HISPEC_PYTHON=$HISPEC_PYTHON is no Python 3.11 or newer."
    printf '%s\n' "$HISPEC_PYTHON"
    return
  fi
  for candidate in python3 python3.11 python3.12 python3.13 python3.14 python; do
    if command -v "$candidate" >/dev/null && is_recent_python "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer found; install one, or name it with HISPEC_PYTHON."
}

listens() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; } # host, port

require_port() { # value, name
  case "$1" in *[!0-9]* | "" | ??????*) die "$2 must be a port, not $1." ;; esac
  [ "$1" -ge 1 ] && [ "$1" -le 65535 ] || die "$2 must lead to ports from 1 to 65535, not $1."
}

# Become a program that gets SIGTERM when this script dies, also where the script could not end it
# (kill -9). For background commands: tied PROGRAM ARGUMENTS &
tied() {
  exec "$PY" -c '
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; exec keeps it
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the script that started this is gone")
os.execvp(sys.argv[2], sys.argv[2:])
' "$$" "$@"
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

require_space() { # folder, MB
  local free_kb
  free_kb="$(df -Pk "$1" | awk 'NR == 2 { print $4 }')"
  if [ "$((free_kb / 1024))" -lt "$2" ]; then
    die "$1 has $((free_kb / 1024)) MB free and about $2 MB are needed; free some space or set HISPEC_VENV."
  fi
}

HEARTBEAT=""
stop_heartbeat() {
  if [ -n "$HEARTBEAT" ]; then kill "$HEARTBEAT" 2>/dev/null || true; wait "$HEARTBEAT" 2>/dev/null || true; fi
  HEARTBEAT=""
}

# pip can be silent for a minute while it unpacks a large package; say what has happened so far.
start_heartbeat() { # what is going on
  (
    exec 9>&- # a leftover sleep must not hold the lock
    while sleep 10 >/dev/null 2>&1; do
      say "still $1: $SECONDS s, $(du -sm "$VENV" 2>/dev/null | cut -f1) MB in the environment;" \
        "$(grep -oE '(Downloading|Processing|Using cached|Building|Installing collected) [^ ]+' \
          "$VENV/hispec-pip.log" 2>/dev/null | tail -n 1)"
    done
  ) &
  HEARTBEAT=$!
}

explain_pip_failure() { # what was being installed
  local log="$VENV/hispec-pip.log"
  if grep -qs 'No space left on device' "$log"; then
    die "the disk is full while installing $1; free some space or set HISPEC_VENV. pip's log: $log"
  fi
  if grep -qsE 'NewConnection|NameResolution|ConnectTimeout|Max retries|Temporary failure|timed out|ProxyError|ConnectionError|from versions: none' "$log"; then
    die "the package registry cannot be reached (or lacks a package) while installing $1; check the network and pip's settings. pip's log: $log"
  fi
  die "pip could not install $1; its last lines are above. pip's log: $log"
}

pip_install() { # what (for messages), pip arguments
  local what="$1" quiet=()
  shift
  # On a terminal pip draws its own progress; in a log that is hundreds of lines nobody reads.
  [ -t 2 ] || quiet=(--quiet --progress-bar off)
  say "installing $what ..."
  rm -f "$VENV/hispec-pip.log"
  start_heartbeat "installing $what"
  if ! "$PY" -m pip install ${quiet[@]+"${quiet[@]}"} --disable-pip-version-check --no-input \
      --log "$VENV/hispec-pip.log" "$@" </dev/null >&2; then
    stop_heartbeat
    explain_pip_failure "$what"
  fi
  stop_heartbeat
}

make_venv() {
  local python options=() version
  python="$(find_python)"
  if [ -e "$PY" ] || [ -L "$PY" ]; then
    [ -z "${HISPEC_VENV:-}" ] || die "the interpreter in HISPEC_VENV=$VENV does not run; remove that folder or name another."
    say "the interpreter in $VENV does not run; making the environment anew."
    options+=(--clear)
  fi
  if version="$(recent_torch "$python")"; then
    say "torch $version of $python will be used"
    options+=(--system-site-packages)
  fi
  say "making the environment $VENV with $python"
  "$python" -m venv ${options[@]+"${options[@]}"} "$VENV" >&2 \
    || die "$python cannot make an environment in $VENV; is its venv module installed and the folder writable?"
}

install_torch() {
  local version
  if version="$(recent_torch "$PY")"; then
    say "keeping torch $version"
    return
  fi
  require_space "$VENV" "$NEEDED_MB_WITH_TORCH"
  # Left to itself pip takes the newest build for CUDA, several GB that a machine without a GPU
  # has no use for; with a GPU that build is the right one.
  if has_gpu && [ -z "${HISPEC_TORCH:-}" ]; then
    pip_install "torch for the GPU (several GB)" "torch>=2.11"
  else
    pip_install "torch $TORCH_RELEASE" "torch==$TORCH_RELEASE"
  fi
}

checksum() { "$PY" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'; }

# Make sure that the environment holds the project with the extra $1. Quick where nothing changed.
ensure_environment() {
  local extra="$1" stamp wanted
  mkdir -p "$VENV" 2>/dev/null || die "the folder $VENV cannot be made."
  if command -v flock >/dev/null; then
    exec 9>"$VENV/.hispec-lock"
    flock -n 9 || { say "another set-up of $VENV is running; waiting for it ..."; flock 9; }
  fi
  trap 'stop_heartbeat' EXIT
  trap 'stop_heartbeat; say "interrupted; run it again to go on"; exit 130' INT TERM
  is_recent_python "$PY" || make_venv
  stamp="$VENV/.hispec-stamp-$extra"
  wanted="$({ cat "$ROOT/pyproject.toml"; "$PY" --version; echo "$ROOT $extra"; } | checksum)"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    "$PY" -m pip --version >/dev/null 2>&1 || "$PY" -m ensurepip >&2 \
      || die "the environment $VENV has no pip and it cannot be added; remove that folder or name another with HISPEC_VENV."
    install_torch
    require_space "$VENV" "$NEEDED_MB"
    pip_install "the project with its extra '$extra'" -e "$ROOT[$extra]"
    printf '%s\n' "$wanted" >"$stamp"
  fi
  trap - EXIT INT TERM
  # The lock must not live on in the program that the script turns into.
  exec 9>&-
}

# Mooncake's client needs a library of the system that no wheel brings, with or without RDMA.
ensure_rdma_library() {
  local log="$VENV/hispec-apt.log"
  has_rdma_library && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing libibverbs1 for Mooncake ..."
    if install_rdma_library >"$log" 2>&1 || { apt-get update >"$log" 2>&1 && install_rdma_library >>"$log" 2>&1; }
    then
      has_rdma_library && return
    fi
    say "libibverbs1 could not be installed; apt's log: $log"
  fi
  say "libibverbs.so.1 is missing: Mooncake cannot be used (Debian, Ubuntu: apt-get install libibverbs1)"
  return 1
}

has_rdma_library() { "$PY" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; }

install_rdma_library() { apt-get install -y --no-install-recommends libibverbs1; }
