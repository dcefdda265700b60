"""Finds and loads libefla_ops.so, which registers torch.ops.efla."""

import os
from pathlib import Path

import torch

_NAME = "libefla_ops.so"


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


def load_library() -> Path:
    """Loads the library into this process (once) and returns its path."""
    path = find_library()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"{path} could not be loaded with torch {torch.__version__}: {error}; "
            "build it again with scripts/build.sh, against this torch"
        ) from error
    return path
