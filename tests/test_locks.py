import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from fedrecon._src.storage.atomic import StorageError
from fedrecon._src.storage.ownership import LockedError, file_lock, read_holder

HOLD_FOREVER = """
import sys, time
from fedrecon._src.storage.ownership import file_lock
with file_lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def held_by_another_process(path):
    process = subprocess.Popen([sys.executable, "-c", HOLD_FOREVER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_lock_says_who_holds_it_and_goes_with_its_block(tmp_path):
    path = tmp_path / "deep" / "run.lock"
    with file_lock(path):
        assert read_holder(path).startswith(f"process {os.getpid()} on {socket.gethostname()} (since ")
        with (
            pytest.raises(LockedError, match=f"my run is in use by process {os.getpid()} on ") as error,
            file_lock(path, "my run"),
        ):
            pass
        assert isinstance(error.value, StorageError)
    assert not path.exists()
    with file_lock(path):
        pass


def test_another_process_is_refused_until_the_holder_is_killed(tmp_path):
    path = tmp_path / "run.lock"
    process = held_by_another_process(path)
    try:
        with pytest.raises(LockedError, match=f"process {process.pid} on "), file_lock(path):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert path.exists()  # nobody could remove it, and it locks nothing
    with file_lock(path):
        assert f"process {os.getpid()} on" in read_holder(path)


def test_a_waiting_process_gets_the_lock_and_logs_its_holder_once(tmp_path):
    path, told, order = tmp_path / "run.lock", [], []
    begun, may_end = threading.Event(), threading.Event()

    def first():
        with file_lock(path):
            begun.set()
            may_end.wait(30)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait(30)

    def on_wait(holder):
        told.append(holder)
        may_end.set()

    with file_lock(path, wait=math.inf, on_wait=on_wait):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    assert [holder.split(" on ")[0] for holder in told] == [f"process {os.getpid()}"]


def test_waiting_ends_when_its_time_is_over(tmp_path):
    with file_lock(tmp_path / "a"), pytest.raises(LockedError), file_lock(tmp_path / "a", wait=0.05):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x", "host": 1, "since": 2}', "[" * 100_000])
def test_a_lock_file_with_arbitrary_content_does_not_lock(tmp_path, content):
    path = tmp_path / "a"
    path.write_text(content)
    assert read_holder(path) == "another process"
    with file_lock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_failing_block_releases_its_lock(tmp_path):
    with pytest.raises(ZeroDivisionError), file_lock(tmp_path / "a"):
        raise ZeroDivisionError
    with file_lock(tmp_path / "a"):
        pass


def test_only_one_of_many_threads_holds_a_lock_at_a_time(tmp_path):
    inside, most, done = 0, 0, 0

    def work():
        nonlocal inside, most, done
        for _ in range(5):
            with file_lock(tmp_path / "a", wait=math.inf):
                inside += 1
                most = max(most, inside)
                done += 1
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, done) == (1, 20)
