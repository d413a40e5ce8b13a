#!/usr/bin/env bash
#SBATCH --nodes=128
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --job-name=gpt3-175b
# GPT-3 175B on 1024 GPUs: tensor-parallel 8, pipeline 16, data-parallel 8.
set -euo pipefail

GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-128}
MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "${SLURM_JOB_NODELIST:-localhost}" | head -n 1)}
MASTER_PORT=${MASTER_PORT:-6000}

# weight, prefix, weight, prefix, ...
DATA_BLEND=${DATA_BLEND:-"0.5 web_text_document 0.3 books_text_document 0.2 wiki_text_document"}
VOCAB_FILE=${VOCAB_FILE:-gpt2-vocab.json}
MERGE_FILE=${MERGE_FILE:-gpt2-merges.txt}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints/gpt3_175b}

# shellcheck disable=SC2086  # the blend is several words
srun python tools/launch.py --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" \
  --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "${SLURM_JOB_ID:-0}" \
  pretrain_gpt.py \
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --sequence-parallel \
  --num-layers 96 --hidden-size 12288 --num-attention-heads 96 \
  --seq-length 2048 --max-position-embeddings 2048 \
  --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 \
  --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105 \
  --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine \
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.006 \
  --recompute-granularity full --recompute-method uniform \
  --use-distributed-optimizer --overlap-grad-reduce \
  --data-path $DATA_BLEND --split 98,2,0 \
  --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE" \
  --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 1000 --async-save \
  --exit-duration-in-mins 230 --exit-signal-handler \
  --log-interval 10 --eval-interval 1000 --eval-iters 40 --tensorboard-dir "$CHECKPOINT_PATH/tensorboard" \
  --bf16 "$@"
