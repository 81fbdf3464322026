"""Loading causal language models, and the two parts the toolkit uses of them: decoder and output head."""

import inspect
import warnings
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from opd.errors import UserError
from opd.kernels.head import OutputHead
from opd.locate import described, locate

SOFTCAP = "final_logit_softcapping"  # in the configuration of Gemma and its like
WHOLE = "opd_whole_logits"  # set on a model whose own logits are taken


def load_causal_lm(
    name: str,
    field: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    attention: str = "sdpa",
    quantization: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A causal language model in eval mode. Only safetensors weights are read and no code of the repository is run.

    Raises `UserError` naming `field` when it cannot be loaded. Warns of a model whose logits are no scaled, capped linear
    map of its last hidden states: the losses then take the model's own logits.
    """
    options: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype), "revision": revision}
    if quantization:
        options["quantization_config"] = _quantization_config(quantization, field)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            locate(name, field),
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{field}: {described(name)} cannot be loaded: {_one_line(error)}") from None
    model, info = loaded
    absent = sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"])))
    if absent:
        raise UserError(f"{field}: {name} lacks {len(absent)} weights, such as {absent[0]}: its files are not whole")
    model.eval()
    _check_head(model, described(name), field)
    return model


def model_limits(name: str, field: str, revision: str | None = None) -> tuple[int, int]:
    """(context length, rows of the output head) from the configuration alone. Raises `UserError`."""
    text = read_text_config(name, field, revision)
    return context_limit(text), int(text.vocab_size)


def read_text_config(name: str, field: str, revision: str | None = None) -> Any:
    """A model's configuration, of its text part. Raises `UserError` naming `field`."""
    try:
        config = AutoConfig.from_pretrained(locate(name, field), revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{field}: {name} has no readable configuration: {_one_line(error)}") from None
    return config.get_text_config()


def context_limit(config: Any) -> int:
    """The longest sequence of a text model's configuration, in tokens."""
    return int(getattr(config, "max_position_embeddings", None) or 2**30)


def decoder(model: nn.Module) -> nn.Module:
    """The part that turns ids into what `last_states` reads; with adapters in place if there are any.

    Of a model whose logits are no known map of its last hidden states it is the whole model.
    """
    base = _base(model)
    return base.get_decoder() if _reads_states(base) else base


def last_states(output: Any) -> Tensor:
    """Of what a `decoder` returns: last hidden states, or logits where `output_head` has no weight."""
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def output_head(model: nn.Module) -> OutputHead:
    """The part that turns `last_states` into logits."""
    base = _base(model)
    config = base.config.get_text_config()
    if not _reads_states(base):
        return OutputHead(None, width=int(config.vocab_size))
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    layer = base.get_output_embeddings()
    return OutputHead(layer.weight, float(scale), getattr(layer, "bias", None), getattr(config, SOFTCAP, None))


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _reads_states(base: Any) -> bool:
    return not getattr(base, WHOLE, False)


def cache_argument(module: nn.Module) -> str:
    """What a decoder calls its KV cache: `cache` in newer transformers, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def _check_head(model: Any, name: str, field: str) -> None:
    """Compares a few positions with the model's own logits. A model with another head than an `OutputHead` is marked, so
    that its own logits are taken.

    Raises `UserError` where they are not finite.
    """
    ids = torch.arange(4, device=model.device)[None]
    with torch.no_grad():
        theirs = model(input_ids=ids, use_cache=False).logits[0].float()
        if not theirs.isfinite().all():
            raise UserError(f"{field}: this model's logits are not finite: its weights are damaged")
        if not _agrees(model, ids, theirs):
            setattr(model, WHOLE, True)
            warnings.warn(
                f"{field}: the logits of {name} ({type(model).__name__}) are no known map of its last hidden states: its "
                "own logits of all tokens and ids are taken, at the cost of memory",
                stacklevel=3,
            )


def _agrees(model: Any, ids: Tensor, theirs: Tensor) -> bool:
    """Whether decoder and head give these logits."""
    try:
        head, states = output_head(model), last_states(decoder(model)(input_ids=ids, use_cache=False))[0]
        ours = head.logits(states, head.num_rows)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # it has no such parts
        return False
    # bf16 rounds the product once on either path; a missing scale or cap is far larger
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=3e-2, atol=3e-2 * theirs.abs().max().item())


def _quantization_config(options: dict[str, Any], field: str) -> Any:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    method = options.get("quant_method")
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        known = ", ".join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
        raise UserError(f"{field.removesuffix('.model')}.quantization.quant_method: one of {known}")
    arguments = {name: value for name, value in options.items() if name != "quant_method"}
    return AUTO_QUANTIZATION_CONFIG_MAPPING[method](**arguments)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


transformers.utils.logging.disable_progress_bar()  # a bar of our own shows the long work; loading is not it
