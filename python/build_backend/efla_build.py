"""The build backend of the Python package: scikit-build-core's, told where torch is.

The library is built against a torch that is already installed, so that a build needs no download of
gigabytes: that of the environment which pip installs into, although pip hides it from the build. Only
where none is found does the build ask for one. The wheel then depends on that release of torch.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from scikit_build_core import build as _backend

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

_WANTED = "torch==2.11.*"  # where none is installed
_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"


def _programs() -> list[str]:
    """Interpreters that may have torch: the named one, the running one, and who called it."""
    found = [os.environ.get("EFLA_PYTHON"), sys.executable]
    environment = os.environ.get("VIRTUAL_ENV")
    if environment:
        found.append(f"{environment}/bin/python")
    found += [str(_ROOT / ".venv/bin/python"), shutil.which("python3")]
    return [program for program in found if program and shutil.which(program)]


def find_torch() -> Path | None:
    """The folder of the torch package to build against, or None."""
    named = os.environ.get("EFLA_TORCH_DIR")
    if named:
        return Path(named)
    here = importlib.util.find_spec("torch")
    if here is not None and here.origin is not None:
        return Path(here.origin).parent
    for program in _programs():
        # -I: without the environment variables by which an isolated build hides what is installed.
        answer = subprocess.run([program, "-I", "-c", _SCRIPT], capture_output=True, text=True)
        origin = answer.stdout.strip()
        if answer.returncode == 0 and origin:
            return Path(origin).parent
    return None


def torch_version(torch: Path) -> str:
    """As its version.py says it, for example 2.11.0+cu130."""
    match = re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text())
    if match is None:
        raise RuntimeError(f"{torch}/version.py names no version: install torch again")
    return match.group(1)


def dynamic_metadata(field: str, settings: Any = None, project: Any = None) -> list[str]:
    """The wheel's dependencies: the release of torch that the library is built against."""
    if field != "dependencies":
        raise RuntimeError(f"{field} is not dynamic")
    torch = find_torch()
    if torch is None:
        return [_WANTED]
    return [f"torch=={'.'.join(torch_version(torch).split('+')[0].split('.')[:2])}.*"]


def _with_torch(requirements: list[str]) -> list[str]:
    return requirements if find_torch() else [*requirements, _WANTED]


def get_requires_for_build_wheel(settings: Any = None) -> list[str]:
    return _with_torch(_backend.get_requires_for_build_wheel(settings))


def get_requires_for_build_editable(settings: Any = None) -> list[str]:
    return _with_torch(_backend.get_requires_for_build_editable(settings))


def get_requires_for_build_sdist(settings: Any = None) -> list[str]:
    return list(_backend.get_requires_for_build_sdist(settings))


def _tell_cmake() -> None:
    torch = find_torch()
    if torch is None:
        raise SystemExit("error: no torch to build against: pip install torch first")
    os.environ["EFLA_TORCH_DIR"] = str(torch)


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    _tell_cmake()
    return _backend.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    _tell_cmake()
    return _backend.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    return _backend.build_sdist(sdist_directory, config_settings)
