#!/usr/bin/env bash
# Fine-tunes BERT 345M for MNLI on one node of eight devices: data-parallel 8.
set -euo pipefail

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

DATA=${DATA:-glue_data/MNLI}
VOCAB_FILE=${VOCAB_FILE:-bert-vocab.txt}
PRETRAINED_CHECKPOINT=${PRETRAINED_CHECKPOINT:-checkpoints/bert_345m}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/bert_345m_mnli}

python tools/launch.py --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
  tasks/main.py \
  --task MNLI --epochs 5 \
  --train-data "$DATA/train.tsv" --valid-data "$DATA/dev_matched.tsv" "$DATA/dev_mismatched.tsv" \
  --pretrained-checkpoint "$PRETRAINED_CHECKPOINT" \
  --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
  --seq-length 512 --max-position-embeddings 512 \
  --micro-batch-size 8 \
  --lr 5e-5 --lr-decay-style linear --lr-warmup-fraction 0.065 --weight-decay 1e-1 --clip-grad 1.0 \
  --tokenizer-type BertWordPieceLowerCase --vocab-file "$VOCAB_FILE" \
  --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \
  --log-interval 10 \
  --bf16 "$@"
