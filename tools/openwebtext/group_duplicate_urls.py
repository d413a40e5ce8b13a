#!/usr/bin/env python
"""The same as group_duplicate_url.py, under the name by which Megatron's instructions call it.

python tools/openwebtext/group_duplicate_urls.py duplicates.jsonl groups.jsonl 0.7
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.openwebtext.group_duplicate_url import main

if __name__ == "__main__":
    raise SystemExit(main())
