"""Stands in for vLLM where only the harness is under test: the names that it touches, and a model without weights.

Logits are a function of a request's tokens alone, unless ``STAND_IN_BATCH_DEPENDENT`` is set: then they also follow the
number of requests in the step.
"""

from __future__ import annotations

import itertools
import os
import zlib
from types import SimpleNamespace
from typing import Any

import torch

VOCAB = 64


class SamplingParams(SimpleNamespace):
    """What a request is drawn with."""


class RequestOutput(SimpleNamespace):
    """What comes of a request."""


def _logits(tokens: list[int], batch: int, weights: str = "a") -> torch.Tensor:
    key = weights + ",".join(map(str, tokens)) + (f"/{batch}" if os.environ.get("STAND_IN_BATCH_DEPENDENT") else "")
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))


class _Model:
    def __init__(self, weights: str) -> None:
        self.weights = weights

    def compute_logits(self, hidden: list[tuple[list[int], int]]) -> torch.Tensor:
        return torch.stack([_logits(*row, self.weights) for row in hidden])


class _Scheduler:
    def __init__(self, budget: int) -> None:
        self.budget, self.running, self.waiting = budget, [], []

    def schedule(self) -> dict[str, int]:
        self.running += self.waiting
        self.waiting = []
        left, scheduled = self.budget, {}
        for request in self.running:
            count = min(left, len(request.tokens) - request.computed)
            if count:
                scheduled[request.id] = count
            left -= count
        return scheduled

    def _preempt_request(self, request: Any) -> None:
        request.computed = 0
        self.waiting.append(request)

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        while self.running:
            self._preempt_request(self.running.pop(0))
        return True


class _Runner:
    def __init__(self, weights: str) -> None:
        self.model = _Model(weights)
        self.requests: dict[str, Any] = {}
        self.num_prompt_logprobs: dict[str, int] = {}
        self.cudagraph_dispatcher = SimpleNamespace(
            dispatch=lambda tokens: (SimpleNamespace(name="FULL" if tokens <= 8 else "NONE"), None)
        )

    def get_model(self) -> _Model:
        return self.model

    def execute_model(self, scheduled: dict[str, int], requests: list[Any]) -> None:
        self.cudagraph_dispatcher.dispatch(sum(scheduled.values()))
        self.batch = [request for request in requests if request.id in scheduled]
        for request in self.batch:
            self.requests[request.id] = SimpleNamespace(
                prompt_token_ids=request.tokens[: request.prompt], num_computed_tokens=request.computed
            )
        self.input_batch = SimpleNamespace(
            req_ids=[request.id for request in self.batch],
            num_computed_tokens_cpu=[request.computed for request in self.batch],
        )
        rows = [(r.tokens[: r.computed + scheduled[r.id]], len(self.batch)) for r in self.batch]
        self.execute_model_state = SimpleNamespace(
            logits=self.model.compute_logits(rows), scheduler_output=SimpleNamespace(num_scheduled_tokens=scheduled)
        )

    def sample_tokens(self, grammar_output: None) -> None:
        logits, scheduled = (
            self.execute_model_state.logits,
            self.execute_model_state.scheduler_output.num_scheduled_tokens,
        )
        self._get_prompt_logprobs_dict(None, scheduled)
        for request, row in zip(self.batch, logits, strict=True):
            request.computed += scheduled[request.id]
            if request.computed == len(request.tokens):
                token = int(row.argmax())
                request.tokens.append(token)
                request.logprobs.append({token: SimpleNamespace(logprob=float(row.log_softmax(0)[token]))})

    def _get_prompt_logprobs_dict(self, hidden_states: None, scheduled: dict[str, int]) -> None:
        for request in self.batch:
            left = request.prompt - 1 - request.computed
            count = min(scheduled[request.id], left) if request.id in self.num_prompt_logprobs else 0
            if count > 0:
                places = range(request.computed + 1, request.computed + 1 + count)
                logits = self.model.compute_logits([(request.tokens[:place], len(self.batch)) for place in places])
                for place, row in zip(places, logits, strict=True):
                    token = request.tokens[place]
                    request.prompt_logprobs[place] = {token: SimpleNamespace(logprob=float(row.log_softmax(0)[token]))}


class LLM:
    """An engine in this process."""

    def __init__(self, **settings: Any) -> None:
        if crash := os.environ.get("STAND_IN_CRASH"):
            raise RuntimeError(crash)
        self.scheduler = _Scheduler(settings["max_num_batched_tokens"])
        self.runner = _Runner(settings["model"].rpartition("/")[2])
        worker = SimpleNamespace(
            model_runner=self.runner, get_model=self.runner.get_model, reload_weights=self._reload_weights
        )
        core = SimpleNamespace(
            scheduler=self.scheduler, model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
        )
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
        self.ids = itertools.count()

    def generate(self, inputs: list[Any], parameters: list[Any], *, use_tqdm: bool) -> list[RequestOutput]:
        requests = []
        for prompt, wanted in zip(inputs, parameters, strict=True):
            tokens = list(prompt["prompt_token_ids"])
            request = SimpleNamespace(
                id=f"{next(self.ids)}-abc", tokens=tokens, prompt=len(tokens), computed=0, wanted=wanted.max_tokens,
                logprobs=[], prompt_logprobs=[None] * len(tokens),
            )  # fmt: skip
            requests.append(request)
            if getattr(wanted, "prompt_logprobs", None) is not None:
                self.runner.num_prompt_logprobs[request.id] = 0
        self.scheduler.running = list(requests)
        while self.scheduler.running or self.scheduler.waiting:
            self.runner.execute_model(self.scheduler.schedule(), self.scheduler.running)
            self.runner.sample_tokens(None)
            self.scheduler.running = [r for r in self.scheduler.running if len(r.logprobs) < r.wanted]
        return [
            RequestOutput(
                request_id=r.id.rpartition("-")[0], num_cached_tokens=0, prompt_logprobs=r.prompt_logprobs,
                outputs=[SimpleNamespace(token_ids=r.tokens[r.prompt :], logprobs=r.logprobs)],
            )
            for r in requests
        ]  # fmt: skip

    def _reload_weights(self, *, weights_path: str) -> None:
        self.runner.model.weights = weights_path.rpartition("/")[2]

    def _run_engine(self, *, output_type: type, use_tqdm: bool) -> list[RequestOutput]:
        return []
