#!/usr/bin/env bash
# GPT-2's vocabulary and merges, or BERT's vocabularies (bert), into dataset/: download_vocab.sh [gpt2|bert]
# --help lists the flags, --dry-run only says what comes from where.
exec python "$(dirname "${BASH_SOURCE[0]}")/../tools/downloads/download.py" vocab "$@"
