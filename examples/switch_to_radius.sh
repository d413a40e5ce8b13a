#!/usr/bin/env bash
# From a dense checkpoint to Radius: GPT 345M goes on with stable Top-K sums of its gradients. On each node:
#   DENSE_PATH=checkpoints/gpt2_345m_distributed NODE_RANK=0 NNODES=2 MASTER_ADDR=first-node examples/switch_to_radius.sh
# The first call reads the dense checkpoint (weights, Adam's moments, schedule, position in the data); its first step is
# dense and chooses the coordinates. Later calls go on from their own checkpoints, residuals and choices included.
set -euo pipefail

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

DATA_PATH=${DATA_PATH:-my-gpt2_text_document}
VOCAB_FILE=${VOCAB_FILE:-gpt2-vocab.json}
MERGE_FILE=${MERGE_FILE:-gpt2-merges.txt}
DENSE_PATH=${DENSE_PATH:-checkpoints/gpt2_345m_distributed}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/gpt2_345m_radius}
DENSITY=${DENSITY:-0.3}
INTERVAL=${INTERVAL:-200}

LOAD_PATH=$DENSE_PATH
if [ -e "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" ]; then
  LOAD_PATH=$CHECKPOINT_PATH
fi

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
  --compress "dp-grad=stable-topk,density=$DENSITY,interval=$INTERVAL,flush=rotate" \
  --data-path "$DATA_PATH" --split 949,50,1 \
  --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE" \
  --load "$LOAD_PATH" --save "$CHECKPOINT_PATH" --save-interval 10_000 --exit-on-missing-checkpoint \
  --log-interval 100 --log-comm --eval-interval 1000 --eval-iters 10 \
  --bf16 "$@"
