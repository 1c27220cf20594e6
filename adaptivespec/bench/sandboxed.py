"""Runs one untrusted Python program; started by `sandbox.run` as a process of its own.

Reads a job from standard input, gives up what the process could do beyond computing, runs the
program, and writes the job's token to standard output only if the program ran to its end.
"""

import importlib
import json
import os
import resource
import sys

pyseccomp = importlib.import_module("pyseccomp")

# What an interpreter needs to compute and to import: neither sockets, processes, threads and
# signals to others, nor anything that changes a file, a limit or a right. Opening to read is added.
# fmt: off
ALLOWED = [
    "access", "brk", "clock_getres", "clock_gettime", "clock_nanosleep", "close", "exit",
    "exit_group", "faccessat", "faccessat2", "fstat", "fstatfs", "futex", "getcwd", "getdents64",
    "getegid", "geteuid", "getgid", "getpid", "getppid", "getrandom", "getrusage", "gettid",
    "gettimeofday", "getuid", "lseek", "lstat", "madvise", "mmap", "mprotect", "mremap", "munmap",
    "nanosleep", "newfstatat", "pread64", "read", "readlink", "readlinkat", "restart_syscall",
    "rseq", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sched_getaffinity", "sched_yield",
    "set_robust_list", "sigaltstack", "stat", "statx", "sysinfo", "time", "times", "uname", "write",
    "writev",
]
# fmt: on


def restrict(memory_bytes: int, cpu_s: int) -> None:
    """For good: the limits of this process, then its system calls. All others fail with EPERM."""
    for limit, value in {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: 4096,  # of standard output, the only file that is open for writing
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }.items():
        resource.setrlimit(limit, (value, value))
    calls = pyseccomp.SyscallFilter(pyseccomp.ERRNO(1))
    for name in ALLOWED:
        calls.add_rule(pyseccomp.ALLOW, name)
    writing = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC  # bits of the flags, which are argument 2
    reading = pyseccomp.Arg(2, pyseccomp.MASKED_EQ, writing, os.O_RDONLY)
    calls.add_rule(pyseccomp.ALLOW, "openat", reading)
    calls.load()


def main() -> None:
    job = json.load(sys.stdin)
    verdict = os.dup(1)
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    restrict(job["memory_bytes"], job["cpu_s"])
    try:
        exec(compile(job["program"], "<answer>", "exec"), {"__name__": "__main__"})
    except BaseException:  # noqa: BLE001 - whatever it raised, exit and interrupt included
        os._exit(1)
    os.write(verdict, job["token"].encode())
    os._exit(0)


if __name__ == "__main__":
    main()
