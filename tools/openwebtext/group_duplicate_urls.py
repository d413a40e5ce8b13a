#!/usr/bin/env python
"""The same as group_duplicate_url.py, under its name in Megatron's instructions.

python tools/openwebtext/group_duplicate_urls.py duplicates.jsonl groups.jsonl 0.7
"""

from _clone import start_program

if __name__ == "__main__":
    start_program("tools.openwebtext.group_duplicate_url")
