#!/usr/bin/env bash
# Fine-tunes a Hugging Face DeBERTa-v2 or -v3, or a GPT-2, for a task of GLUE over pipeline stages whose links are slow,
# as AQ-SGD does: activations are sent as quantized changes since the sample's last visit (3 bits), their gradients
# quantized (6 bits).
#
#   MODEL=deberta-v3-base DATA=glue_data/CoLA examples/finetune_deberta_aqsgd.sh
#   MODEL=deberta-v2-xxlarge TASK=QNLI DATA=glue_data/QNLI STAGES=8 examples/finetune_deberta_aqsgd.sh
#
# MODEL: folder with config.json, weights and the tokenizer's files (spm.model; vocab.json and merges.txt). DATA: folder
# with train.tsv and dev.tsv. A GPT-2 needs KIND=gpt. Evaluates after every epoch, which is a checkpoint, and the same
# command goes on from the newest. RAW=1 sends everything uncompressed, for comparison.
set -euo pipefail
: "${MODEL:?folder of a Hugging Face DeBERTa-v2 or -v3, or GPT-2}" "${DATA:?folder with train.tsv and dev.tsv}"
# Paths are those of the caller's folder, not of the repository's.
MODEL=$(realpath -m "$MODEL") DATA=$(realpath -m "$DATA")
OUT=$(realpath -m "${OUT:-finetune_out}") # everything that is made
cd "$(dirname "$0")/.."

KIND=${KIND:-deberta}            # or gpt
TASK=${TASK:-CoLA}
STAGES=${STAGES:-2}              # pipeline stages, each a process of this machine
REPLICAS=${REPLICAS:-1}          # data-parallel copies
EPOCHS=${EPOCHS:-10}
SEQ_LENGTH=${SEQ_LENGTH:-256}
MICRO_BATCH=${MICRO_BATCH:-8}
BATCH=${BATCH:-32}
# DeBERTa-v2-xxlarge's, with which a GPT-2 learns nothing in its epochs.
case $KIND in gpt) USUAL_LR=5e-5 ;; *) USUAL_LR=2.5e-6 ;; esac
LR=${LR:-$USUAL_LR}
PYTHON=${PYTHON:-python}
read -r -a EXTRA <<< "${FLAGS:-}" # further flags of tasks/main.py

mkdir -p "$OUT"
if [ ! -f "$OUT/pretrained/latest_checkpointed_iteration.txt" ]; then
  "$PYTHON" tools/ckpt_convert.py --load "$MODEL" --save "$OUT/pretrained" --to megatron-cc
fi
COMPRESS=(--compress pp-forward=delta,bits=3 --compress pp-backward=fixpoint,bits=6)
RUN=$OUT/run
if [ "${RAW:-}" = 1 ]; then COMPRESS=() RUN=$OUT/run-raw; fi

exec "$PYTHON" tools/launch.py --standalone --nproc-per-node $((STAGES * REPLICAS)) tasks/main.py \
  --model-type "$KIND" --task "$TASK" --epochs "$EPOCHS" --train-data "$DATA/train.tsv" --valid-data "$DATA/dev.tsv" \
  --pretrained-checkpoint "$OUT/pretrained" --load "$RUN" --save "$RUN" \
  --pipeline-model-parallel-size "$STAGES" --micro-batch-size "$MICRO_BATCH" --global-batch-size "$BATCH" \
  --seq-length "$SEQ_LENGTH" --lr "$LR" --lr-decay-style linear --lr-warmup-fraction 0.1 --clip-grad 1.0 \
  --log-interval 10 --log-comm --sample-order fixed --seed 42 \
  ${COMPRESS[@]+"${COMPRESS[@]}"} ${EXTRA[@]+"${EXTRA[@]}"}
