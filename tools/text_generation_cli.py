#!/usr/bin/env python3
"""Asks a text generation server, prompt by prompt.

    python tools/text_generation_cli.py localhost:5000
    python tools/text_generation_cli.py localhost:5000 --tokens-to-generate 100 --temperature 0.8 --top-p 0.9

Standard library only: it runs where the server's packages are not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("url", help="of the server, such as localhost:5000")
    made.add_argument("--tokens-to-generate", type=int, metavar="N", help="new tokens (asked for each prompt)")
    made.add_argument("--temperature", type=float, default=1.0, metavar="X", help="1.0; 0 takes the likeliest token")
    made.add_argument("--top-k", "--top_k", type=int, default=0, metavar="N", help="likeliest tokens to choose among")
    made.add_argument("--top-p", "--top_p", type=float, default=0.0, metavar="X", help="their total probability")
    made.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for an answer (600)")
    return made


def address(url: str) -> str:
    """The API's address; the scheme and the path may be left out."""
    whole = url if "://" in url else f"http://{url}"
    return whole if whole.rstrip("/").endswith("/api") else f"{whole.rstrip('/')}/api"


def ask(url: str, request: dict[str, Any], timeout: float) -> str:
    """The text, or a line that says why there is none."""
    data = json.dumps(request).encode()
    put = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="PUT")
    try:
        with urllib.request.urlopen(put, timeout=timeout) as reply:
            return str(json.load(reply)["text"][0])
    except urllib.error.HTTPError as error:
        try:
            reason = json.load(error)["message"]
        except (ValueError, KeyError, TypeError):
            reason = error.reason
        return f"error {error.code}: {reason}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    while True:
        try:
            prompt = input("Enter prompt (an empty line ends): ")
            if not prompt:
                return 0
            count = options.tokens_to_generate or int(input("Enter number of tokens to generate: "))
        except EOFError:
            return 0
        except ValueError:
            print("that is no number")
            continue
        request = {"prompts": [prompt], "tokens_to_generate": count, "temperature": options.temperature}
        request |= {name: value for name in ("top_k", "top_p") if (value := getattr(options, name))}
        try:
            print(f"Megatron Response:\n{ask(address(options.url), request, options.timeout)}\n", flush=True)
        except (OSError, ValueError) as error:
            print(f"error: {options.url}: {getattr(error, 'reason', error)}; is the server running?", file=sys.stderr)
            return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
