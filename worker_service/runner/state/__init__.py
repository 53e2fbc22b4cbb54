"""The sequences of an epoch.

| file | holds |
| --- | --- |
| `sequence_table.py` | tokens, block tables and progress of all sequences, as columns |
| `sequence_state.py` | the table, its pending tokens and constraints |
"""
