"""The command `doctor`: can this machine serve with these settings, or does a running server? Each finding has its remedy."""

from __future__ import annotations

import argparse
import mmap
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from rackserve.api.guard import LOOPBACK
from rackserve.api.keys import KEY_VARIABLE
from rackserve.api.server import RESERVED_DESCRIPTORS, listen
from rackserve.arguments import add_address, add_settings, address_overrides
from rackserve.base.errors import RackserveError, ResourceError
from rackserve.base.topology import ROLES
from rackserve.base.units import MIB
from rackserve.config import Settings, resolve
from rackserve.doctor_server import Finding as Finding
from rackserve.doctor_server import Verdict, examine_server, is_rackserve
from rackserve.live.computing import crowding, expect, in_words
from rackserve.live.cores import allowed_cores, share_cores
from rackserve.live.regions import RegionShape, available_bytes, check_memory
from rackserve.live.runner import layout_of, process_bytes, require_packages
from rackserve.model.embedded import cache_root
from rackserve.serving import describe_model, open_keys

DISK_BYTES = 1 << 30
FEW_DESCRIPTORS = 1024
YEAR_S = 365 * 86_400


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("--url", help="look at the server that runs there, not at this machine")
    add_address(command)
    add_settings(command)
    command.epilog = f"The key of the server at --url, if it asks for one, is read from {KEY_VARIABLE}."


def doctor(options: argparse.Namespace) -> int:
    """Print all findings; 0 if none is bad, else 4."""
    if options.url:
        findings = list(examine_server(options.url, os.environ.get(KEY_VARIABLE, "")))
        good, bad = "the server works", "to mend before the server at --url can be used"
    else:
        settings = resolve(options.config, [*options.overrides, *address_overrides(options)], environment=os.environ).settings
        findings = list(examine(settings))
        good, bad = "`rackserve serve` can work here", "to mend before `rackserve serve` can work"
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.verdict:4}  {finding.what:{width}}  {finding.text}")
    num_bad = sum(finding.verdict == "bad" for finding in findings)
    print(f"{num_bad} {bad}" if num_bad else good)
    return ResourceError.exit_code if num_bad else 0


def examine(settings: Settings) -> Iterator[Finding]:
    """All findings, one after the other; a check that fails by itself is a finding, too."""
    for what, check in CHECKS.items():
        try:
            verdict, text = check(settings)
        except (RackserveError, OSError) as error:
            verdict, text = "bad", str(error)
        yield Finding(what, verdict, text)


def _python(_: Settings) -> tuple[Verdict, str]:
    told = f"Python {platform.python_version()}, {platform.system()} {platform.release()}, {os.cpu_count()} CPUs"
    if sys.platform != "linux":
        return "bad", f"{told}: ranks share memory by means that only Linux has"
    return "ok", told


def _torch(settings: Settings) -> tuple[Verdict, str]:
    if settings.runner.kind == "digest":
        return "ok", "not needed by the toy model"
    require_packages(settings.runner)
    from importlib.metadata import version

    flags = cpu_flags(Path("/proc/cpuinfo"))
    wide = next((name for name in ("avx512f", "avx2") if name in flags), "")
    bf16 = [name for name in ("amx_bf16", "avx512_bf16") if name in flags]
    told = f"torch {version('torch')}; CPU has {', '.join([wide or 'no AVX2', *bf16])}"
    return ("ok", told) if wide else ("note", f"{told}: steps will take several times longer than on a CPU with AVX2")


def _kernels(settings: Settings) -> tuple[Verdict, str]:
    runner = settings.runner
    if runner.kind == "digest":
        return "ok", "not needed by the toy model"
    if find_spec("numpy") is None:
        return "note", "not looked at: the packages of a real model are missing"
    expected, cores = expect(runner, settings.topology), allowed_cores()
    if expected.kernels == "torch":
        return "ok" if runner.kernels == "torch" else "note", in_words("torch", 1, expected.reason)
    devices = settings.topology.num_devices
    told = in_words(expected.kernels, share_cores(runner.threads, 0, devices, cores).threads)
    crowded = crowding(runner.threads, devices, cores)
    return ("note", f"{told}; {crowded}") if crowded else ("ok", told)


def cpu_flags(path: Path) -> set[str]:
    """Features of the first CPU that a cpuinfo file lists."""
    lines = path.read_text().splitlines() if path.exists() else []
    return set(next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "").split())


def _port(settings: Settings) -> tuple[Verdict, str]:
    server = settings.server
    try:
        listen(server.host, server.port).close()
    except ResourceError as error:
        url = f"http://{server.host}:{server.port}"
        if not is_rackserve(url):
            raise
        return "bad", f"{error}; a rackserve answers there: `rackserve doctor --url {url}` looks at it"
    return "ok", f"{server.host}:{server.port} can be listened on" if server.port else "any free one will be taken"


def _memory(settings: Settings) -> tuple[Verdict, str]:
    topology, layout = settings.sized().topology, layout_of(settings.runner)
    kv_bytes, model_bytes = (
        topology.num_segments * RegionShape.of(layout, topology.segment_blocks, topology.segment_windows).num_bytes,
        0,
    )
    for role in ROLES:
        ranks, tp_size = topology.group_size(role), topology.tensor_parallel(role)
        workers = len(topology.workers(role))
        arena = RegionShape.of(layout, topology.num_blocks(role), topology.rank_windows)
        kv_bytes += workers * ranks * arena.num_bytes
        model_bytes += workers * ranks * tp_size * process_bytes(settings.engine, tp_size, ranks)
    check_memory(kv_bytes, model_bytes)
    room = available_bytes(Path("/proc"), Path("/sys/fs/cgroup"))
    told = f"{(kv_bytes + model_bytes) / MIB:,.0f} MiB wanted, {room / MIB:,.0f} MiB available"
    return ("ok", told) if kv_bytes + model_bytes < 0.9 * room else ("note", f"{told}: close; expect swapping or a kill")


def _shared_memory(_: Settings) -> tuple[Verdict, str]:
    descriptor = os.memfd_create("rackserve-doctor")
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory, open(f"/proc/self/fd/{descriptor}", "r+b") as again:
            memory[:2] = b"ok"
            if again.read(2) != b"ok":
                return "bad", "memory shared through /proc/PID/fd does not show what was written; is /proc mounted?"
    finally:
        os.close(descriptor)
    return "ok", "anonymous memory files work; /dev/shm is not used"


def _sockets(_: Settings) -> tuple[Verdict, str]:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"\0rackserve-doctor-{os.getpid()}")
    return "ok", "Unix sockets in the abstract namespace work"


def _limits(settings: Settings) -> tuple[Verdict, str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 16
    told = f"open files {soft} (can be raised to {most}), processes {_shown(resource.RLIMIT_NPROC)}"
    if most < RESERVED_DESCRIPTORS + 16:
        return "bad", f"{told}: at least {RESERVED_DESCRIPTORS + 16} open files are needed; raise it with ulimit -n"
    if most < FEW_DESCRIPTORS:
        return "note", f"{told}: only {most - RESERVED_DESCRIPTORS} clients at once; raise it with ulimit -n"
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return "note", f"{told}; address space is limited to {_shown(resource.RLIMIT_AS)}: models are mapped; lift ulimit -v"
    return "ok", told


def _shown(which: int) -> str:
    soft = resource.getrlimit(which)[0]
    return "without limit" if soft == resource.RLIM_INFINITY else str(soft)


def _model(settings: Settings) -> tuple[Verdict, str]:
    served = describe_model(settings, layout_of(settings.runner))
    chat = "with" if served.template is not None else "without"
    told = f"{served.names[0]}: {served.tokenizer.vocab_size} token ids, context {served.max_model_len}, {chat} chat template"
    return ("ok", told) if served.template is not None else ("note", f"{told}: only /v1/completions will work")


def _clock(_: Settings) -> tuple[Verdict, str]:
    grain = time.get_clock_info("monotonic").resolution
    if grain > 1e-3:
        return "bad", f"the monotonic clock moves in steps of {grain:g} s; deadlines and measurements need 1 ms or finer"
    if abs(time.time() - Path(__file__).stat().st_mtime) > 20 * YEAR_S:
        return "note", f"the wall clock says {time.strftime('%Y-%m-%d')}: log times will be wrong; set it"
    return "ok", f"monotonic in steps of {grain:g} s, wall clock {time.strftime('%Y-%m-%d %H:%M:%S %Z')}"


def _keys(settings: Settings) -> tuple[Verdict, str]:
    keys, host = open_keys(settings), settings.server.host
    if keys:
        return "ok", "an API key is asked for on every path but those of health"
    if host in LOOPBACK:
        return "ok", f"no key: every user and process of this machine may ask; set {KEY_VARIABLE} to change that"
    return "note", f"no key on {host}, as security.keyless says: anyone who reaches it may ask, and see others' timing"


def _disk(_: Settings) -> tuple[Verdict, str]:
    folder = next(each for each in (cache_root(), *cache_root().parents) if each.exists())
    free = shutil.disk_usage(folder).free
    told = f"{free / MIB:,.0f} MiB free under {folder}"
    if not os.access(folder, os.W_OK):
        return "note", f"{folder} cannot be written: the embedded model cannot be kept there; set RACKSERVE_CACHE"
    return ("ok", told) if free > DISK_BYTES else ("note", f"{told}: the embedded model needs 360 MB once; free some")


CHECKS: dict[str, Callable[[Settings], tuple[Verdict, str]]] = {
    "machine": _python,
    "torch": _torch,
    "kernels": _kernels,
    "port": _port,
    "model": _model,
    "memory": _memory,
    "shared memory": _shared_memory,
    "sockets": _sockets,
    "limits": _limits,
    "clock": _clock,
    "keys": _keys,
    "disk": _disk,
}
