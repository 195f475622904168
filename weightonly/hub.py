"""A model is a folder, or an id of the Hugging Face Hub, whose files are downloaded: the one rule for both.

"OWNER/NAME" is an id, unless it is something on this machine. A pathlib.Path, and what begins with "/", "." or "~", is
never one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from .extras import require_package
from .require import require_path
from .shown import shown

_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w-][\w.-]*", re.ASCII)
_FILES = (".safetensors", ".json", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
_UNWANTED = ["*/*", "consolidated*"]
"""Other copies of the weights, for other programs."""


def model_folder(model: str | os.PathLike[str], revision: str | None = None, argument: str = "folder") -> Path:
    """The folder of a model; of an id, that of the hub's cache, with its newest files, or those of `revision`.

    Without a network, or with HF_HUB_OFFLINE=1, it is what was downloaded before. A folder is not looked at.

    Raises TypeError for no path, ValueError for a `revision` of a folder, or one that the hub does not know. Raises
    OSError, which names the id, for an unknown, a private and a gated model, and for one that cannot be downloaded.
    Raises ImportError where huggingface_hub is missing.
    """
    path = require_path(argument, model)
    if not isinstance(model, str) or os.path.lexists(path) or not _ID.fullmatch(model) or model.endswith(_FILES):
        if revision is not None:
            raise ValueError(f"revision: expected none of a folder, got {revision!r} for {shown(path)}")
        return path
    require_package("huggingface_hub")
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{model}: expected a model that may be downloaded, got a gated one; accept its terms at "
            f"https://huggingface.co/{model} and log in with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{model}: expected a folder or the id of a model on the Hugging Face Hub, got neither; `hf auth login` "
            "shows private ones"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"revision: expected a branch, tag or commit of {model}, got {revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        raise FileNotFoundError(f"{model}: expected a folder, or a model {_what_offline(error)}") from error
    except OSError as error:
        reason = shown(str(error).partition("\n")[0])
        raise OSError(f"{model}: it is no folder, and could not be downloaded: {reason}") from error
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(
            f"{model}: expected safetensors files, got none; pickles and GGUF files are not downloaded"
        )
    return folder


def _what_offline(error: Exception) -> str:
    from huggingface_hub import constants, errors

    got = "a part of it" if isinstance(error, errors.IncompleteSnapshotError) else "none"
    if constants.HF_HUB_OFFLINE:
        return f"that was downloaded before, as HF_HUB_OFFLINE is set, got {got}; unset it, or give its folder"
    return f"of the Hugging Face Hub, which cannot be reached, that was downloaded before, got {got}; give its folder"
