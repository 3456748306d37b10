"""Logs in parts that are spoiled in the 18th row of their second file, and what every engine must say of them."""

from dataclasses import replace

import duckdb

from tests.calibration.test_parts import some_log, spoil, write_parts

ROW = "q47"
FILE = r"/scores-01\.parquet"
SAID = {
    "infinite": rf"ScoreLogError: \S+{FILE}: row 18, column 'primary': inf",
    "ragged": rf"ScoreLogError: \S+{FILE}: row 18, column 'guardian': ",
    "unknown": rf"ScoreLogError: \S+{FILE}: row 18: no Guardian score",
    "repeated": r"ScoreLogError: \S+: 'q2' is the id of more than one row",
    "corrupt": rf"\w+Error: .*{FILE}",
}
"""What is said of files; a table has partitions, so see `said_of_table`."""


def said_of_table(what):
    """Return what is said of a table of one partition, in which rows keep their order."""
    return (
        SAID[what]
        .replace(rf"\S+{FILE}:", "frame, partition 0:")
        .replace("row 18", r"row \d+")
        .replace(r"\S+:", "frame:")
    )


def spoiled_logs(folder):
    """Return a folder of files for each way to spoil one."""
    folder.mkdir()
    folders = {what: folder / what for what in SAID}
    for what, where in folders.items():
        write_parts(replace(some_log(90), identities=None), where, [30, 60])
        path = where / "scores-01.parquet"
        if what == "infinite":
            spoil(path, ROW)
        elif what == "ragged":
            rewrite(path, "case when id = '{}' then list_append(guardian, 0.5) else guardian end as guardian")
        elif what == "unknown":
            rewrite(path, "case when id = '{}' then null else guardian end as guardian")
        elif what == "repeated":
            rewrite(path, "case when id = '{}' then 'q2' else id end as id")
        else:
            corrupt(path)
    return folders


def rewrite(path, column):
    with duckdb.connect() as connection:
        chosen = f"select * replace ({column.format(ROW)}) from '{path}'"
        connection.execute(f"copy ({chosen}) to '{path.with_suffix('.bad')}' (format parquet)")
    path.with_suffix(".bad").rename(path)


def corrupt(path):
    """Overwrite the pages of a file, and leave its footer as it is."""
    data = bytearray(path.read_bytes())
    pages = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    data[4:pages] = b"\xff" * (pages - 4)
    path.write_bytes(bytes(data))
