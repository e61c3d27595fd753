#!/usr/bin/env bash
# Set up the environment, then check style and types and run the tests.
#
#   scripts/test.sh                  ruff, mypy, then the whole test suite
#   scripts/test.sh ARGUMENTS        pytest ARGUMENTS, nothing else; paths start at the project
#
# HISPEC_MODEL_DIR names a folder with the small model; without it, it is fetched when a test
# needs it. lib.sh lists the other environment variables.

# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

case "${1:-}" in -h | --help)
  sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit ;;
esac

ensure_environment test
# Without it the tests of that backend are skipped, but not on a machine of continuous integration.
ensure_rdma_library || true

# More threads than cores to spare make small tensors slower, and tests start several processes.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
export MYPY_NUM_WORKERS="${MYPY_NUM_WORKERS:-2}"

cd "$ROOT"
if [ $# -gt 0 ]; then
  exec "$PY" -m pytest "$@"
fi

FOLDERS=()
for folder in python test scripts benchmark examples; do
  if [ -d "$folder" ]; then FOLDERS+=("$folder"); fi
done
FAILED=()
check() { # name, command
  local name="$1"
  shift
  say "$name"
  "$@" || FAILED+=("$name")
}
check "ruff check" "$PY" -m ruff check "${FOLDERS[@]}"
check "ruff format" "$PY" -m ruff format --check "${FOLDERS[@]}"
check "mypy" "$PY" -m mypy "${FOLDERS[@]}"
# Loading schemathesis takes every worker a second, and only a registered test has a use for it.
check "unit tests" "$PY" -m pytest -n 2 -p no:schemathesis test/unit
# A file is one worker's: its tests share a server. The files come in the order of conftest.py.
check "registered tests" "$PY" -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
  --durations=25 test/registered
if [ ${#FAILED[@]} -gt 0 ]; then
  printf '[hispec] failed: %s\n' "${FAILED[@]}" >&2
  exit 1
fi
say "all checks passed"
