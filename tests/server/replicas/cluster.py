"""A Ray cluster of two nodes on one machine: its own network namespace, and another one."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import psutil

NEAR, FAR = "10.177.0.1", "10.177.0.2"  # where the server runs, and the other node
PORT = 26_379
ENVIRON = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
}
START_ATTEMPTS = 4


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def may_make_namespaces() -> bool:
    """Whether this machine lets us; a container may not, even root."""
    if shutil.which("ip") is None:
        return False
    name = f"od{os.getpid()}t"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    ip("netns", "del", name)
    return True


@dataclass(frozen=True)
class Cluster:
    namespace: str  # of the far node
    link: str  # this node's end of the cable

    @property
    def address(self) -> str:
        return f"{NEAR}:{PORT}"

    def cut(self) -> None:
        """Take the cable off."""
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        ip("link", "set", self.link, "up")

    def far(self, module: str) -> list[int]:
        """Ids of processes on the far node that run a module."""
        network = os.stat(f"/run/netns/{self.namespace}").st_ino
        return [
            one.pid
            for one in psutil.process_iter(["cmdline"])
            if module in (one.info["cmdline"] or ())
            and os.stat(f"/proc/{one.pid}/ns/net").st_ino == network
        ]


@contextmanager
def two_nodes() -> Iterator[Cluster]:
    """Two nodes with one core each, and a cable between them."""
    name = f"od{os.getpid()}"
    cluster = Cluster(name, f"{name}a")
    folder = mkdtemp(prefix="od-", dir="/tmp")  # paths of sockets must be short
    nodes: list[subprocess.Popen[bytes]] = []
    ip("netns", "add", name)
    try:
        ip("link", "add", cluster.link, "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("addr", "add", f"{NEAR}/24", "dev", cluster.link)
        ip("link", "set", cluster.link, "up")
        ip("-n", name, "addr", "add", f"{FAR}/24", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        ip("-n", name, "link", "set", "lo", "up")
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
        nodes.append(_node([], NEAR, head, Path(folder) / "near.log"))
        other = [f"--address={cluster.address}"]
        inside = ["ip", "netns", "exec", name]
        nodes.append(_node(inside, FAR, other, Path(folder) / "far.log"))
        yield cluster
    finally:
        for node in nodes:
            _end(node)
        ip("netns", "del", name)  # and the cable with it
        shutil.rmtree(folder, ignore_errors=True)


def _node(prefix: list[str], address: str, flags: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A node that has started. One that Ray gives up, after half a minute, is started again."""
    command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += [f"--node-ip-address={address}", "--num-cpus=1", "--object-store-memory=80000000"]
    for _ in range(START_ATTEMPTS):
        with log.open("w") as file:
            node = subprocess.Popen(
                [*command, *flags], stdout=file, stderr=file, env={**os.environ, **ENVIRON}
            )
        started: list[psutil.Process] = []
        while node.poll() is None:
            if "Ray runtime started" in log.read_text():
                return node
            with suppress(psutil.NoSuchProcess):
                started = psutil.Process(node.pid).children(recursive=True) or started
            time.sleep(0.2)
        for process in started:  # they outlive the one that gave up, and hold its port
            with suppress(psutil.NoSuchProcess):
                process.kill()
    raise AssertionError(log.read_text())


def _end(node: subprocess.Popen[bytes]) -> None:
    """End a node at once, with all that it has started."""
    started = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
    node.kill()
    node.wait()
    for process in started:
        if process.is_running():
            process.kill()
    # Those whose parent has gone may stay zombies: nobody is there to collect them.
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in started):
        time.sleep(0.05)
