"""The progress of a download from the hub, which its library reports to a class like tqdm's."""

from typing import Any

from tqdm import tqdm

from worker_service.load_progress import Advance


def download_bars(advance: Advance) -> type[Any]:
    """A class for `tqdm_class` of `snapshot_download` that draws nothing and reports to `advance`.

    The library makes a bar of the bytes received, one of those written, and one of the files. Which
    of the first two moves depends on the protocol, so the greater is reported.
    """
    num_reported = 0

    class DownloadBar(tqdm):
        """One bar; only those that count bytes matter."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            settings.pop("name", None)
            super().__init__(*args, **{**settings, "disable": True})
            self._counts_bytes = settings.get("unit") == "B"
            self._done = 0

        def update(self, n: float | None = 1) -> bool | None:
            """Add bytes, from any thread."""
            nonlocal num_reported
            with self.get_lock():
                self._done += int(n or 0)
                if self._counts_bytes and self._done > num_reported:
                    advance(self._done - num_reported, int(self.total or 0))
                    num_reported = self._done
            return None

    return DownloadBar
