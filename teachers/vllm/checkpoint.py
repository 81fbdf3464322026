"""Files of a checkpoint, for an engine that reads them itself."""

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from opd.errors import UserError
from opd.locate import described, locate

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for
FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


def resolve(model: str, revision: str | None) -> Path:
    """The folder of a model, downloaded where it is a hub id. Raises `UserError`."""
    where = locate(model, "--model")
    if Path(where).is_dir():
        return Path(where).resolve()
    try:
        return Path(snapshot_download(where, revision=revision, allow_patterns=FILES))
    except (OSError, ValueError, HfHubHTTPError) as error:
        line = " ".join(str(error).split())[:200]
        raise UserError(f"--model: {described(model)} cannot be had: {line}") from None


def weight_files(folder: Path, field: str) -> list[Path]:
    """The safetensors files, by name. Raises `UserError` where there are none: nothing else is read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{field}: {folder} has no .safetensors files; convert its weights, or name another folder")
    return files


def adapter_rank(folder: Path, field: str) -> int:
    """The smallest rank with room for a LoRA adapter. Raises `UserError` for what is no such adapter."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
        if config["peft_type"] == "LORA" and type(rank) is int and rank <= RANKS[-1]:
            return next(size for size in RANKS if size >= rank)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{field}: {folder} is no adapter: adapter_config.json: {type(error).__name__}") from None
    raise UserError(f"{field}: {folder} is no LoRA adapter of a rank up to {RANKS[-1]}; merge it into the model")
