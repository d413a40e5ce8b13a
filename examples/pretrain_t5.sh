#!/usr/bin/env bash
# T5 220M on one device.
set -euo pipefail

DATA_PATH=${DATA_PATH:-my-t5_text_sentence}
VOCAB_FILE=${VOCAB_FILE:-bert-vocab.txt}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/t5_220m}

python pretrain_t5.py \
  --num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64 --ffn-hidden-size 3072 \
  --encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512 --vocab-extra-ids 100 \
  --micro-batch-size 16 --global-batch-size 16 \
  --train-iters 1_000_000 --lr-decay-iters 990_000 \
  --lr 1e-4 --min-lr 1e-5 --lr-decay-style linear --lr-warmup-fraction .01 \
  --weight-decay 1e-2 --clip-grad 1.0 \
  --recompute-granularity full --recompute-method uniform \
  --data-path "$DATA_PATH" --split 949,50,1 \
  --tokenizer-type BertWordPieceLowerCase --vocab-file "$VOCAB_FILE" \
  --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 10_000 \
  --log-interval 100 --eval-interval 1000 --eval-iters 10 \
  --bf16 "$@"
