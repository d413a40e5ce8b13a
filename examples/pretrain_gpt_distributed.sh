#!/usr/bin/env bash
# GPT 345M, data-parallel over the devices of one or more nodes. On each node:
#   NODE_RANK=0 NNODES=2 MASTER_ADDR=first-node examples/pretrain_gpt_distributed.sh
set -euo pipefail

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

DATA_PATH=${DATA_PATH:-my-gpt2_text_document}
VOCAB_FILE=${VOCAB_FILE:-gpt2-vocab.json}
MERGE_FILE=${MERGE_FILE:-gpt2-merges.txt}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/gpt2_345m_distributed}

python tools/launch.py --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
  pretrain_gpt.py \
  --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
  --seq-length 1024 --max-position-embeddings 1024 \
  --micro-batch-size 8 --global-batch-size 64 \
  --train-iters 500_000 --lr-decay-iters 320_000 \
  --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-fraction .01 \
  --weight-decay 1e-2 --clip-grad 1.0 \
  --overlap-grad-reduce \
  --data-path "$DATA_PATH" --split 949,50,1 \
  --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE" \
  --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 10_000 \
  --log-interval 100 --eval-interval 1000 --eval-iters 10 \
  --bf16 "$@"
