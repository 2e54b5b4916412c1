"""Tests that ranks of two machines meet where a machine's name is 127.0.1.1: two network namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from omni_async.training.device import init_process_group
from omni_async.weights.transport.tcp_store import serve_store
from tests.support.patience import PATIENCE
from tests.support.places import ROOT

_MADE = ["unshare", "--map-root-user", "--net", "--mount", "--uts"]
# What the second machine is entered by: the process that holds its namespace.
_SCRIPT = r"""
set -e
printf '127.0.0.1 localhost\n127.0.1.1 debian\n' > hosts
mount --bind hosts /etc/hosts
hostname debian
exec 3<&0
unshare --net cat <&3 & other=$!
trap 'kill $other' EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do :; done
ip link add here type veth peer name there netns $other
ip link set lo up
ip addr add 10.77.0.1/24 dev here
ip link set here up
nsenter --target $other --net sh -e -c \
  'ip link set lo up; ip addr add 10.77.0.2/24 dev there; ip link set there up'
if [ $# -gt 0 ]; then
  nsenter --target $other --net "$@" 1 & second=$!
  "$@" 0
  wait $second
fi
"""


def two_machines(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs the command on both machines, with the machine's number as its last argument."""
    given = [*_MADE, "bash", "-c", _SCRIPT, "two_machines", *command]
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    with subprocess.Popen(["sleep", "infinity"], stdout=subprocess.PIPE) as held:  # the input of `cat`
        try:
            return subprocess.run(
                given, stdin=held.stdout, capture_output=True, text=True, cwd=folder, env=environment, timeout=200
            )
        finally:
            held.kill()


def rank(number: int) -> None:
    """Joins the trainer's group and one of gloo alone, and writes the sums over both."""
    ports = dist.FileStore("ports", 2)
    store = serve_store("10.77.0.1", PATIENCE) if number == 0 else None
    if store is not None:
        ports.set("port", str(store.port))
    device = torch.device("cpu")
    init_process_group(number, 2, f"tcp://10.77.0.1:{int(ports.get('port'))}", 20.0, device)
    for group in (None, dist.new_group(backend="gloo")):
        total = torch.tensor([number + 1.0])
        dist.all_reduce(total, group=group)
        sys.stdout.write(f"rank {number}: {total.item():g} over {os.environ['GLOO_SOCKET_IFNAME']}\n")
    ports.add("done", 1)
    while ports.add("done", 0) < 2:  # the store is rank 0's
        pass


@pytest.mark.slow
@pytest.mark.thorough
def test_ranks_of_two_machines_meet_on_the_interface_between_them(tmp_path: Path) -> None:
    if (made := two_machines(tmp_path)).returncode:
        pytest.skip(f"this machine makes no network namespaces: {made.stderr.strip()[-200:]}")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.training.test_two_hosts import rank"
    done = two_machines(tmp_path, sys.executable, "-c", f"{code}; rank(int(sys.argv[1]))")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0: 3 over here"] * 2 + ["rank 1: 3 over there"] * 2
