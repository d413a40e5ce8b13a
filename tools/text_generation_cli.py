#!/usr/bin/env python3
"""Send prompts to a text generation server, one by one.

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


class Refused(Exception):
    """A prompt is not continued; the message says why."""


def api_address(url: str) -> str:
    """Complete an address: the scheme and the path of the API may be left out.

    Raises:
        ValueError: for an invalid address.
    """
    whole = url if "://" in url else f"http://{url}"
    parts = urllib.parse.urlsplit(whole)
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c <= " " for c in whole):
        raise ValueError("is not an address; give one such as localhost:5000")
    if parts.port is not None and parts.port < 1:
        raise ValueError("the port must be at least 1; give an address such as localhost:5000")
    return whole if whole.rstrip("/").endswith("/api") else f"{whole.rstrip('/')}/api"


def request_text(url: str, request: dict[str, Any], timeout: float) -> str:
    """Send a request; return the generated text.

    Raises:
        Refused: if the server refuses the request.
        OSError: if no server answers.
        ValueError: if the answer is not that of a text generation server.
    """
    data = json.dumps(request).encode()
    put = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="PUT")
    try:
        try:
            with urllib.request.urlopen(put, timeout=timeout) as reply:
                text = json.load(reply)["text"][0]
        except urllib.error.HTTPError as error:
            raise Refused(f"error {error.code}: {_reason(error)}") from error
    except (http.client.HTTPException, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"this is not a text generation server ({type(error).__name__})") from error
    if not isinstance(text, str):
        raise ValueError("this is not a text generation server (it sends no text)")
    return text


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the server's message about an error, or that of HTTP."""
    try:
        return str(json.load(error)["message"])
    except (OSError, http.client.HTTPException, LookupError, TypeError, ValueError, RecursionError):
        return str(error.reason)


def read_request(options: argparse.Namespace) -> dict[str, Any] | None:
    """Read the user's next request; None at the end.

    Raises:
        Refused: for invalid input.
    """
    try:
        prompt = input("Enter prompt (an empty line ends): ").removeprefix("\ufeff")
        if not prompt:
            return None
        # surrogateescape turns bytes that are not UTF-8 into surrogates.
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise Refused("the prompt is not UTF-8 text")
        count = options.tokens_to_generate or int(input("Enter number of tokens to generate: "))
    except EOFError:
        return None
    except ValueError as error:
        raise Refused("the number of tokens is not a whole number") from error
    request = {"prompts": [prompt], "tokens_to_generate": count, "temperature": options.temperature}
    return request | {name: value for name in ("top_k", "top_p") if (value := getattr(options, name))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: 0 if every prompt was continued, 1 if one was refused, 2 if there is no server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of the server, such as localhost:5000")
    parser.add_argument("--tokens-to-generate", type=int, metavar="N", help="new tokens (default: ask at each prompt)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="1.0; 0 takes the likeliest token")
    parser.add_argument("--top-k", "--top_k", type=int, default=0, metavar="N", help="sample from the N likeliest")
    parser.add_argument("--top-p", "--top_p", type=float, default=0.0, metavar="X", help="their total probability")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="wait for an answer (600)")
    options = parser.parse_args(arguments)
    if not options.timeout > 0:
        parser.error(f"--timeout {options.timeout:g}: must be more than 0")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a bad line must not end the session
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # nor what a terminal cannot show
    status = 0
    try:
        url = api_address(options.url)
        while True:
            try:
                request = read_request(options)
                if request is None:
                    return status
                text = request_text(url, request, options.timeout)
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
        # The reader has closed the pipe (| head); flushing the buffer at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
