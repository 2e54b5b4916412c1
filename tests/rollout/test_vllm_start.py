import multiprocessing as mp
import os
import select
import signal
from multiprocessing.connection import Connection

import pytest

from omni_async.rollout.vllm_start import end_with, refuse_experts
from tests.support.patience import PATIENCE


def _worker(engine: int, ready: Connection) -> None:
    end_with(engine)
    ready.send(os.getpid())
    signal.pause()


def _core(engine: int, ready: Connection, nested: bool) -> None:
    """Plays vLLM's core: with a worker below it, or as its own worker."""
    if nested:
        mp.Process(target=_worker, args=(engine, ready)).start()
        signal.pause()
    _worker(engine, ready)


def _engine(ready: Connection, nested: bool) -> None:
    core = mp.Process(target=_core, args=(os.getpid(), ready, nested))
    core.start()
    ready.send(core.pid)
    signal.pause()


@pytest.mark.parametrize("nested", [False, True])
def test_vllm_ends_with_a_killed_engine(nested):
    ours, theirs = mp.Pipe()
    engine = mp.get_context("fork").Process(target=_engine, args=(theirs, nested))
    engine.start()
    processes = set()
    for _ in range(2):
        assert ours.poll(PATIENCE)
        processes.add(ours.recv())
    assert len(processes) == 1 + nested
    watched = [os.pidfd_open(process) for process in processes]
    engine.kill()
    engine.join(PATIENCE)
    for one in watched:
        assert select.select([one], [], [], PATIENCE)[0], "it outlives its engine"
        os.close(one)


def test_experts_are_refused_on_a_cpu():
    refuse_experts(is_moe=False, on_cpu=True)
    refuse_experts(is_moe=True, on_cpu=False)
    with pytest.raises(ValueError, match="on a CPU vLLM does not load new weights of a mixture of experts"):
        refuse_experts(is_moe=True, on_cpu=True)
