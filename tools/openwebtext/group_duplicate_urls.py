#!/usr/bin/env python
"""The same as group_duplicate_url.py, under the name by which Megatron's instructions call it.

python tools/openwebtext/group_duplicate_urls.py duplicates.jsonl groups.jsonl 0.7
"""

from _clone import start_program

if __name__ == "__main__":
    start_program("tools.openwebtext.group_duplicate_url")
