"""A teacher behind `opd serve teacher`: the same questions and answers as in process, over HTTP, from one or more replicas.

Whatever is awaited runs in a thread with a loop of its own: requests leave, answers arrive and time limits run while the
caller's loop decodes or trains.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from opd.errors import UserError
from opd.kernels.head import OutputHead
from opd.records import SampleRequest, ScoreRequest, Scores, Turn
from opd.teachers.abilities import Abilities
from opd.teachers.client.addresses import check_addresses, read_token
from opd.teachers.client.answers import check_scores, check_turn
from opd.teachers.client.handshake import Info, check_same
from opd.teachers.client.replica import OtherModel
from opd.teachers.client.replicas import Job, Patience, Replicas
from opd.teachers.client.servers import MAX_ROW_BYTES, Servers
from opd.teachers.config import FrozenConfig
from opd.teachers.loop_thread import LoopThread
from opd.teachers.wire import Asked, decode_scores, decode_turn, encode_sample_request, encode_score_request

SLACK_BYTES = 65536  # of an answer beside its tensors
STOP_S = 5.0
START_S = 20.0  # a server that does not answer at the start is more likely absent than busy
T = TypeVar("T")


class ServedTeacher:
    """Implements `opd.teachers.pool.Teacher`. Made by `connect`."""

    def __init__(
        self, config: FrozenConfig, servers: Servers, infos: Sequence[tuple[str, Info]], vocab: int | None = None
    ) -> None:
        """`infos` are the replicas' `/v1/info` by address. Raises `UserError` where they are not one teacher, or another."""
        self.name, self.config, self.servers, self.field = servers.name, config, servers, servers.field
        of_its_own = config.adapter is not None or config.active_experts is not None
        self.model = config.served_as or (self.name if of_its_own else "base")
        self.identity = check_same(infos, f"teachers.{self.name}", model=self.model, digest=config.digest)
        first = infos[0][1]
        self.info: Info = {**first, "max_context": min(info["max_context"] for _, info in infos)}
        self.abilities = Abilities.shared([Abilities.of(info) for _, info in infos])
        self.vocab = min(first["num_tokens"], first["rows"])  # ids that it is asked about
        if vocab is not None:
            self.ask_about(vocab)
        self.digest: str | None = self.identity.weights
        self.head_id = self.identity.head  # what `Scores.head` says
        self.max_body_bytes = min(info["limits"]["body_bytes"] for _, info in infos)
        self._head: OutputHead | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._thread: LoopThread | None = None
        self._replicas: Replicas | None = None  # lives in the thread
        self._closing: set[asyncio.Task[None]] = set()

    @classmethod
    def connect(cls, name: str, config: FrozenConfig, vocab: int | None = None) -> "ServedTeacher":
        """Asks every replica what it serves; one that does not answer is asked again for a few seconds.

        `vocab` is the number of ids it will be asked about; None is all of them. Not to be called while an event loop runs.
        Raises `UserError` naming the field and the address: it does not answer, wants a token, speaks another protocol, does
        not serve the model, has other weights than `config.digest`, or differs from the other replicas.
        """
        check_addresses(config.urls, f"teachers.{name}.url")
        token = None if config.token_file is None else read_token(config.token_file, f"teachers.{name}.token_file")
        servers = Servers(name, config.urls, token, config.timeout_s, min(config.deadline_s, START_S))
        return cls(config, servers, servers.infos(), vocab)

    def ask_about(self, vocab: int) -> None:
        """From here on, scores are over the first `vocab` ids. Raises `UserError` where it has fewer."""
        if vocab > self.info["rows"]:
            raise UserError(f"{self.field}: its output head has {self.info['rows']} rows for the {vocab} ids of the student")
        self.vocab = vocab

    @property
    def head(self) -> OutputHead:
        """The output head, on the CPU; see `load_head`."""
        return self.load_head()

    @property
    def num_failed(self) -> int:
        """Attempts that came to nothing since the first request, or since `close`."""
        return 0 if self._replicas is None else self._replicas.num_failed

    def load_head(self) -> OutputHead:
        """The output head, downloaded once. Not to be called for the first time while an event loop runs.

        Raises `UserError` when it does not come whole, or is not the one the replicas name.
        """
        if self._head is None:
            self._head = self.servers.head(self.identity)
        return self._head

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, downloaded once. Not to be called for the first time while a loop runs. Raises `UserError`."""
        if self._tokenizer is None:
            self._tokenizer = self.servers.tokenizer(self.identity)
        return self._tokenizer

    async def score(self, request: ScoreRequest) -> Scores:
        """The answer of whichever replica gives it, checked against the request.

        Raises `opd.teachers.stream.StreamLost` when no replica holds the request's stream, and `UserError` when no answer
        came within the deadline or no further attempt could help.
        """
        return await self._run(lambda: self._score(request))

    async def generate(self, request: SampleRequest) -> Turn:
        """A turn sampled by the served base. Raises `UserError`."""
        return await self._run(lambda: self._generate(request))

    def close_stream(self, name: str) -> None:
        """Lets the replica that holds the stream forget it. Never waits; to be called from a coroutine."""
        if self._thread is not None:

            async def forget() -> None:
                if self._replicas is not None:
                    self._replicas.forget(name)

            task = asyncio.get_running_loop().create_task(self._thread.run(forget))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Gives up connections and the thread; they are made again when needed, but streams are then lost."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        here = asyncio.get_running_loop()
        await asyncio.gather(*(task for task in self._closing if task.get_loop() is here))

        async def close() -> None:
            replicas, self._replicas = self._replicas, None
            if replicas is not None:
                await replicas.close()

        await thread.run(close)
        await thread.stop(STOP_S)

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._thread is None:
            self._thread = LoopThread(f"teacher {self.name}")
            self._thread.start()
        return await self._thread.run(work)

    def _opened(self) -> Replicas:
        """The replicas in the thread's loop."""
        if self._replicas is None:
            patience = Patience(self.config.timeout_s, self.config.deadline_s, self.config.max_in_flight)
            self._replicas = Replicas(self.servers.urls, self.name, self.servers.token, patience, self.model, self.identity)
        return self._replicas

    async def _score(self, request: ScoreRequest) -> Scores:
        request = replace(request, k=min(request.k, self.vocab))
        vocab, floor = self.vocab, self.config.logp_floor
        hidden_size = None if self._head is None else self._head.hidden_size

        def read(body: bytearray) -> Scores:
            scores, weights = decode_scores(body)
            self._check_weights(weights)
            check_scores(
                scores,
                request,
                vocab=vocab,
                logp_floor=floor,
                head=self.head_id,
                hidden_size=hidden_size,
                abilities=self.abilities,
            )
            return scores

        width = 1 + request.k + (0 if request.ids is None else request.ids.shape[1])
        state_bytes = MAX_ROW_BYTES if hidden_size is None else 4 * hidden_size
        job = Job(
            "/v1/score",
            self._sized(encode_score_request(Asked(request, vocab, floor, self.model))),
            num_tokens=request.num_tokens,
            max_bytes=len(request.token_ids) * (state_bytes if request.hidden else 8 * width) + SLACK_BYTES,
            read=read,
            stream=request.stream,
            keep_tokens=request.keep_tokens,
        )
        return await self._opened().ask(job)

    async def _generate(self, request: SampleRequest) -> Turn:
        def read(body: bytearray) -> Turn:
            turn, weights = decode_turn(body, request.context_ids)
            self._check_weights(weights)
            check_turn(turn, request, min(self.identity.num_tokens, self.identity.rows))
            return turn

        job = Job(
            "/v1/generate",
            self._sized(encode_sample_request(request, self.model)),
            num_tokens=len(request.context_ids) + request.max_new_tokens,
            max_bytes=request.max_new_tokens * 8 * (2 + request.sampling.num_topk) + SLACK_BYTES,
            read=read,
        )
        return await self._opened().ask(job)

    def _sized(self, body: bytes) -> bytes:
        """`body`, if servers take it: one that they refuse in the middle looks like a broken connection."""
        if len(body) > self.max_body_bytes:
            raise UserError(
                f"{self.field}: a request has {len(body)} bytes and a server takes {self.max_body_bytes}: "
                "start it with a larger --max-body-mib, or ask about fewer tokens at once"
            )
        return body

    def _check_weights(self, weights: str) -> None:
        if weights != self.identity.weights:
            raise OtherModel(
                f"{self.field}: a server answers with weights {weights}, at the start they were {self.identity.weights}: "
                "it serves other weights than at the start; start it again with the same model and resume with --resume"
            )
