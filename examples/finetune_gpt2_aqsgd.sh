#!/usr/bin/env bash
# Fine-tunes a Hugging Face GPT-2 over pipeline stages whose links are slow, as AQ-SGD does: activations are sent as
# quantized changes since the sample's last visit (4 bits), their gradients quantized (8 bits).
#
#   GPT2=gpt2 TEXT=train.txt VALID_TEXT=valid.txt examples/finetune_gpt2_aqsgd.sh
#
# GPT2: folder with config.json, weights, vocab.json and merges.txt. TEXT: plain text; without VALID_TEXT its last tenth
# is for validation. Prints the perplexity before and after; every epoch is a checkpoint, and the same command goes on
# from the newest, to more EPOCHS if they were raised. RAW=1 sends everything uncompressed, for comparison.
set -euo pipefail
: "${GPT2:?folder of a Hugging Face GPT-2}" "${TEXT:?text to train on}"
# Paths are those of the caller's folder, not of the repository's.
GPT2=$(realpath -m "$GPT2") TEXT=$(realpath -m "$TEXT") VALID_TEXT=${VALID_TEXT:+$(realpath -m "$VALID_TEXT")}
OUT=$(realpath -m "${OUT:-finetune_out}") # everything that is made
cd "$(dirname "$0")/.."

STAGES=${STAGES:-2}              # pipeline stages, each a process of this machine
REPLICAS=${REPLICAS:-1}          # data-parallel copies
EPOCHS=${EPOCHS:-3}
MICRO_BATCH=${MICRO_BATCH:-1}
BATCH=${BATCH:-8}
LR=${LR:-5e-5}
PYTHON=${PYTHON:-python}
read -r -a EXTRA <<< "${FLAGS:-}" # further flags of pretrain_gpt.py

mkdir -p "$OUT"
STAMP=$("$PYTHON" - "$TEXT" "$VALID_TEXT" "$OUT" <<'PY'
import hashlib, json, sys
from pathlib import Path

def read(name, path):
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"is not UTF-8 text (byte {error.start})"
        sys.exit(f"finetune_gpt2_aqsgd: error: {name}={path}: {reason}")

train, valid, out = read("TEXT", sys.argv[1]), sys.argv[2], Path(sys.argv[3])
if valid:
    held_out = read("VALID_TEXT", valid)
else:
    lines = train.splitlines(keepends=True)
    cut = len(lines) * 9 // 10
    train, held_out = "".join(lines[:cut]), "".join(lines[cut:])
for part, text in (("to train on", train), ("for validation", held_out)):
    if len(text.split()) < 2:
        sys.exit(f"finetune_gpt2_aqsgd: error: TEXT={sys.argv[1]}: leaves no text {part}; give more lines, or VALID_TEXT")
stamp = hashlib.sha256(json.dumps([train, held_out]).encode()).hexdigest()
done = out / "data.done"
if done.exists() and done.read_text().strip() != stamp:
    sys.exit(f"finetune_gpt2_aqsgd: error: OUT={out}: was made of other texts; name another OUT")
if not done.exists():
    for name, text in (("train", train), ("valid", held_out)):
        (out / f"{name}.txt").write_text(text, encoding="utf-8")
        (out / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
print(stamp)
PY
)
if [ ! -f "$OUT/gpt2/latest_checkpointed_iteration.txt" ]; then
  "$PYTHON" tools/ckpt_convert.py --load "$GPT2" --save "$OUT/gpt2" --to megatron-cc
fi
if [ ! -f "$OUT/data.done" ]; then
  for part in train valid; do
    "$PYTHON" tools/preprocess_data.py --input "$OUT/$part.jsonl" --output-prefix "$OUT/$part" --workers 1 --append-eod \
      --tokenizer-type GPT2BPETokenizer --vocab-file "$GPT2/vocab.json" --merge-file "$GPT2/merges.txt"
  done
  echo "$STAMP" > "$OUT/data.done"
fi
STEPS=$("$PYTHON" - "$OUT" "$EPOCHS" "$BATCH" <<'PY'
import sys
from megatron.data.indexed import IndexedDataset
from megatron.checkpoint.load import saved_config

config, _ = saved_config(f"{sys.argv[1]}/gpt2")
tokens = int(IndexedDataset(f"{sys.argv[1]}/train_text_document").lengths.sum())
samples = (tokens - 1) // config.model.max_position_embeddings
if samples < 1:
    sys.exit(f"finetune_gpt2_aqsgd: error: TEXT holds {tokens} tokens, not enough for one sample; give more text")
per_epoch = max(samples // int(sys.argv[3]), 1)
print(int(sys.argv[2]) * per_epoch, per_epoch)
PY
)
read -r ITERATIONS PER_EPOCH <<< "$STEPS"
evaluate() {
  "$PYTHON" tasks/main.py --task WIKITEXT103 --valid-data "$OUT/valid.txt" --overlapping-eval 0 --load "$1" | grep avg
}
COMPRESS=(--compress pp-forward=delta,bits=4 --compress pp-backward=fixpoint,bits=8)
RUN=$OUT/run
if [ "${RAW:-}" = 1 ]; then COMPRESS=() RUN=$OUT/run-raw; fi
# The first run starts from GPT-2's weights, a later one where the last was ended.
START=(--load "$OUT/gpt2" --finetune)
if [ -f "$RUN/latest_checkpointed_iteration.txt" ]; then START=(--load "$RUN"); fi

before=$(evaluate "$OUT/gpt2")
echo "before:$before"
"$PYTHON" tools/launch.py --standalone --nproc-per-node $((STAGES * REPLICAS)) pretrain_gpt.py \
  "${START[@]}" --use-checkpoint-args --save "$RUN" --save-interval "$PER_EPOCH" \
  --pipeline-model-parallel-size "$STAGES" --micro-batch-size "$MICRO_BATCH" --global-batch-size "$BATCH" \
  --train-data-path "$OUT/train_text_document" --valid-data-path "$OUT/valid_text_document" \
  --train-iters "$ITERATIONS" --eval-interval "$PER_EPOCH" --eval-iters 4 --log-interval 10 --log-comm \
  --lr "$LR" --lr-decay-style linear --lr-warmup-fraction 0.1 --override-opt_param-scheduler \
  --sample-order fixed \
  ${COMPRESS[@]+"${COMPRESS[@]}"} ${EXTRA[@]+"${EXTRA[@]}"}
after=$(evaluate "$RUN")
echo "after:$after"
