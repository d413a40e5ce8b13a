#!/usr/bin/env bash
# Texts of a Wikipedia into dataset/wikipedia.jsonl: download_wikipedia.sh
# Those of another date and language into dataset/wikipedia-20231101.de.jsonl: download_wikipedia.sh 20231101.de
# --help lists the flags, --dry-run only says what comes from where.
exec python "$(dirname "${BASH_SOURCE[0]}")/../tools/downloads/download.py" wikipedia "$@"
