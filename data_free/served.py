"""A teacher behind `opd serve teacher` as a sampler: what writes prompts in process writes them there, too."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from torch import nn

from opd.contexts import Contexts
from opd.errors import UserError
from opd.eval.models import Opened
from opd.eval.options import EvalOptions
from opd.records import Chunk, SampleRequest
from opd.teachers.client.served import ServedTeacher
from opd.teachers.config import FrozenConfig

NAME = "author"


class ServedSampler:
    """Implements `opd.students.sampler.Sampler`; every turn is one chunk."""

    concurrent = True

    def __init__(self, teacher: ServedTeacher) -> None:
        self.teacher, self.num_busy = teacher, 0

    @property
    def busy(self) -> bool:
        return self.num_busy > 0

    async def generate(self, request: SampleRequest) -> AsyncIterator[Chunk]:
        self.num_busy += 1
        try:
            with in_words():
                turn = await self.teacher.generate(request)
        finally:
            self.num_busy -= 1
        yield Chunk(turn.sampled_ids, turn.sampler_logps, turn.finish, turn.versions[-1][1])

    def sync(self, student: nn.Module, version: int) -> None:
        raise AssertionError("a served teacher is frozen")

    def release(self) -> None:
        """Nothing is held here."""

    def close(self) -> None:
        """The teacher that is asked has its own end."""


def connect(options: EvalOptions) -> ServedTeacher:
    """The teacher at the addresses `options.url`, its tokenizer read. Not while an event loop runs. Raises `UserError`."""
    config = FrozenConfig(
        url=options.url,
        token_file=options.token_file,
        timeout_s=options.deadline_s,  # a long text behind others takes as long as it takes
        deadline_s=options.deadline_s,
        max_in_flight=options.max_in_flight,
    )
    with in_words():
        teacher = ServedTeacher.connect(NAME, config)
        teacher.tokenizer()
    return teacher


@asynccontextmanager
async def open_served(teacher: ServedTeacher, options: EvalOptions) -> AsyncIterator[Opened]:
    """As `opd.eval.models.open_model`, for one that `connect` made."""
    info = teacher.info
    contexts = Contexts(teacher.tokenizer(), info["max_context"], options.max_new_tokens, tuple(info["eos_ids"]))
    try:
        yield Opened(ServedSampler(teacher), contexts, None, teacher.identity.weights)
    finally:
        await teacher.close()


@contextmanager
def in_words() -> Iterator[None]:
    """Errors about the recipe's fields in the words of the command line."""
    try:
        yield
    except UserError as error:
        text = str(error)
        fields = ((f"teachers.{NAME}.token_file", "--token-file"), (f"teachers.{NAME}.url", "--teacher"))
        for field, flag in (*fields, (f"teachers.{NAME}", "--teacher"), ("set token_file", "set --token-file")):
            text = text.replace(field, flag)
        raise UserError(text) from None
