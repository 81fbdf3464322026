"""Low-rank adapters over one frozen base, of which one or none is on.

Only adapters that leave the base as it is are taken: another adapter, or none, may be asked about next.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from opd.errors import UserError

PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")  # others take their start out of the base's weights


class Adapters:
    """The adapters in `folders` by name, over `model`, which becomes `self.model`."""

    def __init__(self, model: nn.Module, folders: Mapping[str, str], field: str, device: torch.device) -> None:
        """Reads safetensors only. `field` is that of an adapter for error messages, `{}` standing for its name.

        Raises `UserError` for what is no LoRA adapter of this base, or changes more than layers between the embeddings and
        the output head.
        """
        self.model: Any = model
        self._names = {name: f"adapter{i}" for i, name in enumerate(folders)}  # a module's name takes no dots
        for name, folder in folders.items():
            self._load(name, Path(folder).expanduser(), field.format(name), device)
        if folders:
            self._switch(None)

    @contextmanager
    def on(self, name: str | None) -> Iterator[None]:
        """This adapter alone is on within; at all other times the model is the base, for whoever else uses it."""
        if name is None:
            yield
            return
        self._switch(self._names[name])
        try:
            yield
        finally:
            self._switch(None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def state(self, name: str) -> dict[str, Tensor]:
        """All that an adapter's effect depends on, by name: its weights, and the factor of each of its layers."""
        import peft
        from peft.tuners.lora import LoraLayer

        own = self._names[name]
        state = peft.get_peft_model_state_dict(self.model, adapter_name=own, save_embedding_layers=False)
        for path, module in self.model.get_base_model().named_modules():
            if isinstance(module, LoraLayer) and own in module.scaling:
                state[f"{path}.scaling"] = torch.tensor(float(module.scaling[own]), dtype=torch.float64)
        return state

    def _switch(self, own: str | None) -> None:
        if own is None:
            self.model.base_model.disable_adapter_layers()
        else:
            self.model.base_model.enable_adapter_layers()
            self.model.set_adapter(own)
        self.model.requires_grad_(False)  # peft takes an adapter that is on for one that learns

    def _load(self, name: str, folder: Path, field: str, device: torch.device) -> None:
        try:
            import peft
        except ImportError:
            raise UserError(f"{field}: adapters need peft; install it with: pip install 'opd[lora]'") from None
        _check_files(folder, field)
        base = self.model.get_base_model() if self._on_peft else self.model
        ends = base.get_input_embeddings(), base.get_output_embeddings()
        own = self._names[name]
        with warnings.catch_warnings(), torch.random.fork_rng():  # weights are drawn before they are read
            warnings.simplefilter("ignore")
            try:
                if not self._on_peft:
                    config = peft.PeftConfig.from_pretrained(str(folder))
                    config.inference_mode = True
                    self.model = peft.PeftModel(base, config, own)
                result = self.model.load_adapter(str(folder), own, torch_device=str(device))
            except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
                raise UserError(f"{field}: {folder} is no adapter of this base: {_one_line(error)}") from None
        strange = [*result.missing_keys, *result.unexpected_keys]
        if strange:
            raise UserError(f"{field}: {folder} is no adapter of this base: {len(strange)} weights differ, as {strange[0]}")
        if any(now is not before for now, before in zip((base.get_input_embeddings(), base.get_output_embeddings()), ends)):
            raise UserError(f"{field}: {folder} changes the embeddings or the output head; train it on the layers between")
        self.model.eval()

    @property
    def _on_peft(self) -> bool:
        return hasattr(self.model, "get_base_model")


class Beneath:
    """What is beneath the adapters of a student that learns: its frozen start, in the student's own weights."""

    names: tuple[str, ...] = ()

    def __init__(self, student: Any) -> None:
        self.model = student

    @contextmanager
    def on(self, name: str | None) -> Iterator[None]:
        """Within, the adapters are off and nothing is dropped out; afterwards the student is as it was."""
        assert name is None
        training = self.model.training
        self.model.eval()
        try:
            with self.model.disable_adapter():
                yield
        finally:
            self.model.train(training)

    def state(self, name: str) -> dict[str, Tensor]:
        """It has no adapters of its own."""
        raise KeyError(name)


def _check_files(folder: Path, field: str) -> None:
    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"{field}: {folder} holds no adapter (no adapter_config.json)")
    if not (folder / "adapter_model.safetensors").is_file():
        raise UserError(f"{field}: {folder} has no adapter_model.safetensors, the only form of weights that is read")
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
    except ValueError as error:
        raise UserError(f"{field}: {folder}/adapter_config.json is not JSON: {_one_line(error)}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UserError(f"{field}: {folder} is no LoRA adapter, the only kind that is read")
    start = config.get("init_lora_weights")
    for changed, what in (
        (config.get("bias") not in (None, "none"), "bias"),
        (config.get("layer_replication"), "layer_replication"),
        (config.get("alora_invocation_tokens"), "alora_invocation_tokens"),
        (start not in PLAIN_STARTS, "init_lora_weights"),
    ):
        if changed:
            raise UserError(f"{field}: {folder} changes the base as well (its {what}); save it as plain LoRA")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
