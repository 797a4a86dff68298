"""Whether the packages are here that only a real model needs. Looks for them without loading them."""

from __future__ import annotations

from importlib.util import find_spec

from rackserve.base.errors import ResourceError

PACKAGES = ("torch", "gguf", "safetensors", "numpy")
"""What the extra `engine` installs."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def require_engine(kind: str = "llama") -> None:
    """ResourceError with the command that mends it if a package of the extra `engine` is not installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ResourceError(
            f"runner.kind {kind} needs {', '.join(missing)}: pip install -e '.[engine]' in the checkout "
            f"(without a GPU first: pip install torch --index-url {CPU_INDEX})"
        )
