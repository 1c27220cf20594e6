"""Runs programs that a model wrote, and says whether they ran to their end.

Each is a process of its own, without environment, that may compute and read files: its system calls
are filtered by the kernel (seccomp), so that it can neither reach the network, start a process or a
thread, signal another, nor write a file; memory and time are limited. What it reads goes nowhere:
all that leaves it is one verdict. It guards the machine; the verdict is safe from accidents (a
program that exits early has not passed), not from a program that looks for its token in memory.
"""

import json
import math
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from adaptivespec.bench import extra
from adaptivespec.errors import ConfigError

Verdict = Literal["passed", "failed", "timed out"]

MEMORY_BYTES = 2**30


def run(program: str, timeout_s: float = 10.0, memory_bytes: int = MEMORY_BYTES) -> Verdict:
    """Run a Python program. `timeout_s` is wall time, the interpreter's start included."""
    token = secrets.token_hex(16)
    job = {
        "program": program,
        "memory_bytes": memory_bytes,
        "cpu_s": math.ceil(timeout_s) + 1,
        "token": token,
    }
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as answer:
        json.dump(job, given)
        given.seek(0)
        try:
            subprocess.run(
                [sys.executable, "-I", str(Path(__file__).with_name("sandboxed.py"))],
                stdin=given,
                stdout=answer,
                stderr=subprocess.DEVNULL,
                env={
                    "OPENBLAS_NUM_THREADS": "1"
                },  # numpy, without the threads that it may not start
                cwd="/",
                start_new_session=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "timed out"
        answer.seek(0)
        return "passed" if answer.read(len(token)) == token else "failed"


def check() -> None:
    """Raises ConfigError where programs cannot be run, or would not be shut in."""
    extra.load("pyseccomp", "HumanEval's tests run on Linux with libseccomp2")
    if run("assert 1 + 1 == 2", 60) != "passed":
        raise ConfigError("HumanEval's tests cannot run here: this kernel refuses seccomp filters")
    if run("import os; os.fork()", 60) == "passed":
        raise ConfigError("HumanEval's tests cannot run here: the sandbox does not hold")
