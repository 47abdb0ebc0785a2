"""Hosts on one machine: network namespaces on one bridge, with faults of the network between them. Needs root.

The bridge has a namespace of its own and no way out. A host has its own name, addresses and `/etc/hosts`, where its own
name is 127.0.1.1 as on Debian; files and process ids are everyone's. All faults but `reset` are silent: to a peer they
look like a host that is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from arealite.utils.processes import is_alive

SUBNET = "10.213.0"
_PREFIX = "arealite"
_ENTER = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


def why_impossible() -> str | None:
    """Say what is missing to make hosts here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "iptables", "nsenter", "unshare") if shutil.which(name) is None]:
        return f"{', '.join(missing)} not found"
    try:
        with network(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.decode(errors='replace').strip()}"


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[Network]:
    """Make hosts 1..n, and remove them; what runs there must have ended by then."""
    _remove_left_overs()
    with tempfile.TemporaryDirectory(prefix="arealite-hosts-") as folder:
        made = Network(f"{_PREFIX}-{os.getpid()}", num_hosts, Path(folder))
        try:
            made.create()
            yield made
        finally:
            made.remove()


class Network:
    """Hosts 1..n and their bridge."""

    def __init__(self, prefix: str, num_hosts: int, folder: Path) -> None:
        self._prefix = prefix
        self._hosts = range(1, num_hosts + 1)
        self._folder = folder
        self._switch = f"{prefix}-switch"

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"{SUBNET}.{host}"

    def command(self, host: int, command: list[str]) -> list[str]:
        """Return a command that runs on a host; the process is the very one that is started."""
        enter = ["nsenter", f"--net=/run/netns/{self._name(host)}", "unshare", "--uts", "--mount", "sh", "-c", _ENTER]
        return [*enter, str(self._folder / f"hosts-{host}"), f"host{host}", *command]

    def cut(self, host: int) -> None:
        """Pull the plug of a host."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def one_way(self, source: int, target: int) -> None:
        """Lose all packets from one host to another; those back still arrive."""
        self._filter(target, "-s", self.address(source), "-j", "DROP")

    def limit(self, host: int, mbit: int) -> None:
        """Let a host send no more than so many megabits per second."""
        shape = ["tbf", "rate", f"{mbit}mbit", "burst", "1mb", "latency", "100ms"]
        _run("tc", "-n", self._name(host), "qdisc", "add", "dev", "eth0", "root", *shape)

    def reset(self, source: int, target: int, *, except_port: int) -> None:
        """Answer all TCP packets from one host to another with a reset, but for one port."""
        match = ["-p", "tcp", "!", "--tcp-flags", "RST", "RST", "-s", self.address(source)]  # resets themselves arrive
        match += ["-m", "multiport", "!", "--ports", str(except_port)]
        self._filter(target, *match, "-j", "REJECT", "--reject-with", "tcp-reset")

    def heal(self) -> None:
        """Undo all faults."""
        for host in self._hosts:
            _run("ip", "-n", self._switch, "link", "set", f"port{host}", "up")
            _run("ip", "netns", "exec", self._name(host), "iptables", "-F", "INPUT")

    def create(self) -> None:
        """Make everything."""
        _run("ip", "netns", "add", self._switch)
        bridge = ["type", "bridge", "forward_delay", "0", "stp_state", "0"]
        _run("ip", "-n", self._switch, "link", "add", "bridge0", *bridge)
        _run("ip", "-n", self._switch, "link", "set", "bridge0", "up")
        for host in self._hosts:
            name, port = self._name(host), f"port{host}"
            _run("ip", "netns", "add", name)
            ends = ["link", "add", "name", port, "netns", self._switch, "type", "veth", "peer", "name", "eth0"]
            _run("ip", *ends, "netns", name)  # both ends are born in namespaces: the machine's own names stay free
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge0", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            others = [f"{self.address(other)} host{other}" for other in self._hosts if other != host]
            lines = ["127.0.0.1 localhost", f"127.0.1.1 host{host}", *others]
            (self._folder / f"hosts-{host}").write_text("\n".join(lines) + "\n")

    def remove(self) -> None:
        """Remove what was made."""
        for name in _namespaces():
            if name.startswith(f"{self._prefix}-"):
                _run("ip", "netns", "del", name)

    def _name(self, host: int) -> str:
        return f"{self._prefix}-{host}"

    def _filter(self, host: int, *rule: str) -> None:
        _run("ip", "netns", "exec", self._name(host), "iptables", "-A", "INPUT", *rule)


def _remove_left_overs() -> None:
    """Remove the hosts of suites that were killed."""
    for name in _namespaces():
        prefix, _, owner = name.rpartition("-")[0].rpartition("-")
        if prefix == _PREFIX and owner.isdecimal() and not is_alive(int(owner)):
            _run("ip", "netns", "del", name)


def _namespaces() -> list[str]:
    return sorted(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else []


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=120)
