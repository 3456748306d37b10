"""A part that cannot be used is named, with its row, on threads and in other processes; Spark and Dask have scripts."""

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from conformal_arbitrage import ScoreParts, calibrate
from conformal_arbitrage.scorelog.parts import ExecutorPool, Threads
from tests.calibration.spoiled import SAID, spoiled_logs
from tests.calibration.test_parts import told


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return spoiled_logs(tmp_path_factory.mktemp("spoiled") / "logs")


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield ExecutorPool(pool)


@pytest.mark.parametrize("what", SAID)
def test_threads_name_file_and_row(logs, what):
    assert re.match(SAID[what], told(lambda: calibrate(ScoreParts.read(logs[what]), "0.2", engine=Threads(2))))


@pytest.mark.parametrize("what", SAID)
def test_other_processes_name_file_and_row(logs, what, processes):
    assert re.match(SAID[what], told(lambda: calibrate(ScoreParts.read(logs[what]), "0.2", engine=processes)))
