"""The live dashboard: a page at `/`, and the stream of changes that it draws.

    core ── WatchStatus ──▶ hub ──▶ model ──▶ changes ──▶ one line of JSON a second ──▶ browsers
                             └────▶ series (rates, percentiles of the last minutes)

| module | holds |
| --- | --- |
| `model` | a status as facts, columns and block tables |
| `changes` | what differs between two of them, in few bytes |
| `series` | points of the charts |
| `hub` | one watch of the core for all browsers, as long as there is one |
| `router` | the stream, for operators, and the page's files, for anybody |
| `static/` | the page: HTML, CSS and modules as browsers take them |

The page shows what requests do, never what they say.
"""
