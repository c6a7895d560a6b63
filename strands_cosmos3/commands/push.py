"""Upload a dataset or a checkpoint to the Hugging Face hub, or to the server that HF_ENDPOINT
names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from strands_cosmos3.errors import ConfigError
from strands_cosmos3.extras import needed_by


def require_repository(repository: str | None) -> None:
    """Raise ConfigError unless this is a repository's name, ``owner/name``; None passes."""
    if repository is None:
        return
    with needed_by("--push"):
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    try:
        validate_repo_id(repository)
        if repository.count("/") != 1:
            raise HFValidationError("it must be owner/name.")
    except HFValidationError as error:
        raise ConfigError(
            f"--push {repository!r} is not the name of a repository: {error}"
        ) from None


def push_folder(folder: Path, repository: str, kind: Literal["dataset", "model"]) -> str:
    """Upload a folder as one commit; a repository that does not exist yet is made, private. Return
    its address.

    Raises:
        ConfigError: The hub refuses it or cannot be reached; the folder is as it was.
    """
    require_repository(repository)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api = HfApi()
        url = api.create_repo(repository, repo_type=kind, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            repo_type=kind,
            commit_message=f"Upload of {folder.name}",
        )
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{folder} was written, but not pushed to {repository!r}: {reason} Log in with `hf "
            "auth login`, then push it: "
            f"hf upload {repository} {folder} --repo-type {kind}"
        ) from None
    return str(url)
