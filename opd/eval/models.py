"""The model that is evaluated behind a sampler: in this process, or on a vLLM server that runs already."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from opd.contexts import Contexts
from opd.eval.options import EvalOptions
from opd.models import context_limit, load_causal_lm, output_head
from opd.students.hf_sampler import HFSampler
from opd.students.sampler import Sampler
from opd.students.vllm_sampler import VLLMSampler
from opd.teachers.client.addresses import read_token
from opd.teachers.digest import weights_digest
from opd.tokenization import eos_ids, load_tokenizer


@dataclass(frozen=True)
class Opened:
    """`block`: completions that are sampled together; None where the sampler batches by itself.

    `identity`: of the weights where they are in this process, else the name that the server gives them.
    """

    sampler: Sampler
    contexts: Contexts
    block: int | None
    identity: str


@asynccontextmanager
async def open_model(model: str, options: EvalOptions, field: str = "--model") -> AsyncIterator[Opened]:
    """Loads it, or looks for it on the server. Raises `UserError` naming `field`."""
    tokenizer = load_tokenizer(model, field)
    ends = eos_ids(model, field, tokenizer)
    if options.url is not None:
        token = read_token(options.token_file, "--token-file") if options.token_file else None
        served = VLLMSampler(
            options.url,
            tokenizer,
            ends,
            served_as=options.served_as,
            max_in_flight=options.max_in_flight,
            deadline_s=options.deadline_s,
            token=token,
        )
        async with served as sampler:
            contexts = Contexts(tokenizer, sampler.max_context, options.max_new_tokens, ends)
            yield Opened(sampler, contexts, None, sampler.model)
        return
    student = load_causal_lm(model, field, dtype=options.dtype)
    digest = weights_digest(student)
    student = student.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # type: ignore[arg-type]
    vocab = min(max(tokenizer.get_vocab().values()) + 1, output_head(student).num_rows)
    contexts = Contexts(tokenizer, context_limit(student.config.get_text_config()), options.max_new_tokens, ends)
    yield Opened(HFSampler(student, vocab, ends, max_rows=options.max_rows), contexts, options.max_rows, digest)
