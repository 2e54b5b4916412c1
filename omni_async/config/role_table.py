"""Lists the roles of a run.

A row has everything that the runtimes, the placement, the replacement and the scaling of workers need to know about a
role. It names the role's builder; only the process that builds the role imports it.

| role        | workers           | lost                                  | scales |
|-------------|-------------------|---------------------------------------|--------|
| coordinator | one               | a new attempt                         |        |
| services    | `roles[].workers` | replaced                              | yes    |
| servers     | `reward.servers`  | replaced                              | yes    |
| pools       | `reward.pools`    | replaced                              | yes    |
| rollout     | `rollout.workers` | replaced                              | yes    |
| reader      | one, offline      | a new attempt                         |        |
| reward      | `reward.workers`  | replaced                              | yes    |
| trainer     | `trainer.workers` | a new attempt                         |        |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from omni_async.config.schema import Config
from omni_async.config.section import Resources
from omni_async.plugins.services import find_service, service_names
from omni_async.worker import COORDINATOR, READER, REWARD, ROLLOUT, TRAINER, Worker

CONTROL = Resources(cpus=0.01)


class Membership(Protocol):
    """The coordinator's calls about workers that join and are lost; `omni_async.control.coordinator` has the rest."""

    async def engine_joins(self, engine: str) -> None: ...
    async def engine_lost(self, engine: str, reason: str) -> None: ...
    async def objects_lost(self, engine: str) -> None: ...
    async def scorer_lost(self, worker: str) -> None: ...
    async def service_lost(self, worker: str) -> None: ...


class Peers(Protocol):
    """The roles that are notified of joining and lost workers.

    `stores_die`: the objects that a worker put into the store are lost with its process."""

    stores_die: bool

    @property
    def coordinator(self) -> Membership: ...

    @property
    def trainer(self) -> Any: ...


@dataclass(frozen=True)
class RoleSpec:
    """A row of the table.

    workers: its workers at the start of a run, by the recipe.
    section: the key of its workers' resources; None: it needs next to none.
    build: `module:function`; (`omni_async.roles.builders.WorkerContext`) -> the role, called in the worker's process.
    on_loss: "replace": another worker takes the slot while the run continues. "new attempt": the run restarts from its
        last checkpoint.
    works: the workers that have `start` and `run`: "all"; the "first", which calls the others; "none", because the role
        only answers calls.
    services: further methods of a worker that works, which run until they are cancelled, by task name.
    long_calls: the calls that wait for an event; `start` and `run` always do.
    starts_last: in a sequential start it is last, because it loads slowly or finds mistakes late.
    in_sequence_groups: its workers form groups like ranks that share a sequence; a group needs a single machine.
    colocated: it shares devices with other roles under `placement.colocated`.
    emulated: `emulation` replaces its devices, so that it needs no devices.
    scales: `omni-async scale` changes the number of its workers; a surplus worker gets `leave`.
    loading: activity of a new worker before it is at work, for the console.
    joins, lost: callbacks that notify peers of a started and a lost worker; None: no peer needs a notice."""

    role: str
    workers: Callable[[Config], tuple[Worker, ...]]
    build: str
    section: str | None = None
    on_loss: Literal["replace", "new attempt"] = "new attempt"
    works: Literal["all", "first", "none"] = "all"
    services: Mapping[str, str] = field(default_factory=dict)
    long_calls: frozenset[str] = frozenset()
    starts_last: bool = False
    in_sequence_groups: bool = False
    colocated: bool = True
    emulated: bool = True
    scales: bool = False
    loading: str = "starting"
    joins: Callable[[Peers, str, Any], Awaitable[None]] | None = None
    lost: Callable[[Peers, str, str], Awaitable[None]] | None = None

    def resources(self, config: Config) -> Resources:
        """Return the resources of a worker."""
        return CONTROL if self.section is None else config.resources[self.section]

    def is_at_work(self, worker: Worker) -> bool:
        """Return whether this worker has a `run`."""
        return self.works == "all" or (self.works == "first" and worker.index is None)

    @property
    def waiting_calls(self) -> frozenset[str]:
        """Return the calls that may take long, because they wait for an event."""
        return self.long_calls | {"start", "run", *self.services.values()}


# ---- notices of workers that join and are lost ---------------------------------------------------------------------


async def _engine_joins(peers: Peers, name: str, worker: Any) -> None:
    await peers.coordinator.engine_joins(name)
    await peers.trainer.admit(name, worker)


async def _engine_lost(peers: Peers, name: str, reason: str) -> None:
    await peers.trainer.remove_engine(name)
    await peers.coordinator.engine_lost(name, reason)
    if peers.stores_die:
        await peers.coordinator.objects_lost(name)


# ---- rows ----------------------------------------------------------------------------------------------------------


def _slots(role: str, number: int) -> tuple[Worker, ...]:
    return tuple(Worker(role, index) for index in range(number))


def _ranks(config: Config) -> tuple[Worker, ...]:
    number = config.trainer.workers if config.emulation is None else 1  # one emulated rank stands for all
    return Worker(TRAINER), *(Worker(TRAINER, rank) for rank in range(1, number))


_BUILDERS = "omni_async.roles.builders"

BUILT_IN = (
    RoleSpec(
        COORDINATOR,
        lambda config: (Worker(COORDINATOR),),
        f"{_BUILDERS}:coordinator",
        works="none",
        long_calls=frozenset({"next_samples", "next_to_score", "closing", "next_groups", "events", "addresses"}),
        colocated=False,
    ),
    RoleSpec(
        ROLLOUT,
        lambda config: _slots(ROLLOUT, config.rollout.workers) if config.data.preferences is None else (),
        f"{_BUILDERS}:producer",
        "placement.rollout",
        "replace",
        long_calls=frozenset({"receive_weights"}),
        starts_last=True,
        scales=True,
        loading="loading its model; it gets work once it holds the newest weights",
        joins=_engine_joins,
        lost=_engine_lost,
    ),
    RoleSpec(
        READER,
        lambda config: () if config.data.preferences is None else (Worker(READER),),
        f"{_BUILDERS}:reader",
        "placement.rollout",
        starts_last=True,
    ),
    RoleSpec(
        REWARD,
        lambda config: _slots(REWARD, config.reward.workers) if config.scored else (),
        f"{_BUILDERS}:rewarder",
        "placement.reward",
        "replace",
        scales=True,
        loading="loading its scorers",
        lost=lambda peers, name, reason: peers.coordinator.scorer_lost(name),
    ),
    RoleSpec(
        TRAINER,
        _ranks,
        f"{_BUILDERS}:trainer",
        "placement.trainer",
        works="first",
        in_sequence_groups=True,
        services={"publisher": "run_publisher"},
        long_calls=frozenset({"admit"}),
        loading="loading its model",
    ),
)


def _service(number: int, name: str) -> RoleSpec:
    return RoleSpec(
        name,
        lambda config: _slots(name, config.roles[number].workers),
        f"{_BUILDERS}:service",
        f"roles.{number}.resources",
        "replace",
        colocated=False,
        emulated=False,
        scales=True,
        loading=find_service(name).loading,
        lost=lambda peers, name, reason: peers.coordinator.service_lost(name),
    )


def _pool(number: int, name: str) -> RoleSpec:
    return RoleSpec(
        name,
        # Emulated reward workers have the scorers of pools themselves.
        lambda config: _slots(name, config.reward.pools[number].workers) if config.emulation is None else (),
        "omni_async.roles.pool:build",
        f"reward.pools.{number}.resources",
        "replace",
        colocated=False,
        scales=True,
        loading="loading its scorers",
        lost=lambda peers, name, reason: peers.coordinator.service_lost(name),
    )


def _server(number: int, name: str) -> RoleSpec:
    return RoleSpec(
        name,
        lambda config: _slots(name, config.reward.servers[number].replicas) if config.emulation is None else (),
        "omni_async.roles.vllm_server:build",
        f"reward.servers.{number}.resources",
        "replace",
        colocated=False,
        scales=True,
        loading="starting vLLM, which loads its model",
        lost=lambda peers, name, reason: peers.coordinator.service_lost(name),
    )


# The roles that do the work of a run, in display order.
WORKING = tuple(spec.role for spec in BUILT_IN if spec.works != "none")


def roles_of(config: Config) -> dict[str, RoleSpec]:
    """Return the rows of a recipe's run by role.

    The order is: the coordinator; services, model servers and pools of scorers, which others may need; the other
    built-in roles."""
    coordinator, *others = BUILT_IN
    services = (_service(number, role.name) for number, role in enumerate(config.roles))
    pools = (_pool(number, pool.name) for number, pool in enumerate(config.reward.pools))
    servers = (_server(number, one.name) for number, one in enumerate(config.reward.servers))
    return {spec.role: spec for spec in (coordinator, *services, *servers, *pools, *others)}


def scalable_roles() -> tuple[str, ...]:
    """Return the roles whose number of workers may change, for any recipe."""
    return *(spec.role for spec in BUILT_IN if spec.scales), *service_names()
