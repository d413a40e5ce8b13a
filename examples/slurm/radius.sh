#!/usr/bin/env bash
# Submits the pretraining runs of Radius: examples/slurm/radius.sh 355M|2.0B dense|radius|topk [flags of pretrain_gpt.py]
#
# 16 nodes of 4 GPUs, data-parallel; each run outlives its time limit (pretrain_gpt.sbatch). A `radius` or `topk` run
# without checkpoints of its own begins at a dense one, DENSE_DIR; the first step of `radius` is dense and chooses the
# coordinates. Later runs go on from their own, residuals and choices included.
#
#   DENSITY, INTERVAL  of the stable Top-K (355M: 0.3, 500; 2.0B: 0.4, 200)
#   DENSE_DIR          checkpoints to begin at (those of the dense run of the same size)
#   DENSE_ITERATION    the one of them to begin at (their latest)
#   RUN_DIR, DATA_PATH, VOCAB_FILE, MERGE_FILE, NODES
set -euo pipefail

MODEL=${1:?355M or 2.0B}
SCHEME=${2:?dense, radius or topk}
shift 2
case $MODEL in
  355M) SIZE=(--hidden-size 1024 --num-attention-heads 16 --train-iters 500000 --lr-decay-iters 320000 --min-lr 1e-5)
        DENSITY=${DENSITY:-0.3} INTERVAL=${INTERVAL:-500} ;;
  2.0B) SIZE=(--hidden-size 2560 --num-attention-heads 32 --train-iters 300000 --lr-decay-iters 192000 --min-lr 1e-6)
        DENSITY=${DENSITY:-0.4} INTERVAL=${INTERVAL:-200} ;;
  *) echo "$MODEL: 355M or 2.0B" >&2; exit 2 ;;
esac
export RUN_DIR=${RUN_DIR:-runs/radius/$MODEL-$SCHEME}
case $SCHEME in
  dense) OWN=() ;;
  radius) OWN=(--compress "dp-grad=stable-topk,density=$DENSITY,interval=$INTERVAL") ;;
  topk) OWN=(--compress "dp-grad=topk,density=1~0.01@1000") ;;
  *) echo "$SCHEME: dense, radius or topk" >&2; exit 2 ;;
esac
if [ "$SCHEME" != dense ] && [ ! -e "$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt" ]; then
  DENSE_DIR=${DENSE_DIR:-runs/radius/$MODEL-dense/checkpoints}
  if [ -n "${DENSE_ITERATION:-}" ]; then
    SOURCE=DENSE_ITERATION
  else
    SOURCE=$DENSE_DIR/latest_checkpointed_iteration.txt
    if [ ! -e "$SOURCE" ]; then
      echo "$DENSE_DIR holds no checkpoint: run the dense one first, or name another by DENSE_DIR" >&2
      exit 1
    fi
    DENSE_ITERATION=$(head -c 100 "$SOURCE" | tr -d '[:space:]\0')
  fi
  if ! [[ $DENSE_ITERATION =~ ^[0-9]{1,18}$ ]]; then
    echo "$SOURCE: '$DENSE_ITERATION' is no iteration: name one in $DENSE_DIR by DENSE_ITERATION" >&2
    exit 1
  fi
  FOLDER=$(printf 'iter_%07d' "$((10#$DENSE_ITERATION))")
  if [ ! -d "$DENSE_DIR/$FOLDER" ]; then
    echo "$SOURCE: there is no $DENSE_DIR/$FOLDER: name an iteration that there is by DENSE_ITERATION" >&2
    exit 1
  fi
  # Its own checkpoints begin as a copy of the dense one, so that every run of the job loads from the same place.
  mkdir -p "$RUN_DIR/checkpoints"
  cp -r "$DENSE_DIR/$FOLDER" "$RUN_DIR/checkpoints/"
  printf '%s' "$((10#$DENSE_ITERATION))" > "$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt"
fi

sbatch --job-name="radius-$MODEL-$SCHEME" --nodes="${NODES:-16}" --gpus-per-node=4 examples/slurm/pretrain_gpt.sbatch \
  --num-layers 24 "${SIZE[@]}" --seq-length 1024 --max-position-embeddings 1024 \
  --micro-batch-size 8 --global-batch-size 512 \
  --lr 1.5e-4 --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.01 --clip-grad 1.0 --bf16 \
  --overlap-grad-reduce --data-path "${DATA_PATH:-web_text_document}" --split 949,50,1 \
  --tokenizer-type GPT2BPETokenizer --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" \
  --merge-file "${MERGE_FILE:-gpt2-merges.txt}" --eval-interval 100 --eval-iters 10 --save-interval 10000 \
  --log-interval 1 --log-comm "${OWN[@]}" "$@"
