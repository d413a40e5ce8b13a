#!/usr/bin/env python3
"""Asks a text generation server, prompt by prompt.

    python tools/text_generation_cli.py localhost:5000
    python tools/text_generation_cli.py localhost:5000 --tokens-to-generate 100 --temperature 0.8 --top-p 0.9

Standard library only: it runs where the server's packages are not installed.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import sys
import urllib.error
import urllib.parse
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


class Refused(Exception):
    """The server says why it does not continue a prompt."""


def address(url: str) -> str:
    """The API's address; the scheme and the path may be left out.

    Raises:
        ValueError: when it is none.
    """
    whole = url if "://" in url else f"http://{url}"
    parts = urllib.parse.urlsplit(whole)
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c <= " " for c in whole):
        raise ValueError("is no address; give one such as localhost:5000")
    if parts.port is not None and parts.port < 1:
        raise ValueError("is no port; give one such as localhost:5000")
    return whole if whole.rstrip("/").endswith("/api") else f"{whole.rstrip('/')}/api"


def ask(url: str, request: dict[str, Any], timeout: float) -> str:
    """The text.

    Raises:
        Refused: when the server gives none.
        OSError: when there is no server.
        ValueError: when what is there is no such server.
    """
    data = json.dumps(request).encode()
    put = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="PUT")
    try:
        try:
            with urllib.request.urlopen(put, timeout=timeout) as reply:
                found = json.load(reply)["text"][0]
        except urllib.error.HTTPError as error:
            raise Refused(f"error {error.code}: {_reason(error)}") from error
    except (http.client.HTTPException, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"what answers there is no text generation server ({type(error).__name__})") from error
    if not isinstance(found, str):
        raise ValueError("what answers there is no text generation server (it sends no text)")
    return found


def _reason(error: urllib.error.HTTPError) -> str:
    """What the server says of an error, or what HTTP does."""
    try:
        return str(json.load(error)["message"])
    except (OSError, http.client.HTTPException, LookupError, TypeError, ValueError, RecursionError):
        return str(error.reason)


def asked(options: argparse.Namespace) -> dict[str, Any] | None:
    """The next request that the user types; None at the end.

    Raises:
        Refused: for what makes none.
    """
    try:
        prompt = input("Enter prompt (an empty line ends): ").removeprefix("\ufeff")
        if not prompt:
            return None
        # Bytes that are no UTF-8 arrive as halves of characters.
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise Refused("that is no UTF-8 text")
        count = options.tokens_to_generate or int(input("Enter number of tokens to generate: "))
    except EOFError:
        return None
    except ValueError as error:
        raise Refused("that is no number") from error
    request = {"prompts": [prompt], "tokens_to_generate": count, "temperature": options.temperature}
    return request | {name: value for name in ("top_k", "top_p") if (value := getattr(options, name))}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 when every prompt was continued, 1 when one was refused, 2 when there is no server."""
    made = parser()
    options = made.parse_args(arguments)
    if not options.timeout > 0:
        made.error(f"--timeout {options.timeout:g}: give seconds, more than 0")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a bad line must not end the session
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # nor what a terminal cannot show
    status = 0
    try:
        url = address(options.url)
        while True:
            try:
                request = asked(options)
                if request is None:
                    return status
                text = ask(url, request, options.timeout)
            except Refused as error:
                print(error, file=sys.stderr)
                status = 1
                continue
            except OSError as error:
                reason = getattr(error, "reason", error)
                print(f"error: {options.url}: {reason}; is the server running?", file=sys.stderr)
                return 2
            print(f"Megatron Response:\n{text}\n", flush=True)
    except ValueError as error:
        print(f"error: {options.url}: {error}", file=sys.stderr)
    except BrokenPipeError:
        # The reader has seen enough (| head); what is left in the buffer must not fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
