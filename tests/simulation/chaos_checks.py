"""Checks what must hold in every schedule, whatever happens: after each message, and of all attempts of a job
together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from chaos_job import Job

from omni_async.control.control_state import ControlState
from omni_async.control.coordinator import Coordinator
from omni_async.control.group_table import GroupState
from omni_async.control.ledger import encode_line, extend
from omni_async.control.reporting import buffer_statistics
from omni_async.control.seeds import PromptStream, sample_seed, window_of
from omni_async.types import LedgerEntry, Prompt, ReadyGroup, SampleRequest, SampleResult, Score, UpdateReport

COMPLETE = (GroupState.READY, GroupState.REMADE)


class Violation(AssertionError):
    """An invariant that does not hold."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


class Checks:
    def __init__(self, job: Job, prompts: list[Prompt]) -> None:
        self._config = job.config
        self._prompts = PromptStream(prompts, job.config.run.seed, job.config.data.shuffle)
        self._rounds: list[int] = []  # validated versions, of all attempts
        self._attempts = 0

    # ---- after each message ------------------------------------------------------------------------------------------

    def message(self, coordinator: Coordinator, call: str, args: tuple[Any, ...], answer: Any) -> None:
        """Checks the state after `call` was made with `args`, when it is about to be answered."""
        self._buffers(coordinator)
        match call:
            case "next_samples":
                _, free, _ = args
                require(len(answer) <= free, f"{len(answer)} samples leased, {free} asked for")
            case "next_to_score":
                require(len(answer) <= args[1], f"{len(answer)} samples to score, {args[1]} asked for")
            case "next_groups":
                require(len(answer) <= args[1], f"{len(answer)} groups, {args[1]} asked for")
                for group in answer:
                    self._group(coordinator, args[0], group)
            case "update_done":
                self._update(args[0])
            case "samples_done" if not coordinator.versions.knows(args[0]):
                for result in args[1]:
                    require(
                        _result(coordinator, result.sample_id) is not result,
                        f"{result.sample_id}: {args[0]} was lost, and its result is used",
                    )
            case "scored" if args[0] in coordinator._samples.lost_workers:
                for result in args[1]:
                    used = result.score is not None and _score(coordinator, result.sample_id) is result.score
                    require(not used, f"{result.sample_id}: {args[0]} was lost, and its result is used")
            case "continuation" if not coordinator._closed:
                self._control_state(coordinator, answer)

    def _buffers(self, coordinator: Coordinator) -> None:
        statistics = buffer_statistics(coordinator._groups, coordinator._samples)
        slots = statistics["slots"]
        require(slots["live"] + slots["awaiting_publication"] <= slots["capacity"], f"slots over capacity: {slots}")
        for name in ("replay", "trajectories"):
            buffer = statistics[name]
            require(
                0 <= buffer["ready"] <= buffer["reserved"] <= buffer["capacity"],
                f"{name} buffer over capacity: {buffer}",
            )
        coordinator._groups.check()

    def _group(self, coordinator: Coordinator, version: int, group: ReadyGroup) -> None:
        """Checks a group that the trainer takes to train from `version`."""
        config = self._config
        staleness = version - group.oldest_version
        require(
            0 <= staleness <= config.staleness.max_updates,
            f"group {group.group} is {staleness} updates old, S = {config.staleness.max_updates}",
        )
        # Groups that the trainer gave back do not count: they were taken before.
        overtaken = [
            older
            for older, one in coordinator._groups.groups.items()
            if older < group.group and one.state in (GroupState.MAKING, GroupState.READY)
        ]
        require(
            len(overtaken) < config.buffer.window,
            f"group {group.group} overtook {overtaken}, window = {config.buffer.window}",
        )
        require(
            len(group.samples) == config.rollout.group_size, f"group {group.group} has {len(group.samples)} samples"
        )
        for number, sample in enumerate(group.samples):
            made = sample.trajectory.value
            require(
                made.request.sample_id == sample.sample_id == f"g{group.group}.s{number}",
                f"{sample.sample_id} is {made.request.sample_id}",
            )
            self.request(made.request)
            trained = tuple(made.versions[step] for step in group.window.steps) if group.window else made.versions
            require(
                tuple(sample.step_versions) == trained,
                f"{sample.sample_id} says {sample.step_versions}, its engine used {made.versions}",
            )

    def request(self, request: SampleRequest) -> None:
        """Checks that prompt, seed and window follow from the group's number alone, in every attempt."""
        if request.kind == "validation":
            return
        config, seed = self._config, self._config.run.seed
        require(request.prompt == self._prompts[request.group], f"{request.sample_id} of prompt {request.prompt.index}")
        expected = sample_seed(seed, request.prompt.index, request.group, request.sample)
        require(request.seed == expected, f"{request.sample_id} with seed {request.seed}, its own is {expected}")
        require(request.window == window_of(request.group, config), f"{request.sample_id} with window {request.window}")

    def _control_state(self, coordinator: Coordinator, kept: ControlState) -> None:
        complete = {group.number for group in coordinator._groups.groups.values() if group.state in COMPLETE}
        require(
            complete <= {group.group for group in kept.ready},
            f"groups {complete} are ready, {len(kept.ready)} are kept",
        )
        rounds = coordinator._validation.rounds
        require(
            kept.validated is None or all(version > kept.validated for version in rounds),
            f"rounds {[*rounds]} would not be repeated",
        )

    def _update(self, report: UpdateReport) -> None:
        number = self._config.trainer.groups_per_update
        require(
            len(set(report.groups)) == len(report.groups) == number,
            f"update {report.version} trained groups {report.groups}",
        )

    # ---- of an attempt, and of all -----------------------------------------------------------------------------------

    def attempt(self, start: int, events: Iterable[Any]) -> None:
        """Checks `events` of one attempt, which began at version `start`."""
        updates = [event.data["version"] for event in events if event.kind == "update"]
        require(
            updates == [*range(start + 1, start + 1 + len(updates))],
            f"from version {start} on updates {updates} were made",
        )
        rounds = [event.data["version"] for event in events if event.kind == "validation"]
        require(len(set(rounds)) == len(rounds), f"validation rounds {rounds}")
        self._rounds += rounds
        self._attempts += 1

    def goes_on(self, start: ControlState, lines: list[LedgerEntry]) -> None:
        """Checks a resume with `lines`, those of the ledger that the checkpoint counts: they must be the ones that
        it counted, as in a file."""
        size, digest = 0, ""
        for line in map(encode_line, lines):
            size, digest = size + len(line), extend(digest, line)
        require(
            (size, digest) == (start.ledger.size, start.ledger.digest),
            "the ledger's lines are not those that the checkpoint counts",
        )
        require(
            len(start.rewards) == start.version,
            f"the checkpoint of update {start.version} has {len(start.rewards)} rewards",
        )

    def ledger(self, lines: list[LedgerEntry]) -> None:
        """Checks a job that is done: the lines that count, of all attempts."""
        trainer = self._config.trainer
        numbers = sorted(line.group for line in lines)
        require(numbers == [*range(len(numbers))], f"groups {numbers} have a line: not each exactly once, or with gaps")
        trained = Counter(line.trained_version for line in lines if line.event == "trained")
        expected = dict.fromkeys(range(1, trainer.updates + 1), trainer.groups_per_update)
        require(trained == expected, f"groups by update: {dict(trained)}")
        for line in lines:
            require((line.event == "trained") == (line.reason is None), f"{line.event} because {line.reason}")
            require(
                not (line.reason or "").startswith("run "),
                f"group {line.group} was admitted for nothing: {line.reason}",
            )
            if line.staleness is not None:
                require(
                    0 <= line.staleness <= self._config.staleness.max_updates,
                    f"group {line.group} was trained {line.staleness} updates old",
                )
        if self._config.validation is not None:
            expected_rounds = (
                {0, trainer.updates} if self._attempts == 1 else {trainer.updates}
            )  # the first may have been cut short
            require(expected_rounds <= set(self._rounds), f"rounds of versions {self._rounds} only")


def _result(coordinator: Coordinator, sample_id: str) -> SampleResult | None:
    """Returns the result that the coordinator has of a sample that is being worked on."""
    found = coordinator._samples.samples.get(sample_id)
    return found.result if found else None


def _score(coordinator: Coordinator, sample_id: str) -> Score | None:
    found = coordinator._samples.samples.get(sample_id)
    return found.score if found else None
