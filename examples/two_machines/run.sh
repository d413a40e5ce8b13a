#!/usr/bin/env bash
# Trains one small GPT on two machines, each an island of its own: a slow link between them is enough. README.md beside
# this file says what to expect.
#
#   examples/two_machines/run.sh first 10.0.0.1      on the machine whose address that is
#   examples/two_machines/run.sh second 10.0.0.1     on the other one
#
# Further words are flags of pretrain_gpt.py, which must be the same on both. The same command goes on from the newest
# checkpoint, or joins the other machine, if that is still training.
set -euo pipefail
usage="usage: $0 first|second ADDRESS-OF-THE-FIRST [flags of pretrain_gpt.py]"
who=${1:?$usage} address=${2:?$usage}
shift 2
CORPUS=${CORPUS:+$(realpath -m "$CORPUS")}     # folder of train.jsonl and heldout.jsonl; Python's own sources if unset
OUT=$(realpath -m "${OUT:-two_machines_out}") # everything that is made
cd "$(dirname "$0")/../.."

PORT=${PORT:-29600}           # of the first machine; the islands' own connections take any port of either
PYTHON=${PYTHON:-python}      # the same version of Python and of torch on both
PROCESSES=${PROCESSES:-2}     # of each machine: pipeline stages
BACKEND=${BACKEND:-gloo}      # nccl computes on GPUs, one for each of the PROCESSES; the same on both
ITERS=${ITERS:-500}
VOCAB_SIZE=${VOCAB_SIZE:-4096}

case $who in
  first) place=(--island 0 --serve-islands "$address:$PORT") ;;
  second) place=(--island 1 --islands-address "$address:$PORT") ;;
  *) echo "$usage" >&2; exit 2 ;;
esac

# Without the second, torch warns of machines at home that have no name.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
tokenizer=(--tokenizer-type GPT2BPETokenizer --vocab-file "$OUT/vocabulary/vocab.json"
  --merge-file "$OUT/vocabulary/merges.txt")
if [ ! -e "$OUT/data/done" ]; then
  echo "preparing data in $OUT (only once)"
  mkdir -p "$OUT/data"
  if [ -z "$CORPUS" ]; then
    CORPUS=$OUT/corpus
    "$PYTHON" tools/quickstart/make_corpus.py --output-dir "$CORPUS"
  fi
  "$PYTHON" tools/train_vocab.py --input "$CORPUS/train.jsonl" --vocab-size "$VOCAB_SIZE" \
    --output-dir "$OUT/vocabulary" >> "$OUT/data/log"
  for part in train heldout; do
    "$PYTHON" tools/preprocess_data.py --input "$CORPUS/$part.jsonl" --output-prefix "$OUT/data/$part" \
      "${tokenizer[@]}" --append-eod >> "$OUT/data/log"
  done
  touch "$OUT/data/done"
fi

# A tenth of the run in step, where each iteration sends all gradients; then a round every 30 iterations, at 4 bits.
exec "$PYTHON" tools/launch.py --standalone --nproc-per-node "$PROCESSES" --islands 2 "${place[@]}" pretrain_gpt.py \
  --islands-quorum 1 \
  --compress "${OUTER:-outer=fixpoint,bits=4,every=30,warmup=0.1}" \
  --pipeline-model-parallel-size "$PROCESSES" --distributed-backend "$BACKEND" \
  --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 \
  --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 \
  --micro-batch-size 2 --global-batch-size 8 --train-iters "$ITERS" \
  --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.08 --weight-decay 0.1 --adam-beta2 0.95 \
  --train-data-path "$OUT/data/train_text_document" --valid-data-path "$OUT/data/heldout_text_document" \
  "${tokenizer[@]}" --num-workers 0 \
  --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval 100 \
  --log-interval 10 --eval-interval 100 --eval-iters 10 --log-json-file "$OUT/log.jsonl" "$@"
