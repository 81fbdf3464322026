"""Loading causal language models, and the two parts the toolkit uses of them: decoder and output head."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from opd.errors import UserError
from opd.locate import described, locate


@dataclass(frozen=True)
class OutputHead:
    """logits = scale * hidden @ weight.T. Rows beyond the vocabulary in use are padding and are never multiplied."""

    weight: Tensor  # [R, H]
    scale: float = 1.0

    def logits(self, hidden: Float[Tensor, "c H"], vocab: int) -> Float[Tensor, "c V"]:
        """Unscaled logits of the first `vocab` rows, in the type of the weight."""
        return torch.mm(hidden.to(self.weight.dtype), self.weight[:vocab].t())


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

    Raises `UserError` naming `field` when it cannot be loaded, or when its logits are not a scaled linear map of its last
    hidden states (the losses are computed from those).
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
    _check_head(model, field)
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
    """The part that turns ids into last hidden states; with adapters in place if there are any."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return base.get_decoder()  # type: ignore[union-attr,operator]


def output_head(model: nn.Module) -> OutputHead:
    """The part that turns last hidden states into logits."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    config = base.config.get_text_config()  # type: ignore[union-attr,operator]
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    return OutputHead(base.get_output_embeddings().weight, float(scale))  # type: ignore[union-attr,operator]


def cache_argument(module: nn.Module) -> str:
    """What a decoder calls its KV cache: `cache` in newer transformers, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def _check_head(model: PreTrainedModel, field: str) -> None:
    """Compares a few positions with the model's own logits, so that no soft cap or bias goes unnoticed."""
    ids = torch.arange(4, device=model.device)[None]
    with torch.no_grad():
        head = output_head(model)
        hidden = decoder(model)(input_ids=ids, use_cache=False).last_hidden_state[0]
        ours = head.logits(hidden, head.weight.shape[0]).float() * head.scale
        theirs = model(input_ids=ids, use_cache=False).logits[0].float()
    if not theirs.isfinite().all():
        raise UserError(f"{field}: this model's logits are not finite: its weights are damaged")
    # bf16 rounds the product once on either path; a soft cap or a missing scale is far larger
    if not torch.allclose(ours, theirs, rtol=3e-2, atol=3e-2 * theirs.abs().max().item()):
        raise UserError(
            f"{field}: this model's logits are not a scaled linear map of its hidden states (a soft cap or a bias?)"
        )


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
