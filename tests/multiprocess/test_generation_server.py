"""The server and its command line, over HTTP: answers, streams, bounds, and its end."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from megatron.inference.generate import generate, score
from megatron.inference.model import LoadedModel, load_model
from megatron.inference.sampling import Sampling
from tests.support.cli import REPO
from tests.support.server import Client, serving
from tests.unit.convert.support import MODELS, saved_model

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("warm")]

GREEDY = Sampling(greedy=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("saved"), MODELS["gpt2"], layers=4)


@pytest.fixture(scope="module")
def model(saved: Path) -> LoadedModel:
    return load_model(saved)


@pytest.fixture(scope="module")
def client(saved: Path) -> Iterator[Client]:
    with serving(saved, "--max-tokens-to-oom", "200", "--max-queue", "3") as running:
        yield running


def _texts(tokens: list[int]) -> list[str]:
    """The texts of tokens that are numbers with spaces between them."""
    return [f" {token}" if position else str(token) for position, token in enumerate(tokens)]


def test_megatrons_api(client: Client, model: LoadedModel) -> None:
    status, answer = client.put(prompts=["1 2", "5"], tokens_to_generate=6, top_k=1, logprobs=True)
    assert status == 200
    expected = generate(model, [[1, 2], [5]], 6, GREEDY)
    assert answer["text"] == [model.tokenizer.detokenize(sample.tokens) for sample in expected]
    assert answer["segments"] == [_texts(sample.tokens) for sample in expected]
    scored = score(model, [sample.tokens for sample in expected])
    for row, tokens in zip(answer["logprobs"], scored, strict=True):
        assert row == pytest.approx([token.logprob for token in tokens], abs=1e-4)
    status, answer = client.put(prompts=["1 2"], tokens_to_generate=3, top_k=1, add_BOS=True)
    assert (status, answer["segments"][0][0]) == (200, str(model.tokenizer.eod))
    assert "logprobs" not in answer


def test_completions(client: Client, model: LoadedModel) -> None:
    prompt = [1, 2, 3]
    (expected,) = generate(model, [prompt], 6, GREEDY, top=2)
    status, answer = client.complete(prompt=prompt, max_tokens=6, temperature=0, logprobs=2, echo=True)
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["text"] == model.tokenizer.detokenize(expected.tokens)
    assert choice["finish_reason"] == ("stop" if expected.finished else "length")
    assert not expected.finished
    assert choice["logprobs"]["tokens"] == _texts(expected.tokens)
    assert choice["logprobs"]["text_offset"] == [0, *accumulate(map(len, _texts(expected.tokens)[:-1]))]
    assert choice["logprobs"]["token_logprobs"][0] is None
    scored = score(model, [expected.tokens], top=2)[0]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx([token.logprob for token in scored], abs=1e-4)
    for top, token in zip(choice["logprobs"]["top_logprobs"][1:], scored, strict=True):
        assert set(top) == {f" {number}" for number, _ in (*token.top, (token.id, 0))}
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["total_tokens"] == len(expected.tokens)


def _stream(client: Client, **body: object) -> list[Any]:
    status, text = client.complete(stream=True, **body)
    assert status == 200
    events = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_a_stream_adds_up_to_the_answer(client: Client) -> None:
    request: dict[str, Any] = {"prompt": ["1 2", "7"], "max_tokens": 8, "seed": 3, "n": 2, "stop": [" 4", "9 "]}
    _, answer = client.complete(**request)
    events = _stream(client, **request, stream_options={"include_usage": True})
    assert events[-1]["usage"] == answer["usage"]
    assert len(events) > 4
    assert len(answer["choices"]) == 4
    for choice in answer["choices"]:
        chunks = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in chunks) == choice["text"]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
        assert not any(stop in choice["text"] for stop in request["stop"])


def test_a_tiny_temperature_is_greedy(client: Client) -> None:
    answers = [client.complete(prompt="1 2", max_tokens=6, temperature=t)[1]["choices"][0]["text"] for t in (0, 1e-46)]
    assert answers[0] == answers[1]


def test_offsets_run_on_in_streams_and_bos_has_room(client: Client) -> None:
    events = _stream(client, prompt="1 2", max_tokens=5, seed=1, logprobs=0)
    pieces = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]["tokens"]]
    at = 0
    for piece in pieces:
        assert piece["text_offset"] == [at]
        at += len(piece["tokens"][0])
    assert client.put(prompts=["1 " * 14], add_BOS=True)[0] == 200


def test_health_models_and_form(client: Client) -> None:
    status, health = client.ask("GET", "/health")
    assert (status, health["status"], health["window"]) == (200, "ok", 16)
    _, models = client.ask("GET", "/v1/models")
    assert models["data"][0]["id"] == "megatron-cc-7"
    assert client.ask("GET", "/v1/models/megatron-cc-7") == (200, models["data"][0])
    status, page = client.ask("GET", "/")
    assert status == 200
    assert "<form" in page


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/api", {}, 400, "prompts"),
        ("/api", {"prompts": "1 2"}, 400, "prompts"),
        ("/api", {"prompts": []}, 400, "no prompt"),
        ("/api", {"prompts": ["1"] * 129}, 400, "129"),
        ("/api", {"prompts": ["1"], "tokens_to_generate": 0}, 400, "logprobs"),
        ("/api", {"prompts": ["1"], "tokens_to_generate": True}, 400, "tokens_to_generate"),
        ("/api", {"prompts": ["1"], "tokens_to_generate": 17}, 400, "tokens_to_generate"),
        ("/api", {"prompts": ["1"], "tokens_to_generate": 16}, 400, "window"),
        ("/api", {"prompts": ["1"] * 100, "tokens_to_generate": 5}, 400, "200"),
        ("/api", {"prompts": ["1"], "top_k": 3000}, 400, "top_k"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}]}, 400, "no chat template"),
        ("/api", {"prompts": ["1"], "temperature": 1000}, 400, "temperature"),
        ("/api", {"prompts": ["1"], "tokens_to_generate": 2, "top_q": 0.5}, 400, "top_q"),
        ("/api", {"prompts": ["1"], "tokens_to_generate": 2, "beam_width": 3}, 400, "beam_width"),
        ("/api", [1], 400, "object"),
        ("/v1/completions", {"prompt": [[1, 97]]}, 400, "96"),
        ("/v1/completions", {"prompt": [["1"]]}, 400, "tokens"),
        ("/v1/completions", {"prompt": 5}, 400, "prompt"),
        ("/v1/completions", {"prompt": "1", "max_tokens": 2, "logprobs": 50}, 400, "logprobs"),
        ("/v1/completions", {"prompt": "1", "max_tokens": 2, "n": 10**9}, 400, "n is 1_000_000_000; it must"),
        ("/v1/completions", {"prompt": "1", "max_tokens": 2, "best_of": 3}, 400, "best_of"),
        ("/v1/completions", {"prompt": "1", "max_tokens": 2, "stop": ["a"] * 9}, 400, "stop"),
        ("/v1/completions", {"prompt": "1", "max_tokens": 2, "temperature": float("nan")}, 400, "temperature"),
        ("/v1/completions", {"prompt": 0, "max_tokens": 2}, 400, "prompt"),
        ("/v1/completions", {"prompt": [[]] * 3, "n": 100, "max_tokens": 2}, 400, "at most 128"),
        ("/v1/completions", b'{"prompt": "\\ud800", "max_tokens": 2}', 400, "half a character"),
        ("/v1/completions", b'{"\\ud800": 2}', 400, "half a character"),
        ("/v1/completions", b"{", 400, "JSON"),
        ("/v1/completions", b"[" * 100_000, 400, "JSON"),
        ("/v1/completions", b" " * (2 << 20), 413, "longer"),
    ],
)
def test_bad_requests_are_refused_with_a_reason(
    client: Client, path: str, body: object, status: int, message: str
) -> None:
    status_found, answer = client.ask("POST", path, body)
    assert status_found == status
    assert message in answer["message"]
    assert answer["error"]["message"] == answer["message"]


def test_pages_of_other_origins_cannot_use_it(client: Client) -> None:
    body = json.dumps({"prompt": "1", "max_tokens": 1}).encode()
    status, _ = client.ask("POST", "/v1/completions", body, {"Content-Type": "text/plain"})
    assert status == 415
    rebound = {"Content-Type": "application/json", "Host": f"evil.example:{client.port}"}
    assert client.ask("POST", "/v1/completions", body, rebound)[0] == 403


def test_many_at_once_are_served_or_told_to_wait(client: Client) -> None:
    together = threading.Barrier(250)

    def one(seed: int) -> int:
        together.wait(60)
        return client.complete(prompt=["1"] * 10, max_tokens=15, seed=seed)[0]

    with ThreadPoolExecutor(250) as pool:
        statuses = list(pool.map(one, range(250)))
    assert set(statuses) == {200, 503}
    assert client.ask("GET", "/health")[1]["status"] == "ok"


def test_a_client_that_leaves_frees_the_server(client: Client) -> None:
    connection = http.client.HTTPConnection(client.host, client.port, timeout=60)
    body = json.dumps({"prompt": ["1"] * 12, "max_tokens": 15, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    connection.getresponse().read(10)
    connection.close()
    deadline = time.monotonic() + 20
    while (health := client.ask("GET", "/health")[1])["busy"] or health["waiting"]:
        assert time.monotonic() < deadline
    assert client.complete(prompt="1", max_tokens=2)[0] == 200


def test_a_client_that_leaves_before_the_answer_frees_the_server(saved: Path) -> None:
    with serving(saved, "--recompute") as running:  # noted, and without effect
        connection = http.client.HTTPConnection(running.host, running.port, timeout=60)
        body = json.dumps({"prompts": ["1"] * 128, "tokens_to_generate": 15})
        for _ in range(3):
            connection.request("PUT", "/api", body, {"Content-Type": "application/json"})
            time.sleep(0.2)
            connection.close()
        deadline = time.monotonic() + 20
        while (health := running.ask("GET", "/health")[1])["busy"] or health["waiting"]:
            assert time.monotonic() < deadline


def test_the_command_line_client(client: Client) -> None:
    done = subprocess.run(
        [sys.executable, "tools/text_generation_cli.py", f"{client.host}:{client.port}", "--top-k", "1"],
        input="1 2\n4\n5\n99\n\n", capture_output=True, text=True, cwd=REPO, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    _, answer = client.put(prompts=["1 2"], tokens_to_generate=4, top_k=1)
    assert f"Megatron Response:\n{answer['text'][0]}\n" in done.stdout
    assert "error 400: tokens_to_generate" in done.stderr
    lost = subprocess.run(
        [sys.executable, "tools/text_generation_cli.py", "127.0.0.1:1"],
        input="1\n2\n", capture_output=True, text=True, cwd=REPO, timeout=60,
    )  # fmt: skip
    assert lost.returncode == 2
    assert "is the server running?" in lost.stderr


def test_four_ranks_answer_as_one_and_end_together(saved: Path, client: Client) -> None:
    split = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    request: dict[str, Any] = {"prompt": ["1 2", "7"], "max_tokens": 8, "seed": 3, "echo": True, "logprobs": 1}
    with serving(saved, *split, ranks=4) as four:
        four_answer, expected = four.complete(**request)[1], client.complete(**request)[1]
        assert [choice["text"] for choice in four_answer["choices"]] == [
            choice["text"] for choice in expected["choices"]
        ]
        assert _stream(four, prompt="1", max_tokens=4, seed=1)
        children = subprocess.run(
            ["pgrep", "-P", str(four.process.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        assert len(children) == 4
        os.kill(int(children[0]), signal.SIGKILL)
        assert four.process.wait(60) != 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_well(saved: Path, number: signal.Signals) -> None:
    with serving(saved) as running:
        assert running.complete(prompt="1", max_tokens=2)[0] == 200
        running.process.send_signal(number)
        assert running.process.wait(20) == 0


def test_a_signal_answers_those_that_wait(saved: Path) -> None:
    with serving(saved, "--max-queue", "20") as running, ThreadPoolExecutor(20) as pool:
        requests = [pool.submit(running.complete, prompt="1", n=128, max_tokens=15) for _ in range(20)]
        deadline = time.monotonic() + 20
        # All have come before the server closes its door, and some will not have begun before it sees the signal.
        while (health := running.ask("GET", "/health")[1])["waiting"] < 5 or (
            health["waiting"] + health["busy"] + health["served"] < 20
        ):
            assert time.monotonic() < deadline
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
        statuses = [request.result()[0] for request in requests]
    assert set(statuses) <= {200, 503}
    assert 503 in statuses


def test_a_taken_port_is_one_line(saved: Path, client: Client) -> None:
    flags = ["--load", str(saved), "--port", str(client.port)]
    done = subprocess.run(
        [sys.executable, "tools/run_text_generation_server.py", *flags], capture_output=True, text=True, cwd=REPO
    )
    assert done.returncode == 2
    assert "Address already in use" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_form_in_a_browser(client: Client) -> None:
    pytest.importorskip("selenium")
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        driver.get(f"http://{client.host}:{client.port}/")
        wait = WebDriverWait(driver, 30)
        wait.until(lambda browser: "window of 16" in browser.find_element(By.ID, "state").text)

        def fill(name: str, text: str) -> None:
            field = driver.find_element(By.ID, name)
            field.clear()
            field.send_keys(text)

        def run() -> None:
            driver.find_element(By.ID, "start").click()
            wait.until(lambda browser: browser.find_element(By.ID, "start").is_enabled())

        for name, text in (("prompt", "1 2"), ("max_tokens", "6"), ("seed", "3"), ("temperature", "1"), ("top_p", "1")):
            fill(name, text)
        run()
        _, answer = client.complete(prompt="1 2", max_tokens=6, seed=3, echo=True)
        assert driver.find_element(By.ID, "output").text == answer["choices"][0]["text"]
        assert "tokens" in driver.find_element(By.ID, "figures").text
        fill("top_k", "5")
        fill("temperature", "99")
        fill("prompt", "1 " * 15)
        run()
        assert "window" in driver.find_element(By.ID, "error").text
    finally:
        driver.quit()
