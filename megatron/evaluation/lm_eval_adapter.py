"""Adapter of a checkpoint to lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from megatron.evaluation.lm_eval_rules import ContinuationRules, EncodedPair, answer_length
from megatron.inference.jobs import InferenceJob, Leader
from megatron.inference.sampling import Sampling
from megatron.inference.text import TextStream
from megatron.tokenizer.api import start_token

GREEDY = Sampling(greedy=True)


class CheckpointLM(ContinuationRules):
    """Harness model that evaluates a checkpoint; lives on the leading rank.

    Args:
        leader: leader of the model's ranks.
        batch: texts in a forward pass.
    """

    def __init__(self, leader: Leader, batch: int) -> None:
        super().__init__()
        self.leader = leader
        self.batch = batch
        self.model_tokenizer = leader.model.tokenizer
        self.window = leader.model.window

    @property
    def eot_token_id(self) -> int:
        return self.model_tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        return start_token(self.model_tokenizer)

    @property
    def longest_continuation(self) -> int:
        return self.window

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.model_tokenizer.tokenize(string)

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]], quiet: bool) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding would generate it."""
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for first in tqdm(range(0, len(order), self.batch), desc="log-likelihoods", disable=quiet):
            batch_indices = order[first : first + self.batch]
            rows = [[*pairs[i][0], *pairs[i][1]][-(self.window + 1) :] for i in batch_indices]
            job = InferenceJob(rows, 0, GREEDY, [0] * len(rows), top=1, score=True)
            for i, tokens in zip(batch_indices, self.leader.run(job)[0], strict=True):
                continuation_tokens = tokens[max(len(tokens) - len(pairs[i][1]), 0) :]
                likeliest = all(token.top[0][0] == token.id for token in continuation_tokens)
                results[i] = (sum(token.logprob for token in continuation_tokens), likeliest)
        return results

    def _loglikelihood_tokens(
        self, requests: Sequence[EncodedPair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        self.check_pairs(requests)
        return self._score([(context, continuation) for _, context, continuation in requests], disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        owners, pairs = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.model_tokenizer.tokenize(text), self.prefix_token_id, self.window, 1
            )
            for window in windows:
                context, continuation = make_disjoint_window(window)
                owners.append(number)
                pairs.append((list(context), list(continuation)))
        sums = [0.0] * len(requests)
        for number, (logprob, _) in zip(owners, self._score(pairs, disable_tqdm), strict=True):
            sums[number] += logprob
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        answers = []
        for number, request in enumerate(tqdm(requests, desc="texts", disable=disable_tqdm)):
            text, options = request.args
            until = options.get("until") or []
            new = answer_length(options)
            # If the answer alone may fill the window, the window slides as the answer grows.
            room = self.window - new if new < self.window else self.window
            tokens = self.model_tokenizer.tokenize(text)
            self.contexts.count_context(len(tokens), room)
            prompt = tokens[-room:] or [self.prefix_token_id]
            sampling, temperature = GREEDY, float(options.get("temperature") or 0.0)
            if temperature and options.get("do_sample", temperature > 0):
                top_p = float(options.get("top_p") or 0.0)
                sampling = Sampling(temperature, int(options.get("top_k") or 0), 0.0 if top_p >= 1 else top_p)
            stop = [until] if isinstance(until, str) else until
            answers.append(self._text(prompt, new, sampling, stop, number))
        return answers

    def _text(self, prompt: list[int], new: int, sampling: Sampling, stop: list[str], seed: int) -> str:
        stream, pieces = TextStream(self.model_tokenizer, stop, prompt), list[str]()

        def on_token(row: int, token: Any) -> bool:
            pieces.append(stream.add_token(token.id))
            return stream.stopped

        self.leader.run(InferenceJob([prompt], new, sampling, [seed]), on_token)
        return "".join(pieces) + stream.finish()
