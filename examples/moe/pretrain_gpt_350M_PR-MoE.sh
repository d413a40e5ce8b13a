#!/usr/bin/env bash
# GPT 350M with a pyramid of experts and an MLP beside them (PR-MoE): 32 experts in ten layers, 64 in the last two.
# Eight nodes of eight devices; neighboring replicas share the experts.
set -euo pipefail

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

DATA_PATH=${DATA_PATH:-my-gpt2_text_document}
VOCAB_FILE=${VOCAB_FILE:-gpt2-vocab.json}
MERGE_FILE=${MERGE_FILE:-gpt2-merges.txt}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/gpt2_350m_pr_moe}

python tools/launch.py --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
  pretrain_gpt.py \
  --moe-expert-parallel-size 32 --use-distributed-optimizer \
  --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
  --seq-length 2048 --max-position-embeddings 2048 \
  --num-experts 32 32 32 32 32 32 32 32 32 32 64 64 --expert-interval 2 --topk 1 --mlp-type residual \
  --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 --moe-eval-capacity-factor 1.0 --moe-min-capacity 4 \
  --micro-batch-size 4 --global-batch-size 256 \
  --train-tokens 300_000_000_000 --lr-decay-tokens 300_000_000_000 --lr-warmup-tokens 375_000_000 \
  --lr 3e-4 --min-lr 1e-6 --lr-decay-style cosine \
  --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --init-method-std 0.014 \
  --attention-dropout 0 --hidden-dropout 0 \
  --data-path "$DATA_PATH" --split 98,2,0 \
  --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE" \
  --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 10_000 \
  --log-interval 10 --eval-interval 100 --eval-iters 10 \
  --bf16 "$@"
