"""The progress bar of long commands."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conformal_arbitrage.collecting.collect import Progress


class ProgressBar:
    """A progress bar on stderr: rows, rate, time left, cost so far, failures."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
            TextColumn("{task.fields[money]}"), TextColumn("{task.fields[failures]}"),
            console=Console(stderr=True), refresh_per_second=4,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, rate="", money="", failures="")

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def show(self, progress: "Progress") -> None:
        """Update the bar after a row."""
        from conformal_arbitrage.models.wrappers import dollars

        speed = self._bar.tasks[0].speed
        self._bar.update(
            self._task,
            total=progress.total,
            completed=progress.done,
            rate="" if speed is None else f"{speed:.1f} rows/s",
            money=f"cost {dollars(progress.spent.cost)}",
            failures=f"failed: Primary {progress.primary_failures}, Guardian {progress.guardian_failures}",
        )
