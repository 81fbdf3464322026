"""`opd serve`: models behind HTTP."""

from typing import Annotated, Literal

import typer

Host = Annotated[str, typer.Option(help="Any other than the loopback address needs --token-file.")]
TokenFile = Annotated[str | None, typer.Option(help="File with the bearer token that clients must show.")]
Revision = Annotated[str | None, typer.Option(help="Commit, tag or branch of a hub id.")]
Dtype = Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Type of the weights.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
QueueTokens = Annotated[int, typer.Option(min=1, help="Tokens waiting; more are told to come again.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one and prints it.")]
VLLMPython = Annotated[
    str | None, typer.Option(help="Python of an environment with vLLM.", show_default="that of OPD_VLLM, or this one")
]
TensorParallel = Annotated[int, typer.Option(min=1, help="vllm: GPUs that share the model.")]
Executor = Annotated[Literal["mp", "ray"] | None, typer.Option(help="vllm: ray where one engine spans machines.")]
MemoryShare = Annotated[float, typer.Option(min=0.01, max=1.0, help="vllm: share of a GPU's memory that it takes.")]
Adapters = Annotated[
    list[str] | None, typer.Option(metavar="NAME=DIR", help="A LoRA adapter over the model; may be repeated.")
]
ActiveExperts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=N", help="Serve a mixture-of-experts model, or its adapter NAME, with N experts a token too."
    ),
]
Quantization = Annotated[
    str | None,
    typer.Option(metavar="JSON|NAME", help="JSON of transformers' quantisation config; with vllm a name, such as fp8."),
]


def add_to(app: typer.Typer) -> None:
    serve = typer.Typer(help="Serve a model to training runs on this and other machines.", no_args_is_help=True)
    serve.command("teacher")(teacher)
    serve.command("student")(student)
    app.add_typer(serve, name="serve")


def teacher(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A model folder, a hub id, or tiny:teacher.")],
    port: Port = 8400,
    host: Host = "127.0.0.1",
    token_file: TokenFile = None,
    adapter: Adapters = None,
    active_experts: ActiveExperts = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    attention: Annotated[str, typer.Option(help="Attention kind, as transformers' attn_implementation.")] = "sdpa",
    quantization: Quantization = None,
    device: Device = "auto",
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a forward pass, padding included.", show_default="16384, with vllm 2048"),
    ] = None,
    max_queue_tokens: QueueTokens = 1048576,
    max_body_mib: Annotated[int, typer.Option(min=1, help="MiB of a request, and of an answer.")] = 64,
    stream_cache_gib: Annotated[float, typer.Option(min=0.0, help="GiB of KV caches of unfinished rollouts.")] = 2.0,
    max_logits_mib: Annotated[int, typer.Option(min=1, help="MiB of logits that exist at once.")] = 64,
    backend: Annotated[Literal["hf", "vllm"], typer.Option(help="What computes: transformers here, or vLLM.")] = "hf",
    vllm_python: VLLMPython = None,
    max_logprobs: Annotated[int, typer.Option(min=0, help="vllm: most log-probs a token that may be asked for.")] = 256,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="vllm: tokens of a sequence, and one.", show_default="the model's own")
    ] = None,
    tensor_parallel_size: TensorParallel = 1,
    distributed_executor_backend: Executor = None,
    gpu_memory_utilization: MemoryShare = 0.9,
) -> None:
    """Score rollouts with a frozen model until SIGTERM, which lets it answer what it has accepted."""
    from opd.locate import check_location
    from opd.teachers.server import options as server

    server.check_backend(backend, server.given_options(context))
    vllm = server.VLLMOptions(
        python=vllm_python,
        max_logprobs=max_logprobs,
        max_model_len=max_model_len,
        tensor_parallel_size=tensor_parallel_size,
        distributed_executor_backend=distributed_executor_backend,
        gpu_memory_utilization=gpu_memory_utilization,
        quantization=quantization if backend == "vllm" else None,
    )
    options = server.ServeOptions(
        model=model,
        host=host,
        port=port,
        token_file=token_file,
        adapters=server.parse_adapters(adapter or []),
        active_experts=server.parse_active_experts(active_experts or []),
        revision=revision,
        dtype=dtype,
        attention=attention,
        quantization=server.parse_quantization(quantization) if backend == "hf" else {},
        device=device,
        max_batch_tokens=max_batch_tokens or server.BATCH_TOKENS[backend],
        max_queue_tokens=max_queue_tokens,
        max_body_mib=max_body_mib,
        stream_cache_gib=stream_cache_gib,
        max_logits_mib=max_logits_mib,
        backend=backend,
        vllm=vllm,
    )
    check_location(model, "--model")
    from opd.teachers.server.process import serve_teacher

    serve_teacher(options)


def student(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="The model that the trainer starts from: a folder, a hub id, or tiny:student.")],
    port: Port = 8500,
    host: Host = "127.0.0.1",
    token_file: TokenFile = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    attention: Annotated[str, typer.Option(help="sdpa or eager.")] = "sdpa",
    device: Device = "auto",
    max_rows: Annotated[int, typer.Option(min=1, help="Turns decoded at once; others wait.")] = 64,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens between two reports of an unfinished turn.")] = 16,
    kept_mib: Annotated[int, typer.Option(min=0, help="MiB of keys and values between the turns of episodes.")] = 1024,
    max_queue_tokens: QueueTokens = 1048576,
    max_body_mib: Annotated[int, typer.Option(min=1, help="MiB of a request; weights may be larger.")] = 16,
    backend: Annotated[Literal["hf", "vllm"], typer.Option(help="What samples: transformers here, or vLLM.")] = "hf",
    vllm_python: VLLMPython = None,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="vllm: tokens of a step of the engine.")] = 8192,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="vllm: tokens of a sequence.", show_default="the model's own")
    ] = None,
    tensor_parallel_size: TensorParallel = 1,
    distributed_executor_backend: Executor = None,
    gpu_memory_utilization: MemoryShare = 0.9,
) -> None:
    """Sample the student's rollouts from the weights that a trainer sends, until SIGTERM."""
    from opd.locate import check_location
    from opd.students.server.options import StudentOptions, check_backend
    from opd.teachers.server.options import VLLMOptions, given_options

    check_backend(backend, given_options(context))
    vllm = VLLMOptions(
        python=vllm_python,
        max_model_len=max_model_len,
        tensor_parallel_size=tensor_parallel_size,
        distributed_executor_backend=distributed_executor_backend,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    options = StudentOptions(
        model=model,
        host=host,
        port=port,
        token_file=token_file,
        revision=revision,
        dtype=dtype,
        attention=attention,
        device=device,
        max_rows=max_rows,
        chunk_tokens=chunk_tokens,
        kept_mib=kept_mib,
        max_queue_tokens=max_queue_tokens,
        max_body_mib=max_body_mib,
        backend=backend,
        max_batch_tokens=max_batch_tokens,
        vllm=vllm,
    )
    check_location(model, "--model")
    from opd.students.server.process import serve_student

    serve_student(options)
