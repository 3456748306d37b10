"""MAPIE's own conformal risk control as a rule for `compare`, run by a Python that has it.

A worker in the other Python reads one line of JSON per calibration and answers with which queries it keeps.
"""

import json
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, Any

import numpy as np

from conformal_arbitrage.core.exact import Bools
from conformal_arbitrage.errors import OptionError
from conformal_arbitrage.evaluation.compare import NamedRule, RuleRows

_WORKER = """
import json, sys, warnings
import numpy as np
from mapie.risk_control import MultiLabelClassificationController
warnings.simplefilter("ignore")
print(json.dumps("ready"), flush=True)

def shown(margin):
    # action 0 is always in the set; action 1 stands for the Guardian, who is in it at margins up to 1 - threshold: a hair
    # more than 1 - margin, so that the threshold 0 defers everything, as a relaxation of 1 does
    return np.column_stack([np.ones(len(margin)), np.clip(1 - np.array(margin) + 1e-9, 0, 1)])

for line in sys.stdin:
    task = json.loads(line)
    wanted = np.eye(2, dtype=int)[np.array(task["loss"], dtype=int)]
    controller = MultiLabelClassificationController(
        predict_function=lambda x: x, risk="recall", method="crc", target_level=1 - task["alpha"],
        predict_params=np.arange(101) / 100,
    )
    controller.calibrate(shown(task["margin"]), wanted)
    sets = np.asarray(controller.predict(shown(task["queries"]))).reshape(len(task["queries"]), 2, -1)[:, :, 0]
    print(json.dumps([bool(one) for one in sets[:, 1] == 0]), flush=True)
"""


@contextmanager
def mapie_rule(python: str) -> Generator[NamedRule]:
    """Run a worker in another Python and give its rule; rows tied at the top count as rows without a loss.

    Raises:
        OptionError: that Python cannot be run, or has no MAPIE.
    """
    with TemporaryFile("w+") as complaints:
        try:
            worker = subprocess.Popen(
                [python, "-c", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True
            )
        except OSError as error:
            raise OptionError(
                f"{python}: cannot be run ({error.strerror}); name a Python that has MAPIE: .venv-mapie/bin/python"
            ) from error
        with worker:
            yield NamedRule(
                name="CRC on a grid of 0.01, MAPIE",
                promise="expected loss at most alpha",
                keeps=_Worker(worker, python, complaints).keeps,
                binary=True,
                promises_loss=True,
            )


class _Worker:
    """One worker, used by one thread at a time."""

    def __init__(self, process: "subprocess.Popen[str]", python: str, complaints: IO[str]) -> None:
        self._process, self._python, self._complaints, self._lock = process, python, complaints, Lock()
        self._read()

    def keeps(self, rows: RuleRows, queries: RuleRows, alpha: float) -> Bools:
        """Let MAPIE calibrate on the rows and decide the queries."""
        tied = rows.n - len(rows.loss)
        task = {
            "margin": [*rows.margin.tolist(), *[0.0] * tied],
            "loss": [*rows.loss.tolist(), *[0.0] * tied],
            "queries": queries.margin.tolist(),
            "alpha": alpha,
        }
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            return np.array(self._read(), dtype=np.bool_)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._complaints.seek(0)
            reason = self._complaints.read().strip().splitlines() or ["it ended without a word"]
            raise OptionError(
                f"{self._python}: MAPIE cannot be used there ({reason[-1]}); `make .venv-mapie/.installed` installs it"
            )
        return json.loads(line)
