"""Runs at an address, killed in the middle of what they write there, and gone on with elsewhere."""

import random
import shutil

import pytest

from mask_rcnn_jax import store_folders
from tests.buckets import KINDS, bucket
from tests.faults.harness import Server, assert_same

CALLS = 16  # to the store, about as many as an uninterrupted run needs


@pytest.fixture(scope="module", params=KINDS)
def address(request, tmp_path_factory):
    with bucket(request.param, tmp_path_factory.mktemp("store")) as address:
        yield address


@pytest.fixture(scope="module")
def clients(address, server):
    """Starts runs that know the store."""
    started = Server(server.data)
    yield started
    started.close()


@pytest.mark.slow
def test_a_run_killed_while_it_copies_goes_on_anywhere(
    clients, reference, address, tmp_path, request, figure
):
    """Of five machines, each is killed in mid-call; every second one is the one before again."""
    wanted, rng = max(1, request.config.getoption("--faults") // 5), random.Random(2026)
    kills = 0
    for number in range(wanted):
        place, log = f"{address}/{number}/run", tmp_path / f"{number}.log"
        for turn in range(5):
            home = tmp_path / f"home{number}.{turn // 2}"
            die = {"DIE_IN_STORE_CALL": str(rng.randrange(1, CALLS))}
            environment = {"MASK_RCNN_HOME": str(home), "FEWEST_BESIDE": rng.choice(["1", "5000"])}
            run = clients.start(place, log=log.with_suffix(f".{turn}"), **environment, **die)
            code = run.wait()
            assert code in (-9, 0), run.said()
            kills += code == -9
            if turn % 2:
                shutil.rmtree(home)
        run = clients.start(place, log=log, MASK_RCNN_HOME=str(tmp_path / f"last{number}"))
        assert run.wait() == 0, run.said()
        copy = tmp_path / f"copy{number}"
        store_folders.get_files(place, store_folders.list_tree(place), copy)
        assert_same(copy, reference)
    assert kills
    figure(
        f"{address}: {kills} kills in calls to the store, {wanted} runs, all as if uninterrupted"
    )
