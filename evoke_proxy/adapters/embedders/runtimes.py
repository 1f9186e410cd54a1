"""Finds out which of the packages that run ONNX encoders are installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


def conflicting_runtimes() -> str:
    """Return the problem and its fix when both onnxruntime packages are installed; else ''."""
    installed = [name for name in _RUNTIMES if _is_installed(name)]
    if len(installed) < len(_RUNTIMES):
        return ""
    return (
        "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: run"
        " pip uninstall -y onnxruntime onnxruntime-gpu, then pip install 'evoke-proxy[gpu]' (or"
        " [cpu])"
    )


def missing_packages() -> list[str]:
    """Return the packages that ONNX encoders need and that are not installed."""
    return [name for name in ("onnxruntime", "tokenizers") if find_spec(name) is None]


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
