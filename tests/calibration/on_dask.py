"""Calibrations on a real scheduler of Dask with two worker processes, in a process of their own.

    python -m tests.calibration.on_dask FOLDER [--faults]

Prints one JSON line per check: its name, and what differs from what was expected.
"""

import json
import re
import sys
import warnings
from pathlib import Path

from conformal_arbitrage import ScoreParts, calibrate
from conformal_arbitrage.scorelog.parts import DaskWorkers, as_engine
from tests.calibration.planted import FAULTS, ROWS, PlantedEngine, differences, differing, edge_log, is_caught
from tests.calibration.spoiled import SAID, spoiled_logs
from tests.calibration.test_parts import KEY, Dying, some_log, told, write_parts


class DyingWorkers(DaskWorkers):
    marker = ""

    def run(self, work, parts, /):
        return super().run(Dying(work, self.marker), parts)


def check_faults(folder, engine):
    """Return the faults planted in the workers that nobody noticed, and what differs without one."""
    edge = edge_log()
    parts = ScoreParts.read(write_parts(edge[0], folder / "edge", [ROWS // 2]))
    missed = {
        fault: "not caught" for fault in FAULTS if not is_caught(*edge, parts, engine=PlantedEngine(engine, fault))
    }
    return missed | differences(*edge, parts, engine=engine)


def check_spoiled(folder, engine):
    """Return what is said of spoiled parts, where it does not name file and row."""
    logs = spoiled_logs(folder / "spoiled").items()
    said = {what: told(lambda w=where: calibrate(ScoreParts.read(w), "0.2", engine=engine)) for what, where in logs}
    return {what: message for what, message in said.items() if not re.match(SAID[what], message)}


def main():
    warnings.simplefilter("ignore")
    import dask
    from distributed import LocalCluster

    folder = Path(sys.argv[1])
    log = some_log(600, kind="coarse")
    where = ScoreParts.read(write_parts(log, folder / "scores", [200, 400]))
    keywords = {"boundary": "random", "key": KEY}
    expected, found = calibrate(log, "0.1", **keywords), {}
    with dask.config.set({"distributed.comm.timeouts.connect": "2s"}):
        nowhere = told(lambda: as_engine("tcp://127.0.0.1:9"))
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1") as cluster:
        engine = as_engine(cluster.scheduler_address)
        found["equal"] = differing(expected, calibrate(where, "0.1", engine=engine, **keywords))
        DyingWorkers.marker = str(folder / "died")
        certificate = calibrate(where, "0.1", engine=DyingWorkers(engine.client), **keywords)
        died = (folder / "died").exists()
        found["a worker is killed"] = differing(expected, certificate) or ({} if died else "no worker died")
        found["unforeseen"] = told(lambda: list(engine.run(len, where.parts())))
        if "--faults" in sys.argv:
            found["planted"], found["spoiled"] = check_faults(folder, engine), check_spoiled(folder, engine)
        engine.client.close()
    found["nowhere"] = nowhere
    for name, one in found.items():
        print(json.dumps({"check": name, "differences": one}, default=repr))


if __name__ == "__main__":
    main()
