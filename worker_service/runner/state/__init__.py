"""The sequences of an epoch.

| file | holds |
| --- | --- |
| `sequence_table.py` | tokens and progress of all sequences, as columns |
| `block_tables.py` | their block tables in one cache group |
| `state_positions.py` | how many tokens lead to the states in blocks |
| `texts.py` | those that are pooled |
| `sequence_state.py` | the table, its pending tokens and constraints |
"""
