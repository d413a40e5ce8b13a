#!/usr/bin/env bash
# The 10 MB of OSCAR that the JUPITER benchmark trains on into dataset/oscar-10MB.jsonl: download_oscar.sh
# --help lists the flags, --dry-run only says what comes from where.
exec python "$(dirname "${BASH_SOURCE[0]}")/../tools/downloads/download.py" oscar "$@"
