"""Finds and loads libefla_ops.so, which registers torch.ops.efla."""

import json
import os
from pathlib import Path
from typing import Any

import torch

_NAME = "libefla_ops.so"
_INFO = "libefla_ops.json"  # beside the library: what it was built against


def find_library() -> Path:
    """The path of libefla_ops.so.

    Looked for, in this order: the file that the environment variable EFLA_LIBRARY names; beside this
    package; in the build folders of the checkout that this package lies in, build/release before
    the others and those newest first. Raises ImportError, saying where it looked, if there is none.
    """
    chosen = os.environ.get("EFLA_LIBRARY")
    if chosen:
        path = Path(chosen)
        if not path.is_file():
            raise ImportError(
                f"EFLA_LIBRARY names {chosen}, which is not a file; "
                f"set it to the path of {_NAME} or unset it"
            )
        return path
    package = Path(__file__).resolve().parent
    beside = package / _NAME
    if beside.is_file():
        return beside
    checkout = package.parent.parent
    release = checkout / "build" / "release" / "efla" / "ops" / _NAME
    built = list(checkout.glob(f"build/*/efla/ops/{_NAME}"))
    if built:
        # A debug or sanitizer build that happens to be newer is not what a user wants to run.
        return max(built, key=lambda path: (path == release, path.stat().st_mtime))
    raise ImportError(
        f"{_NAME} was found neither beside {package} nor under {checkout}/build/*/efla/ops; "
        "build it with scripts/build.sh, or set EFLA_LIBRARY to its path"
    )


def build_info(library: Path) -> dict[str, Any]:
    """What the library was built against: torch (its version), cuda (whether the CUDA part is in)
    and cxx11_abi; empty if nobody wrote it down."""
    path = library.parent / _INFO
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _release(version: str) -> tuple[str, ...]:
    """The part of a version that binaries depend on: 2.11.0+cu130 -> (2, 11)."""
    return tuple(version.split("+")[0].split(".")[:2])


def check_torch(library: Path) -> None:
    """Raises ImportError, in one sentence, if the library was built against another torch."""
    built = build_info(library).get("torch")
    if built is None or _release(built) == _release(torch.__version__):
        return
    older, newer = ".".join(_release(built)), ".".join(_release(torch.__version__))
    raise ImportError(
        f"{library} was built against torch {built}, but torch {torch.__version__} is installed: "
        f"install torch {older}, or build efla again with torch {newer} (pip install "
        "--force-reinstall --no-deps from its source, or scripts/build.sh in a checkout)"
    )


def load_library() -> Path:
    """Loads the library into this process (once) and returns its path."""
    path = find_library()
    check_torch(path)
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        needs_cuda = build_info(path).get("cuda") and "cuda" in str(error)
        advice = (
            "it holds CUDA kernels, so install a torch with CUDA, or build efla again without nvcc"
            if needs_cuda
            else "build it again with scripts/build.sh, against this torch"
        )
        raise ImportError(
            f"{path} could not be loaded with torch {torch.__version__}: {error}; {advice}"
        ) from error
    return path
