#!/usr/bin/env bash
# Trains a small GPT on four processes of this machine (tensor parallel 2 x pipeline parallel 2), on text that is
# already there, and shows what came of it. No GPU is needed. A second call resumes.
#
#   examples/quickstart.sh [--train-iters N] [--out FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
exec make quickstart ARGS="$*"
