"""A download's bars, as the hub's library moves them, become the progress of a phase."""

from worker_service.loader.files.hub_progress import download_bars


def test_the_bar_of_bytes_that_moves_is_reported_and_files_are_not() -> None:
    reports: list[tuple[int, int | None]] = []
    bar = download_bars(lambda num_bytes, total=None: reports.append((num_bytes, total)))
    transfer = bar(total=0, initial=0, unit="B", unit_scale=True, desc="Downloading", name="a")
    written = bar(total=0, initial=0, unit="B", unit_scale=True, desc="Reconstructing", name="b")
    files = bar([1, 2, 3], desc="Fetching 3 files", total=3)
    written.total += 100
    transfer.total += 100
    written.update(40)
    transfer.update(30)
    transfer.update(30)
    files.update(1)
    assert list(files) == [1, 2, 3]
    assert reports == [(40, 100), (20, 100)]
