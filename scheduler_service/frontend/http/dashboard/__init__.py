"""The live dashboard: a page at `/`, and the stream of changes that it draws.

    core ── WatchStatus ──▶ hub ──▶ view (and its changes) ──▶ a line of JSON a second ──▶ browsers
                             └────▶ series (rates, percentiles of the last minutes)

| module | holds |
| --- | --- |
| `view` | a status as facts, columns and block tables, and the changes between two views |
| `series` | points of the charts |
| `hub` | one watch of the core that all browsers share; the stream and the page's files |
| `static/` | the page: HTML, CSS and modules as browsers take them |

The page shows what requests do, never what they say.
"""
