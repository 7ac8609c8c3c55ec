"""`--platform`: the devices that are asked for, or an error."""

from importlib import metadata

# Extras of this package that bring what JAX needs.
EXTRAS = {"gpu": ("cuda13", "cuda12"), "tpu": ("tpu",)}
PLATFORMS = ("cpu", *EXTRAS)
_GPUS = ("cuda", "rocm", "oneapi")  # JAX's names, which are in those of its plugins


def choose_platform(platform: str | None) -> None:
    """Have JAX run on a platform; ValueError if nothing installed is for it."""
    if platform is None:
        return
    import jax

    names = _gpu_plugins() if platform == "gpu" else [platform]
    if not names:
        raise ValueError(_absent(platform, "no plugin of JAX for GPUs is installed"))
    # JAX runs on the first; with an accelerator, the CPU stays available.
    jax.config.update("jax_platforms", ",".join(dict.fromkeys([*names, "cpu"])))


def check_platform(platform: str | None) -> None:
    """Raise ValueError if the chosen platform is not there. Processes must have joined before."""
    if platform is None:
        return
    import jax

    try:
        found = jax.default_backend()
    except RuntimeError as error:
        reason = " ".join(str(error).partition(" (set JAX_PLATFORMS")[0].split())
        raise ValueError(_absent(platform, f"JAX says: {reason}")) from error
    if found != platform:  # JAX goes on without CUDA where it sees no GPU
        raise ValueError(_absent(platform, f"JAX finds no {platform.upper()} here"))


def _gpu_plugins() -> list[str]:
    """JAX's names of the GPUs that installed plugins are for."""
    plugins = [entry.name for entry in metadata.entry_points(group="jax_plugins")]
    return [name for name in _GPUS if any(name in plugin for plugin in plugins)]


def _absent(platform: str, why: str) -> str:
    extras = EXTRAS.get(platform, ())
    install = " or ".join(f"'mask-rcnn-jax[{extra}]'" for extra in extras)
    needs = f"; beside the device and its driver, it needs pip install {install}" if extras else ""
    return f"--platform={platform}: {why}{needs}"
