"""Datasets by folder, or by name on the Hugging Face hub or the server that HF_ENDPOINT names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from strands_cosmos3.engine.variants import cached_revisions
from strands_cosmos3.errors import (
    DatasetAccessError,
    DatasetError,
    DatasetNotFoundError,
    DatasetUnreachableError,
)
from strands_cosmos3.extras import needed_by

_PATTERNS = ["meta/*", "data/*", "videos/*"]


def locate_dataset(name: str, option: str) -> Path:
    """Return the folder of a dataset: a local one, or the snapshot of ``owner/name`` or
    ``owner/name@revision``.

    A snapshot is downloaded into huggingface_hub's cache, and complete ones are used without a
    network, the only one also where no branch points to it. ``HF_HOME``, ``HF_HUB_OFFLINE`` and
    ``HF_TOKEN`` are honoured.

    Raises:
        DatasetNotFoundError: There is no such folder, and no such dataset or revision on the hub.
        DatasetAccessError: The hub asks for a log-in, or for its conditions to be accepted.
        DatasetUnreachableError: The hub cannot be reached, and the cache has no complete snapshot.
        DatasetError: The download failed otherwise.
    """
    folder = Path(name).expanduser()
    repository, _, revision = name.partition("@")
    if folder.exists():
        return folder
    with needed_by(option):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    missing = f"{option} {name!r} is neither a folder nor a dataset on the hub"
    if repository.count("/") != 1 or name.startswith(("/", ".", "~")):
        raise DatasetNotFoundError(f"{missing}; give a folder, owner/name or owner/name@revision.")
    fetch = partial(snapshot_download, repository, repo_type="dataset", allow_patterns=_PATTERNS)
    try:
        try:
            return Path(fetch(revision=revision or None))
        except LocalEntryNotFoundError:
            cached = cached_revisions(repository, "dataset")
            if revision or len(cached) != 1:
                raise
            return Path(fetch(revision=cached[0]))
    except HFValidationError as error:
        raise DatasetNotFoundError(f"{missing}: {error}") from None
    except GatedRepoError:
        raise DatasetAccessError(
            f"{option}: access to the dataset {repository!r} is restricted; accept its conditions "
            "on its page, then log in "
            "with `hf auth login`."
        ) from None
    except RevisionNotFoundError:
        raise DatasetNotFoundError(
            f"{option}: the dataset {repository!r} has no revision {revision!r}."
        ) from None
    except RepositoryNotFoundError:
        raise DatasetNotFoundError(
            f"{missing}; if it is private, log in with `hf auth login`."
        ) from None
    except LocalEntryNotFoundError as error:
        raise DatasetUnreachableError(
            f"{option}: there is no folder {name!r}, the hub cannot be reached, and "
            f"{repository!r} is not in the cache: "
            f"{_first_line(error.__cause__ or error)}. Check the network and HF_ENDPOINT, or give "
            "a folder."
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise DatasetError(
            f"{option}: the download of {repository!r} failed: {_first_line(error)}; run it again."
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
