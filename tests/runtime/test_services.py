"""Tests a role of another package and its host: the recipe names it, and it is started, replaced and scaled as built-in
roles are, in one process and on Ray."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import Iterator
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from omni_async.cli import main
from omni_async.commands.operate import running_lines
from omni_async.config import ConfigError, load
from omni_async.config.role_table import roles_of, scalable_roles
from omni_async.config.yaml_text import to_yaml
from omni_async.plugins import entry_points as lookup
from omni_async.plugins import services
from omni_async.plugins.services import Service
from omni_async.rewards.base import Outage
from omni_async.roles.builders import ServiceEnded, ServiceHost, ServiceNotStarted
from omni_async.runtime.driver.control_socket import Request, ask
from omni_async.runtime.placement import plan_placements
from omni_async.types import Prompt
from tests.roles.actor_world import Desk
from tests.runtime import outside_role
from tests.runtime.runtime_world import write_package, write_world
from tests.support.images import as_media
from tests.support.job_world import Disturbed, slow_at
from tests.support.loops import settle
from tests.support.moved_clock import move_clock, run_moved
from tests.support.patience import PATIENCE
from tests.support.places import ROOT

COUNTER = {"name": "counter", "workers": 2, "resources": {"cpus": 0.1}, "settings": {"first": 7}}


def register(site: Path, package: str, **roles: str) -> None:
    """Puts a package on the path whose entry points lead to `outside_role`, for this process and actors'."""
    points = {name: f"tests.runtime.outside_role:{made}" for name, made in roles.items()}
    write_package(site, package, "omni_async.roles", **points)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    site = tmp_path / "site"
    register(site, "outside", counter="ROLE", trainer="ROLE", broken="CounterSettings", none="NONE")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    services.find_service.cache_clear()
    services.service_names.cache_clear()
    yield
    services.find_service.cache_clear()
    services.service_names.cache_clear()


def recipe(folder: Path, *roles: dict[str, Any]) -> Path:
    write_world(folder)
    path = folder / "recipe.yaml"
    path.write_text(path.read_text() + to_yaml({"roles": [*roles]}))
    return path


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ([{"name": "clock"}], "roles: expected one of ['broken', 'counter', 'none', 'trainer'], which"),
        ([{"name": "trainer"}], "roles: 'trainer' is a role that every run has"),
        ([COUNTER, COUNTER], "roles.1.name: 'counter' is there twice"),
        ([{"name": "broken"}], "is of type StructMeta, not ServiceRole"),
        ([{"name": "Counter"}], "roles.0.name: expected str of lower-case letters and '_', at most 40, got 'Counter'"),
        ([COUNTER | {"settings": {"last": 1}}], "roles.0.settings.last: unknown key; allowed: first, start"),
        ([COUNTER | {"settings": {"first": -1}}], "roles.0.settings.first: expected int >= 0, got -1"),
    ],
)
def test_a_wrong_role_is_refused_in_one_line(tmp_path, capsys, roles, said):
    assert main(["check", str(recipe(tmp_path, *roles))]) == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == 1


def test_an_installed_role_is_listed_scaled_and_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    listed = "roles           broken (cannot be used), counter, none, trainer (cannot be used)\n"
    assert listed in capsys.readouterr().out
    assert "counter" in scalable_roles()
    config = load(recipe(tmp_path, COUNTER | {"resources": {"cpus": 2, "gpus": 1}}))
    plan = plan_placements(config)
    assert [plan.bundles[plan.actors[f"counter-{i}"].bundle or 0].gpus for i in range(2)] == [1, 1]
    row = roles_of(config)["counter"]
    assert (row.on_loss, row.scales, row.loading) == ("replace", True, "opening its port")


def asked(address: str, text: str = "") -> tuple[str, int, int]:
    """Asks a counter and returns the name and process of the one that answered, and its number."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        connection.sendall(f"{text}\n".encode())
        name, pid, number = connection.makefile().read().split()
    return name, int(pid), int(number)


def status(run: Disturbed) -> dict[str, Any]:
    return ask(run.job.run / "control.sock", Request(), timeout_s=PATIENCE)


def test_a_service_in_the_process_is_replaced_when_it_fails(tmp_path: Path) -> None:
    def disturb(run: Disturbed) -> None:
        run.updated(2)
        addresses = status(run)["addresses"]
        answers = [asked(addresses[name])[::2] for name in ("counter-0", "counter-1", "counter-0")]
        assert answers == [("counter-0", 7), ("counter-1", 7), ("counter-0", 8)]
        asked(addresses["counter-1"], "break")
        run.wait_for(lambda: len(run.faults) == 1)
        addresses = status(run)["addresses"]
        assert set(addresses) == {"counter-0", "counter-1.2"}
        assert asked(addresses["counter-1.2"])[::2] == ("counter-1.2", 7)
        run.stop()

    run = Disturbed.emulated(tmp_path, slow_at("train", 0.02), run={"runtime": "inprocess"}, roles=[COUNTER])
    run.require_whole(run.run(disturb))
    assert [(fault.part, fault.reason) for fault in run.faults] == [("counter-1", "OSError: told to break")]


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("fails", "counter-0 did not start: OSError: told not to start"),
        ("never", "counter-0: not ready within run.startup_timeout_s = 60"),
        ("asks", "counter-0 did not start: ValueError: addresses: expected a role of the recipe, one of ['counter']"),
        ("", "none-0 was not built: expected a Service, got a int"),
    ],
)
def test_a_service_that_does_not_start_ends_the_run(tmp_path, monkeypatch, start, said):
    """Moves the clock of the run's loop once nothing but the service that never starts is waited for."""
    asleep = outside_role.Counter.start

    async def start_late(self: outside_role.Counter) -> str:
        if start == "never":
            await settle()
            move_clock(PATIENCE)
        return await asleep(self)

    monkeypatch.setattr(outside_role.Counter, "start", start_late)
    monkeypatch.setattr(asyncio, "run", run_moved)
    role = COUNTER | {"settings": {"start": start}} if start else {"name": "none"}
    settings = {"runtime": "inprocess", "startup_timeout_s": PATIENCE}
    run = Disturbed.emulated(tmp_path, slow_at("train", 0.02), run=settings, roles=[role])
    summary = run.run(lambda _: None)
    assert summary.status == "failed" and said in (summary.reason or "")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_service_on_ray_is_replaced_and_scaled(tmp_path: Path) -> None:
    def disturb(run: Disturbed) -> None:
        run.updated(2)
        found = status(run)
        assert len({found["parts"][f"counter-{i}"]["pid"] for i in range(2)}) == 2
        assert asked(found["addresses"]["counter-0"])[:2] == ("counter-0", found["parts"]["counter-0"]["pid"])
        run.signal("counter-0", signal.SIGKILL)
        run.wait_for(lambda: len(run.faults) == 1)
        found = status(run)
        assert asked(found["addresses"]["counter-0.2"]) == ("counter-0.2", found["parts"]["counter-0.2"]["pid"], 7)
        (line,) = (line.split() for line in running_lines(found) if line.startswith("counter-0.2"))
        assert line == ["counter-0.2", str(found["parts"]["counter-0.2"]["pid"]), found["addresses"]["counter-0.2"]]
        assert "counter-2" in run.scale(counter=3)["addresses"]
        run.scale(counter=1)
        run.wait_for(lambda: sum("counter" in name for name in run.parts()) == 1)
        assert set(status(run)["addresses"]) == {"counter-0.2"}
        run.stop()

    run = Disturbed.emulated(tmp_path, slow_at("train", 0.05), roles=[COUNTER])
    run.require_whole(run.run(disturb))
    assert [fault.part for fault in run.faults] == ["counter-0"]
    told = "\n".join(run.console.phases + run.console.notes)
    assert "counter-0 counts from 7" in told and "counter-0.2: ready at " in told and "counter-2 drains" in told


class Told(Service):
    """A service that remembers its calls; the test ends it, or lets it drain or close."""

    def __init__(self, desk: Desk, address: Any = "here:1") -> None:
        self.desk, self.address = desk, address
        self.told: list[str] = []
        self.ends, self.drained, self.closed = (asyncio.Event() for _ in range(3))

    async def start(self) -> str:
        if isinstance(self.address, Exception):
            raise self.address
        return self.address

    async def run(self) -> None:
        await self.ends.wait()

    async def drain(self) -> None:
        self.told.append(f"drain, {len(self.desk.addresses)} known")
        await self.drained.wait()

    async def close(self) -> None:
        self.told.append(f"close, {len(self.desk.addresses)} known")
        await self.closed.wait()
        raise RuntimeError("and closing fails, too")


async def serving() -> tuple[Told, ServiceHost, asyncio.Task[None]]:
    service = Told(desk := Desk())
    host = ServiceHost("judge-0", service, desk)
    await host.start()
    assert desk.addresses == {"judge-0": "here:1"}
    running = asyncio.ensure_future(host.run())
    await asyncio.sleep(0)
    return service, host, running


async def test_a_service_serves_until_the_run_is_over_or_it_has_drained() -> None:
    """When it drains, nobody gets its address any more."""
    service, host, running = await serving()
    service.closed.set()
    service.desk.close()
    await running
    await host.close()
    assert service.told == ["close, 1 known"], "once"
    service, host, running = await serving()
    service.closed.set()
    await host.leave()
    await settle()
    assert service.told == ["drain, 0 known"] and not running.done()
    service.drained.set()
    await running
    assert service.told == ["drain, 0 known", "close, 0 known"]


@pytest.mark.virtual_time
async def test_a_service_that_ends_before_the_run_is_lost() -> None:
    service, _, running = await serving()
    before = asyncio.get_running_loop().time()
    service.ends.set()
    with pytest.raises(ServiceEnded, match="judge-0: its service ended before the run"):
        await running
    assert service.told == ["close, 0 known"] and asyncio.get_running_loop().time() - before == 10.0


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("address", "said"), [(OSError("no port"), "judge-0 did not start: OSError: no port"), (8080, "a text, got int")]
)
async def test_a_service_that_does_not_start_is_closed(address: Any, said: str) -> None:
    service = Told(Desk(), address)
    with pytest.raises((ServiceNotStarted, TypeError), match=said):
        await ServiceHost("judge-0", service, service.desk).start()
    assert service.told == ["close, 0 known"] and service.desk.addresses == {}


def test_a_role_of_no_package_or_of_two_is_refused(tmp_path, monkeypatch):
    path = recipe(tmp_path, COUNTER)
    with monkeypatch.context() as patched:
        patched.setattr(lookup, "entry_points", EntryPoints)
        with pytest.raises(ConfigError, match="no installed package brings a role; install the package that brings"):
            load(path)
    register(tmp_path / "other", "other", counter="NONE")
    monkeypatch.syspath_prepend(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"roles.*'counter' is registered more than once, as \['tests\.runtime\."):
        load(path)


def test_the_documented_role(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "roles.md").read_text()
    program, entry_point, role, scorer = re.findall(r"^```(?:python|toml|yaml)\n(.*?)^```$", page, flags=re.M | re.S)
    (tmp_path / "site" / "word_count.py").write_text(program)
    asks: dict[str, Any] = {}
    exec(scorer, asks)
    points = tmp_path / "site" / "outside-1.0.dist-info" / "entry_points.txt"
    points.write_text(entry_point.replace("project.entry-points.", "").replace('"', ""))
    path = recipe(tmp_path, *yaml.safe_load(role)["roles"])
    assert main(["check", "--no-probe", str(path)]) == 0
    assert "longest: 50" in capsys.readouterr().out
    name, settings = "word_count", load(path).roles[0].settings
    media, grey = [as_media(np.full((4, 4, 3), 51, np.uint8))], 51 / 255

    async def counts(*texts: str) -> list[float]:
        desk, known = Desk(), dict[str, str]()
        site = services.ServiceSite(f"{name}-0", 0, None, settings, "127.0.0.1", desk.phase, desk.service_lost)
        service, words = services.find_service(name).load()(site), asks["Words"]()

        async def addresses(role: str) -> dict[str, str]:
            assert role == name
            return known

        words.connect(addresses)
        with pytest.raises(Outage, match="no word count answers"):
            await words.score(media, [Prompt(0, "a red cat")])
        known["word_count-0"], known["word_count-1"] = "127.0.0.1:1", await service.start()
        scores = [(await words.score(media, [Prompt(0, text)]))[0].value for text in texts]
        await service.close()
        return scores

    assert asyncio.run(counts("a red cat", "cat " * 60)) == pytest.approx([3 * grey, 50 * grey])
