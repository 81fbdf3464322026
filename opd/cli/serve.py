"""`opd serve`: models behind HTTP."""

from typing import Annotated, Literal

import typer


def add_to(app: typer.Typer) -> None:
    serve = typer.Typer(help="Serve a model to training runs on this and other machines.", no_args_is_help=True)
    serve.callback()(lambda: None)  # a group, though it has one command
    serve.command("teacher")(teacher)
    app.add_typer(serve, name="serve")


def teacher(
    model: Annotated[str, typer.Option(help="A model folder, a hub id, or tiny:teacher.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one and prints it.")] = 8400,
    host: Annotated[str, typer.Option(help="Any other than the loopback address needs --token-file.")] = "127.0.0.1",
    token_file: Annotated[str | None, typer.Option(help="File with the bearer token that clients must show.")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=DIR", help="A LoRA adapter over the model; may be repeated.")
    ] = None,
    active_experts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N", help="Serve a mixture-of-experts model, or its adapter NAME, with N experts a token too."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Commit, tag or branch of a hub id.")] = None,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Type of the weights.")] = "auto",
    attention: Annotated[str, typer.Option(help="Attention kind, as transformers' attn_implementation.")] = "sdpa",
    quantization: Annotated[
        str | None, typer.Option(metavar="JSON", help="Arguments of transformers' quantisation config, with quant_method.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a forward pass, padding included.")] = 16384,
    max_queue_tokens: Annotated[int, typer.Option(min=1, help="Tokens waiting; more are told to come again.")] = 1048576,
    max_body_mib: Annotated[int, typer.Option(min=1, help="MiB of a request, and of an answer.")] = 64,
    stream_cache_gib: Annotated[float, typer.Option(min=0.0, help="GiB of KV caches of unfinished rollouts.")] = 2.0,
    max_logits_mib: Annotated[int, typer.Option(min=1, help="MiB of logits that exist at once.")] = 64,
) -> None:
    """Score rollouts with a frozen model until SIGTERM, which lets it answer what it has accepted."""
    from opd.locate import check_location
    from opd.teachers.server.options import ServeOptions, parse_active_experts, parse_adapters, parse_quantization

    options = ServeOptions(
        model=model,
        host=host,
        port=port,
        token_file=token_file,
        adapters=parse_adapters(adapter or []),
        active_experts=parse_active_experts(active_experts or []),
        revision=revision,
        dtype=dtype,
        attention=attention,
        quantization=parse_quantization(quantization),
        device=device,
        max_batch_tokens=max_batch_tokens,
        max_queue_tokens=max_queue_tokens,
        max_body_mib=max_body_mib,
        stream_cache_gib=stream_cache_gib,
        max_logits_mib=max_logits_mib,
    )
    check_location(model, "--model")
    from opd.teachers.server.process import serve_teacher

    serve_teacher(options)
