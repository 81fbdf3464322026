"""Uploading a checkpoint to the Hugging Face hub."""

import json
import os
from pathlib import Path

from opd.errors import UserError
from opd.eval.provenance import steps_of

STATE = "trainer"  # what a resumed run needs; of no use to others


def find_model(path: Path) -> Path:
    """`path` if it is a model folder, else the last checkpoint of the run in it. Raises `UserError`."""
    if any((path / marker).is_file() for marker in ("config.json", "adapter_config.json")):
        return path
    if steps := steps_of(path):
        return path / "checkpoints" / f"step-{steps[-1]}"
    raise UserError(f"{path}: no model and no run with a checkpoint; name a checkpoint's folder or a run's directory")


def files_to_push(folder: Path) -> dict[str, int]:
    """Size in bytes of each file that is uploaded, by its path in the folder. Raises `UserError` without any weights."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder): path.stat().st_size for path in paths}
    files = {str(name): size for name, size in names.items() if name.parts[0] not in {STATE, ".cache", ".git"}}
    if not any(name.endswith(".safetensors") for name in files):
        raise UserError(f"{folder}: it holds no weights (no .safetensors)")
    return files


def local_base(folder: Path) -> str | None:
    """The base model of an adapter, where that is a folder of this machine, which nobody else can load."""
    try:
        base = str(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return base if base.count("/") != 1 or base.startswith(("/", "~", ".")) else None


def push(folder: Path, repo: str, *, private: bool = False, revision: str | None = None, message: str | None = None) -> str:
    """Uploads a model folder, without `trainer/`, in one commit, and returns the commit's address.

    The repository, and the branch `revision`, are created if need be; an existing repository keeps its visibility. The
    endpoint is that of `HF_ENDPOINT`, the token that of `hf auth login` or `HF_TOKEN`. Raises `UserError` for a repository
    that cannot be written, and without network.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    files = files_to_push(folder)
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="opd")
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision,
            commit_message=message or f"Upload {folder.name} with opd",
            allow_patterns=[_literal(name) for name in files],
        )
    except HFValidationError as error:
        raise UserError(f"--repo: {_line(error)}") from None
    except LocalTokenNotFoundError:
        raise UserError("--repo: no token; run `hf auth login`, or set HF_TOKEN") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        fix = "; run `hf auth login` with a token that may write there" if status in {401, 403, 404} else ""
        raise UserError(f"--repo: the hub refused {repo}: {_line(error)}{fix}") from None
    except Exception as error:  # of whichever HTTP library is below: the reason is in its message
        raise UserError(f"--repo: {repo} could not be written to {api.endpoint}: {_line(error)}") from None
    return str(commit.commit_url)


def _literal(name: str) -> str:
    """A pattern that matches this name only."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
