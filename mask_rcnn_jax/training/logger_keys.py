"""Whether services that log runs can be reached at all: keys and addresses, without a network."""

import os
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit


def check_wandb(wandb: ModuleType, kwargs: dict[str, Any]) -> None:
    """Raise ValueError without a key, which `wandb.init` would ask for, or miss, minutes later.

    kwargs: those of `wandb.init`.
    """
    settings = wandb.setup().settings
    if kwargs.get("mode", settings.mode) in ("offline", "disabled", "dryrun"):
        return
    if settings.api_key or getattr(settings, "identity_token_file", None):
        return
    from requests.utils import get_netrc_auth  # a requirement of wandb, which reads it so

    if not get_netrc_auth(settings.base_url):
        host = urlsplit(settings.base_url).hostname
        raise ValueError(
            f"the logger 'wandb' has no key for {host}: run `wandb login`, or set WANDB_API_KEY or "
            "WANDB_MODE=offline"
        )


def check_mlflow(mlflow: ModuleType, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for an address of a kind that the installed mlflow cannot log to."""
    try:
        mlflow.MlflowClient()  # which connects to nothing yet
    except Exception as error:
        address, text = mlflow.get_tracking_uri(), " ".join(str(error).split())[:200]
        raise ValueError(
            f"the logger 'mlflow' cannot log to {address}: set MLFLOW_TRACKING_URI to the address "
            f"of a server ({text})"
        ) from error


def check_clearml(clearml: ModuleType, kwargs: dict[str, Any]) -> None:
    """Raise ValueError where neither the environment nor a file has a key."""
    given = ("CLEARML_API_ACCESS_KEY", "TRAINS_API_ACCESS_KEY", "CLEARML_AUTH_TOKEN")
    if clearml.Task.is_offline() or any(map(os.environ.get, given)):
        return
    named = os.environ.get("CLEARML_CONFIG_FILE") or os.environ.get("TRAINS_CONFIG_FILE")
    files = (
        [Path(named)] if named else [Path.home() / name for name in ("clearml.conf", "trains.conf")]
    )
    if not any(path.is_file() for path in files):
        raise ValueError(
            f"the logger 'clearml' has no key: there is no {files[0]}; run `clearml-init`, or set "
            "CLEARML_API_ACCESS_KEY and CLEARML_API_SECRET_KEY, or CLEARML_OFFLINE_MODE=1"
        )
