#!/usr/bin/env bash
# OpenWebText into dataset/openwebtext.jsonl: download_openwebtext.sh
# --help lists the flags, --dry-run only says what comes from where.
exec python "$(dirname "${BASH_SOURCE[0]}")/../tools/downloads/download.py" openwebtext "$@"
