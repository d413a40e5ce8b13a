"""Serves a trained model over HTTP, on one process or, under tools/launch.py, on several."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.base.errors import UserError
from megatron.base.option import option
from megatron.distributed.agreement import run_together
from megatron.inference.flags import ModelFlags, check_layout, open_model, parse_flags
from megatron.inference.jobs import follow
from megatron.inference.model import LoadedModel
from megatron.inference.server.requests import RequestLimits
from megatron.inference.server.worker import Worker
from megatron.training.program import Ranks, run_program

if TYPE_CHECKING:  # installed by the server extra
    from megatron.inference.server.hosts import AllowedHosts

DESCRIPTION = """Serves a trained model over HTTP, on one process or, under tools/launch.py, on several.

    pip install -e '.[server]'
    python tools/run_text_generation_server.py --load DIR                       then open http://127.0.0.1:5000
    python tools/launch.py --nproc-per-node 2 tools/run_text_generation_server.py --tensor-model-parallel-size 2 \\
        --load DIR

    curl -X PUT localhost:5000/api -H 'Content-Type: application/json' \\
        -d '{"prompts": ["Once upon a time"], "tokens_to_generate": 32}'
    curl localhost:5000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "Once upon a time", "max_tokens": 32, "stream": true}'
    python tools/text_generation_cli.py localhost:5000

PUT /api is Megatron's API, POST /v1/completions and /v1/chat/completions are OpenAI's; GET /health reports the state of
the server, and GET / is a form.
Requests run one at a time; their size and the number of waiting requests are limited. There is no encryption and no
password: anyone who reaches the port can use the model, so by default (--host) only this machine can. The Host header
of a request must name the server: by a loopback name, by a name of --allowed-host, or, if other machines can reach the
server, by an address or this machine's name."""


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Address of the server, and limits of requests. Each request has its own sampling options."""

    host: str = option(
        "127.0.0.1", "Address to listen on; 0.0.0.0 is every address of this machine.", metavar="ADDRESS"
    )
    port: int = option(5000, "Port to listen on; 0 chooses a free port and prints it.", minimum=0, maximum=65535)
    allowed_host: list[str] = option(  # noqa: RUF009
        [],
        "Additional host name that requests may use for the server; repeatable, * for any.",
        metavar="NAME",
        repeatable=True,
    )
    max_connections: int = option(
        512,
        "Maximum number of open connections; others are told to try again later.",
        unit="connections",
        minimum=1,
        maximum=65536,
    )
    max_queue: int = option(
        32, "Maximum number of waiting requests; others are told to try again later.", unit="requests", minimum=1
    )
    max_tokens_to_oom: int = option(
        12000, "Maximum size of a request: prompts x (tokens of the longest + new tokens).", unit="tokens", minimum=1
    )
    max_request_bytes: int = option(1 << 20, "Maximum length of a request.", unit="bytes", minimum=1)


def listen(flags: ServerFlags) -> socket.socket:
    """Open a listening socket.

    Raises:
        UserError: when the address cannot be bound.
    """
    from megatron.inference.server.listening import BACKLOG

    try:
        family = socket.AF_INET6 if ":" in flags.host else socket.AF_INET
        return socket.create_server((flags.host, flags.port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--host {flags.host} --port {flags.port}: {reason}; choose others") from error


def serve(
    model: LoadedModel, flags: ServerFlags, patience_s: float, listening: socket.socket, hosts: AllowedHosts
) -> None:
    """Serve requests until SIGINT or SIGTERM.

    Raises:
        CommunicationError: when another rank is gone.
    """
    from megatron.inference.server.app import Server
    from megatron.inference.server.listening import HTTPServer, configuration
    from megatron.tokenizer.chat import open_chat_template

    def request_exit() -> None:
        server.should_exit = True

    worker = Worker(model, flags.max_queue, patience_s, request_exit)
    limits = RequestLimits(model.window, flags.max_tokens_to_oom)
    name = f"megatron-cc-{model.iteration}"
    template = open_chat_template(model.tokenizer_flags)
    app = Server(worker, limits, flags.max_request_bytes, name, hosts, template).app()
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    config = configuration(app, flags.max_connections)
    server = HTTPServer(config, worker, lambda: print(f"serving {name} at {url}", flush=True))
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn handles both signals while it runs, and raises them again after the server has stopped.
        signal.signal(number, lambda *_: request_exit())
    worker.start()
    server.run(sockets=[listening])
    worker.stop()
    if worker.error is not None:
        raise worker.error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 after a signal, or 2 after printing a one-line error for invalid input."""

    def body(ranks: Ranks) -> None:
        arguments = sys.argv[1:] if argv is None else argv
        parsed = parse_flags(arguments, {"server": ServerFlags}, "run_text_generation_server.py", DESCRIPTION)
        model_flags: ModelFlags = parsed.sections["model"]
        flags: ServerFlags = parsed.sections["server"]
        try:
            import jinja2  # noqa: F401
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise UserError(f"{error.name} is missing: pip install -e '.[server]'") from error
        from megatron.inference.server.hosts import AllowedHosts

        hosts = AllowedHosts(flags.host, flags.allowed_host)  # rejects invalid names before the process group exists
        layout = check_layout(model_flags, ranks.env, replicas=False)
        ranks.join(model_flags.backend, model_flags.distributed_timeout_minutes, parsed.sections, parsed.notes)
        model = open_model(model_flags, parsed.sections["tokenizer"], layout, ranks.env)
        listening = run_together(model.topology.control.pg, lambda: listen(flags) if model.is_sampling_rank else None)
        if listening is None:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # the sampling rank stops this rank
            follow(model)
        else:
            serve(model, flags, 60 * model_flags.distributed_timeout_minutes, listening, hosts)

    return run_program(body)
