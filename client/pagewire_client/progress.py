"""A batch's progress on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pagewire_client.batch import BatchProgress, OnProgress


@contextmanager
def progress_bar(*, shown: bool) -> Iterator[OnProgress | None]:
    """A bar on standard error, to be told of progress; None if it is not to be shown."""
    if not shown:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=None, rates="")

        def on_progress(batch: BatchProgress) -> None:
            elapsed = progress.tasks[0].elapsed or 0.0
            progress.update(
                task,
                total=batch.num_requests,
                completed=batch.num_finished,
                rates=_rates(batch, elapsed),
            )

        yield on_progress


def _rates(batch: BatchProgress, elapsed_s: float) -> str:
    if elapsed_s <= 0:
        return ""
    prompt = batch.num_prompt_tokens / elapsed_s
    output = batch.num_generated_tokens / elapsed_s
    return f"in {prompt:.0f} out {output:.0f} tokens/s"
