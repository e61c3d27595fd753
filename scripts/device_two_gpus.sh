#!/usr/bin/env bash
# On a machine with two GPUs, prepared as scripts/device.sh says: everything that only a second rank
# can break, then the trainers that broadcast from the second GPU. Six minutes or less for the
# first; each part has a time limit, and a part that fails does not stop the others.
#
#   scripts/device_two_gpus.sh [two-gpus] [trainers] [weights]     default: two-gpus trainers
set -euo pipefail
case ${1:-} in
  -h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
    exit
    ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Multicast over NVLink stays off, and both sides of a group share memory the same way.
export NCCL_NVLS_ENABLE=0 NCCL_CUMEM_ENABLE=0
exec scripts/device.sh run "${@:-two-gpus trainers}"
