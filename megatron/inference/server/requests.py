"""Parsing and validation of requests of Megatron's API and OpenAI's completions; both become an ``InferenceJob``."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.base.errors import UserError
from megatron.base.parse_numbers import MAX_INTEGER
from megatron.base.user_text import nearest
from megatron.base.values import Values
from megatron.inference.jobs import InferenceJob
from megatron.inference.sampling import Sampling
from megatron.tokenizer.api import Tokenizer, start_token

MAX_PROMPTS = 128
MAX_TOP = 20
MAX_TOP_K = 1000
MAX_BIASES = 300
MAX_STOP, MAX_STOP_LENGTH = 8, 100


class RequestError(UserError):
    """Raised when a request is invalid or too large; the message names the fix.

    Args:
        message: message to the client.
        status: HTTP status.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class RequestLimits:
    """Limits per request.

    Args:
        window: number of positions of the model.
        tokens: maximum number of tokens of all prompts of a request and their continuations.
    """

    window: int
    tokens: int


class Fields(Values):
    """Fields of a JSON request.

    Args:
        values: the request.
        subject: name of the request in messages.

    Raises:
        UserError: by every method, when a value has the wrong type.
    """

    def __init__(self, values: object, subject: str = "the request") -> None:
        if not isinstance(values, dict):
            raise RequestError(f"{subject} must be a JSON object")
        super().__init__(values)

    def nested(self, name: str) -> Fields:
        """Fields of an object; empty if the field is missing."""
        return Fields(self[name] if self.has(name) else {}, name)

    def bounded_texts(self, name: str, most: int, longest: int) -> list[str]:
        """Value of a string or list of strings, as a list; empty if the field is missing."""
        value = self.get(name)
        listed = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(text, str) and len(text) <= longest for text in listed):
            raise RequestError(f"{name} must be a text or a list of texts of at most {longest} characters")
        if len(listed) > most:
            raise RequestError(f"{name} holds {len(listed)} texts, at most {most} are allowed")
        return listed

    def reject_unsupported(self, name: str, *neutral: object) -> None:
        """Reject an unsupported field, unless its value is neutral."""
        if self.has(name) and self[name] not in neutral:
            raise RequestError(f"{name} is not supported; leave it out")

    def reject_unknown(self, names: Sequence[str]) -> None:
        """Reject unknown fields; a misspelled field would silently have no effect."""
        unknown = sorted(set(self) - set(names))
        if unknown:
            hint = nearest(unknown[0], names)
            raise RequestError(f"unknown field {unknown[0]}{hint}; the fields are {', '.join(sorted(names))}")


def _seeds(fields: Fields, name: str, count: int) -> list[int]:
    if not fields.has(name):
        return [random.getrandbits(62) for _ in range(count)]
    first = fields.integer(name, minimum=-MAX_INTEGER, maximum=MAX_INTEGER)
    return [first + i for i in range(count)]


def _temperature(fields: Fields) -> float:
    return fields.number("temperature", 1.0, minimum=0, maximum=100)


def _longest(prompts: Sequence[Sequence[int]]) -> int:
    """Number of positions of the longest prompt; an empty prompt starts from a single token."""
    return max((len(prompt) or 1 for prompt in prompts), default=1)


def default_new_tokens(usual: int, prompts: Sequence[Sequence[int]], limits: RequestLimits) -> int:
    """Default number of new tokens: ``usual``, limited by the window."""
    return max(1, min(usual, limits.window - _longest(prompts)))


def _check_size(prompts: Sequence[Sequence[int]], new: int, limits: RequestLimits) -> None:
    if not prompts:
        raise RequestError("there is no prompt")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"there are {len(prompts)} prompts, at most {MAX_PROMPTS} are allowed")
    longest = _longest(prompts)
    if longest + new > limits.window:
        raise RequestError(
            f"the longest prompt has {longest} tokens, with {new} more requested; the model's window is {limits.window}"
        )
    total = len(prompts) * (longest + new)
    if total > limits.tokens:
        raise RequestError(
            f"{len(prompts)} prompts of up to {longest} tokens and {new} more for each are {total} tokens; "
            f"the limit is {limits.tokens}"
        )


MEGATRON_FIELDS = [
    "prompts",
    "tokens_to_generate",
    "logprobs",
    "temperature",
    "top_k",
    "top_p",
    "top_p_decay",
    "top_p_bound",
    "add_BOS",
    "stop_on_double_eol",
    "stop_on_eol",
    "prevent_newline_after_colon",
    "random_seed",
    "no_log",
    "beam_width",
    "length_penalty",
]


def megatron_job(body: object, tokenizer: Tokenizer, limits: RequestLimits) -> InferenceJob:
    """Parse a request of ``PUT /api``.

    Raises:
        UserError: when the request is invalid.
    """
    fields = Fields(body)
    fields.reject_unknown(MEGATRON_FIELDS)
    fields.reject_unsupported("beam_width", 0)
    fields.reject_unsupported("prevent_newline_after_colon", False)
    fields.listed("prompts")  # a bare text is not allowed
    texts = fields.bounded_texts("prompts", MAX_PROMPTS, 1 << 20)
    prompts = tokenizer.tokenize_batch(texts)
    if fields.flag("add_BOS", False):
        prompts = [[start_token(tokenizer), *prompt] for prompt in prompts]
    new = fields.integer(
        "tokens_to_generate", default_new_tokens(64, prompts, limits), minimum=0, maximum=limits.window
    )
    logprobs = fields.flag("logprobs", False)
    if not new and not logprobs:
        raise RequestError("tokens_to_generate 0 only makes sense with logprobs: true")
    stop = ["\n\n"] if fields.flag("stop_on_double_eol", False) else ["\n"] if fields.flag("stop_on_eol", False) else []
    greedy = fields.get("temperature") == 0 or fields.get("top_k") == 1
    temperature = 1.0 if greedy else _temperature(fields)
    top_p = fields.number("top_p", 0.0, minimum=0, maximum=1)
    top_k = 0 if greedy else fields.integer("top_k", 0, minimum=0, maximum=MAX_TOP_K)
    decay, bound = (fields.number(name, 0.0, minimum=0, maximum=1) for name in ("top_p_decay", "top_p_bound"))
    try:
        sampling = Sampling(temperature, top_k, top_p, greedy, decay, bound)
    except UserError as error:
        raise RequestError(str(error).replace("--", "")) from error
    _check_size(prompts, new, limits)
    seeds = _seeds(fields, "random_seed", len(prompts))
    return InferenceJob(prompts, new, sampling, seeds, 0 if logprobs else None, logprobs, stop)


COMPLETION_FIELDS = [
    "prompt",
    "max_tokens",
    "logprobs",
    "echo",
    "best_of",
    "suffix",
]
"""Fields of completion requests only."""

SHARED_FIELDS = [
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "n",
    "stop",
    "stop_token_ids",
    "seed",
    "stream",
    "stream_options",
    "user",
]
"""Fields of both completion and chat requests: OpenAI's, and common extensions of other servers."""


@dataclass(frozen=True)
class Completion:
    """A request of ``POST /v1/completions`` or ``/v1/chat/completions``, and the form of its response.

    Args:
        job: job that computes it.
        n: number of continuations of each prompt; they are adjacent in the job.
        stream: whether to stream tokens.
        echo: whether to begin with the prompt.
        usage: whether to end a stream with the number of tokens.
    """

    job: InferenceJob
    n: int
    stream: bool
    echo: bool
    usage: bool


def completion_job(body: object, tokenizer: Tokenizer, limits: RequestLimits) -> Completion:
    """Parse a request of ``POST /v1/completions``.

    Raises:
        UserError: when the request is invalid.
    """
    fields = Fields(body)
    fields.reject_unknown([*COMPLETION_FIELDS, *SHARED_FIELDS])
    fields.reject_unsupported("best_of", 1)
    fields.reject_unsupported("suffix", "")
    prompt = fields.get("prompt", "")
    if not isinstance(prompt, (str, list)):
        raise RequestError("prompt must be a text, a list of texts, tokens, or a list of tokens")
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        prompt = [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(tokens, list) for tokens in prompt):
        for tokens in prompt:
            _check_tokens("prompt", tokens, tokenizer)
        prompts = prompt
    elif not prompt:
        prompts = [[]]
    else:
        prompts = tokenizer.tokenize_batch(fields.bounded_texts("prompt", MAX_PROMPTS, 1 << 20))
    top = fields.integer("logprobs", minimum=0, maximum=MAX_TOP) if fields.has("logprobs") else None
    echo = fields.flag("echo", False)
    new = fields.integer("max_tokens", default_new_tokens(16, prompts, limits), minimum=0, maximum=limits.window)
    if not new and not echo:
        raise RequestError("max_tokens 0 only makes sense with echo: true")
    completion = openai_completion(fields, tokenizer, limits, prompts, new, top=top, echo=echo)
    if completion.stream and echo and top is not None:
        raise RequestError("stream with both echo and logprobs is not supported; leave one of them out")
    return completion


def openai_completion(
    fields: Fields,
    tokenizer: Tokenizer,
    limits: RequestLimits,
    prompts: Sequence[list[int]],
    new: int,
    *,
    top: int | None,
    echo: bool,
) -> Completion:
    """Parse the fields that completion and chat requests share.

    Args:
        fields: the request.
        tokenizer: tokenizer of the model.
        limits: limits per request.
        prompts: token ids of the prompts.
        new: maximum number of new tokens for each prompt.
        top: number of alternatives to report with each token; None: no log-probabilities are requested.
        echo: whether to begin with the prompt.

    Raises:
        UserError: when the request is invalid.
    """
    n = fields.integer("n", 1, maximum=MAX_PROMPTS)
    if len(prompts) * n > MAX_PROMPTS:
        raise RequestError(f"there are {len(prompts)} prompts and n is {n}; at most {MAX_PROMPTS} texts are allowed")
    rows = [prompt for prompt in prompts for _ in range(n)]
    temperature, top_p = _temperature(fields), fields.number("top_p", 1.0, minimum=0, maximum=1)
    top_k = max(fields.integer("top_k", 0, minimum=-1, maximum=MAX_TOP_K), 0)  # vLLM's clients send -1 for all
    min_p = fields.number("min_p", 0.0, minimum=0, maximum=1)
    # OpenAI's clients send top_p 0 for greedy decoding; in Megatron's API it disables top_p.
    greedy = temperature == 0 or top_p == 0
    biases = fields.nested("logit_bias")
    if len(biases) > MAX_BIASES:
        raise RequestError(f"logit_bias names {len(biases)} tokens, at most {MAX_BIASES} are allowed")
    pairs = []
    for name in biases:
        if not (name.isascii() and name.isdecimal() and len(name) < 10 and int(name) < tokenizer.vocab_size):
            raise RequestError(f"logit_bias: tokens must be integers from 0 to {tokenizer.vocab_size - 1}")
        if type(biases[name]) not in (int, float) or not -100 <= biases[name] <= 100:
            raise RequestError(f"logit_bias: the bias of token {name} must be a number from -100 to 100")
        pairs.append((int(name), float(biases[name])))
    sampling = Sampling(
        temperature=1.0 if greedy else temperature,
        top_k=0 if greedy else top_k,
        top_p=0.0 if greedy or top_p == 1 else top_p,
        greedy=greedy,
        min_p=0.0 if greedy else min_p,
        repetition_penalty=fields.number("repetition_penalty", 1.0, minimum=0.01, maximum=100),
        presence_penalty=fields.number("presence_penalty", 0.0, minimum=-2, maximum=2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, minimum=-2, maximum=2),
        logit_bias=pairs,
    )
    stop = fields.bounded_texts("stop", MAX_STOP, MAX_STOP_LENGTH)
    _check_size(rows, new, limits)
    seeds = _seeds(fields, "seed", len(rows))
    stop_tokens = fields.listed("stop_token_ids") if fields.has("stop_token_ids") else []
    if len(stop_tokens) > MAX_BIASES:
        raise RequestError(f"stop_token_ids holds {len(stop_tokens)} tokens, at most {MAX_BIASES} are allowed")
    _check_tokens("stop_token_ids", stop_tokens, tokenizer)
    job = InferenceJob(rows, new, sampling, seeds, top, echo and top is not None, stop, stop_tokens)
    options = fields.nested("stream_options")
    return Completion(job, n, fields.flag("stream", False), echo, options.flag("include_usage", False))


def _check_tokens(name: str, tokens: Sequence[object], tokenizer: Tokenizer) -> None:
    if not all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in tokens):
        raise RequestError(f"{name}: tokens must be integers from 0 to {tokenizer.vocab_size - 1}")
