#!/usr/bin/env bash
# Train an EAGLE-3 draft for the small model on one GPU within a time limit, without a network.
#
#   MINUTES=25 scripts/train_small_draft.sh [MORE OPTIONS OF train_eagle3.py]
#
# Writes the training text, trains, evaluates; the draft is in $OUT/draft. A run that was stopped or
# cut off goes on when the same command is given again (checkpoints every 250 steps; one that was cut
# off while it wrote the text begins anew). The limit is for all runs together.
#
# MINUTES  time limit, writing the text included      (default 25)
# DATA_MINUTES   of these, for writing the text       (default 6)
# SLICE_MINUTES  stop this call after that time, save and exit 124; calling again goes on
# OUT      folder of the run                          (default ./draft-run)
# MODEL    folder of the target                       (default: what fetch_model.py makes; where
#          .parts/model.gguf.* lie, see device.sh, they are joined and converted instead)
# PYTHON   interpreter                                (default python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-$PWD/draft-run}
MINUTES=${MINUTES:-25}
DATA_MINUTES=${DATA_MINUTES:-6}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

if [[ -z ${MODEL:-} ]]; then
  if compgen -G ".parts/model.gguf.*" >/dev/null; then
    gguf=$(mktemp --suffix .gguf)
    trap 'rm -f "$gguf"' EXIT
    cat .parts/model.gguf.* >"$gguf"
    MODEL=$("$PYTHON" scripts/fetch_model.py --gguf "$gguf" | tail -n 1)
  else
    MODEL=$("$PYTHON" scripts/fetch_model.py | tail -n 1)
  fi
fi

slice=()
if [[ -n ${SLICE_MINUTES:-} ]]; then slice=(timeout -s TERM "${SLICE_MINUTES}m"); fi

"${slice[@]}" "$PYTHON" scripts/train_eagle3.py \
  --model "$MODEL" --output "$OUT" --resume --device cuda \
  --builtin-prompts 12000 --self-prompts 40000 --write-batch 768 --answer-tokens 640 \
  --greedy-share 0.35 --repetition-share 0.2 --max-length 1536 \
  --draft-vocab-size 24576 --intermediate-size 2048 \
  --optimizer muon --lr 2e-3 --warmup-steps 60 --batch-tokens 30000 --loss-rows 32768 \
  --chain-weight 0.3 --step-decay 0.85 \
  --eval-prompts 128 --eval-repeated 32 --eval-every 1000 --checkpoint-every 250 \
  --data-minutes "$DATA_MINUTES" --max-minutes "$MINUTES" "$@"
