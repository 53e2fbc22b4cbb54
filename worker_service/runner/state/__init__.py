"""The sequences of an epoch.

| file | holds |
| --- | --- |
| `state_positions.py` | how many tokens lead to the states in blocks |
| `block_tables.py` | their block tables, and the states in blocks |
| `texts.py` | those that are pooled |
| `sequence_table.py` | tokens and progress of all sequences, as columns |
| `sequence_state.py` | the table, its pending tokens and constraints |
"""
