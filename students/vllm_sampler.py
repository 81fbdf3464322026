"""The vLLM sampler: turns from a running `vllm serve MODEL`, token ids in and token ids out, for evaluation.

Asks `/v1/completions`, which every server has (`/inference/v1/generate` is there only with --enable-scale-out). A turn is
one answer, not a stream: an attempt that fails has reported nothing and can be repeated whole, and vLLM aborts a request
whose connection is closed in either form. Every parameter of sampling is sent, so that none comes from the model's
generation config.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from opd.errors import UserError
from opd.records import Chunk, Finish, SampleRequest, Sampling
from opd.teachers.client.addresses import check_addresses
from opd.teachers.client.answers import LOGP_SLACK
from opd.teachers.client.replica import Failed, pause_s

TRIES = 8  # of one request; the pauses between them add up to about 9 s
CHECK_TRIES, CHECK_S = 3, 60.0  # of what needs no model, and how long it may take
CONNECT_S = 30.0
PROBE = "Let x² ≤ 12345.678; then\n\n  \\boxed{\\frac{1}{2}} isn't 日本語 🙂\tdef f(a): return a**10 # "


class VLLMSampler:
    """Use it as `async with VLLMSampler(...) as sampler`: entering checks the server.

    Then `model` is the served name and `max_context` the most tokens that a prompt with its completion may have. The noise
    of a seed is vLLM's: other tokens than `HFSampler` draws, of the same distribution.
    """

    concurrent = True

    def __init__(
        self,
        url: str,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Sequence[int],
        *,
        served_as: str | None = None,
        logps: bool = False,
        max_in_flight: int = 256,
        deadline_s: float = 3600.0,
        token: str | None = None,
    ) -> None:
        """Sends nothing yet. `eos_ids` end a turn, whatever the server's own configuration says.

        `logps`: ask for the log-probs of the distribution sampled from; without it every `sampler_logps` is 0.
        `deadline_s`: for one turn with all attempts, from its first. Raises `UserError` for what is no address.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        check_addresses([self.url], "--url")
        self.tokenizer, self.eos_ids = tokenizer, sorted(eos_ids)
        self.served_as, self.logps, self.deadline_s, self.token = served_as, logps, deadline_s, token
        self.model, self.max_context = "", 0
        self._places = asyncio.Semaphore(max_in_flight)
        self._num_turns = 0
        self._processed = False  # whether the server's log-probs are those after temperature, penalty and truncation
        self._session: aiohttp.ClientSession | None = None

    @property
    def busy(self) -> bool:
        return self._num_turns > 0

    async def __aenter__(self) -> "VLLMSampler":
        """Asks the server. Raises `UserError` unless it lives, serves the model, and has this tokenizer."""
        self._session = aiohttp.ClientSession(
            headers={} if self.token is None else {"Authorization": f"Bearer {self.token}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        try:
            self.model, self.max_context = self._choose(await self._ask("/v1/models"))
            await self._check_tokenizer()
            if self.logps:
                self._processed = await self._probe_logps()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        assert self._session is not None
        await self._session.close()

    def sync(self, student: nn.Module, version: int) -> None:
        """Always raises `UserError`: the server samples from the weights that it was started with."""
        raise UserError(f"--sampler: the vLLM server at {self.url} has weights of its own and takes no others; use hf")

    def release(self) -> None:
        """Nothing is held here."""

    def close(self) -> None:
        """Connections end with the `async with`."""

    async def generate(self, request: SampleRequest) -> AsyncIterator[Chunk]:
        """One chunk, the whole turn. Cancelling while it is awaited aborts the turn on the server.

        Raises `UserError`: the server is gone, refuses the request, takes fewer tokens, or must be started otherwise.
        """
        assert len(request.context_ids), "an empty context has nothing to condition on"
        assert not request.sampling.num_topk, "the vLLM sampler returns no further tokens"
        if (num_tokens := len(request.context_ids) + request.max_new_tokens) > self.max_context:  # it would cut in silence
            raise UserError(
                f"--url: {self.url} takes {self.max_context} tokens and a prompt with its completion may have {num_tokens}: "
                "start it with a larger --max-model-len, or lower --max-new-tokens"
            )
        with_logps = self.logps and request.sampling.temperature > 0.0
        if with_logps and not self._processed and (request.sampling.temperature != 1.0 or request.sampling.truncated):
            raise UserError(
                f"--url: {self.url} gives log-probs before temperature, penalty and truncation: start it with "
                "--logprobs-mode processed_logprobs"
            )
        body = self._body(request, with_logps)
        self._num_turns += 1
        try:
            async with self._places:
                chunk = self._chunk(request, await self._ask("/v1/completions", body), with_logps)
        finally:
            self._num_turns -= 1
        yield chunk

    def _body(self, request: SampleRequest, with_logps: bool) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "model": self.model,
            "prompt": request.context_ids.tolist(),
            "max_tokens": request.max_new_tokens,
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,  # the server's own: exactly the ids below end a turn, as in `HFSampler`
            "stop_token_ids": self.eos_ids,
            "logprobs": 0 if with_logps else None,  # 0: of the sampled token alone
            "return_token_ids": True,
        }

    def _chunk(self, request: SampleRequest, answer: Any, with_logps: bool) -> Chunk:
        try:
            choice = answer["choices"][0]
            ids = np.array(choice["token_ids"], np.int32)
            sent_ids = np.array(choice["prompt_token_ids"], np.int32)
            logps = choice["logprobs"]["token_logprobs"] if with_logps else np.zeros(len(ids))
            logps = np.array(logps, np.float32)
            if not 0 < len(ids) == len(logps) <= request.max_new_tokens or not (logps <= LOGP_SLACK).all():
                raise ValueError
        except (LookupError, TypeError, ValueError, OverflowError):
            raise UserError(f"--url: {self.url} gives no usable ids or log-probs: it needs vLLM 0.10.2 or newer") from None
        if not np.array_equal(sent_ids, request.context_ids):
            raise UserError(f"--url: {self.url} completes another prompt than it was sent: is there a proxy in between?")
        finish: Finish
        if ids[-1] in self.eos_ids:
            finish = "eos"
        elif len(ids) == request.max_new_tokens:
            finish = "length"
        else:
            where = f"after {len(ids)} of {request.max_new_tokens} tokens, at no EOS ({choice.get('finish_reason')})"
            hint = "if it has limits of its own, start it with --generation-config vllm"
            raise UserError(f"--url: {self.url} ended a turn {where}: {hint}")
        return Chunk(sampled_ids=ids, sampler_logps=logps, finish=finish, version=0)

    def _choose(self, answer: Any) -> tuple[str, int]:
        """(name of the model to ask, tokens it takes). Adapters name no limit: theirs is the base's."""
        try:
            cards = {str(card["id"]): int(card.get("max_model_len") or 0) for card in answer["data"]}
            max_context = max(cards.values())
            if not max_context:
                raise ValueError
        except (LookupError, TypeError, ValueError, AttributeError):
            raise UserError(f"--url: {self.url} is no vLLM server: its /v1/models names no model and its limit") from None
        served = ", ".join(cards)
        if self.served_as is None and len(cards) > 1:
            raise UserError(f"--served-as: {self.url} serves {served}; name one of these")
        model = self.served_as or next(iter(cards))
        if model not in cards:
            raise UserError(f"--served-as: {self.url} serves no {model!r}, only {served}; name one of these")
        return model, max_context

    async def _check_tokenizer(self) -> None:
        """Sends a text with figures, mathematics, other scripts, and special tokens: the first and the last, maybe all."""
        special = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        text = PROBE + "".join(special if len(special) <= 100 else special[:50] + special[-50:])
        answer = await self._ask("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
        theirs = answer.get("tokens") if isinstance(answer, dict) else None
        if theirs != self.tokenizer(text, add_special_tokens=False)["input_ids"]:
            raise UserError(f"--url: {self.url} serves {self.model} with another tokenizer than --model has; name one model")

    async def _probe_logps(self) -> bool:
        """Of a token that no model is sure of: where truncation leaves it alone, its log-prob is 0 only after truncation."""
        context = np.array(self.tokenizer(PROBE)["input_ids"], np.int32)
        request = SampleRequest(context, 0, 1, Sampling(top_k=1))
        chunk = self._chunk(request, await self._ask("/v1/completions", self._body(request, True)), True)
        return bool(chunk.sampler_logps[0] == 0.0)

    async def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON value of an answer, after retries. Raises `UserError`."""
        tries, limit_s = TRIES, self.deadline_s
        if path != "/v1/completions":
            tries, limit_s = CHECK_TRIES, min(CHECK_S, self.deadline_s)
        failures: list[str] = []
        try:
            async with asyncio.timeout(limit_s):
                for number in range(1, tries + 1):
                    try:
                        return await self._once(path, body)
                    except Failed as error:
                        failures.append(str(error))
                    if number < tries:
                        await asyncio.sleep(pause_s(number))
        except TimeoutError:
            failures.append(f"nothing within {limit_s:g} s")
        why = ", then ".join(dict.fromkeys(failures))
        raise UserError(f"--url: {self.url} gave no answer ({why}); start it (vllm serve MODEL), or correct the address")

    async def _once(self, path: str, body: dict[str, Any] | None) -> Any:
        """Raises `UserError`, and `Failed` where another attempt may succeed."""
        assert self._session is not None, "use it as `async with VLLMSampler(...)`"
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, self.url + path, json=body, allow_redirects=False) as response:
                status, content = response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise Failed(" ".join(str(error).split()) or type(error).__name__) from None
        try:
            value = json.loads(content)
        except ValueError:
            value = None
        if status == 200 and value is not None:
            return value
        if status == 200:
            raise UserError(f"--url: {self.url} is no vLLM server: its {path} is not JSON")
        text = f"answers {status}: {_message(value, content)}"
        if status in (408, 429) or status >= 500:
            raise Failed(f"it {text}")
        raise UserError(f"--url: {self.url}{path} {text}")


def _message(value: Any, content: bytes) -> str:
    """What an answer says about an error, in one line: vLLM's JSON, or the beginning of whatever it is."""
    error = value.get("error") if isinstance(value, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(text or content[:300].decode("utf-8", "replace")).split())[:300] or "nothing further"
