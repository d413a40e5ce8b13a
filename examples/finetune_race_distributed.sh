#!/usr/bin/env bash
# Fine-tunes BERT 345M for RACE on one node of eight devices: data-parallel 8. A micro-batch of 4 questions is one of 16
# sequences.
set -euo pipefail

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

DATA=${DATA:-data/RACE}
VOCAB_FILE=${VOCAB_FILE:-bert-vocab.txt}
PRETRAINED_CHECKPOINT=${PRETRAINED_CHECKPOINT:-checkpoints/bert_345m}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/bert_345m_race}

python tools/launch.py --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
  tasks/main.py \
  --task RACE --epochs 3 \
  --train-data "$DATA/train/middle" "$DATA/train/high" --valid-data "$DATA/dev/middle" "$DATA/dev/high" \
  --pretrained-checkpoint "$PRETRAINED_CHECKPOINT" \
  --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
  --seq-length 512 --max-position-embeddings 512 \
  --micro-batch-size 4 \
  --lr 1e-5 --lr-decay-style linear --lr-warmup-fraction 0.06 --weight-decay 1e-1 --clip-grad 1.0 \
  --recompute-granularity full --recompute-method uniform \
  --tokenizer-type BertWordPieceLowerCase --vocab-file "$VOCAB_FILE" \
  --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
  --log-interval 10 \
  --bf16 "$@"
