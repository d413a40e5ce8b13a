#!/usr/bin/env bash
# A public checkpoint into checkpoints/NAME: download_ckpt.sh [gpt2_345m|gpt2|gpt2-medium|gpt2-large|gpt2-xl]
# --help lists the flags, --dry-run only says what comes from where.
exec python "$(dirname "${BASH_SOURCE[0]}")/../tools/downloads/download.py" ckpt "$@"
