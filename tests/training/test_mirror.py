"""Runs at addresses of object stores, with a stub of a model: other machines, faults, two starters.

A machine is a folder of its own for what is kept of stores.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from mask_rcnn_jax import store_folders
from mask_rcnn_jax.training.ending import StopTraining
from mask_rcnn_jax.training.mirror import OWNER, Mirror
from mask_rcnn_jax.weights import stored_run
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint
from tests.buckets import KINDS, bucket
from tests.pair import Pair
from tests.training import stubbed_run
from tests.training.stubbed_run import EVERY, kept, series

pytestmark = pytest.mark.usefixtures("stubbed")
stubbed = stubbed_run.stubbed


@pytest.fixture(scope="module", params=KINDS)
def kind_and_bucket(request, tmp_path_factory):
    with bucket(request.param, tmp_path_factory.mktemp("store")) as address:
        yield request.param, address


@pytest.fixture(scope="module")
def folder_bucket(tmp_path_factory):
    with bucket("file", tmp_path_factory.mktemp("store")) as address:
        yield address


@pytest.fixture
def there(kind_and_bucket, tmp_path):
    return f"{kind_and_bucket[1]}/{tmp_path.name}/run"


@pytest.fixture
def here(folder_bucket, tmp_path):
    """An address of a store that is a folder."""
    return f"{folder_bucket}/{tmp_path.name}/run"


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A function that goes to another machine, by its name."""

    def go_to(name: str) -> None:
        monkeypatch.setenv("MASK_RCNN_HOME", str(tmp_path / f"machine {name}"))

    go_to("a")
    return go_to


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The workdir of a run on a disk that nothing interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        stubbed_run.patch(patch.setattr)
        folder = tmp_path_factory.mktemp("whole") / "run"
        stubbed_run.run(folder)
    return folder


def copied(address: str, target: Path) -> Path:
    """What a plain copy of the address is."""
    store_folders.get_files(address, store_folders.list_tree(address), target)
    return target


def check_same(address: str, whole: Path, target: Path) -> None:
    found = copied(address, target)
    assert series(found) == series(whole) and kept(found) == kept(whole)
    for step in kept(whole):
        ours, theirs = (load_checkpoint(one / "checkpoints" / step) for one in (found, whole))
        np.testing.assert_array_equal(
            ours["params"]["head"]["kernel"], theirs["params"]["head"]["kernel"]
        )


def stop_at(step: int):
    """A logger that has the run stopped as a batch system does."""

    def log(at, values, images):
        if at == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return log


def newest(address: str) -> int:
    return stored_run.whole_steps(store_folders.list_tree(address))[0]


def run_until(step: int, address: str) -> int:
    """Stop a run once a step is logged; returns the step that it is saved at, or the next one."""
    with pytest.raises(SystemExit) as end:
        stubbed_run.run(address, [stop_at(step)])
    assert end.value.code == 75
    assert newest(address) in (step, step + 1)
    return newest(address)


def test_a_copy_of_the_address_is_the_run(there, whole, tmp_path):
    assert int(stubbed_run.run(there).step) == stubbed_run.STEPS
    check_same(there, whole, tmp_path / "copy")
    assert {"config.json", "report.html"} <= store_folders.list_tree(there).keys()
    before = store_folders.list_tree(there)
    stubbed_run.run(there)  # is finished
    assert store_folders.list_tree(there) == before


@pytest.mark.slow
def test_another_machine_goes_on(there, whole, machine, tmp_path):
    for name, step in (("a", 3), ("b", 7), ("a", 10)):
        machine(name)
        run_until(step, there)
    machine("c")
    stubbed_run.run(there)
    check_same(there, whole, tmp_path / "copy")


@pytest.mark.slow
def test_a_machine_without_a_store_in_mid_run_loses_nothing(here, whole, tmp_path, caplog):
    """The store does not answer while steps 4 to 9 are made."""
    place = Path(here.removeprefix("file://"))
    away = place.with_name("away")

    def log(step, values, images):
        if step == 4:
            place.rename(away)
            place.touch()
        elif step == 10:
            place.unlink()
            away.rename(place)

    stubbed_run.run(here, [log])
    assert "the run goes on" in caplog.text
    check_same(here, whole, tmp_path / "copy")


@pytest.mark.slow
def test_a_store_that_is_gone_in_the_end_is_an_error_and_the_same_call_copies(
    here, whole, machine, tmp_path
):
    place = Path(here.removeprefix("file://"))
    away = place.with_name("away")

    def log(step, values, images):
        if step == 7:
            place.rename(away)
            place.touch()

    with pytest.raises(OSError, match=f"{here}.*; all of it is in {tmp_path}.*machine a"):
        stubbed_run.run(here, [log])
    place.unlink()
    away.rename(place)
    assert newest(here) < stubbed_run.STEPS
    stubbed_run.run(here)
    check_same(here, whole, tmp_path / "copy")


@pytest.mark.slow
def test_a_run_that_is_stopped_without_a_store_is_to_be_started_again(here, whole, tmp_path):
    place = Path(here.removeprefix("file://"))
    away = place.with_name("away")

    def log(step, values, images):
        if step == 7:
            place.rename(away)
            place.touch()

    with pytest.raises(SystemExit) as end:
        stubbed_run.run(here, [log, stop_at(8)])
    assert end.value.code == 75
    place.unlink()
    away.rename(place)
    stubbed_run.run(here)
    check_same(here, whole, tmp_path / "copy")


def test_the_last_one_to_start_goes_on(here, whole, machine, tmp_path):
    """Another machine starts while this one is at step 5."""

    def log(step, values, images):
        if step == 5:
            machine("b")
            others.append(run_until(7, here))
            machine("a")

    others = []
    with pytest.raises(OSError, match=f"{here}/{OWNER} is gone or another run's"):
        stubbed_run.run(here, [log])
    assert [newest(here)] == others
    seen = []
    stubbed_run.run(here, [lambda step, *_: seen.append(step)])
    assert seen[0] == others[0] + 1
    check_same(here, whole, tmp_path / "copy")


def test_files_that_another_run_was_still_putting_damage_nothing(here, machine):
    """They come after this one has looked at the address."""
    run_until(3, here)
    machine("b")
    late = f"{here}/checkpoints/8/state/late"
    put = lambda step, *_: step == 6 and store_folders.write_bytes(late, b"a")  # noqa: E731
    with pytest.raises(SystemExit):
        stubbed_run.run(here, [put, stop_at(8)])
    machine("c")
    last = newest(here)
    assert kept(stored_run.local(here)) == [str(last)]
    assert "checkpoints/8/state/late" not in store_folders.list_tree(here)


@pytest.mark.parametrize("lost", [".", "checkpoints", "checkpoints/{}/state/_METADATA"])
def test_a_folder_that_is_gone_is_fetched_again(lost, here, whole, tmp_path):
    """As by what cleans up a disk, which leaves some files."""
    last = run_until(7, here)
    path = Mirror(here).folder / lost.format(last)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    seen = []
    stubbed_run.run(here, [lambda step, *_: seen.append(step)])
    assert seen[0] == last + 1
    check_same(here, whole, tmp_path / "copy")


@pytest.mark.slow
def test_a_start_by_mistake_takes_nothing_from_a_run(here, whole, machine, tmp_path):
    """Of another config, on another machine, while the run is at step 5."""

    def log(step, values, images):
        if step == 5:
            machine("b")
            with pytest.raises(ValueError, match=f"{here} holds a run of another config: train.st"):
                stubbed_run.run(here, steps=stubbed_run.STEPS - 1)
            machine("a")

    assert int(stubbed_run.run(here, [log]).step) == stubbed_run.STEPS
    check_same(here, whole, tmp_path / "copy")


def test_a_run_on_another_server_has_a_folder_of_its_own(monkeypatch, here):
    before = Mirror(here).folder
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9")
    assert Mirror(here).folder != before


@pytest.mark.parametrize("name", ["..", "."])
def test_a_run_stays_in_its_folder_whatever_its_name(name, here):
    top = stored_run.place(f"{here}/{name}", "train").resolve()
    assert top.parent == Mirror(f"{here}/{name}").folder.resolve().parent
    assert top.parent.name == "train"


@pytest.mark.parametrize("address", ["s3://", "file://", "s3:/"])
def test_an_address_names_something(address):
    for use in (stubbed_run.run, lambda one: store_folders.written_at(one).__enter__()):
        with pytest.raises(ValueError, match="expected .* such as s3://bucket/"):
            use(address)


def test_a_store_that_answers_nonsense_ends_no_run(here, whole, monkeypatch, tmp_path, caplog):
    """As a proxy does, whose page is no json: some packages raise ValueError."""
    read, answers = store_folders.read_bytes, iter([*range(4)])

    def read_or_fail(address):
        if address.endswith(OWNER) and next(answers, 0) == 2:
            raise ValueError("Expecting value: line 1 column 1")
        return read(address)

    monkeypatch.setattr(store_folders, "read_bytes", read_or_fail)
    stubbed_run.run(here)
    assert "Expecting value: line 1 column 1; the run goes on" in caplog.text
    check_same(here, whole, tmp_path / "copy")


@pytest.mark.slow
def test_two_hosts_that_share_nothing_but_the_address_go_on(here, whole, tmp_path):
    run_until(5, here)

    def start(index, port):
        where = [f"--coordinator_address=localhost:{port}", "--num_processes=2"]
        line = [sys.executable, "-m", "tests.training.stubbed_run", here]
        environment = {"MASK_RCNN_HOME": str(tmp_path / f"host{index}"), "JAX_PLATFORMS": "cpu"}
        environment["JAX_NUM_CPU_DEVICES"] = "1"
        return [*line, *where, f"--process_id={index}"], os.environ | environment

    with Pair(start, tmp_path) as pair:
        assert pair.codes() == [0, 0], pair.said()
    check_same(here, whole, tmp_path / "copy")


def test_what_else_is_below_an_address_stays_there(here, machine):
    """As of a bucket that holds the data, too."""
    run_until(3, here)
    other = [f"data/{n}.jpg" for n in range(3)] + ["runs/b/metrics.jsonl", "runs/b/checkpoints/1/a"]
    for name in other:
        store_folders.write_bytes(f"{here}/{name}", b"a")
    machine("b")
    stubbed_run.run(here)
    assert {*other} <= store_folders.list_tree(here).keys()
    assert not {"data", "runs"} & {path.name for path in Mirror(here).folder.iterdir()}


def test_what_is_ahead_of_the_address_is_kept(here, machine, caplog):
    step = run_until(5, here)
    store_folders.delete(here, store_folders.list_tree(here))
    run_until(3, here)
    assert f"this machine had step {step}, which is in " in caplog.text
    aside = Mirror(here).folder.parent / "replaced"
    assert (aside / "checkpoints" / str(step)).is_dir()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    there, whole, machine, tmp_path, caplog
):
    run_until(9, there)
    last, before = stored_run.whole_steps(store_folders.list_tree(there))[:2]
    name = f"checkpoints/{last}/state/_METADATA"
    store_folders.write_bytes(f"{there}/{name}", b"{}")
    machine("b")
    found = stored_run.local(there)
    assert f"{there}/checkpoints/{last} is damaged: state/_METADATA differs" in caplog.text
    assert kept(found) == [str(before)]
    with pytest.raises(ValueError, match=f"{there}/checkpoints/{last} is damaged"):
        stored_run.local(f"{there}/checkpoints/{last}")
    stubbed_run.run(there)
    folder = Mirror(there).folder / "checkpoints"
    assert f"{folder / str(last)} is damaged: state/_METADATA differs" in caplog.text
    assert f"the run goes on from step {before}" in caplog.text
    check_same(there, whole, tmp_path / "copy")


def test_a_part_of_a_checkpoint_does_not_count(here, whole, machine, tmp_path):
    """Left by a run that was killed while it copied."""
    last = f"checkpoints/{run_until(7, here)}"
    store_folders.delete(here, [f"{last}/SHA256SUMS", f"{last}/state/_METADATA"])
    store_folders.write_bytes(f"{here}/{last}/state/d/other", b"left")
    machine("b")
    stubbed_run.run(here)
    check_same(here, whole, tmp_path / "copy")


def test_a_part_of_a_checkpoint_that_no_run_left_is_refused(here, machine):
    last = f"checkpoints/{run_until(7, here)}"
    store_folders.delete(here, [f"{last}/SHA256SUMS", OWNER])
    machine("b")
    with pytest.raises(ValueError, match=f"{last} has no SHA256SUMS: .*delete it"):
        stubbed_run.run(here)
    assert any(name.startswith(f"{last}/") for name in store_folders.list_tree(here))


def test_a_folder_that_is_removed_takes_nothing_with_it(here, machine):
    """Of the run's folder, as a cache may be, and not of what is in the store."""

    def log(step, values, images):
        if step == 7:
            shutil.rmtree(Mirror(here).folder)

    with pytest.raises(OSError, match="folder was removed|could not be written"):
        stubbed_run.run(here, [log])
    assert newest(here) in (4, 6)


def test_readers_take_the_newest_and_what_is_named(there, machine):
    last = run_until(7, there)
    machine("b")
    found = stored_run.local(there)
    assert kept(found) == [str(last)] and stored_run.address_of(found) == there
    assert stored_run.local(f"{there}/") == found
    older = stored_run.local(f"{there}/checkpoints/6")
    assert older.name == "6" and (older / "state").is_dir()
    for absent in ("checkpoints/5", "checkpoints"):
        with pytest.raises((OSError, ValueError), match=f"{there}/{absent}(:| holds) no "):
            stored_run.local(f"{there}/{absent}")
    with pytest.raises(OSError, match="no such file"):
        stored_run.local(f"{there}/nothing")


def test_nothing_can_be_written(here):
    place = Path(here.removeprefix("file://"))
    place.parent.mkdir(parents=True)
    place.touch()
    with pytest.raises(OSError, match=f"{here} cannot be written"):
        stubbed_run.run(here)


def test_a_run_that_a_logger_ends_is_copied(here):
    def log(step, values, images):
        if step == 5:
            raise StopTraining("enough")

    stubbed_run.run(here, [log])
    assert newest(here) in (5, 6)


@pytest.mark.slow
def test_two_processes_share_no_folder(here, whole, tmp_path):
    """One process begins, and two on other machines go on."""
    begun = run_until(7, here)

    def start(index: int, port: int):
        where = f"--coordinator_address=localhost:{port} --num_processes=2 --process_id={index}"
        command = [sys.executable, "-m", "tests.training.stubbed_run", *where.split(), here]
        quiet = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        home = {"MASK_RCNN_HOME": str(tmp_path / f"machine {index}")}
        changes = [f"{name}={value}" for name, value in EVERY.items()]
        return [*command, *changes], {**os.environ, **quiet, **home}

    with Pair(start, tmp_path) as pair:
        assert pair.codes() == [0, 0], pair.said()
    assert f"resuming at step {begun} of" in pair.said()[0]
    check_same(here, whole, tmp_path / "copy")
    fetched = list((tmp_path / "machine 1").glob(f"runs/*/*/run/checkpoints/{begun}"))
    assert len(fetched) == 1 and "train" not in fetched[0].parts
