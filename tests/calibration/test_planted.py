"""Planted faults are caught on threads and processes; Spark and Dask have scripts of their own."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from conformal_arbitrage import ScoreParts
from conformal_arbitrage.scorelog.parts import ExecutorPool, Processes, Threads
from tests.calibration.planted import FAULTS, ROWS, PlantedEngine, differences, edge_log, is_caught
from tests.calibration.test_parts import write_parts

pytestmark = pytest.mark.proof
nightly = pytest.mark.skipif("ENGINE_ROUNDS" not in os.environ, reason="make engines runs it")


@pytest.fixture(scope="module")
def edge():
    return edge_log()


@pytest.fixture(scope="module")
def folder(edge, tmp_path_factory):
    return write_parts(edge[0], tmp_path_factory.mktemp("edge") / "scores", [ROWS // 2])


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield ExecutorPool(pool)


def check_faults(edge, folder, engine):
    parts = ScoreParts.read(folder)
    assert not differences(*edge, parts, engine=engine)
    assert [fault for fault in FAULTS if not is_caught(*edge, parts, engine=PlantedEngine(engine, fault))] == []


def test_faults_on_threads_are_caught(edge, folder):
    check_faults(edge, folder, Threads(1))


def test_faults_in_another_process_are_caught(edge, folder, processes):
    check_faults(edge, folder, processes)


@nightly
def test_faults_on_the_engine_of_processes_are_caught(edge, folder):
    check_faults(edge, folder, Processes(2))
