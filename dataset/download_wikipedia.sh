#!/usr/bin/env bash
# Texts of a Wikipedia into dataset/wikipedia.jsonl: download_wikipedia.sh [20231101.en, or another date.language]
# --help lists the flags, --dry-run only says what comes from where.
exec python "$(dirname "${BASH_SOURCE[0]}")/../tools/downloads/download.py" wikipedia "$@"
