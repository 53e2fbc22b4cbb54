"""What benchmarks measure with.

| module | what it has |
| --- | --- |
| `machine` | facts of the machine, and what other processes take of it |
| `ceilings`, `kernel_ceilings` | the most that it reaches: of memory and products, of kernels |
| `kernel_cases`, `kernel_timing` | kernels with their inputs, and how long they take |
| `steady_core` | a scheduler core with requests in steady progress |
| `processes`, `json_lines` | child processes, and lines that they exchange |
| `tables` | tables of results, which `report` copies |
"""
