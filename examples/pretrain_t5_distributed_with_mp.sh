#!/usr/bin/env bash
# T5 220M on one node of eight devices: tensor-parallel 2, a pipeline stage for the encoder and one for
# the decoder, data-parallel 2.
set -euo pipefail

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

DATA_PATH=${DATA_PATH:-my-t5_text_sentence}
VOCAB_FILE=${VOCAB_FILE:-bert-vocab.txt}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/t5_220m_mp}

python tools/launch.py --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
  pretrain_t5.py \
  --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \
  --pipeline-model-parallel-size 2 --pipeline-model-parallel-split-rank 1 \
  --num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64 --ffn-hidden-size 3072 \
  --encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512 --vocab-extra-ids 100 \
  --micro-batch-size 8 --global-batch-size 128 \
  --train-iters 1_000_000 --lr-decay-iters 990_000 \
  --lr 1e-4 --min-lr 1e-5 --lr-decay-style linear --lr-warmup-fraction .01 \
  --weight-decay 1e-2 --clip-grad 1.0 \
  --recompute-granularity selective \
  --data-path "$DATA_PATH" --split 949,50,1 \
  --tokenizer-type BertWordPieceLowerCase --vocab-file "$VOCAB_FILE" \
  --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 10_000 \
  --log-interval 100 --eval-interval 1000 --eval-iters 10 \
  --bf16 "$@"
